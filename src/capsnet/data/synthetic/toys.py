"""Fifty toys of five categories, ten instances each, as lists of solids.

Builders make toys that face +x and stand on the plane z = 0, in units of about half a toy; `fitted` then moves each
toy into the unit sphere, as the objects of smallNORB were normalised in size.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from capsnet.data.synthetic.solids import Solid, Vector, ball, block, rod, vector, wing

Toy = tuple[Solid, ...]
DARK, GLASS, TYRE = 0.22, 0.16, 0.1


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


def both(make: Callable[[float], Solid]) -> list[Solid]:
    """A solid on the left (+1) and its counterpart on the right (−1)."""
    return [make(1.0), make(-1.0)]


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


# --- Aeroplanes ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Aeroplane:
    """An aeroplane whose fuselage reaches from −1 to 1."""

    shade: float
    radius: float
    span: float
    sweep: float
    chord: float
    place: tuple[float, float]
    """Position of the wings along the fuselage, and their height in radii."""
    taper: float = 0.4
    engines: int = 0
    extra: str = ""


AEROPLANES = (
    Aeroplane(0.85, 0.13, 1.05, 0.45, 0.42, (0.05, -0.5), engines=2),
    Aeroplane(0.5, 0.12, 0.75, 0.45, 0.8, (-0.1, -0.2), taper=0.75, extra="twin-tail"),
    Aeroplane(0.7, 0.14, 0.95, 0.0, 0.36, (0.25, 0.9), taper=0.1, extra="propeller"),
    Aeroplane(0.35, 0.15, 0.95, 0.0, 0.36, (0.3, -0.7), taper=0.15, extra="biplane"),
    Aeroplane(0.9, 0.09, 1.35, 0.05, 0.2, (0.2, 0.3), taper=0.5, extra="t-tail"),
    Aeroplane(0.75, 0.16, 1.15, 0.4, 0.46, (0.05, -0.5), engines=4),
    Aeroplane(0.4, 0.11, 0.75, 0.3, 0.4, (0.0, -0.3), taper=0.5, extra="canopy"),
    Aeroplane(0.75, 0.12, 0.85, 0.35, 0.36, (0.1, -0.6), engines=-2, extra="t-tail"),
    Aeroplane(0.55, 0.17, 1.1, 0.1, 0.4, (0.1, 1.0), engines=4, extra="propellers"),
    Aeroplane(0.95, 0.13, 0.75, 0.6, 1.25, (-0.2, -0.4), taper=0.9, extra="delta"),
)


def aeroplane(instance: int) -> list[Solid]:
    p = AEROPLANES[instance]
    high = 0.55
    x, z = p.place[0], high + p.place[1] * p.radius
    solids = [
        rod((-0.55, 0.0, high), (0.7, 0.0, high), p.radius, p.shade),
        ball((0.7, 0.0, high), (0.32, p.radius, p.radius), p.shade),
        ball((-0.5, 0.0, high + 0.02), (0.52, p.radius, p.radius), p.shade),
        ball((0.72, 0.0, high + 0.45 * p.radius), (0.16, 0.75 * p.radius, 0.65 * p.radius), GLASS),
    ]
    solids += both(lambda y: wing((x, 0.0, z), (x - p.sweep, y * p.span, z + 0.06), p.chord, 0.05, p.shade, p.taper))
    return solids + tail(p, high) + engines(p, high, z) + aeroplane_extra(p, high, z)


def tail(p: Aeroplane, high: float) -> list[Solid]:
    """Fin and tailplane; a delta has no tailplane."""
    root = high + 0.5 * p.radius
    fins = [wing((-0.8, 0.0, root), (-1.0, 0.0, root + 0.42), 0.32, 0.04, p.shade * 0.7)]
    if p.extra == "twin-tail":
        fins = both(lambda y: wing((-0.75, 0.2 * y, root), (-0.95, 0.27 * y, root + 0.35), 0.3, 0.04, p.shade * 0.7))
    level = root + 0.4 if p.extra == "t-tail" else high + 0.03
    start = -0.98 if p.extra == "t-tail" else -0.82
    planes = both(lambda y: wing((start, 0.0, level), (start - 0.14, 0.42 * y, level), 0.24, 0.04, p.shade * 0.85))
    return fins + (planes if p.extra != "delta" else [])


def engines(p: Aeroplane, high: float, z: float) -> list[Solid]:
    """Engines under the wings, or with −2 at the rear of the fuselage."""
    if p.engines < 0:
        return both(lambda y: rod((-0.7, 0.22 * y, high + 0.05), (-0.35, 0.22 * y, high + 0.05), 0.085, DARK))
    solids = []
    for share in ((), (0.4,), (0.32, 0.62))[p.engines // 2]:
        x, drop = p.place[0] - share * p.sweep + 0.2, z - 0.09
        solids += [
            rod((x - 0.22, y, drop), (x + 0.14, y, drop), 0.075, DARK) for y in (share * p.span, -share * p.span)
        ]
    return solids


def aeroplane_extra(p: Aeroplane, high: float, z: float) -> list[Solid]:
    """What only some aeroplanes have."""
    if p.extra in ("propeller", "biplane"):
        solids = [block((1.03, 0.0, high), (0.015, 0.04, 0.36), 0.15), ball((1.03, 0.0, high), (0.07, 0.05, 0.05), 0.2)]
        solids += both(lambda y: rod((0.5, 0.2 * y - 0.03, 0.1), (0.5, 0.2 * y + 0.03, 0.1), 0.1, TYRE))
        solids += both(lambda y: rod((0.5, 0.2 * y, 0.1), (0.45, 0.05 * y, high), 0.03, DARK))
        if p.extra == "biplane":
            above, x = z + 0.42, p.place[0]
            solids += both(lambda y: wing((x, 0.0, above), (x, y * p.span, above), p.chord, 0.05, p.shade, p.taper))
            solids += both(lambda y: rod((x, 0.6 * y, z), (x, 0.6 * y, above), 0.025, DARK))
        return solids
    if p.extra == "propellers":
        return [
            block((p.place[0] - share * p.sweep + 0.37, side * share * p.span, z - 0.09), (0.012, 0.03, 0.2), 0.15)
            for share in (0.32, 0.62)
            for side in (1.0, -1.0)
        ]
    if p.extra == "canopy":
        return [ball((0.25, 0.0, high + 0.09), (0.3, 0.08, 0.1), GLASS)]
    return []


# --- Lorries and cars ---------------------------------------------------------------------------------------------


def wheels(places: tuple[float, ...], width: float, radius: float, thick: float = 0.1) -> list[Solid]:
    """A pair of wheels with light hubs at each place along x."""
    solids = []
    for x, s in itertools.product(places, (1, -1)):
        inner, outer, hub = ((x, s * (width + depth), radius) for depth in (-2 * thick, 0.0, 0.012))
        solids += [rod(outer, inner, radius, TYRE), rod(hub, outer, 0.5 * radius, 0.75)]
    return solids


@dataclass(frozen=True)
class Lorry:
    """A lorry: shades of cab and load, height of the cab, axles, and what it carries."""

    cab: float
    load: float
    height: float
    axles: tuple[float, ...]
    kind: str
    length: float = 1.0


LORRIES = (
    Lorry(0.45, 0.85, 0.85, (0.7, -0.35, -0.7), "box"),
    Lorry(0.7, 0.6, 0.75, (0.7, -0.45, -0.8), "tank"),
    Lorry(0.35, 0.5, 0.8, (0.7, -0.6), "tipper"),
    Lorry(0.8, 0.4, 0.7, (0.75, -0.55, -0.85), "logs", 1.1),
    Lorry(0.55, 0.55, 0.8, (0.7, -0.3, -0.7), "ladder"),
    Lorry(0.9, 0.65, 0.9, (0.8, 0.2, -0.6, -0.95), "box", 1.25),
    Lorry(0.3, 0.75, 0.75, (0.65, -0.3, -0.65), "mixer"),
    Lorry(0.6, 0.3, 0.7, (0.7, -0.55), "canvas", 0.9),
    Lorry(0.5, 0.45, 0.85, (0.7, -0.5, -0.8), "crane"),
    Lorry(0.75, 0.9, 0.95, (0.75, -0.5, -0.8), "tank", 1.15),
)


def lorry(instance: int) -> list[Solid]:
    t = LORRIES[instance]
    front, floor = t.length, 0.32
    top = floor + t.height
    solids = [
        block((0.0, 0.0, floor - 0.05), (front, 0.3, 0.07), DARK),
        block((front - 0.27, 0.0, floor + t.height / 2), (0.29, 0.42, t.height / 2), t.cab, (0.2, 0.06)),
        block((front - 0.085, 0.0, floor + 0.66 * t.height), (0.06, 0.36, 0.2 * t.height), GLASS, pitch=14),
        block((front - 0.24, 0.0, floor + 0.66 * t.height), (0.13, 0.425, 0.16 * t.height), GLASS),
        block((front + 0.03, 0.0, floor), (0.05, 0.42, 0.09), 0.2),
        *both(lambda y: ball((front + 0.03, 0.3 * y, floor + 0.16), (0.04, 0.07, 0.07), 0.98)),
        *wheels(t.axles, 0.44, 0.21),
    ]
    return solids + cargo(t, floor, top)


def cargo(t: Lorry, floor: float, top: float) -> list[Solid]:
    """What stands behind the cab."""
    back, front = -t.length, t.length - 0.62
    middle, half = (back + front) / 2, (front - back) / 2
    bed = block((middle, 0.0, floor + 0.07), (half, 0.44, 0.05), t.load * 0.6)
    if t.kind == "box":
        return [block((middle, 0.0, floor + 0.08 + 0.56), (half, 0.46, 0.54), t.load)]
    if t.kind == "tank":
        high = floor + 0.5
        ends = [ball((x, 0.0, high), (0.12, 0.4, 0.4), t.load) for x in (back + 0.1, front - 0.1)]
        lids = [rod((x, 0.0, high), (x, 0.0, high + 0.45), 0.1, DARK) for x in (middle - 0.3, middle + 0.3)]
        return [bed, rod((back + 0.1, 0.0, high), (front - 0.1, 0.0, high), 0.4, t.load), *ends, *lids]
    if t.kind == "tipper":
        return [block((middle - 0.02, 0.0, floor + 0.42), (half * 0.9, 0.4, 0.3), t.load, (-0.15, -0.15), pitch=9),
                ball((middle, 0.0, floor + 0.72), (half * 0.8, 0.36, 0.17), 0.8)]  # fmt: skip
    if t.kind == "logs":
        piles = ((-0.26, 0.26), (0.0, 0.26), (0.26, 0.26), (-0.13, 0.5), (0.13, 0.5), (0.0, 0.74))
        logs = [rod((back - 0.1, y, floor + z), (front, y, floor + z), 0.13, t.load + 0.06 * k)
                for k, (y, z) in enumerate(piles)]  # fmt: skip
        return [bed, *logs]
    return [bed, *machine(t, floor, top, back, front)]


def machine(t: Lorry, floor: float, top: float, back: float, front: float) -> list[Solid]:
    """Loads that are more than a container."""
    middle, half = (back + front) / 2, (front - back) / 2
    if t.kind == "ladder":
        rails = both(lambda y: rod((back - 0.15, 0.12 * y, top + 0.3), (front + 0.5, 0.12 * y, top + 0.12), 0.04, 0.9))
        steps = [(back + k * 0.3, top + 0.28 - 0.03 * k) for k in range(6)]
        rungs = [rod((x, -0.12, z), (x, 0.12, z), 0.03, 0.9) for x, z in steps]
        return [block((middle, 0.0, floor + 0.36), (half, 0.44, 0.28), t.load), *rails, *rungs]
    if t.kind == "mixer":
        drum = ball((middle, 0.0, floor + 0.62), (half * 1.05, 0.44, 0.42), t.load, pitch=-14)
        return [drum, rod((back + 0.1, 0.0, floor + 0.85), (back - 0.08, 0.0, floor + 0.95), 0.2, 0.35)]
    if t.kind == "canvas":
        arch = rod((back, 0.0, floor + 0.5), (front, 0.0, floor + 0.5), 0.44, t.load)
        return [block((middle, 0.0, floor + 0.32), (half, 0.44, 0.22), t.load * 1.4), arch]
    turret = block((middle, 0.0, floor + 0.3), (0.25, 0.3, 0.2), t.load)
    boom = rod((middle, 0.0, floor + 0.4), (t.length + 0.15, 0.0, top + 0.35), 0.07, 0.9)
    return [turret, boom, rod((t.length + 0.12, 0.0, top + 0.35), (t.length + 0.12, 0.0, top), 0.025, DARK)]


@dataclass(frozen=True)
class Car:
    """A car two units long: body height, and the cabin's place, length, height and slopes."""

    shade: float
    body: float
    cabin: tuple[float, float, float]
    """Centre along x, half the length, and height; no cabin if the height is 0."""
    taper: float = 0.35
    wheel: float = 0.19
    clearance: float = 0.16
    width: float = 0.44
    extra: str = ""


