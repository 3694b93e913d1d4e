"""Digits with shapes: what an image consists of, and that it depends on its index alone."""

from __future__ import annotations

import torch

from capsnet.data import Dataset
from capsnet.data.synthetic.shapes import SHAPES, DigitsAndShapes, outlines


def images(n: int = 300) -> DigitsAndShapes:
    generator = torch.Generator().manual_seed(0)
    digits = torch.zeros(40, 1, 28, 28, dtype=torch.uint8)
    digits[..., 8:20, 10:16] = torch.randint(100, 255, (40, 1, 12, 6), generator=generator, dtype=torch.uint8)
    source = Dataset(digits, torch.arange(40) % 10, tuple("0123456789"), "digits")
    return DigitsAndShapes(source, stream=5, images=n)


def test_an_image_is_the_sum_of_a_digit_and_a_shape() -> None:
    batch = images().gather(torch.arange(300))
    assert batch.parts is not None
    assert batch.digits is not None
    torch.testing.assert_close(batch.images, batch.parts.sum(1).clamp(max=1))
    assert (batch.targets.sum(1) == 2).all()
    assert (batch.digits[:, 0] == torch.arange(300) % 10).all()
    assert torch.bincount(batch.digits[:, 1] - 10).min() > 70  # of three shapes
    assert (batch.targets.gather(1, batch.digits) == 1).all()
    drawn = (batch.parts[:, 1] > 0).sum((1, 2, 3))
    expected = (outlines() > 0).sum((1, 2, 3))[batch.digits[:, 1] - 10]
    assert torch.equal(drawn, expected)  # nothing is cut off


def test_an_image_depends_on_its_index_alone() -> None:
    one, other = images().gather(torch.tensor([7, 250])), images().gather(torch.tensor([250]))
    assert torch.equal(one.images[1:], other.images)


def test_there_are_as_many_classes_as_names() -> None:
    assert images().classes[10:] == SHAPES
    assert images().targets.shape == (300, 13)


def test_each_outline_is_two_pixels_wide_and_closed() -> None:
    for shape in outlines()[:, 0] > 0:
        outside = torch.zeros_like(shape)
        outside[0] = True
        for _ in range(60):  # flood from the border
            grown = torch.nn.functional.max_pool2d(outside[None].float(), 3, 1, 1)[0] > 0
            outside = grown & ~shape
        assert not outside[14, 14]
        assert shape.any(1).sum() >= 18
