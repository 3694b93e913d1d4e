"""Augmentation of whole batches, for training only.

The paper shifts MNIST digits by up to 2 pixels with zero padding and does nothing else (section 5), which is
`Augment(shift=2)`; the other fields are ours. All random numbers come from a CPU generator, so the result does not
depend on the device. They are drawn for the whole batch before any image is touched, so that a process which has a part
of the batch augments its images as a process with all of them would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from capsnet.data.config import Augment
from capsnet.errors import UserError


@dataclass(frozen=True)
class Draws:
    """What augmentation does to each image of a batch: tensors with the images as their first axis."""

    move: Tensor  # (b, 2) pixels down and to the right
    flipped: Tensor  # (b,) bool
    affine: Tensor | None = None  # (b, 2, 3) maps output positions to input positions
    bend: Tensor | None = None  # (b, 2, 4, 4) elastic distortion, in pixels
    warped: Tensor | None = None  # (b,) bool: which images are warped and not only shifted; None for all
    corner: Tensor | None = None  # (b, 2) top and left of the erased square
    light: Tensor | None = None  # (b, 2) what brightness adds, and the factor of contrast

    def of(self, part: slice) -> Draws:
        """The draws for some images of the batch."""
        rest = (self.affine, self.bend, self.warped, self.corner, self.light)
        return Draws(self.move[part], self.flipped[part], *(None if value is None else value[part] for value in rest))


def draw(b: int, h: int, w: int, spec: Augment, generator: Generator) -> Draws:
    """The draws for b images of h×w pixels."""
    # Drawn whether used or not, so that switching one on does not change the other
    move = torch.randint(-spec.shift, spec.shift + 1, (2, b), generator=generator)
    flipped = torch.rand(b, generator=generator) < 0.5
    affine = bend = warped = corner = light = None
    if spec.warps:
        affine = _affine(spec, move, h, w, generator)
        bend = torch.randn(b, 2, 4, 4, generator=generator) * spec.elastic if spec.elastic else None
        warped = torch.rand(b, generator=generator) < spec.share if spec.share != 1 else None
    if spec.erase:
        top = torch.randint(0, h - spec.erase + 1, (b,), generator=generator)
        corner = torch.stack([top, torch.randint(0, w - spec.erase + 1, (b,), generator=generator)], 1)
    if spec.lights:
        within = torch.rand(b, 2, generator=generator) * 2 - 1
        light = within * torch.tensor([spec.brightness, spec.contrast]) + torch.tensor([0.0, 1.0])
    return Draws(move.T, flipped, affine, bend, warped, corner, light)


def augment(images: Tensor, spec: Augment, generator: Generator, part: slice | None = None, of: int = 0) -> Tensor:
    """An augmented copy of float images (b, c, h, w). A shift alone keeps every value exactly.

    If the images are a part of a batch of `of` images, they are augmented as in the whole batch.
    """
    h, w = images.shape[2:]
    check_sizes(spec, h, w)
    draws = draw(len(images) if part is None else of, h, w, spec, generator)
    draws = draws if part is None else draws.of(part)
    if spec.flip:
        images = torch.where(draws.flipped.to(images.device).view(-1, 1, 1, 1), images.flip(3), images)
    if spec.warps:
        images = warp_some(images, spec, draws)
    elif spec.shift:
        images = shift_by(images, *draws.move.unbind(1))
    if draws.light is not None:
        images = relight(images, *draws.light.to(images).view(-1, 2, 1, 1, 1).unbind(1))
    return images if draws.corner is None else erase(images, spec.erase, draws.corner)


def check_sizes(spec: Augment, h: int, w: int) -> None:
    """Refuse to shift or to erase more than the images have."""
    if spec.shift >= min(h, w):
        raise UserError(f"a shift of {spec.shift} pixels can push images of {min(h, w)} pixels out of view: lower it.")
    if spec.erase > min(h, w):
        raise UserError(f"erase={spec.erase} is larger than the images, which are {h}×{w}: lower it.")


def shift_by(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Shift each image (c, h, w) of a batch by whole pixels `down`, `right` (b,), padding with zeros."""
    b, c, h, w = images.shape
    most = int(torch.stack([down.abs(), right.abs()]).max()) if b else 0
    padded = F.pad(images, (most, most, most, most))
    # Row y of the result is row y − down of the image, which is row y − down + most of the padded image
    rows = torch.arange(h, device=images.device) + most - down.to(images.device).view(b, 1)
    columns = torch.arange(w, device=images.device) + most - right.to(images.device).view(b, 1)
    flat = rows.view(b, 1, h, 1) * (w + 2 * most) + columns.view(b, 1, 1, w)
    index = flat.reshape(b, 1, h * w).expand(b, c, h * w)
    return padded.flatten(2).gather(2, index).view(b, c, h, w)


def warp_some(images: Tensor, spec: Augment, draws: Draws) -> Tensor:
    """Warp a random share of the images and only shift the others."""
    warped = warp(images, spec, draws)
    if draws.warped is None:
        return warped
    chosen = draws.warped.to(images.device).view(-1, 1, 1, 1)
    return torch.where(chosen, warped, shift_by(images, *draws.move.unbind(1)))


def warp(images: Tensor, spec: Augment, draws: Draws) -> Tensor:
    """Rotate, scale, shear, distort and shift in one interpolation, padding with zeros."""
    b, _, h, w = images.shape
    assert draws.affine is not None
    grid = F.affine_grid(draws.affine, [b, 1, h, w], align_corners=False)
    if draws.bend is not None:
        bend = F.interpolate(draws.bend, (h, w), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
        grid = grid + bend * torch.tensor([2 / w, 2 / h])  # pixels to grid coordinates of −1 to 1
    warped = F.grid_sample(images, grid.to(images), mode=spec.interpolation, align_corners=False)
    return warped.clamp(0, 1) if spec.interpolation == "bicubic" else warped  # bicubic overshoots at edges


def relight(images: Tensor, more: Tensor, factor: Tensor) -> Tensor:
    """Scale the contrast of each image (c, h, w) of a batch and change its brightness; values stay within 0 and 1."""
    mean = images.mean((1, 2, 3), keepdim=True)
    return ((images - mean) * factor + mean + more).clamp(0, 1)


def erase(images: Tensor, side: int, corner: Tensor) -> Tensor:
    """Set the square with this side and corner (b, 2) to zero in each image."""
    b, _, h, w = images.shape
    top, left = corner[:, :1], corner[:, 1:]
    rows = (torch.arange(h) >= top) & (torch.arange(h) < top + side)
    columns = (torch.arange(w) >= left) & (torch.arange(w) < left + side)
    inside = rows.view(b, 1, h, 1) & columns.view(b, 1, 1, w)
    return images.masked_fill(inside.to(images.device), 0)


def _affine(spec: Augment, move: Tensor, h: int, w: int, generator: Generator) -> Tensor:
    """(b, 2, 3): maps output positions (−1 to 1) to input positions, the inverse of the visible transformation."""
    angle, factor, slant = torch.rand(3, move.shape[1], generator=generator) * 2 - 1
    angle, factor, slant = angle * math.radians(spec.rotate), 1 + factor * spec.scale, slant * spec.shear
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rotation = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    shearing = torch.stack([one, slant, zero, one], 1).view(-1, 2, 2)
    inverse = torch.linalg.inv(rotation @ shearing * factor.view(-1, 1, 1))  # acts on (x, y) in pixels
    half = torch.tensor([w / 2, h / 2])
    shift = inverse @ -move.flip(0).T.unsqueeze(2).float()
    return torch.cat([inverse * half, shift], 2) / half.view(2, 1)
