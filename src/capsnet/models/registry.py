"""From a config to a network."""

from __future__ import annotations

import torch

from capsnet.config import CapsNetConfig, ModelConfig
from capsnet.models.baseline import CNN
from capsnet.models.capsnet import CapsNet

Model = CapsNet | CNN


def build(config: ModelConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Model:
    """The network that a config describes, with fresh weights."""
    if isinstance(config, CapsNetConfig):
        return CapsNet(config, device=device, dtype=dtype)
    return CNN(config, device=device, dtype=dtype)
