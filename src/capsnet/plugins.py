"""Plugins: routings, datasets and models that live outside the package.

A plugin is a Python file that registers what it defines (`--plugin my_routing.py` on every verb, or
`capsnet.load_plugin("my_routing.py")`), or an installed package with entry points in the groups `capsnet.routings`,
`capsnet.datasets` and `capsnet.models`. A checkpoint records which plugins it needs and the SHA-256 of their files;
`require` turns a missing one into a sentence that says how to supply it, and warns of one that has changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shlex
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capsnet.errors import UserError
from capsnet.notice import say
from capsnet.registry import BUILT_IN, Registry, registering_from

_loaded: dict[Path, str] = {}  # plugin file → SHA-256 of what was loaded
_warned: set[tuple[Need, str]] = set()  # a process warns once of a plugin that has changed


@dataclass(frozen=True)
class Need:
    """An entry of a registry that a model or a run cannot do without."""

    kind: str
    name: str
    plugin: str
    """The plugin's file name, or package and version."""
    sha256: str = ""
    """Of the plugin's file; empty for a package, and in records of earlier versions."""


def load_plugin(path: str | Path) -> None:
    """Run a plugin's file once, so that what it registers is known by name.

    A plugin is a program: load only files that you trust.
    """
    file = Path(path).expanduser().resolve()
    if file in _loaded:
        return
    if not file.is_file():
        raise UserError(f"there is no plugin {path}: give the path of a Python file.")
    if twin := next((other for other in _loaded if other.name == file.name), None):
        raise UserError(f"{path} has the name of another plugin, {twin}: rename one, because checkpoints use the name.")
    name = f"capsnet_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: a plugin ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        with registering_from(file.name):
            spec.loader.exec_module(module)
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"the plugin {path} has a syntax error in line {error.lineno}: {error.msg}.") from error
    except Exception as error:  # somebody else's code may fail in any way
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
        where = f" (line {lines[-1]})" if lines else ""
        raise UserError(f"the plugin {path} cannot be loaded{where}: {error!r}.") from error
    _loaded[file] = sha256


def flags() -> list[str]:
    """The `--plugin` flags of this process, for the processes that it starts."""
    return [word for file in _loaded for word in ("--plugin", str(file))]


def load_flags(words: Sequence[str]) -> None:
    """Load the plugins in the `flags` of the process that started this one."""
    for file in words[1::2]:
        load_plugin(file)


def command(*words: str) -> str:
    """A command for the user to copy, quoted for a shell, with the plugins of this process.

    >>> command("train", "--resume", "my runs/1")
    "capsnet train --resume 'my runs/1'"
    """
    here = Path.cwd()
    files = [file.relative_to(here) if file.is_relative_to(here) else file for file in _loaded]
    return shlex.join(["capsnet", *words, *(word for file in files for word in ("--plugin", str(file)))])


def describe(registry: Registry[Any], name: str) -> Need:
    """An entry of a registry, with the plugin that supplies it in this process."""
    origin = registry.origin(name)
    sha256 = next((found for file, found in _loaded.items() if file.name == origin), "")
    return Need(registry.kind, name, origin, sha256)


def needs(used: Iterable[tuple[Registry[Any], str]]) -> list[dict[str, str]]:
    """What a record has to name so that another process can supply it: everything that is not built in."""
    found = [describe(registry, name) for registry, name in used]
    return [asdict(need) for need in found if need.plugin != BUILT_IN]


def require(record: Iterable[Mapping[str, str]], registries: Iterable[Registry[Any]], what: str) -> None:
    """Refuse a file whose plugins are missing, and say how to supply them; warn of plugins that have changed."""
    by_kind = {registry.kind: registry for registry in registries}
    for need in read_needs(record, what):
        if need.kind not in by_kind:
            continue
        if need.name not in by_kind[need.kind]:
            supply = f"add --plugin {need.plugin}" if need.plugin.endswith(".py") else f"install {need.plugin}"
            raise UserError(f"{what} needs the {need.kind} '{need.name}' of the plugin {need.plugin}: {supply}.")
        warn_if_changed(need, describe(by_kind[need.kind], need.name), what)


def read_needs(record: Iterable[Mapping[str, str]], what: str) -> list[Need]:
    try:
        return [Need(**entry) for entry in record]
    except TypeError:
        raise UserError(f"the plugins that {what} needs cannot be read: the file is damaged.") from None


def has_changed(need: Need, now: Need) -> bool:
    """Whether an entry comes from another version of its plugin; records without a SHA-256 cannot tell."""
    if need.sha256 and now.sha256:
        return need.sha256 != now.sha256
    are_packages = not (need.plugin.endswith(".py") or now.plugin.endswith(".py"))
    return are_packages and need.plugin != now.plugin


def unchanged(record: Iterable[Mapping[str, str]], registries: Iterable[Registry[Any]]) -> bool:
    """Whether all plugins in a record are here, in the recorded versions."""
    by_kind = {registry.kind: registry for registry in registries}
    return all(
        need.name in by_kind[need.kind] and not has_changed(need, describe(by_kind[need.kind], need.name))
        for need in read_needs(record, "this record")
        if need.kind in by_kind
    )


def warn_if_changed(need: Need, now: Need, what: str) -> None:
    """One line on stderr, once per process and plugin: results may differ from those of the recorded version."""
    if not has_changed(need, now) or (need, now.sha256) in _warned:
        return
    _warned.add((need, now.sha256))
    then = f"another version of the plugin {need.plugin}" if need.plugin == now.plugin else f"the plugin {need.plugin}"
    used = "" if need.plugin == now.plugin else f", and {now.plugin} is used now"
    say(f"capsnet: {what} was made with {then}{used}: results may differ.")
