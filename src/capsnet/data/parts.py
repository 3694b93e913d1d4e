"""Houses, boats and faces, drawn from a few parts at a known pose: the pictures that every talk on capsules shows.

A house and a boat are the same rectangle and the same triangle, put together differently; a face is two eyes, a nose
and a mouth. A whole is its parts in the right arrangement: the same parts in another one are "not a house" and "not a
face" at any angle. Of every object the pose is known: where its centre of mass lies, how far it is turned, how large
it is.

Four kinds of scenes:

    one          one object, anywhere, turned by up to 90° either way
    scrambled    the parts of one object in a wrong arrangement, posed as above; no class is there
    crowded      two or three objects of different classes that hardly overlap, posed as above
    upside-down  crowded, and one of the objects stands on its head (180° ± 30°)

Training, validation and the test set of `parts` are half `one` and half `crowded`: nothing scrambled is ever in them,
and nothing upside down. A scene is a function of (stream, index) and nothing else, as in `multimnist`; training goes on
to new scenes in every epoch. Shapes are drawn by their signed distance d to each pixel's centre, in pixels: the pixel
is covered by ½ − d, cut off at 0 and 1, which draws smooth edges for a whole batch at once.
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

from capsnet.data import options, seeds
from capsnet.data.datasets import Splits
from capsnet.data.examples import Batch, Examples
from capsnet.errors import UserError, unknown

CLASSES = ("house", "boat", "face")
SCENES = ("one", "scrambled", "crowded", "upside-down", "training")
MOST = 3  # objects in a scene
SMALLEST, LARGEST, LARGEST_IN_A_CROWD = 6.5, 11.0, 8.5  # sizes: pixels to a unit of the object; it is two units wide
TURN, OVERTURN = math.radians(90), math.radians(30)
REACH = 1.2  # units from an object's centre that are kept inside the image; no arrangement goes farther
ALONE, CROWD, ORDER, SIZE, ANGLE, ARRANGEMENT = 0, 1, 2, 3, 6, 9  # the draws of a scene; the last three one an object
WINDOW = 18  # side in pixels of a square that holds any part of the largest object
TRIES = 24  # places thrown for a crowd, of which the first that is not too tight is taken
TOUCHING = 0.95  # how near two objects may be, as a share of the sum of their sizes


# --- Shapes: signed distances in units of the object's size, y up, the centre of mass at the origin ---------------


def rectangle(x: Tensor, y: Tensor) -> Tensor:
    return torch.maximum(x.abs() - 0.6, y.abs() - 0.3)


def triangle(x: Tensor, y: Tensor) -> Tensor:
    """Isosceles, base 1.1 and height 0.65, pointing up."""
    return _isosceles(x, y, 1.1, 0.65)


def eye(x: Tensor, y: Tensor) -> Tensor:
    return _distance(x, y) - 0.2


def nose(x: Tensor, y: Tensor) -> Tensor:
    """A slender triangle."""
    return _isosceles(x, y, 0.34, 0.5)


def mouth(x: Tensor, y: Tensor) -> Tensor:
    """A smile: an arc with round ends."""
    x, y = x.abs(), y - SMILE_CENTRE
    sin, cos = math.sin(SMILE_HALF), math.cos(SMILE_HALF)
    end = _distance(x - SMILE_RADIUS * sin, y + SMILE_RADIUS * cos)
    line = torch.where(x * cos < -y * sin, (_distance(x, y) - SMILE_RADIUS).abs(), end)
    return line - SMILE_THICKNESS / 2


def _distance(x: Tensor, y: Tensor) -> Tensor:
    # of exactly rounded operations only (hypot is not one), lest a pixel depend on its place in the batch
    return torch.sqrt(x * x + y * y)


def _isosceles(x: Tensor, y: Tensor, base: float, height: float) -> Tensor:
    """The greatest distance to one of the three sides: exact along the sides, a little short beyond the corners."""
    slant = math.hypot(height, base / 2)
    flank = (x.abs() * height + (y - height * 2 / 3) * base / 2) / slant
    return torch.maximum(flank, -height / 3 - y)


SMILE_RADIUS, SMILE_HALF, SMILE_THICKNESS = 0.62, math.radians(50), 0.2
_BAND, _ENDS = 2 * SMILE_HALF * SMILE_RADIUS * SMILE_THICKNESS, math.pi * SMILE_THICKNESS**2 / 4
_DEEP = SMILE_RADIUS * math.sin(SMILE_HALF) / SMILE_HALF * (1 + (SMILE_THICKNESS / SMILE_RADIUS) ** 2 / 12)
_END_DEEP = SMILE_RADIUS * math.cos(SMILE_HALF) - SMILE_THICKNESS / 2 * 4 / (3 * math.pi) * math.sin(SMILE_HALF)
SMILE_CENTRE = (_BAND * _DEEP + _ENDS * _END_DEEP) / (_BAND + _ENDS)  # how far the arc's centre lies above its mass

SHAPES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (rectangle, triangle, eye, nose, mouth)
AREAS = (1.2 * 0.6, 1.1 * 0.65 / 2, math.pi * 0.2**2, 0.34 * 0.5 / 2, _BAND + _ENDS)
RECTANGLE, TRIANGLE, EYE, NOSE, MOUTH = range(5)


# --- Arrangements: which part lies where, and how it is turned -------------------------------------------------


class Part(NamedTuple):
    """A shape, where its centre of mass lies in the object (y up), and how it is turned, counter-clockwise."""

    shape: int
    x: float
    y: float
    degrees: float = 0.0


Arrangement = tuple[Part, ...]
GAP = 0.1  # between rectangle and triangle, so that both are seen and none of the ink is shared
WIDE, HIGH = 0.6 + GAP, 0.3 + GAP  # from the rectangle's middle to beyond its sides
FOOT, TIP = 0.65 / 3, 0.65 * 2 / 3  # from the triangle's middle to its base and to its tip
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
    """A face with nose and mouth in the slots of others, and the eyes in those that are left."""
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
    _misplaced(3, 2, 0, 0),  # only nose and mouth changed places
)
SCRAMBLED: tuple[tuple[Arrangement, ...], ...] = (_NOT_A_HOUSE, _NOT_A_HOUSE, _NOT_A_FACE)


def balanced(arrangement: Arrangement) -> Arrangement:
    """The same with the centre of mass of all parts at the origin."""
    mass = sum(AREAS[part.shape] for part in arrangement)
    x = sum(AREAS[part.shape] * part.x for part in arrangement) / mass
    y = sum(AREAS[part.shape] * part.y for part in arrangement) / mass
    return tuple(part._replace(x=part.x - x, y=part.y - y) for part in arrangement)


# All arrangements one after the other: the three whole ones, then the wrong ones of each class
_ALL = [balanced(a) for a in (*WHOLE, *(a for wrong in SCRAMBLED for a in wrong))]
_FIRST_WRONG = [len(WHOLE) + sum(len(wrong) for wrong in SCRAMBLED[:k]) for k in range(len(CLASSES))]


# --- Scenes -----------------------------------------------------------------------------------------------------


class Objects(NamedTuple):
    """What is in n scenes. A scene has as many objects as are `present`; the classes of all three places differ.

    kinds int64 (n, 3): the class whose parts it has; present bool (n, 3); scrambled bool (n,); arrangement (n, 3);
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
        """bool (n, 3): the classes that are there, whole."""
        there = torch.zeros_like(self.present).scatter_(1, self.kinds, self.present)
        return there & ~self.scrambled[:, None]


