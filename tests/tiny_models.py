"""The smallest networks that are still whole, for tests that need any network."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, CNNConfig

TINY = CapsNetConfig(
    (1, 12, 12), 3, stem_channels=(8,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    class_dim=6, decoder=(16,),
)  # fmt: skip
TINY_CNN = CNNConfig((1, 12, 12), 3, channels=(4, 4), kernels=(3, 3), pool=(2, 1), hidden=(8,))


def tiny(**changes: Any) -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(replace(TINY, **changes))
