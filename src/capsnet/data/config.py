"""The augmentation settings of a training run, as a config: importing them does not import PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from capsnet.errors import UserError, unknown

Interpolation = Literal["bilinear", "bicubic"]


@dataclass(frozen=True)
class Augment:
    """How training images are augmented. Everything is off by default."""

    shift: int = 0
    """Shift by up to this many whole pixels in each direction, padding with zeros. The paper uses 2 on MNIST."""
    rotate: float = 0.0
    """Rotate by up to this many degrees in either direction."""
    scale: float = 0.0
    """Scale by a factor between 1 - scale and 1 + scale: 0.1 means 0.9 to 1.1."""
    shear: float = 0.0
    """Shear by up to this many pixels per row: 0.2 moves the top of a 20-pixel digit by 4 against its bottom."""
    flip: bool = False
    """Flip horizontally with probability 0.5. Not for digits or letters."""
    elastic: float = 0.0
    """Distort by smooth random displacements of about this many pixels."""
    erase: int = 0
    """Set one random square with this side to zero."""
    brightness: float = 0.0
    """Add up to this much to all values of an image, or subtract it; the values of an image are 0 to 1."""
    contrast: float = 0.0
    """Scale the difference of every value from the mean of its image by a factor between 1 - contrast and
    1 + contrast."""
    share: float = 1.0
    """Fraction of images that are rotated, scaled, sheared or distorted. The rest are only shifted and keep the
    sharpness of the test images. The other augmentations apply to all images."""
    interpolation: Interpolation = "bilinear"
    """Interpolation of warped images; bicubic keeps them sharper."""
    until: float = 1.0
    """Fraction of the training during which all augmentations apply. With 0.8, images are only shifted and flipped
    during the last fifth."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "interpolation" and not 0 <= value < math.inf:
                raise UserError(f"augmentation {name}={value} should be 0 or more.")
        if self.interpolation not in get_args(Interpolation):
            raise unknown("interpolation", self.interpolation, get_args(Interpolation))
        for name, what in (("share", "images"), ("until", "training")):
            if getattr(self, name) > 1:
                raise UserError(
                    f"augmentation {name}={getattr(self, name)} should be at most 1: 0.5 means half of the {what}."
                )
        for name in ("scale", "contrast"):
            if getattr(self, name) >= 1:
                given = f"{name}={getattr(self, name)}"
                raise UserError(f"augmentation {given} should be below 1: 0.1 means factors of 0.9 to 1.1.")

    @property
    def warps(self) -> bool:
        """Whether pixels are interpolated, not only shifted."""
        return any((self.rotate, self.scale, self.shear, self.elastic))

    @property
    def lights(self) -> bool:
        """Whether brightness or contrast change."""
        return self.brightness > 0 or self.contrast > 0

    def at(self, done: float) -> Augment:
        """The augmentation that applies once this fraction of the training is done."""
        return self if done < self.until or self.until == 1 else Augment(shift=self.shift, flip=self.flip)
