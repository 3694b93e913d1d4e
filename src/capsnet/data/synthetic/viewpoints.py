"""Viewpoints: rendered toys under controlled views, a stand-in for smallNORB (LeCun, Huang and Bottou, 2004).

Five categories of ten toys each (`toys`), seen by two cameras from 9 elevations (30° to 70° in steps of 5°) and 18
azimuths (0° to 340° in steps of 20°) under 6 lightings: 972 stereo pairs of 96×96 pixels per toy. As in smallNORB,
instances 4, 6, 7, 8 and 9 are for training and the others for testing, 24,300 pairs each, and the pose of every toy is
known (`Views.poses`).

    viewpoints                           pairs reduced to 48×48, as most networks for smallNORB use them
    viewpoints:size=96                   full size
    viewpoints:crop=32                   random 32×32 windows for training, the central one otherwise
    viewpoints:views=novel-azimuth       trained on azimuths of 300° to 40°, tested on 60° to 280°
    viewpoints:views=familiar-azimuth    trained and tested on azimuths of 300° to 40°
    viewpoints:views=novel-elevation     trained on the three lowest elevations, tested on the six higher ones
    viewpoints:views=familiar-elevation  trained and tested on the three lowest elevations
    viewpoints:standardise=1             every pair with the same mean and contrast
    viewpoints:held_out=1                validation images show the last training instance, which is not trained on
    viewpoints:every=3                   only every third elevation, azimuth and lighting: a small version for trials

Toys are rendered on first use, which takes 2.3 minutes on one core, and cached: a file per toy with its SHA-256 at the
end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.sources.cache import cache_folder, stored_in
from capsnet.data.sources.idx import from_idx, to_idx
from capsnet.data.sources.places import Report
from capsnet.data.splits import Splits
from capsnet.data.synthetic import studio
from capsnet.data.synthetic.toys import toy
from capsnet.data.views import (
    AZIMUTHS,
    CATEGORIES,
    CHOICES,
    ELEVATIONS,
    FAMILIAR,
    INSTANCES,
    LIGHTINGS,
    MEASURES,
    TESTING,
    TRAINING,
    Views,
    splits_of,
)
from capsnet.errors import UserError, unknown
from capsnet.files import Lock, write_bytes
from capsnet.notice import say

VERSION = 1  # of the images: counted up whenever a toy, a light or the camera changes
SIZES = (96, 48, 32, 24, 16)
DIGEST = 32  # bytes of a SHA-256


@dataclass(frozen=True)
class Options:
    """Options after `viewpoints:`."""

    size: int = 48
    """Side that the images of 96×96 are reduced to: 96, 48, 32, 24 or 16."""
    crop: int = 0
    """Side of the windows that are cut out; 0 for none."""
    views: str = "all"
    """All views, or novel or familiar ones by azimuth or elevation."""
    held_out: int = 0
    """Training instances that are used for validation only."""
    standardise: int = 0
    """1 to give every pair the same mean and contrast (`capsnet.data.views.standardised`)."""
    every: int = 1
    """Every how many elevations, azimuths and lightings are used."""

    def __post_init__(self) -> None:
        if self.size not in SIZES:
            raise UserError(f"viewpoints:size={self.size} should be one of {', '.join(map(str, SIZES))} pixels.")
        for name, low, high in (("crop", 0, self.size), ("held_out", 0, 4), ("standardise", 0, 1), ("every", 1, 6)):
            if not low <= getattr(self, name) <= high:
                raise UserError(f"viewpoints:{name}={getattr(self, name)} should be between {low} and {high}.")
        if self.views not in CHOICES:
            raise unknown("choice of viewpoints:views", self.views, CHOICES)

    @property
    def elevations(self) -> Sequence[int]:
        return ELEVATIONS[:: self.every]

    @property
    def azimuths(self) -> Sequence[int]:
        return AZIMUTHS[:: self.every]

    @property
    def lightings(self) -> Sequence[int]:
        return range(0, LIGHTINGS, self.every)

    @property
    def sizes(self) -> tuple[int, int]:
        """Training and test pairs."""
        toys = len(CATEGORIES) * len(TRAINING)
        pairs = toys * len(self.elevations) * len(self.azimuths) * len(self.lightings)
        if self.views == "all":
            return pairs, pairs
        age, what = self.views.split("-")
        steps = self.azimuths if what == "azimuth" else self.elevations
        familiar = pairs * sum(step in FAMILIAR[what] for step in steps) // len(steps)
        return familiar, familiar if age == "familiar" else pairs - familiar


def load(request: Request) -> Splits[Views]:
    """The splits of `viewpoints:OPTIONS`."""
    from capsnet.terminal import Counter

    options = request.spec.options
    parts = []
    with Counter("viewpoints", len(CATEGORIES) * INSTANCES * len(options.azimuths)) as report:
        for start, instances in ((0, TRAINING), (len(CATEGORIES) * len(TRAINING), TESTING)):
            toys = [(category, instance) for category in range(len(CATEGORIES)) for instance in instances]
            images = [
                reduced(pairs_of(*which, options, moved_on(report, (start + k) * len(options.azimuths))), options.size)
                for k, which in enumerate(toys)
            ]
            parts.append(as_views(torch.cat(images), toys, options, request.spec.text))
    train, test = parts
    return splits_of(train, test, request, options.views, options.held_out, options.crop, bool(options.standardise))


def as_views(images: Tensor, toys: Sequence[tuple[int, int]], options: Options, name: str) -> Views:
    """Images in the order of the toys, given as category and instance, with their labels and poses."""
    grid = torch.cartesian_prod(*(torch.tensor(v) for v in (options.elevations, options.azimuths, options.lightings)))
    poses = torch.cat([torch.cat([torch.full((len(grid), 1), instance), grid], 1) for _, instance in toys])
    labels = torch.tensor([category for category, _ in toys]).repeat_interleave(len(grid))
    return Views(images, labels, CATEGORIES, name, poses)


def reduced(images: Tensor, side: int) -> Tensor:
    """Images (n, c, h, h) averaged over squares of pixels, uint8 (n, c, side, side)."""
    factor = images.shape[-1] // side
    return images if factor == 1 else F.avg_pool2d(images.float(), factor).round_().to(torch.uint8)


def moved_on(report: Report, before: int) -> Report:
    """A report of what is done in addition to what was done before."""
    return lambda done: report(before + done)


# --- Rendered once and cached --------------------------------------------------------------------------------------


def pairs_of(category: int, instance: int, options: Options, report: Report = lambda done: None) -> Tensor:
    """The pairs of one toy, uint8 (n, 2, 96, 96) by elevation, azimuth and lighting; rendered if necessary."""
    folder = cache_folder() / "viewpoints"
    images = cached(category, instance, options)
    if images is None:
        with stored_in(folder):
            folder.mkdir(parents=True, exist_ok=True)
            with Lock(folder, lambda: None):
                images = cached(category, instance, options)  # another process may have rendered it meanwhile
                if images is None:
                    images = render_toy(category, instance, options, report)
                    write_bytes(path_of(category, instance, options.every), sealed(to_idx(images)))
    report(len(options.azimuths))
    return torch.from_numpy(images)


def render_toy(category: int, instance: int, options: Options, report: Report) -> np.ndarray:
    solids, lamps = toy(category, instance), [studio.LIGHTINGS[k] for k in options.lightings]
    views = []
    for done, azimuth in enumerate(options.azimuths):
        report(done)
        views.append(studio.render(solids, options.elevations, azimuth, lamps))
    return np.stack(views, 1).reshape(-1, 2, studio.SIDE, studio.SIDE)


def cached(category: int, instance: int, options: Options) -> np.ndarray | None:
    """The pairs of one toy in the cache, if they are intact; a thinned set is also part of the complete one."""
    if (thinned := unsealed(path_of(category, instance, options.every))) is not None or options.every == 1:
        return thinned
    whole = unsealed(path_of(category, instance, 1))
    if whole is None:
        return None
    each = whole.reshape(len(ELEVATIONS), len(AZIMUTHS), LIGHTINGS, *whole.shape[1:])
    step = options.every
    return np.ascontiguousarray(each[::step, ::step, ::step]).reshape(-1, *whole.shape[1:])


def path_of(category: int, instance: int, every: int) -> Path:
    thinned = f"-every{every}" if every > 1 else ""
    name = f"v{VERSION}-{CATEGORIES[category]}-{instance}{thinned}-idx4-ubyte"
    return cache_folder() / "viewpoints" / name


def sealed(content: bytes) -> bytes:
    """The content of a file followed by its SHA-256."""
    return content + hashlib.sha256(content).digest()


def unsealed(path: Path) -> np.ndarray | None:
    """The array in a sealed idx file; None if it is missing or damaged, so that it is made again."""
    if not path.is_file():
        return None
    content = np.fromfile(path, np.uint8)
    body, seal = content[:-DIGEST], content[-DIGEST:]
    if hashlib.sha256(body.data).digest() != seal.tobytes():
        say(f"{path} is damaged; rendering it again.")
        return None
    return from_idx(body, path.name)


register(
    DatasetInfo(
        "viewpoints",
        "stereo pairs of rendered toys at known poses, like smallNORB, 48×48; viewpoints:size=96,views=novel-azimuth",
        load,
        classes=CATEGORIES,
        image_shape=(2, 48, 48),
        options=Options,
        measures=MEASURES,
    )
)