CARS = (
    Car(0.8, 0.26, (-0.08, 0.52, 0.28)),
    Car(0.85, 0.27, (-0.3, 0.62, 0.3), 0.25),
    Car(0.35, 0.18, (-0.15, 0.42, 0.2), 0.5, clearance=0.12, extra="spoiler"),
    Car(0.75, 0.34, (-0.15, 0.6, 0.34), 0.12, 0.24, 0.24, extra="spare"),
    Car(0.5, 0.24, (-0.35, 0.62, 0.3), 0.2, extra="rack"),
    Car(0.9, 0.22, (-0.05, 0.4, 0.0), extra="open"),
    Car(0.45, 0.3, (0.1, 0.32, 0.32), 0.2, 0.22, 0.2, extra="pickup"),
    Car(0.7, 0.2, (-0.02, 0.44, 0.3), extra="beetle"),
    Car(0.3, 0.28, (-0.05, 0.55, 0.26), 0.4, extra="taxi"),
    Car(0.95, 0.15, (0.0, 0.3, 0.0), 0.2, 0.21, 0.1, 0.2, "racing"),
)


def car(instance: int) -> list[Solid]:
    c = CARS[instance]
    if c.extra == "racing":
        return racing_car(c)
    middle = c.clearance + c.body / 2
    lid = c.clearance + c.body
    solids = [
        block((0.0, 0.0, middle), (1.0, c.width, c.body / 2), c.shade, (0.06, 0.08)),
        *both(lambda s: block((s * 1.0, 0.0, c.clearance + 0.06), (0.05, c.width, 0.05), 0.25)),
        *both(lambda y: ball((0.98, 0.3 * y, middle + 0.02), (0.05, 0.07, 0.06), 0.98)),
        *wheels((0.6, -0.6), c.width + 0.01, c.wheel),
    ]
    if c.cabin[2] and c.extra != "beetle":
        solids += cabin(c, lid)
    return solids + car_extra(c, lid)


