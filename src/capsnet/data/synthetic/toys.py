"""Fifty toys of five categories, ten instances each, as lists of solids.

Builders make toys that face +x and stand on the plane z = 0, in units of about half a toy; `fitted` then moves each
toy into the unit sphere, as the objects of smallNORB were normalised in size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from capsnet.data.synthetic.solids import Solid, Vector, ball, block, both, rod, vector
from capsnet.data.synthetic.vehicles import aeroplane, car, lorry

Toy = tuple[Solid, ...]


@cache
def toy(category: int, instance: int) -> Toy:
    """The solids of one toy.

    >>> len(toy(0, 3)) > 8
    True
    """
    return fitted(BUILDERS[category](instance))


def fitted(solids: list[Solid]) -> Toy:
    """Move the centre of a toy to the origin and scale it into the unit sphere."""
    corners = np.concatenate([solid.corners for solid in solids])
    middle = (corners.min(0) + corners.max(0)) / 2
    away = corners - middle
    scale = 1 / math.sqrt(float((away * away).sum(1).max()))
    return tuple(moved(solid, vector(middle), scale) for solid in solids)


def ground(solids: Toy) -> float:
    """Height of the ground that a toy stands on."""
    return min(float(solid.corners[:, 2].min()) for solid in solids)


def moved(solid: Solid, origin: Vector, scale: float) -> Solid:
    def resized(point: Vector, start: Vector = (0.0, 0.0, 0.0)) -> Vector:
        x, y, z = (round(scale * (p - s), 9) for p, s in zip(point, start, strict=True))
        return x, y, z

    first, second, third = (resized(axis) for axis in solid.axes)
    return replace(solid, centre=resized(solid.centre, origin), axes=(first, second, third))


# --- Four-legged animals ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Animal:
    """Proportions of an animal whose body is one unit long from the centre to each end."""

    shade: float
    girth: float
    leg: float
    thick: float
    neck: tuple[float, float]
    """How far forward and up the head is from the shoulders."""
    head: Vector
    muzzle: float
    ears: tuple[float, float]
    """Height and width of an ear."""
    tail: tuple[float, float, float]
    """How far back and up the tail's end is, and its radius."""
    extra: str = ""


ANIMALS = (
    Animal(0.62, 0.42, 0.75, 0.12, (0.35, 0.45), (0.34, 0.3, 0.34), 0.22, (0.14, 0.12), (0.5, -0.5, 0.05), "mane"),
    Animal(0.45, 0.62, 0.8, 0.22, (0.3, 0.2), (0.36, 0.34, 0.42), 0.0, (0.5, 0.5), (0.12, -0.6, 0.05), "trunk"),
    Animal(0.75, 0.3, 0.6, 0.08, (0.3, 0.4), (0.28, 0.2, 0.2), 0.3, (0.28, 0.1), (0.4, 0.5, 0.06)),
    Animal(0.7, 0.36, 1.25, 0.1, (0.55, 1.7), (0.3, 0.14, 0.16), 0.2, (0.16, 0.08), (0.15, -0.6, 0.04), "horns"),
    Animal(0.8, 0.5, 0.3, 0.13, (0.3, 0.05), (0.32, 0.3, 0.3), 0.24, (0.22, 0.16), (0.14, 0.18, 0.05)),
    Animal(0.35, 0.38, 1.0, 0.1, (0.45, 0.8), (0.4, 0.15, 0.18), 0.26, (0.2, 0.08), (0.3, -0.7, 0.1), "mane"),
    Animal(0.85, 0.48, 0.65, 0.11, (0.4, 0.2), (0.34, 0.2, 0.24), 0.28, (0.1, 0.2), (0.1, -0.7, 0.05), "horns"),
    Animal(0.4, 0.55, 0.45, 0.2, (0.4, -0.05), (0.42, 0.26, 0.28), 0.34, (0.16, 0.1), (0.1, -0.45, 0.05), "horn"),
    Animal(0.5, 0.34, 0.4, 0.09, (0.28, 0.15), (0.22, 0.19, 0.19), 0.14, (0.26, 0.14), (0.6, 0.75, 0.06)),
    Animal(0.66, 0.4, 1.15, 0.1, (0.6, 0.75), (0.32, 0.16, 0.18), 0.24, (0.12, 0.08), (0.12, -0.5, 0.05), "hump"),
)


