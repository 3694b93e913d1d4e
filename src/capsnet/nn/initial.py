"""How layers are initialised: PyTorch's defaults, or what the authors' code does."""

from __future__ import annotations

from torch import Tensor, nn

from capsnet.errors import unknown
from capsnet.nn.options import INITS


def check_init(init: str) -> None:
    if init not in INITS:
        raise unknown("initialisation", init, INITS)


def truncated_normal_(weight: Tensor, std: float) -> None:
    """The authors' initialisation: a normal distribution truncated at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)
