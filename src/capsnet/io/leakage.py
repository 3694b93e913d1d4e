"""Leakage: was this model trained on images that you are about to judge it by?

A run that starts from a model (`--init`) or learns from one (`--teacher`) must not hold out images that the model, or
any model before it, was trained on. Published datasets have a fixed test split, so only their validation split can
leak; the seed also decides the test split of your own images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from capsnet.data import load, parse
from capsnet.data.registry import same_images
from capsnet.data.splits import fingerprint
from capsnet.errors import UserError
from capsnet.io import checkpoint, hub, zoo
from capsnet.io.records import Certificate
from capsnet.notice import say
from capsnet.train.config import Config

SPLIT = ("data", "validation", "validation_choice", "seed")  # the settings that decide which images are held out


def check_unseen(config: Config, strict: bool = True) -> None:
    """Refuse a run that would be judged by images on which its `init` or `teacher` was trained.

    With `strict=False` it is refused only if it would be stopped or tested by such images. If only the reported
    validation error is affected, a notice says so.
    """
    names = [config.init, config.teacher]
    for name in names:  # grows by the models before each model, as far as they still exist
        given_from_hub = hub.is_hub_name(name) and name in (config.init, config.teacher)
        if name and (given_from_hub or zoo.is_shipped(name) or Path(name).exists()):
            birth = checkpoint.birth_of(name)
            names += {birth.config.get("init", ""), birth.config.get("teacher", "")} - {*names}
            if problem := leak(name, birth, config):
                if strict or config.patience or config.stop_at or parse(config.data).info.seeded_test:
                    raise UserError(problem)
                return say(f"The validation error will be too optimistic: {problem}") if config.validation else None
    return None


def leak(name: str, birth: Certificate, config: Config) -> str:
    """Why a model may know images that are held out here, and what to do; empty if it does not."""
    theirs = birth.config
    if not theirs or not same_images(theirs["data"], config.data):
        return ""
    if any(theirs.get(setting) != getattr(config, setting) for setting in SPLIT):
        flags = " ".join(f"--{setting.replace('_', '-')} {theirs.get(setting)}" for setting in SPLIT)
        return f"{name} was trained on images that would be held out here: use its split ({flags}), or leave it out."
    if images_unchanged(birth, config, ("validation", "test")):
        return ""
    return (
        f"{config.data} has changed since {name} was trained on it, so it may know images that would be held out here: "
        f"restore the images, or leave {name} out."
    )


def images_unchanged(
    birth: Certificate, config: Config, parts: Sequence[str] = ("train", "validation", "test")
) -> bool:
    """Whether these splits of the user's images are those in a certificate; True for datasets that do not change."""
    if birth.images is None:
        return True
    channels, *size = birth.config["model"]["image_shape"]
    split = {setting: getattr(config, setting) for setting in (*SPLIT[1:], "train_limit")}
    now = fingerprint(load(config.data, **split, image_size=tuple(size), channels=channels), config.data)
    return all(now.get(part) == birth.images.get(part) for part in parts)
