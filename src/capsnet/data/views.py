"""Views: stereo pairs of objects at known poses, as in smallNORB, with windows cut out of them on demand.

Both datasets of views (`viewpoints`, `smallnorb:PATH`) have five categories of ten instances. Instances 4, 6, 7, 8 and
9 are for training and the others for testing. An elevation is 30° to 70°, an azimuth 0° to 340°.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from capsnet.data import seeds
from capsnet.data.examples import Batch, Dataset, Examples
from capsnet.data.registry import Request
from capsnet.data.splits import Splits, limit_training, split, split_indices
from capsnet.errors import UserError, unknown

CATEGORIES = ("animal", "human", "aeroplane", "lorry", "car")
INSTANCES = 10
TRAINING, TESTING = (4, 6, 7, 8, 9), (0, 1, 2, 3, 5)
ELEVATIONS = tuple(range(30, 71, 5))
AZIMUTHS = tuple(range(0, 341, 20))
LIGHTINGS = 6
FAMILIAR = {"azimuth": (300, 320, 340, 0, 20, 40), "elevation": (30, 35, 40)}
CHOICES = ("all", *(f"{new}-{what}" for what in FAMILIAR for new in ("novel", "familiar")))
FIELDS = ("instance", "elevation", "azimuth", "lighting")
MEASURES = {
    "instance": tuple(float(k) for k in range(INSTANCES + 1)),
    "elevation": tuple(float(k) for k in (*ELEVATIONS, 75)),
    "azimuth": tuple(float(k) for k in (*AZIMUTHS, 360)),
    "lighting": tuple(float(k) for k in range(LIGHTINGS + 1)),
}


@dataclass(frozen=True, eq=False)
class Views(Dataset):
    """Stereo pairs (n, 2, h, w) whose `poses`, int64 (n, 4), are instance, elevation, azimuth and lighting.

    With a `crop`, a batch has windows of that side: the central ones, or, if endless, random ones that differ in every
    epoch. A window is a function of (stream, index) alone. `Batch.measures` has the pose by name.
    """

    poses: Tensor
    crop: int = 0
    stream: int = 0
    endless: bool = False

    @property
    def image_shape(self) -> tuple[int, int, int]:
        c, h, w = self.images.shape[1:]
        return (c, self.crop, self.crop) if self.crop else (c, h, w)

    def to(self, device: torch.device | str) -> Self:
        return replace(super().to(device), poses=self.poses.to(device))

    def subset(self, indices: Tensor) -> Self:
        return replace(super().subset(indices), poses=self.poses[indices.to(self.poses.device)])

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        chosen = index % max(1, self.n)
        batch = super().gather(chosen)
        measures = {name: self.poses[chosen, k].float() for k, name in enumerate(FIELDS)}
        images = self.cut(batch.images, index) if self.crop else batch.images
        return replace(batch, images=images, index=index, measures=measures)

    def cut(self, images: Tensor, index: Tensor) -> Tensor:
        """A window of each image: (b, c, h, w) → (b, c, crop, crop)."""
        corners = torch.tensor(images.shape[2:], device=self.device).sub(self.crop)
        if not self.endless:
            top, left = corners.div(2, rounding_mode="floor").tolist()
            return images[:, :, top : top + self.crop, left : left + self.crop]
        window = torch.arange(self.crop, device=self.device)
        top, left = (seeds.integers(self.stream, index, k, int(corners[k]) + 1)[:, None] + window for k in (0, 1))
        b = torch.arange(len(images), device=self.device)[:, None, None]
        return images[b, :, top[:, :, None], left[:, None, :]].movedim(3, 1)

    def in_memory(self) -> Dataset:
        return Examples.in_memory(self)


def splits_of(
    train: Views,
    test: Views,
    request: Request,
    views: str = "all",
    held_out: int = 0,
    crop: int = 0,
    standardise: bool = False,
) -> Splits[Views]:
    """The requested splits; `held_out` training instances, from the last one on, become the validation split."""
    train = seen(train, views.replace("novel", "familiar"))
    request = replace(request, image_size=None) if crop else request  # windows of the images as they are
    test = seen(test, views)
    if standardise:  # whole images, as Hinton et al. (2018) do before they cut windows
        train, test = (replace(part, images=standardised(part.images)) for part in (train, test))
    splits = split_instances(train, test, request, held_out)
    if not crop:
        return splits
    h, w = splits.train.image_shape[1:]
    if not 1 <= crop <= min(h, w):
        raise UserError(f"{train.name}: crop={crop} should be between 1 and the {min(h, w)} pixels of the images.")
    stream = seeds.key(request.seed, "crop")
    parts = (replace(part, crop=crop) for part in (splits.train, splits.validation, splits.test))
    first, *others = parts
    return Splits(replace(first, stream=stream, endless=True), *others)


def standardised(images: Tensor) -> Tensor:
    """Both images of each pair with a mean of one half and a standard deviation of a sixth: uint8 (n, c, h, w) → uint8.

    Values more than three deviations from the mean become black or white.

    >>> standardised(torch.tensor([0, 60], dtype=torch.uint8).view(1, 1, 1, 2)).flatten()
    tensor([ 85, 170], dtype=torch.uint8)
    """
    out = torch.empty_like(images)
    for some, into in zip(images.split(1000), out.split(1000), strict=True):
        values = some.float()
        mean, std = values.mean((1, 2, 3), keepdim=True), values.std((1, 2, 3), correction=0, keepdim=True)
        into.copy_(((values - mean) / std.clamp(min=1) * (255 / 6) + 255 / 2).round_().clamp_(0, 255))
    return out


def split_instances(train: Views, test: Views, request: Request, held_out: int) -> Splits[Views]:
    """Validation images drawn by the seed: among all training images, or only those of the held-out instances."""
    if not held_out:
        return split(train, test, request)  # type: ignore[return-value]
    unseen = torch.isin(train.poses[:, 0], torch.tensor(TRAINING[-held_out:]))
    whole = split(train, test, replace(request, validation=0, train_limit=0))
    assert isinstance(whole.train, Views)
    validation = whole.train.subset(unseen.nonzero().flatten())
    if request.validation < validation.n:
        validation = validation.subset(split_indices(validation.n, request.validation, "seeded", request.seed)[1])
    trained = replace(whole, train=whole.train.subset((~unseen).nonzero().flatten()), validation=validation)
    return limit_training(trained, request)  # type: ignore[return-value]


def seen(part: Views, views: str) -> Views:
    """The views of a kind: all, or the familiar or novel azimuths or elevations.

    >>> FAMILIAR["elevation"]
    (30, 35, 40)
    """
    if views not in CHOICES:
        raise unknown("choice of views", views, CHOICES)
    if views == "all":
        return part
    age, what = views.split("-")
    known = torch.isin(part.poses[:, FIELDS.index(what)], torch.tensor(FAMILIAR[what]))
    return part.subset((known if age == "familiar" else ~known).nonzero().flatten())
