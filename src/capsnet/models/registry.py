"""From a config or a preset's name to a network."""

from __future__ import annotations

from dataclasses import replace

import torch

from capsnet.config import CapsNetConfig, ModelConfig, get_preset
from capsnet.models.baseline import CNN
from capsnet.models.capsnet import CapsNet

Model = CapsNet | CNN


def build(config: ModelConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Model:
    """The network that a config describes, with fresh weights."""
    if isinstance(config, CapsNetConfig):
        return CapsNet(config, device=device, dtype=dtype)
    return CNN(config, device=device, dtype=dtype)


def create_model(
    preset: str = "paper",
    *,
    num_classes: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """A preset's network with fresh weights, for any image shape and number of classes.

    >>> sum(p.numel() for p in create_model("paper").parameters())
    8215568
    """
    config = get_preset(preset).model
    config = replace(
        config, num_classes=num_classes or config.num_classes, image_shape=image_shape or config.image_shape
    )
    return build(config, device=device, dtype=dtype)
