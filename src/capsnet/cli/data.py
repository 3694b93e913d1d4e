"""capsnet data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from capsnet import data as datasets
from capsnet.cli.flags import Switch, parse
from capsnet.data.registry import DATASETS
from capsnet.data.sources import cache
from capsnet.errors import UserError
from capsnet.terminal import print_table

YES_NO: dict[Any, str] = {True: "yes", False: "no", None: "–"}  # user images are not cached


@dataclass(frozen=True)
class Data:
    """List the datasets, fetch them into the cache, verify the cached files, or delete decoded images from the cache.

    Examples:
      capsnet data list
      capsnet data fetch mnist
      capsnet data verify
      capsnet data prune folder:photos
    """

    action: Annotated[
        Positional[Literal["list", "fetch", "verify", "prune"]], arg(metavar="list|fetch|verify|prune")
    ] = "list"
    """List the datasets, fetch them into the cache, verify checksums, or delete the decoded images of large folders,
    which are decoded again when they are needed."""
    names: Annotated[Positional[tuple[str, ...]], arg(metavar="NAME…", help_behavior_hint="")] = ()
    """Datasets (default: all for list, verify and prune)."""
    json: Switch = False
    """Print JSON."""


def data(argv: list[str]) -> int:
    flags = parse(Data, "data", argv)
    if flags.action == "prune":
        return prune(flags)
    if flags.action == "list":
        rows = [about_data(name) for name in flags.names or datasets.list_datasets()]
    else:
        names = dict.fromkeys(published(name) for name in flags.names or fetched())
        if flags.action == "fetch" and not flags.names:
            raise UserError(f"which dataset should be fetched? The choices are: {', '.join(names)}.")
        rows = [check_data(name, fetch=flags.action == "fetch") for name in names]
    if flags.json:
        print(json.dumps({"cache": str(datasets.cache_folder()), "data": rows}))
    else:
        print_table(list(rows[0]), [[YES_NO.get(v) or str(v) for v in row.values()] for row in rows])
        print(f"cache: {datasets.cache_folder()}")
    return 0 if all(row.get("good", True) for row in rows) else 2


def prune(flags: Data) -> int:
    """Delete decoded images."""
    from capsnet.data import image_cache

    for name in flags.names:
        if not datasets.parse(name).info.takes_path:
            raise UserError(f"{name} has no decoded images: name a dataset such as folder:PATH, or leave it out.")
    found = image_cache.prune(flags.names)
    if flags.json:
        rows = [{"name": each.images, "bytes": each.bytes, "deleted": each.deleted} for each in found]
        print(json.dumps({"cache": str(image_cache.caches()), "data": rows}))
    elif found:
        states = {True: "deleted", False: "in use"}
        print_table(["name", "GB", "state"], [(x.images, f"{x.bytes / 1e9:.2f}", states[x.deleted]) for x in found])
    else:
        print(f"nothing to delete in {image_cache.caches()}")
    return 0


def fetched() -> list[str]:
    """The datasets that are downloaded."""
    return [name for name in datasets.list_datasets() if DATASETS.get(name).source]


def published(name: str) -> str:
    """The dataset to download for a name: MNIST for everything made of its digits."""
    base = datasets.parse(name).base
    if base.source is None:
        raise UserError(f"{name} is not downloaded; the choices are: {', '.join(fetched())}.")
    return base.name


def about_data(name: str) -> dict[str, Any]:
    """The description of a dataset, and whether its files are in the cache (None if it needs none)."""
    info = DATASETS.get(name) if name in DATASETS else datasets.parse(name).info
    source = DATASETS.get(info.made_of or info.name).source
    cached = cache.is_cached(source) if source else None
    return {"name": info.usage if name == info.name else name, "about": info.description, "cached": cached}


def check_data(name: str, fetch: bool) -> dict[str, Any]:
    """Fetch a dataset if it is missing or damaged, or only verify the checksums of the cached files."""
    if fetch:
        splits = datasets.load(name, validation=0)
        return {
            "name": name,
            "good": True,
            "training": f"{len(splits.train):,}",
            "test": f"{len(splits.test):,}",
        }
    source = DATASETS.get(name).source
    assert source is not None
    state = cache.verify(source)
    return {"name": name, "good": state in ("good", "not fetched"), "state": state}
