"""Houses, boats and faces, drawn from a few parts at a known pose: the standard pictures of talks on capsules.

A house and a boat consist of the same rectangle and triangle in different arrangements; a face consists of two eyes, a
nose and a mouth. The same parts in another arrangement are "not a house" and "not a face" at any angle. The pose of
every object is known: its centre of mass, angle and size.

There are four kinds of scenes:

    one          one object at a random position, rotated by up to 90° in either direction
    scrambled    the parts of one object in a wrong arrangement, posed as above; no class is present
    crowded      two or three objects of different classes that hardly overlap, posed as above
    upside-down  crowded, with one of the objects upside down (180° ± 30°)

The training, validation and test splits of `parts` are half `one` and half `crowded`, without scrambled or upside-down
scenes. A scene is a function of (stream, index) alone, as in `multimnist`; every epoch of training has new scenes.
Shapes are drawn by their signed distance d to the centre of each pixel, in pixels: a pixel has coverage ½ − d, clipped
to [0, 1], which draws smooth edges for a whole batch at once.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from capsnet.data import seeds
from capsnet.data.examples import Batch, Examples
from capsnet.data.registry import DatasetInfo, Request, register
from capsnet.data.splits import Splits
from capsnet.errors import UserError, unknown

CLASSES = ("house", "boat", "face")
SCENES = ("one", "scrambled", "crowded", "upside-down", "training")
MOST = 3  # objects in a scene
SMALLEST, LARGEST, LARGEST_IN_A_CROWD = 6.5, 11.0, 8.5  # pixels per unit of an object, which is two units wide
TURN, OVERTURN = math.radians(90), math.radians(30)
REACH = 1.2  # no arrangement extends farther from its centre, in units; this radius stays inside the image
ALONE, CROWD, ORDER, SIZE, ANGLE, ARRANGEMENT = 0, 1, 2, 3, 6, 9  # draws of a scene; the last three are per object
WINDOW = 18  # side in pixels of a square that contains any part of the largest object
TRIES = 24  # random placements of a crowd; the first one with enough distance is used
TOUCHING = 0.95  # minimum distance of two objects, relative to the sum of their sizes


# --- Shapes: signed distances in units of the object's size, y up, centre of mass at the origin ----------------


def rectangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() - 0.6, y.abs() - 0.3)


def triangle(x: Tensor, y: Tensor) -> Tensor:
    """Isosceles, base 1.1 and height 0.65, pointing up."""
    return _isosceles(x, y, 1.1, 0.65)


def eye(x: Tensor, y: Tensor) -> Tensor:
    return _distance(x, y) - 0.2


def nose(x: Tensor, y: Tensor) -> Tensor:
    """A narrow triangle."""
    return _isosceles(x, y, 0.34, 0.5)


def mouth(x: Tensor, y: Tensor) -> Tensor:
    """A smile: an arc with round ends."""
    x, y = x.abs(), y - SMILE_CENTRE
    sin, cos = math.sin(SMILE_HALF), math.cos(SMILE_HALF)
    end = _distance(x - SMILE_RADIUS * sin, y + SMILE_RADIUS * cos)
    line = torch.where(x * cos < -y * sin, (_distance(x, y) - SMILE_RADIUS).abs(), end)
    return line - SMILE_THICKNESS / 2


def _distance(x: Tensor, y: Tensor) -> Tensor:
    # only correctly rounded operations (hypot is not), so that no pixel depends on its position in the batch
    return torch.sqrt(x * x + y * y)


def _isosceles(x: Tensor, y: Tensor, base: float, height: float) -> Tensor:
    """Maximum of the distances to the three sides: exact along the sides, slightly too small beyond the corners."""
    slant = math.hypot(height, base / 2)
    flank = (x.abs() * height + (y - height * 2 / 3) * base / 2) / slant
    return torch.maximum(flank, -height / 3 - y)


SMILE_RADIUS, SMILE_HALF, SMILE_THICKNESS = 0.62, math.radians(50), 0.2
_BAND, _ENDS = 2 * SMILE_HALF * SMILE_RADIUS * SMILE_THICKNESS, math.pi * SMILE_THICKNESS**2 / 4
_DEEP = SMILE_RADIUS * math.sin(SMILE_HALF) / SMILE_HALF * (1 + (SMILE_THICKNESS / SMILE_RADIUS) ** 2 / 12)
_END_DEEP = SMILE_RADIUS * math.cos(SMILE_HALF) - SMILE_THICKNESS / 2 * 4 / (3 * math.pi) * math.sin(SMILE_HALF)
SMILE_CENTRE = (_BAND * _DEEP + _ENDS * _END_DEEP) / (_BAND + _ENDS)  # height of the arc's centre above its mass

SHAPES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (rectangle, triangle, eye, nose, mouth)
AREAS = (1.2 * 0.6, 1.1 * 0.65 / 2, math.pi * 0.2**2, 0.34 * 0.5 / 2, _BAND + _ENDS)
RECTANGLE, TRIANGLE, EYE, NOSE, MOUTH = range(5)


# --- Arrangements: position and rotation of each part -------------------------------------------------


class Part(NamedTuple):
    """A shape, the position of its centre of mass in the object (y up), and its rotation, counter-clockwise."""

    shape: int
    x: float
    y: float
    degrees: float = 0.0


Arrangement = tuple[Part, ...]
GAP = 0.1  # between rectangle and triangle, so that they share no ink
WIDE, HIGH = 0.6 + GAP, 0.3 + GAP  # from the centre of the rectangle to beyond its sides
FOOT, TIP = 0.65 / 3, 0.65 * 2 / 3  # from the centre of the triangle to its base and to its tip
HALF_BASE = 0.55

WHOLE: tuple[Arrangement, ...] = (
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, 0, HIGH + FOOT)),  # house: a roof
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, 0.1, HIGH + HALF_BASE, -90)),  # boat: a sail, its base the mast
    (Part(EYE, -0.42, 0.5), Part(EYE, 0.42, 0.5), Part(NOSE, 0, 0.06), Part(MOUTH, 0, -0.5)),
)
_NOT_A_HOUSE: tuple[Arrangement, ...] = (
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, 0, HIGH + TIP, 180)),  # the roof on its tip
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, WIDE + FOOT, 0, -90)),  # against the short side, pointing away
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, WIDE + TIP, 0, 90)),  # against the short side, pointing at it
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, -0.35 - HALF_BASE, HIGH + FOOT)),  # the roof slid off
    (Part(RECTANGLE, 0, 0), Part(TRIANGLE, -0.62, HIGH + 0.42, 45)),  # off a corner
)
_SLOTS = ((-0.42, 0.5), (0.42, 0.5), (0.0, 0.06), (0.0, -0.5))  # left eye, right eye, nose, mouth


def _misplaced(nose_slot: int, mouth_slot: int, nose_degrees: float, mouth_degrees: float) -> Arrangement:
    """A face with nose and mouth in the given slots, and the eyes in the remaining ones."""
    eyes = [slot for slot in range(4) if slot not in (nose_slot, mouth_slot)]
    placed = [(EYE, slot, 0.0) for slot in eyes]
    placed += [(NOSE, nose_slot, nose_degrees), (MOUTH, mouth_slot, mouth_degrees)]
    return tuple(Part(shape, *_SLOTS[slot], degrees) for shape, slot, degrees in placed)


_NOT_A_FACE = (
    _misplaced(0, 1, 0, 90),
    _misplaced(1, 0, 180, 90),
    _misplaced(0, 2, 90, 0),
    _misplaced(1, 2, 0, 180),
    _misplaced(3, 0, 180, -90),
    _misplaced(3, 1, 0, 90),
    _misplaced(3, 2, 0, 0),  # only nose and mouth swapped
)
SCRAMBLED: tuple[tuple[Arrangement, ...], ...] = (_NOT_A_HOUSE, _NOT_A_HOUSE, _NOT_A_FACE)


def balanced(arrangement: Arrangement) -> Arrangement:
    """The arrangement with the centre of mass of all parts at the origin."""
    mass = sum(AREAS[part.shape] for part in arrangement)
    x = sum(AREAS[part.shape] * part.x for part in arrangement) / mass
    y = sum(AREAS[part.shape] * part.y for part in arrangement) / mass
    return tuple(part._replace(x=part.x - x, y=part.y - y) for part in arrangement)


# All arrangements: the three whole ones, then the wrong ones of each class
_ALL = [balanced(a) for a in (*WHOLE, *(a for wrong in SCRAMBLED for a in wrong))]
_FIRST_WRONG = [len(WHOLE) + sum(len(wrong) for wrong in SCRAMBLED[:k]) for k in range(len(CLASSES))]


# --- Scenes -----------------------------------------------------------------------------------------------------


class Objects(NamedTuple):
    """Contents of n scenes. The three objects of a scene have different classes; `present` tells which of them exist.

    kinds int64 (n, 3): the class of the parts; present bool (n, 3); scrambled bool (n,); arrangement (n, 3);
    poses float (n, 3, 4): x to the right and y down in pixels from the upper left corner, angle in radians
    counter-clockwise, size in pixels.
    """

    kinds: Tensor
    present: Tensor
    scrambled: Tensor
    arrangement: Tensor
    poses: Tensor

    @property
    def labels(self) -> Tensor:
        """bool (n, 3): the classes that are present as a whole."""
        there = torch.zeros_like(self.present).scatter_(1, self.kinds, self.present)
        return there & ~self.scrambled[:, None]


@dataclass(frozen=True)
class Layout:
    """The options after `parts:`."""

    train: int = 20_000
    """Scenes per epoch; every epoch has new ones."""
    test: int = 5_000
    """Scenes of the test split."""
    side: int = 40
    """Side of the image in pixels."""

    def __post_init__(self) -> None:
        for name, least in (("train", 1), ("test", 1), ("side", 36)):
            if getattr(self, name) < least:
                raise UserError(f"parts:{name}={getattr(self, name)} should be at least {least}.")
        if self.side > 256:
            raise UserError(f"parts:side={self.side} should be at most 256 pixels.")

    @property
    def sizes(self) -> tuple[int, int]:
        return self.train, self.test


@dataclass(frozen=True, eq=False)
class Scenes(Examples):
    """Drawn scenes of one kind; see the top of this file."""

    kind: str
    stream: int
    scenes: int
    side: int = 40
    name: str = "parts"
    endless: bool = False
    place: str = "cpu"

    classes = CLASSES

    def __post_init__(self) -> None:
        if self.kind not in SCENES:
            raise unknown("kind of scene", self.kind, SCENES)

    def __len__(self) -> int:
        return self.scenes

    @property
    def device(self) -> torch.device:
        return torch.device(self.place)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return 1, self.side, self.side

    @property
    def labels_per_image(self) -> int | None:
        return None

    @property
    def targets(self) -> Tensor:
        return self.objects(self.numbers()).labels.float()

    def to(self, device: torch.device | str) -> Scenes:
        return replace(self, place=str(device))

    def gather(self, index: Tensor) -> Batch:
        """A batch whose `parts` show each of the three objects alone, as targets of a decoder."""
        index = index.to(self.device)
        objects = self.objects(index)
        alone = draw(objects, self.side)
        labels = objects.labels
        whole = objects.present & ~objects.scrambled[:, None]
        return Batch(alone.sum(1).clamp_(max=1), labels.float(), labels, index, alone, objects.kinds, whole)

    def objects(self, index: Tensor) -> Objects:
        """Contents of the scenes at these indices (b,)."""
        index = index.to(self.device)
        number = self.how_many(index)
        present = torch.arange(MOST, device=self.device) < number[:, None]
        orders = torch.tensor(list(itertools.permutations(range(len(CLASSES)))), device=self.device)
        kinds = orders[seeds.integers(self.stream, index, ORDER, len(orders))]
        scrambled = torch.full_like(number, self.kind == "scrambled", dtype=torch.bool)
        size, angle = self.sizes(index, number), self.angles(index)
        poses = torch.cat([self.places(index, size, present), angle[..., None], size[..., None]], 2)
        return Objects(kinds, present, scrambled, self.arrangements(index, kinds), poses)

    def how_many(self, index: Tensor) -> Tensor:
        """Number of objects in each scene, (b,)."""
        crowd = 2 + seeds.integers(self.stream, index, CROWD, 2)
        if self.kind in ("crowded", "upside-down"):
            return crowd
        if self.kind == "training":
            return crowd.masked_fill(seeds.integers(self.stream, index, ALONE, 2) == 0, 1)
        return torch.ones_like(index)

    def sizes(self, index: Tensor, number: Tensor) -> Tensor:
        """Pixels per unit of each object, (b, 3)."""
        largest = torch.where(number > 1, LARGEST_IN_A_CROWD, LARGEST)[:, None]
        return SMALLEST + (largest - SMALLEST) * self.draw_each(index, SIZE)

    def angles(self, index: Tensor) -> Tensor:
        """Radians counter-clockwise, (b, 3), in −π to π; the first object is the one that is upside down."""
        drawn = self.draw_each(index, ANGLE) * 2 - 1
        angle = drawn * TURN
        if self.kind == "upside-down":
            overturned = drawn[:, 0] * OVERTURN
            angle[:, 0] = overturned - overturned.sign() * math.pi
        return angle

    def arrangements(self, index: Tensor, kinds: Tensor) -> Tensor:
        """Index of the arrangement of each object, (b, 3)."""
        if self.kind != "scrambled":
            return kinds
        first = torch.tensor(_FIRST_WRONG, device=self.device)[kinds]
        wrong = torch.tensor([len(wrong) for wrong in SCRAMBLED], device=self.device)[kinds]
        return first + (self.draw_each(index, ARRANGEMENT) * wrong).long()

    def draw_each(self, index: Tensor, draw: int) -> Tensor:
        """A random number in [0, 1) for each object of a scene, (b, 3)."""
        return torch.stack([seeds.uniform(self.stream, index, draw + k) for k in range(MOST)], 1)

    def places(self, index: Tensor, size: Tensor, present: Tensor) -> Tensor:
        """Positions of the objects, (b, 3, 2) as x and y: the first random placement with enough distance."""
        throw = (index[:, None] * TRIES + torch.arange(TRIES, device=self.device))[..., None]
        drawn = torch.cat([seeds.uniform(self.stream + 1, throw, k) for k in range(2 * MOST)], 2)  # b tries 3·2
        reach = (REACH * size + 2)[:, None, :, None]  # keeps the border black
        places = reach + (self.side - 2 * reach) * drawn.unflatten(2, (MOST, 2))
        tightest = tightness(places, size, present)
        best = torch.where(tightest >= 0, 1.0, tightest).argmax(1)  # or the placement with the largest distance
        return places[torch.arange(len(index), device=self.device), best]


def tightness(places: Tensor, size: Tensor, present: Tensor) -> Tensor:
    """Distance of the closest objects of each placement minus the minimum, in pixels: (b, tries, 3, 2) → (b, tries).

    Infinite if there is only one object.
    """
    slack = []
    for one, other in itertools.combinations(range(MOST), 2):
        apart = (places[:, :, one] - places[:, :, other]).square().sum(-1).sqrt()
        enough = TOUCHING * (size[:, one] + size[:, other])[:, None]
        both = (present[:, one] & present[:, other])[:, None]
        slack.append(torch.where(both, apart - enough, math.inf))
    return torch.stack(slack).amin(0)


def draw(objects: Objects, side: int) -> Tensor:
    """Each object alone, in grey levels of 0 to 1: (n, 3, 1, side, side)."""
    n, device = len(objects.kinds), objects.poses.device
    shape, placed = (table.to(device)[objects.arrangement] for table in _tables())  # (n, 3, 4) and (n, 3, 4, 3)
    canvas = torch.zeros(n * MOST, side * side, device=device)
    for number, distance in enumerate(SHAPES):
        scene, place, part = ((shape == number) & objects.present[..., None]).nonzero(as_tuple=True)
        pixels, covered = cover(distance, objects.poses[scene, place], placed[scene, place, part], side)
        pixels = pixels + ((scene * MOST + place) * side * side).view(-1, 1, 1)
        canvas.view(-1).index_add_(0, pixels.flatten(), covered.flatten())
    # integer grey levels, as in a file
    return (canvas.clamp_(max=1) * 255).round_().div_(255).view(n, MOST, 1, side, side)


def cover(distance: Callable[[Tensor, Tensor], Tensor], pose: Tensor, part: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Indices of the pixels around a part, and the coverage of each: (m, WINDOW, WINDOW) both.

    pose (m, 4) of the object; part (m, 3), x, y and angle in it.
    """
    # float64, so that rounding to float32 does not depend on the position in the batch; MPS has no float64
    x, y, angle, size = (pose if pose.device.type == "mps" else pose.double()).unbind(1)
    sin, cos = angle.sin(), angle.cos()
    x = x + size * (part[:, 0] * cos - part[:, 1] * sin)
    y = y - size * (part[:, 0] * sin + part[:, 1] * cos)
    columns, rows = (_window(middle, side) for middle in (x, y))  # (m, WINDOW)
    sin, cos = ((angle + part[:, 2]).sin().float().view(-1, 1, 1), (angle + part[:, 2]).cos().float().view(-1, 1, 1))
    right = ((columns + 0.5 - x[:, None]) / size[:, None]).float()[:, None, :]
    up = ((y[:, None] - rows - 0.5) / size[:, None]).float()[:, :, None]
    away = distance(right * cos + up * sin, up * cos - right * sin) * size.float().view(-1, 1, 1)
    return rows[:, :, None] * side + columns[:, None, :], (0.5 - away).clamp_(0, 1)


