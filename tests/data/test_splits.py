"""Which images are held out."""

from __future__ import annotations

import pytest
import torch

from capsnet.data import Dataset, parse
from capsnet.data.registry import DEFAULT_VALIDATION, Request
from capsnet.data.splits import split
from capsnet.errors import UserError

FEW = Dataset(torch.zeros(50, 1, 4, 4, dtype=torch.uint8), torch.arange(50) % 10, tuple("0123456789"), "few")


def test_a_tenth_of_a_dataset_is_held_out_that_is_smaller_than_the_default() -> None:
    parts = split(FEW, FEW, Request(parse("mnist"), validation=DEFAULT_VALIDATION))
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (45, 5, 50)


def test_more_than_there_is_cannot_be_held_out() -> None:
    with pytest.raises(UserError, match="validation=60 leaves no images to train on: few has 50"):
        split(FEW, FEW, Request(parse("mnist"), validation=60))