@dataclass(frozen=True)
class Layout:
    """The options after `parts:`."""

    train: int = 20_000
    """Scenes in an epoch; every epoch has new ones."""
    test: int = 5_000
    """Scenes in the test set: the first so many of it."""
    side: int = 40
    """Side of the image in pixels."""

    def __post_init__(self) -> None:
        for name, least in (("train", 1), ("test", 1), ("side", 36)):
            if getattr(self, name) < least:
                raise UserError(f"parts:{name}={getattr(self, name)} is too small: it should be {least} or more.")
        if self.side > 256:
            raise UserError(f"parts:side={self.side} is too large: it should be 256 pixels or less.")


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
        """A batch, with each of three objects alone on its canvas as `parts`, so that a decoder can paint it alone."""
        index = index.to(self.device)
        objects = self.objects(index)
        alone = draw(objects, self.side)
        labels = objects.labels
        whole = objects.present & ~objects.scrambled[:, None]
        return Batch(alone.sum(1).clamp_(max=1), labels.float(), labels, index, alone, objects.kinds, whole)

    def objects(self, index: Tensor) -> Objects:
        """What is in the scenes of these numbers (b,), and at what pose."""
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
        """Objects in each scene, (b,)."""
        crowd = 2 + seeds.integers(self.stream, index, CROWD, 2)
        if self.kind in ("crowded", "upside-down"):
            return crowd
        alone = seeds.integers(self.stream, index, ALONE, 2) == 0 if self.kind == "training" else index == index
        return crowd.masked_fill(alone, 1)

    def sizes(self, index: Tensor, number: Tensor) -> Tensor:
        """Pixels to a unit of each object, (b, 3)."""
        largest = torch.where(number > 1, LARGEST_IN_A_CROWD, LARGEST)[:, None]
        return SMALLEST + (largest - SMALLEST) * self.draw_each(index, SIZE)

    def angles(self, index: Tensor) -> Tensor:
        """Radians counter-clockwise, (b, 3), in −π to π; the first object is the one that stands on its head."""
        drawn = self.draw_each(index, ANGLE) * 2 - 1
        angle = drawn * TURN
        if self.kind == "upside-down":
            overturned = drawn[:, 0] * OVERTURN
            angle[:, 0] = overturned - overturned.sign() * math.pi
        return angle

    def arrangements(self, index: Tensor, kinds: Tensor) -> Tensor:
        """Which of all arrangements each object has, (b, 3)."""
        if self.kind != "scrambled":
            return kinds
        first = torch.tensor(_FIRST_WRONG, device=self.device)[kinds]
        wrong = torch.tensor([len(wrong) for wrong in SCRAMBLED], device=self.device)[kinds]
        return first + (self.draw_each(index, ARRANGEMENT) * wrong).long()

    def draw_each(self, index: Tensor, draw: int) -> Tensor:
        """A number in [0, 1) for each of a scene's objects, (b, 3)."""
        return torch.stack([seeds.uniform(self.stream, index, draw + k) for k in range(MOST)], 1)

    def places(self, index: Tensor, size: Tensor, present: Tensor) -> Tensor:
        """Where the objects lie: (b, 3, 2), x and y. Of several throws the first one that is not too tight."""
        throw = (index[:, None] * TRIES + torch.arange(TRIES, device=self.device))[..., None]
        drawn = torch.cat([seeds.uniform(self.stream + 1, throw, k) for k in range(2 * MOST)], 2)  # b tries 3·2
        reach = (REACH * size + 2)[:, None, :, None]  # and the border stays black
        places = reach + (self.side - 2 * reach) * drawn.unflatten(2, (MOST, 2))
        tightest = tightness(places, size, present)
        best = torch.where(tightest >= 0, 1.0, tightest).argmax(1)  # the least tight one, where all of them are
        return places[torch.arange(len(index), device=self.device), best]