def _window(middle: Tensor, side: int) -> Tensor:
    """Indices of WINDOW pixels around a point, (m,) → (m, WINDOW), all inside the image."""
    first = (middle.floor().long() - WINDOW // 2 + 1).clamp_(0, side - WINDOW)
    return first[:, None] + torch.arange(WINDOW, device=middle.device)


@functools.cache
def _tables() -> tuple[Tensor, Tensor]:
    """Shape (a, 4), −1 for no part, and x, y, angle (a, 4, 3) of every part of every arrangement."""
    shape = torch.full((len(_ALL), 4), -1)
    placed = torch.zeros(len(_ALL), 4, 3)
    for a, arrangement in enumerate(_ALL):
        for k, part in enumerate(arrangement):
            shape[a, k] = part.shape
            placed[a, k] = torch.tensor([part.x, part.y, math.radians(part.degrees)])
    return shape, placed


def scenes(kind: str, n: int, *, purpose: str = "test", seed: int = 0) -> Scenes:
    """n fixed scenes of a kind (see the top of this file), different for every purpose and seed.

    >>> two = scenes("crowded", 100).gather(torch.tensor([3, 7]))
    >>> two.images.shape, two.labels.sum(1) >= 2
    (torch.Size([2, 1, 40, 40]), tensor([True, True]))
    """
    return Scenes(kind, seeds.key(seed, f"parts {purpose} {kind}"), n)


def load(request: Request) -> Splits[Scenes]:
    """The splits of `parts:OPTIONS`; validation and test are the same for every seed.

    With a limit, every epoch of training has the same scenes.
    """
    layout, limit = request.spec.options, request.train_limit
    stream = seeds.key(request.seed, "parts training")
    train = Scenes("training", stream, limit or layout.train, layout.side, request.spec.text, endless=not limit)
    fixed = [
        replace(train, stream=seeds.key(0, f"parts {purpose}"), scenes=n, endless=False)
        for purpose, n in (("validation", request.validation), ("test", layout.test))
    ]
    return Splits(train, *fixed)


register(
    DatasetInfo(
        "parts",
        "drawn houses, boats and faces at known poses, 40×40, generated on the fly; parts:train=20000,test=5000",
        load,
        classes=CLASSES,
        image_shape=(1, 40, 40),
        labels_per_image=None,
        options=Layout,
    )
)