def animal(instance: int) -> list[Solid]:
    a = ANIMALS[instance]
    middle = a.leg + a.girth * 0.8
    dark = a.shade * 0.75
    shoulder = 0.75, 0.0, middle + 0.35 * a.girth
    skull = shoulder[0] + a.neck[0], 0.0, shoulder[2] + a.neck[1]
    snout = skull[0] + a.head[0] + 0.5 * a.muzzle, 0.0, skull[2] - 0.25 * a.head[2]
    solids = [
        rod((-0.6, 0.0, middle), (0.6, 0.0, middle), 0.9 * a.girth, a.shade),
        *both(lambda s: ball((0.6 * s, 0.0, middle), (0.42, 0.9 * a.girth, 0.9 * a.girth), a.shade)),
        rod((0.6, 0.0, middle), skull, 0.5 * a.head[1] + 0.25 * a.girth, a.shade),
        ball(skull, a.head, a.shade),
        rod((-0.9, 0.0, middle + 0.2 * a.girth), (-0.95 - a.tail[0], 0.0, middle + a.tail[1]), a.tail[2], dark),
    ]
    feet = [(x, 0.6 * y * a.girth) for x in (0.62, -0.68) for y in (1, -1)]
    solids += [rod((x, y, 0.0), (x, y, middle), a.thick, dark) for x, y in feet]
    if a.muzzle:
        solids.append(ball(snout, (a.muzzle, 0.6 * a.head[1], 0.55 * a.head[2]), dark))
    tip = 0.9 * a.head[2] + 0.5 * a.ears[0]
    solids += both(
        lambda y: ball(
            (skull[0] - 0.3 * a.head[0], y * (0.6 * a.head[1] + 0.4 * a.ears[1]), skull[2] + tip * (a.ears[1] < 0.3)),
            (0.07, a.ears[1], a.ears[0]),
            dark,
        )
    )
    return solids + animal_extra(a, middle, skull)


def animal_extra(a: Animal, middle: float, skull: Vector) -> list[Solid]:
    """What only some animals have."""
    x, _, z = skull
    front = x + a.head[0]
    if a.extra == "trunk":
        bend = front + 0.2, 0.0, 0.45 * a.leg
        tusks = both(lambda y: rod((front - 0.1, 0.2 * y, z - 0.2), (front + 0.4, 0.22 * y, z - 0.35), 0.05, 0.95))
        return [rod((front - 0.1, 0.0, z), bend, 0.13, a.shade), ball(bend, (0.14, 0.13, 0.14), a.shade), *tusks]
    if a.extra == "mane":
        neck = (0.6 + x) / 2, 0.0, (middle + z) / 2 + 0.12
        size = 0.3 + 0.3 * a.neck[0], 0.35 * a.girth, 0.35 + 0.3 * a.neck[1]
        return [ball(neck, size if a.head[1] < 0.2 else (0.3, 0.5, 0.55), 0.2)]
    if a.extra == "hump":
        return [ball((0.05, 0.0, middle + a.girth), (0.35, 0.25, 0.35), a.shade)]
    if a.extra == "horns":
        return both(lambda y: rod((x, 0.5 * y * a.head[1], z), (x, 1.5 * y * a.head[1], z + 0.45), 0.05, 0.95))
    if a.extra == "horn":
        return [rod((front + 0.3, 0.0, z), (front + 0.5, 0.0, z + 0.5), 0.07, 0.95)]
    return []


# --- Human figures ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Human:
    """A figure 1.8 units tall: clothes, stride, and where the hands are relative to the shoulders (left, right)."""

    shirt: float
    trousers: float
    stride: float
    hands: tuple[Vector, Vector]
    width: float = 0.22
    head: float = 0.15
    hat: str = ""
    holding: str = ""