def tightness(places: Tensor, size: Tensor, present: Tensor) -> Tensor:
    """How far the nearest two objects of each throw are from being too near, in pixels: (b, tries, 3, 2) → (b, tries).

    Infinite where there is only one object.
    """
    slack = []
    for one, other in itertools.combinations(range(MOST), 2):
        apart = (places[:, :, one] - places[:, :, other]).square().sum(-1).sqrt()
        enough = TOUCHING * (size[:, one] + size[:, other])[:, None]
        both = (present[:, one] & present[:, other])[:, None]
        slack.append(torch.where(both, apart - enough, math.inf))
    return torch.stack(slack).amin(0)


def draw(objects: Objects, side: int) -> Tensor:
    """Each object alone on its canvas, in grey levels of 0 to 1: (n, 3, 1, side, side)."""
    n, device = len(objects.kinds), objects.poses.device
    shape, placed = (table.to(device)[objects.arrangement] for table in _tables())  # (n, 3, 4) and (n, 3, 4, 3)
    canvas = torch.zeros(n * MOST, side * side, device=device)
    for number, distance in enumerate(SHAPES):
        scene, place, part = ((shape == number) & objects.present[..., None]).nonzero(as_tuple=True)
        pixels, covered = cover(distance, objects.poses[scene, place], placed[scene, place, part], side)
        pixels = pixels + ((scene * MOST + place) * side * side).view(-1, 1, 1)
        canvas.view(-1).index_add_(0, pixels.flatten(), covered.flatten())
    # whole grey levels, as a file would have them
    return (canvas.clamp_(max=1) * 255).round_().div_(255).view(n, MOST, 1, side, side)


def cover(distance: Callable[[Tensor, Tensor], Tensor], pose: Tensor, part: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """The pixels around a part, by number, and how much of each it covers: (m, WINDOW, WINDOW) both.

    pose (m, 4) of the object; part (m, 3), x, y and angle in it.
    """
    # so exact that rounding to float32 is the same anywhere in a batch; Apple's GPUs have no such numbers
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
    """The numbers of WINDOW pixels around a point, (m,) → (m, WINDOW), all of them inside the image."""
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


def scenes(kind: str, n: int, *, purpose: str = "test", seed: int = 0, side: int = 40) -> Scenes:
    """n fixed scenes of a kind (see the top of this file), other ones for every purpose and seed.

    >>> two = scenes("crowded", 100).gather(torch.tensor([3, 7]))
    >>> two.images.shape, two.labels.sum(1) >= 2
    (torch.Size([2, 1, 40, 40]), tensor([True, True]))
    """
    return Scenes(kind, seeds.key(seed, f"parts {purpose} {kind}"), n, side)


def load(name: str, validation: int, seed: int, train_limit: int = 0) -> Splits[Scenes]:
    """The three parts of `parts:OPTIONS`; validation and test are the same for every seed.

    With a limit training has so many scenes and no new ones.
    """
    layout = options.read(Layout, name)
    stream, n = seeds.key(seed, "parts training"), train_limit or layout.train
    train = Scenes("training", stream, n, layout.side, name, endless=not train_limit)
    fixed = [
        replace(train, stream=seeds.key(0, f"parts {purpose}"), scenes=n, endless=False)
        for purpose, n in (("validation", validation), ("test", layout.test))
    ]
    return Splits(train, *fixed)
