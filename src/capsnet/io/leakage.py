"""Leakage: was this model trained on images that you are about to judge it by?

A run that starts from a model (`--init`) or learns from one (`--teacher`) must not hold out images that the model, or
any model before it, was trained on. Published datasets have a fixed test split, so only their validation split can
leak; the seed also decides the test split of your own images.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from pathlib import Path

from capsnet.data import Splits, load, parse
from capsnet.data.progress import notice
from capsnet.data.registry import Choice
from capsnet.errors import UserError
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Certificate
from capsnet.train.config import Config

SPLIT = ("data", "validation", "validation_choice", "seed")  # the settings that decide which images are held out


def check_unseen(config: Config, strict: bool = True) -> None:
    """Refuse a run that would be judged by images on which its `init` or `teacher` was trained.

    With `strict=False` it is refused only if it would be stopped or tested by such images. If only the reported
    validation error is affected, a notice says so.
    """
    problem = find_leak(config, strict)
    if problem and (strict or config.patience or config.stop_at or parse(config.data).info.seeded_test):
        raise UserError(problem)
    if problem and config.validation:
        notice(f"The validation error will be too optimistic: {problem}")


def find_leak(config: Config, strict: bool) -> str:
    """Which model knows images that are held out here, and what to do; empty if none does."""
    models = [name for name in (config.init, config.teacher) if name]
    for name in models:
        birth = birth_of(name)
        theirs = birth.config
        before = (theirs.get("init"), theirs.get("teacher"))
        models += [model for model in before if model and model not in models and exists(model)]
        if not theirs and strict:
            return f"{name} does not say on which images it was trained: leave it out."
        if theirs and same_images(theirs["data"], config.data) and (problem := compare_splits(name, birth, config)):
            return problem
    return ""


def compare_splits(name: str, birth: Certificate, config: Config) -> str:
    """How the split of a model with the same images differs from the split here; empty if it does not."""
    theirs = birth.config
    if any(theirs.get(setting) != getattr(config, setting) for setting in SPLIT):
        flags = " ".join(f"--{setting.replace('_', '-')} {theirs.get(setting)}" for setting in SPLIT)
        return f"{name} was trained on images that would be held back here: use its split ({flags}), or leave it out."
    if birth.images is None:
        return ""
    split = config.validation, config.validation_choice, config.seed
    now = checksums(config.data, parse(config.data).checksum(), split, tuple(theirs["model"]["image_shape"]))
    if all(now[part] == birth.images.get(part) for part in ("validation", "test")):
        return ""
    return (
        f"{config.data} has changed since {name} was trained on it, so that it may know images that would be held back "
        f"here: restore the images, or leave {name} out."
    )


@lru_cache(maxsize=8)  # a search checks every trial
def checksums(
    data: str, files: int | None, split: tuple[int, Choice, int], shape: tuple[int, int, int]
) -> dict[str, int]:
    """The fingerprint of the user's images in a given size; `files` is their checksum on disk."""
    (validation, choice, seed), (channels, height, width) = split, shape
    splits = load(
        data, validation=validation, validation_choice=choice, seed=seed, image_size=(height, width), channels=channels
    )
    return fingerprint(splits, data)


def fingerprint(splits: Splits, data: str) -> dict[str, int]:
    """Checksums of each split of the user's images, which may change; empty for other datasets."""
    if parse(data).info.checksum is None:
        return {}
    parts = {"train": splits.train, "validation": splits.validation, "test": splits.test}
    return {
        name: zlib.crc32(part.labels.numpy(), zlib.crc32(part.images.contiguous().numpy()))
        for name, part in parts.items()
    }


def same_images(one: str, other: str) -> bool:
    """Whether two datasets are made of the same images; the datasets of a missing plugin differ from all others.

    >>> same_images("multimnist", "mnist"), same_images("mnist", "fashion-mnist")
    (True, False)
    """
    try:
        return parse(one).images == parse(other).images
    except UserError:
        return one == other


def birth_of(model: str) -> Certificate:
    """The birth certificate in the header of a model."""
    return Certificate.of_header(checkpoint.read_tensors(checkpoint.model_file(model))[1].get("certificate"))


def exists(model: str) -> bool:
    return zoo.is_shipped(model) or Path(model).exists()
