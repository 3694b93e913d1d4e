"""Aeroplanes, lorries and cars for `toys`, ten of each, as lists of solids."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from capsnet.data.synthetic.solids import Solid, ball, block, both, rod, wing

DARK, GLASS, TYRE = 0.22, 0.16, 0.1


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
