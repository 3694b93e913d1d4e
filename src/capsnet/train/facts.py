"""What all processes of a training have to have in common: code, plugins, settings, data and other models."""

from __future__ import annotations

import hashlib
import json
import zlib
from functools import cache
from pathlib import Path

import torch

import capsnet
from capsnet import plugins
from capsnet.data import Examples
from capsnet.files import sha256
from capsnet.io import checkpoint
from capsnet.train.config_records import to_dict
from capsnet.train.runs import Run

SAMPLE = 256  # images of each split that are compared


def facts(run: Run) -> dict[str, str]:
    """What each fact is called in a message → a checksum that has to be the same everywhere."""
    config = run.config
    settings = to_dict(config) | {"plugins": None}  # which have a checksum of their own
    found = {"settings": json.dumps(settings, sort_keys=True), **facts_of_code()}
    for name in filter(None, (config.init, config.teacher)):
        found |= facts_of_model(name)
    splits = {"training": run.splits.train, "validation": run.splits.validation, "test": run.splits.test}
    found |= {f"{name} images of {config.data}": images_checksum(split) for name, split in splits.items()}
    return found | ({f"images in {config.data}": json.dumps(run.images)} if run.images else {})


def facts_of_code() -> dict[str, str]:
    return {
        "code (capsnet)": code_checksum(),
        "versions of PyTorch": torch.__version__,
        **{f"contents of the plugin {Path(file).name}": sha256(Path(file)) for file in plugins.flags()[1::2]},
    }


def facts_of_model(name: str) -> dict[str, str]:
    return {f"weights of {name}": sha256(checkpoint.model_file(name))}


@cache
def code_checksum() -> str:
    """Version and checksum of the package's source code."""
    root = Path(capsnet.__file__).parent
    told = hashlib.sha256(capsnet.__version__.encode())
    for file in sorted(root.rglob("*.py")):
        told.update(file.relative_to(root).as_posix().encode() + file.read_bytes())
    return told.hexdigest()


def images_checksum(examples: Examples) -> str:
    """Number, classes and a checksum of evenly spaced images with their labels.

    Published data are verified when they are read, and the user's images have a checksum of their own.
    """
    told = 0
    if len(examples):
        batch = examples.gather(examples.sample(SAMPLE))
        for tensor in (batch.images, batch.targets):
            told = zlib.crc32(tensor.cpu().contiguous().numpy().tobytes(), told)
    return f"{len(examples)} {examples.classes} {told}"
