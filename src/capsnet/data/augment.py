"""Augmentation of whole batches, for training only.

The paper moves MNIST digits by up to 2 pixels with zero padding and does nothing else (section 5), which is
`Augment(shift=2)`; the other fields are ours. Every choice is drawn from a CPU generator, so it does not depend
on the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from capsnet.errors import UserError, unknown

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Augment:
    """How training images are varied; everything off by default."""

    shift: int = 0
    """Move by up to this many whole pixels in each direction, zeros coming in; the paper uses 2 on MNIST."""
    rotate: float = 0.0
    """Turn by up to this many degrees either way."""
    scale: float = 0.0
    """Enlarge or shrink by up to this share: 0.1 means 0.9 to 1.1 times."""
    shear: float = 0.0
    """Slant by up to this many pixels a row: 0.2 moves a 20-pixel digit's top by 4 against its bottom."""
    flip: bool = False
    """Mirror left to right, every second image; never for digits or letters."""
    elastic: float = 0.0
    """Bend by smooth random displacements of about this many pixels."""
    erase: int = 0
    """Blank out one random square of this side."""
    share: float = 1.0
    """How many of the images are turned, scaled, slanted or bent: 0.5 for half of them. The others are only moved, and
    stay as sharp as those that the network is tested on; mirroring and blanking out are for all."""
    interpolation: Interpolation = "bilinear"
    """How such an image is read between its pixels: bicubic keeps it sharper."""
    until: float = 1.0
    """For how much of the training: with 0.8, images of the last fifth are only moved (and mirrored), to end on sharp
    ones."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "interpolation" and not 0 <= value < math.inf:
                raise UserError(f"augmentation {name}={value} should be 0 or more.")
        if self.interpolation not in get_args(Interpolation):
            raise unknown("interpolation", self.interpolation, get_args(Interpolation))
        for name, what in (("share", "images"), ("until", "training")):
            if getattr(self, name) > 1:
                raise UserError(
                    f"augmentation {name}={getattr(self, name)} should be 1 at most: 0.5 means half of the {what}."
                )
        if self.scale >= 1:
            raise UserError(f"augmentation scale={self.scale} should be below 1: 0.1 means 0.9 to 1.1 times.")

    @property
    def warps(self) -> bool:
        """True when pixels are interpolated, not only moved."""
        return any((self.rotate, self.scale, self.shear, self.elastic))

    def at(self, done: float) -> Augment:
        """What is left of it when this share of the training is done."""
        return self if done < self.until or self.until == 1 else Augment(shift=self.shift, flip=self.flip)


def augment(images: Tensor, spec: Augment, generator: Generator) -> Tensor:
    """A varied copy of float images (b, c, h, w); the shift alone keeps every value exactly."""
    b, side = len(images), min(images.shape[2:])
    if spec.shift >= side:
        raise UserError(f"a shift of {spec.shift} pixels can push images of {side} pixels out of view.")
    # Drawn whether used or not, so that switching one of them on leaves the other as it was
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
    """Move each image (c, h, w) of a batch by whole pixels `down`, `right` (b,), zeros coming in."""
    b, c, h, w = images.shape
    most = int(torch.stack([down.abs(), right.abs()]).max()) if b else 0
    padded = F.pad(images, (most, most, most, most))
    # Row y of the result is row y − down of the image, which lies `most` further on in the padded one
    rows = torch.arange(h, device=images.device) + most - down.to(images.device).view(b, 1)
    columns = torch.arange(w, device=images.device) + most - right.to(images.device).view(b, 1)
    flat = rows.view(b, 1, h, 1) * (w + 2 * most) + columns.view(b, 1, 1, w)
    index = flat.reshape(b, 1, h * w).expand(b, c, h * w)
    return padded.flatten(2).gather(2, index).view(b, c, h, w)


def warp_some(images: Tensor, spec: Augment, move: Tensor, generator: Generator) -> Tensor:
    """The share of the images that is to be warped; the others shifted alone."""
    warped = warp(images, spec, move, generator)
    if spec.share == 1:
        return warped
    chosen = torch.rand(len(images), generator=generator) < spec.share
    return torch.where(chosen.to(images.device).view(-1, 1, 1, 1), warped, shift_by(images, move[0], move[1]))


def warp(images: Tensor, spec: Augment, move: Tensor, generator: Generator) -> Tensor:
    """Rotation, scale, shear, bending and the shift (2, b) in one interpolation, zeros coming in."""
    b, _, h, w = images.shape
    grid = F.affine_grid(_affine(spec, move, h, w, generator), [b, 1, h, w], align_corners=False)
    if spec.elastic:
        coarse = torch.randn(b, 2, 4, 4, generator=generator) * spec.elastic
        bend = F.interpolate(coarse, (h, w), mode="bicubic", align_corners=True).permute(0, 2, 3, 1)
        grid = grid + bend * torch.tensor([2 / w, 2 / h])  # from pixels to a grid that runs from −1 to 1
    warped = F.grid_sample(images, grid.to(images), mode=spec.interpolation, align_corners=False)
    return warped.clamp(0, 1) if spec.interpolation == "bicubic" else warped  # which overshoots beside an edge


def erase(images: Tensor, side: int, generator: Generator) -> Tensor:
    """Zero a square of this side in each image; the square lies wholly inside."""
    b, _, h, w = images.shape
    if side > min(h, w):
        raise UserError(f"erase={side} is larger than the images, which are {h}×{w}.")
    top = torch.randint(0, h - side + 1, (b, 1), generator=generator)
    left = torch.randint(0, w - side + 1, (b, 1), generator=generator)
    rows = (torch.arange(h) >= top) & (torch.arange(h) < top + side)
    columns = (torch.arange(w) >= left) & (torch.arange(w) < left + side)
    inside = rows.view(b, 1, h, 1) & columns.view(b, 1, 1, w)
    return images.masked_fill(inside.to(images.device), 0)


def _affine(spec: Augment, move: Tensor, h: int, w: int, generator: Generator) -> Tensor:
    """(b, 2, 3): where each output position (−1 to 1) looks in the input, the inverse of what is seen."""
    angle, factor, slant = torch.rand(3, move.shape[1], generator=generator) * 2 - 1
    angle, factor, slant = angle * math.radians(spec.rotate), 1 + factor * spec.scale, slant * spec.shear
    cos, sin, one, zero = angle.cos(), angle.sin(), torch.ones_like(angle), torch.zeros_like(angle)
    rotation = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    shearing = torch.stack([one, slant, zero, one], 1).view(-1, 2, 2)
    inverse = torch.linalg.inv(rotation @ shearing * factor.view(-1, 1, 1))  # acts on (x, y) in pixels
    half = torch.tensor([w / 2, h / 2])
    shift = inverse @ -move.flip(0).T.unsqueeze(2).float()
    return torch.cat([inverse * half, shift], 2) / half.view(2, 1)
