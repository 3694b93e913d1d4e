"""Figures 3, 4 and 5 of any checkpoint and any images: `capsnet reproduce figures --model RUN`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from capsnet.cli.inputs import list_images, prepare_image, splits_for, training_config
from capsnet.cli.reconstruct import MAX_IMAGES
from capsnet.errors import UserError
from capsnet.experiments.core.conduct import save_picture
from capsnet.experiments.figures import looked_at, paper_figures
from capsnet.io import checkpoint


def draw(model_name: str, images: Sequence[str], out: Path | None) -> list[Path]:
    """Draw a model's figures from these images, or from its test images, as PNG; returns the files written."""
    if find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: pip install 'capsnet[train]'.")
    model = checkpoint.load(model_name)
    if images:
        config = training_config(model_name)
        names = list_images(images)[:MAX_IMAGES]
        pictures = paper_figures(model, torch.stack([prepare_image(model, name, config).image for name in names]), None)
    else:
        pictures = paper_figures(model, *looked_at(model, splits_for(model, model_name, None).test))
    place = Path(model_name)
    folder = out or (place if place.is_dir() else place.parent) / "figures"
    stems = [save_picture(figure, folder / name) for name, figure in pictures.items()]
    return [folder / f"{stem}.png" for stem in stems]