DOWN = (0.05, 0.1, -0.62)
HUMANS = (
    Human(0.8, 0.3, 0.25, (DOWN, (0.3, 0.05, -0.5)), hat="cap"),
    Human(0.35, 0.35, 0.1, ((0.5, -0.15, -0.15), (0.35, -0.2, -0.3)), hat="helmet", holding="rifle"),
    Human(0.6, 0.85, 0.0, ((0.0, 0.6, 0.1), (0.0, 0.6, 0.1))),
    Human(0.25, 0.6, 0.3, ((-0.3, 0.1, -0.5), (0.45, 0.05, -0.35)), width=0.2),
    Human(0.9, 0.9, 0.0, ((0.05, 0.3, 0.6), (0.05, 0.3, 0.6)), width=0.2),
    Human(0.5, 0.2, 0.15, (DOWN, (0.55, 0.0, 0.05)), width=0.28, hat="hat"),
    Human(0.75, 0.5, 0.35, ((0.35, 0.1, -0.4), (-0.35, 0.1, -0.4)), holding="backpack"),
    Human(0.4, 0.8, 0.05, ((0.1, 0.35, -0.35), (0.1, 0.35, -0.35)), width=0.26, hat="cap"),
    Human(0.3, 0.25, 0.2, ((0.15, 0.25, 0.55), DOWN), hat="helmet", holding="sword"),
    Human(0.65, 0.45, 0.1, ((0.4, 0.0, -0.35), (0.4, 0.0, -0.35)), width=0.3, hat="hat", holding="crate"),
)
HIP, SHOULDER = 0.85, 1.42


def human(instance: int) -> list[Solid]:
    h = HUMANS[instance]
    skin = 0.78
    top = SHOULDER + 0.08 + h.head
    solids = [
        block((0.0, 0.0, (HIP + SHOULDER) / 2), (0.13, h.width, (SHOULDER - HIP) / 2 + 0.04), h.shirt, (0.1, -0.15)),
        ball((0.0, 0.0, HIP), (0.14, 0.9 * h.width, 0.13), h.trousers),
        ball((0.0, 0.0, top), (h.head, 0.88 * h.head, 1.15 * h.head), skin),
        rod((0.0, 0.0, SHOULDER), (0.0, 0.0, top), 0.06, skin),
    ]
    for side, reach in zip((1.0, -1.0), h.hands, strict=True):
        solids += limb(h, side, reach, skin)
    return solids + human_extra(h, top)


def limb(h: Human, side: float, reach: Vector, skin: float) -> list[Solid]:
    """The arm and the leg of one side; legs stride in opposite directions."""
    foot = side * h.stride, 0.12 * side, 0.06
    shoulder = 0.0, 1.12 * h.width * side, SHOULDER - 0.02
    hand = shoulder[0] + reach[0], shoulder[1] + side * reach[1], shoulder[2] + reach[2]
    return [
        rod((0.0, 0.12 * side, HIP), foot, 0.095, h.trousers),
        block((foot[0] + 0.06, foot[1], 0.05), (0.15, 0.08, 0.05), 0.15),
        rod(shoulder, hand, 0.068, h.shirt),
        ball(shoulder, (0.09, 0.09, 0.09), h.shirt),
        ball(hand, (0.085, 0.085, 0.085), skin),
    ]


def human_extra(h: Human, top: float) -> list[Solid]:
    """Hat and what the figure carries."""
    solids = []
    if h.hat == "cap":
        solids += [ball((0.0, 0.0, top + 0.08), (0.17, 0.15, 0.12), 0.25)]
        solids += [block((0.17, 0.0, top + 0.08), (0.1, 0.11, 0.015), 0.25)]
    elif h.hat == "helmet":
        solids.append(ball((0.0, 0.0, top + 0.05), (0.2, 0.19, 0.17), 0.3))
    elif h.hat == "hat":
        solids += [rod((0.0, 0.0, top + 0.07), (0.0, 0.0, top + 0.1), 0.27, 0.2)]
        solids += [rod((0.0, 0.0, top + 0.1), (0.0, 0.0, top + 0.26), 0.15, 0.2)]
    else:
        solids.append(ball((-0.03, 0.0, top + 0.05), (0.15, 0.145, 0.15), 0.2))
    if h.holding == "rifle":
        solids.append(rod((0.35, 0.3, 1.0), (0.6, -0.3, 1.45), 0.04, 0.12))
    elif h.holding == "backpack":
        solids.append(block((-0.25, 0.0, 1.18), (0.13, 0.2, 0.25), 0.3))
    elif h.holding == "sword":
        solids.append(rod((0.15, 0.5, 1.9), (0.4, 0.65, 2.4), 0.03, 0.95))
    elif h.holding == "crate":
        solids.append(block((0.48, 0.0, 1.08), (0.17, 0.28, 0.17), 0.5))
    return solids


BUILDERS: tuple[Callable[[int], list[Solid]], ...] = (animal, human, aeroplane, lorry, car)
