"""capsnet reconstruct."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import torch
from torch import Tensor
from tyro.conf import arg

from capsnet.cli.flags import ImageNames, MaybePath, ModelName, Switch, parse
from capsnet.cli.inputs import list_images, prepare_image, splits_for, training_config
from capsnet.errors import UserError, unknown
from capsnet.io import checkpoint, zoo
from capsnet.models.base import Model
from capsnet.notice import say

MAX_IMAGES = 64  # per figure


@dataclass(frozen=True)
class Reconstruct:
    """Draw inputs with their reconstructions (Fig. 3), or the effect of each pose dimension (Fig. 4).

    Without images, test images of the model's own dataset are used.

    Examples:
      capsnet reconstruct runs/demo
      capsnet reconstruct runs/demo --what tweaks --class 5
      capsnet reconstruct runs/demo photo.png --what tweaks --out tweaks.svg
    """

    model: ModelName
    """Model name (see `capsnet models`), run folder or .safetensors file."""
    images: ImageNames = ()
    """Image files or folders (default: test images)."""
    what: Literal["reconstructions", "tweaks"] = "reconstructions"
    """Figure to draw."""
    label: Annotated[str | None, arg(name="class", metavar="NAME", help_behavior_hint="")] = None
    """Class whose capsule is decoded (default: the predicted class); without images, also selects the test images."""
    out: MaybePath = None
    """File to write, .png or .svg (default: WHAT.png in the run folder, or in the current folder)."""
    raw: Switch = False
    """Only resize images; skip the MNIST preprocessing."""
    force: Switch = False
    """Overwrite the file if it exists."""


def reconstruct(argv: list[str]) -> int:
    flags = parse(Reconstruct, "reconstruct", argv)
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'capsnet[train]'.")
    from capsnet.report import figures

    model = checkpoint.load(flags.model)
    if model.decoder is None:
        raise UserError(f"{flags.model} has no decoder and cannot reconstruct images: train a model with a decoder.")
    label = class_index(model, flags.label)
    out = picture_file(flags)
    images, true = images_to_draw(model, flags)
    if flags.what == "tweaks":
        figure = figures.tweak_grid(model, images[0], label)
    else:
        figure = figures.reconstructions(model, images, true, label if true is None else None)
    figures.save(figure, out)
    print(out)
    return 0


def picture_file(flags: Reconstruct) -> Path:
    """The file to write; an existing file is only overwritten with --force."""
    folder = Path(flags.model) if Path(flags.model).is_dir() and not zoo.is_shipped(flags.model) else Path()
    out = flags.out or folder / f"{flags.what}.png"
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"{out} should end in .png or .svg.")
    if out.exists() and not flags.force:
        raise UserError(f"{out} already exists: choose another file with --out, or overwrite it with --force.")
    return out


def images_to_draw(model: Model, flags: Reconstruct) -> tuple[Tensor, Tensor | None]:
    """The images of the figure, and their labels if each image has exactly one."""
    if flags.images:
        names = list_images(flags.images)
        if flags.what == "tweaks" and len(names) > 1:
            raise UserError(f"--what tweaks takes one image, not {len(names)}: choose one of them.")
        if len(names) > MAX_IMAGES:
            say(f"drawing the first {MAX_IMAGES} of {len(names)} images.")
        config = None if flags.raw else training_config(flags.model)
        return torch.stack([prepare_image(model, name, config).image for name in names[:MAX_IMAGES]]), None
    test = splits_for(model, flags.model, None).test
    rows = torch.arange(len(test))
    if flags.label is not None:
        here = flags.label in test.classes
        rows = (test.targets[:, test.classes.index(flags.label)] > 0).nonzero()[:, 0] if here else rows[:0]
    if not len(rows):
        raise UserError(f"{test.name} has no test image of class {flags.label}: pass an image file.")
    chosen = test.gather(rows[:MAX_IMAGES])
    if test.multi_label or test.classes != model.classes:
        return chosen.images, None
    return chosen.images, chosen.labels


def class_index(model: Model, name: str | None) -> int | None:
    """The index of a class by name."""
    if name is not None and name not in model.classes:
        raise unknown("class", name, model.classes)
    return None if name is None else model.classes.index(name)
