"""Inputs that several verbs share: the dataset of a trained model, and image files."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from pathlib import Path

from capsnet import data
from capsnet.data import photo
from capsnet.data.folder import pictures
from capsnet.data.registry import DEFAULT_VALIDATION, same_images
from capsnet.data.splits import fingerprint
from capsnet.errors import UserError
from capsnet.io.checkpoint import birth_of
from capsnet.models.base import Model
from capsnet.notice import say
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict


def training_config(model: str) -> Config | None:
    """The config that a model was trained with."""
    birth = birth_of(model)
    return from_dict(birth.config, model) if birth.config else None


def splits_for(model: Model, path: str, name: str | None) -> data.Splits:
    """The named dataset, or the model's own with the split it was trained on; images in the model's size."""
    config = training_config(path)
    if config is None and name is None:
        raise UserError(f"{path} does not record its training data: name a dataset with --data, or pass images.")
    channels, height, width = model.config.image_shape
    config = config or Config()
    name = name or config.data
    same = same_images(name, config.data)  # a held-out digit stays held out in every dataset made of it
    splits = data.load(
        name,
        validation=config.validation if same else DEFAULT_VALIDATION,
        validation_choice=config.validation_choice,
        seed=config.seed,
        train_limit=config.train_limit if same else 0,
        image_size=(height, width),
        channels=channels if channels in (1, 3) else None,  # stereo pairs, for example, are not converted
    )
    then = birth_of(path).images
    if then and same and fingerprint(splits, name) != then:
        say(f"{name} has changed since {path} was trained, so it may contain images that the model was trained on")
    return splits


def labels_per_image(config: Config | None) -> int | None:
    """Labels of each image that a model was trained on; None if unknown or varying."""
    return data.parse(config.data).labels_per_image if config else None


def list_images(names: Sequence[str]) -> list[str]:
    """The image files that these names stand for: a folder stands for the images in it."""
    if not names:
        raise UserError("no image given: pass image files, folders, or - for stdin.")
    found: list[str] = []
    for name in names:
        if name != "-" and Path(name).is_dir():
            inside = [str(path) for path in pictures(Path(name))]
            if not inside:
                raise UserError(f"the folder {name} contains no images (.png, .jpg, …): choose another one.")
            found += inside
        else:
            found.append(name)
    return found


def prepare_image(model: Model, name: str, config: Config | None) -> photo.Prepared:
    """An image file (or - for stdin) as the input of a model that was trained with this config."""
    stdin = name == "-"
    picture = photo.read_image(io.BytesIO(sys.stdin.buffer.read()) if stdin else name, "stdin" if stdin else name)
    return photo.prepare_for(picture, tuple(model.config.image_shape), config.data if config else "")
