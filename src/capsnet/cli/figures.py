"""Fig. 3, 4 and 5 of any checkpoint and any images: `capsnet reproduce figures --model RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from capsnet import checkpoint
from capsnet.cli.use import MOST_PAINTED, digit_side, list_images, prepare_image, splits_for, training_config
from capsnet.errors import UserError
from capsnet.experiments.conduct import save_picture
from capsnet.experiments.figures import looked_at, paper_figures


def paint(model_name: str, images: Sequence[str], out: Path | None) -> list[Path]:
    """Draw the figures of a model, of its test images or of these, as PNG and SVG; the files that were written."""
    if find_spec("matplotlib") is None:
        raise UserError("pictures need matplotlib, which is not installed: pip install 'capsnet[train]'.")
    model = checkpoint.load(model_name)
    if images:
        side = digit_side(training_config(model_name))
        names = list_images(images)[:MOST_PAINTED]
        pictures = paper_figures(model, torch.stack([prepare_image(model, name, side)[0] for name in names]), None)
    else:
        pictures = paper_figures(model, *looked_at(model, splits_for(model, model_name, None).test))
    place = Path(model_name)
    folder = out or (place if place.is_dir() else place.parent) / "figures"
    stems = [save_picture(figure, folder / name) for name, figure in pictures.items()]
    return [folder / f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")]