def cabin(c: Car, lid: float) -> list[Solid]:
    """Dark windows all round, and a roof in the colour of the car."""
    x, half, height = c.cabin
    roof = half * (1 - c.taper)
    wide = c.width * 0.92
    return [
        block((x, 0.0, lid + height / 2), (half, wide, height / 2), GLASS, (c.taper, 0.2)),
        block((x, 0.0, lid + height), (roof + 0.02, 0.82 * wide, 0.03), c.shade),
        *both(lambda y: rod((x, y * wide, lid), (x, y * 0.81 * wide, lid + height), 0.03, c.shade)),
    ]


def car_extra(c: Car, lid: float) -> list[Solid]:
    """What only some cars have."""
    x, _, height = c.cabin
    top = lid + height
    if c.extra == "spoiler":
        legs = both(lambda y: block((-0.88, 0.3 * y, lid + 0.07), (0.03, 0.03, 0.08), DARK))
        return [block((-0.9, 0.0, lid + 0.16), (0.1, 0.45, 0.02), c.shade), *legs]
    if c.extra == "spare":
        return [rod((-1.0, 0.0, 0.5), (-1.12, 0.0, 0.5), 0.2, TYRE)]
    if c.extra == "rack":
        bars = both(lambda s: rod((x + 0.25 * s, -0.33, top + 0.05), (x + 0.25 * s, 0.33, top + 0.05), 0.02, DARK))
        return [block((x, 0.0, top + 0.12), (0.3, 0.28, 0.07), 0.35), *bars]
    if c.extra == "open":
        seats = [block((-0.2, 0.2 * s, lid + 0.08), (0.06, 0.14, 0.16), DARK, pitch=10) for s in (1, -1)]
        return [block((-0.05, 0.0, lid - 0.02), (0.42, 0.36, 0.04), 0.12), *seats,
                block((0.36, 0.0, lid + 0.1), (0.02, 0.36, 0.12), GLASS, pitch=30)]  # fmt: skip
    if c.extra == "pickup":
        return [block((-0.58, 0.0, lid), (0.36, 0.35, 0.03), 0.12)]
    if c.extra == "beetle":
        glass = ball((x, 0.0, lid + 0.06), (0.6, 0.37, height), GLASS)
        wings = [ball((0.6 * s, 0.36 * t, 0.26), (0.34, 0.13, 0.2), c.shade) for s in (1, -1) for t in (1, -1)]
        return [ball((0.0, 0.0, lid), (1.0, 0.4, 0.2), c.shade), glass, *wings,
                ball((x - 0.02, 0.0, lid + 0.16), (0.4, 0.27, height - 0.06), c.shade)]  # fmt: skip
    if c.extra == "taxi":
        return [block((x, 0.0, top + 0.08), (0.07, 0.18, 0.06), 0.98)]
    return []


def racing_car(c: Car) -> list[Solid]:
    """An open-wheeled car with two wings and a driver."""
    axles = [rod((x, -0.4, 0.2), (x, 0.4, 0.2), 0.03, DARK) for x in (0.65, -0.65)]
    return [
        ball((0.1, 0.0, 0.26), (0.98, 0.17, 0.13), c.shade),
        block((-0.3, 0.0, 0.26), (0.5, 0.32, 0.12), c.shade, (0.2, 0.2)),
        ball((-0.08, 0.0, 0.4), (0.11, 0.11, 0.13), DARK),
        block((-0.45, 0.0, 0.42), (0.25, 0.09, 0.12), c.shade, (0.6, 0.2)),
        block((1.0, 0.0, 0.14), (0.12, 0.46, 0.025), 0.3),
        block((-0.98, 0.0, 0.55), (0.12, 0.42, 0.025), 0.3),
        *both(lambda y: block((-0.95, 0.42 * y, 0.45), (0.14, 0.02, 0.14), 0.3)),
        *axles,
        *wheels((0.65, -0.65), 0.5, c.wheel, 0.09),
    ]


BUILDERS: tuple[Callable[[int], list[Solid]], ...] = (animal, human, aeroplane, lorry, car)
