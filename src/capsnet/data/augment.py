"""Augmentation of whole batches, for training only.

The paper shifts MNIST digits by up to 2 pixels with zero padding and does nothing else (section 5), which is
`Augment(shift=2)`; the other fields are ours. All random numbers come from a CPU generator, so the result does not
depend on the device.
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from capsnet.data.augmentation import Augment
from capsnet.errors import UserError


def augment(images: Tensor, spec: Augment, generator: Generator) -> Tensor:
    """An augmented copy of float images (b, c, h, w). A shift alone keeps every value exactly."""
    b, side = len(images), min(images.shape[2:])
    if spec.shift >= side:
        raise UserError(f"a shift of {spec.shift} pixels can push images of {side} pixels out of view: lower it.")
    # Drawn whether used or not, so that switching one on does not change the other
    move = torch.randint(-spec.shift, spec.shift + 1, (2, b), generator=generator)
    flipped = torch.rand(b, generator=generator) < 0.5
    if spec.flip:
        images = torch.where(flipped.to(images.device).view(b, 1, 1, 1), images.flip(3), images)
    if spec.warps:
        images = warp_some(images, spec, move, generator)
    elif spec.shift:
        images = shift_by(images, move[0], move[1])
    return erase(images, spec.erase, generator) if spec.erase else images


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


def warp_some(images: Tensor, spec: Augment, move: Tensor, generator: Generator) -> Tensor:
    """Warp a random share of the images and only shift the others."""
    warped = warp(images, spec, move, generator)
    if spec.share == 1:
        return warped
    chosen = torch.rand(len(images), generator=generator) < spec.share
    return torch.where(chosen.to(images.device).view(-1, 1, 1, 1), warped, shift_by(images, move[0], move[1]))


def warp(images: Tensor, spec: Augment, move: Tensor, generator: Generator) -> Tensor:
    """Rotate, scale, shear, distort and shift by (2, b) in one interpolation, padding with zeros."""
    b, _, h, w = images.shape
    grid = F.affine_grid(_affine(spec, move, h, w, generator), [b, 1, h, w], align_corners=False)
    if spec.elastic:
        coarse = torch.randn(b, 2, 4, 4, generator=generator) * spec.elastic
        bend = F.interpolate(coarse, (h, w), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
        grid = grid + bend * torch.tensor([2 / w, 2 / h])  # pixels to grid coordinates of −1 to 1
    warped = F.grid_sample(images, grid.to(images), mode=spec.interpolation, align_corners=False)
    return warped.clamp(0, 1) if spec.interpolation == "bicubic" else warped  # bicubic overshoots at edges


def erase(images: Tensor, side: int, generator: Generator) -> Tensor:
    """Set a random square with this side to zero in each image; the square lies inside the image."""
    b, _, h, w = images.shape
    if side > min(h, w):
        raise UserError(f"erase={side} is larger than the images, which are {h}×{w}: lower it.")
    top = torch.randint(0, h - side + 1, (b, 1), generator=generator)
    left = torch.randint(0, w - side + 1, (b, 1), generator=generator)
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
