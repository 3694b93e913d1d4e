"""Ray casting of toys made of simple solids: balls, cylinders and blocks, each with an analytic intersection.

A solid is the image of a unit shape under an affine map: centre + axes · p, where the columns of `axes` are its half
axes. A ray o + t d is mapped back into the frame of the unit shape, which keeps t, so that three intersections suffice:

    ball      |p| ≤ 1
    cylinder  x² + y² ≤ 1, −1 ≤ z ≤ 1
    block     |x| ≤ w(z), |y| ≤ w'(z), −1 ≤ z ≤ 1, where w and w' shrink linearly from 1 to 1 − taper

A ray enters a convex solid where it has entered all of its surfaces. Only the window of pixels around each solid is
computed. Visible surfaces do not depend on the light: `Surface` is computed once for all lights. Pixels result from
correctly rounded single operations in a fixed order, so that the bytes are reproducible.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

Vector = tuple[float, float, float]
Components = tuple[np.ndarray, np.ndarray, np.ndarray]  # x, y and z of many points, float32
NEVER = np.float32(1e9)  # depth of a pixel that shows no solid
CORNERS = np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], np.float64)


@dataclass(frozen=True, eq=False)
class Solid:
    """One part of a toy; lengths in units of the toy, z up. `shade` is the reflected share of the light."""

    kind: Literal["ball", "cylinder", "block"]
    centre: Vector
    axes: tuple[Vector, Vector, Vector]
    """The three half axes; they need not be orthogonal, so that a wing can be swept."""
    shade: float = 0.6
    taper: tuple[float, float] = (0.0, 0.0)
    """Blocks: how much narrower the end at +z is, along x and y."""

    @cached_property
    def matrix(self) -> np.ndarray:
        """(3, 3) with the half axes as columns."""
        return np.array(self.axes, np.float64).T

    def raised(self, by: float) -> Solid:
        x, y, z = self.centre
        return replace(self, centre=(x, y, z + by))

    @cached_property
    def inverse(self) -> np.ndarray:
        """(3, 3): from the world into the frame of the unit shape."""
        return np.linalg.inv(self.matrix).round(9)

    @cached_property
    def corners(self) -> np.ndarray:
        """(8, 3) corners of a box around the solid."""
        return np.array(self.centre) + CORNERS @ self.matrix.T


def ball(centre: Vector, half: Vector, shade: float = 0.6, pitch: float = 0.0) -> Solid:
    """An ellipsoid with half axes along x, y and z, then pitched nose up by degrees."""
    return Solid("ball", centre, pitched(half, pitch), shade)


def block(
    centre: Vector, half: Vector, shade: float = 0.6, taper: tuple[float, float] = (0, 0), pitch: float = 0.0
) -> Solid:
    """A box, narrower at the top if tapered, then pitched nose up by degrees."""
    return Solid("block", centre, pitched(half, pitch), shade, taper)


def rod(start: Vector, end: Vector, radius: float, shade: float = 0.6) -> Solid:
    """A cylinder between two points."""
    a, b = np.array(start, np.float64), np.array(end, np.float64)
    along = (b - a) / 2
    helper = (0.0, 1.0, 0.0) if abs(along[1]) < 0.9 * math.sqrt(float((along * along).sum())) else (1.0, 0.0, 0.0)
    across = np.cross(helper, along)
    across *= radius / math.sqrt(float((across * across).sum()))
    third = np.cross(along, across)
    third *= radius / math.sqrt(float((third * third).sum()))
    return Solid("cylinder", vector((a + b) / 2), (vector(across), vector(third), vector(along)), shade)


def wing(root: Vector, tip: Vector, chord: float, thickness: float, shade: float = 0.6, taper: float = 0.4) -> Solid:
    """A swept and tapered wing from root to tip; the chord is along x and becomes shorter by `taper`."""
    a, b = np.array(root, np.float64), np.array(tip, np.float64)
    along = vector((b - a) / 2)
    upright = abs(along[2]) > abs(along[1])
    flat = (0.0, thickness / 2, 0.0) if upright else (0.0, 0.0, thickness / 2)
    return Solid("block", vector((a + b) / 2), ((chord / 2, 0.0, 0.0), flat, along), shade, (taper, 0.0))


def both(make: Callable[[float], Solid]) -> list[Solid]:
    """A solid on the left (+1) and its counterpart on the right (−1)."""
    return [make(1.0), make(-1.0)]


def pitched(half: Vector, degrees: float) -> tuple[Vector, Vector, Vector]:
    """Half axes along x, y and z, rotated about y so that the front (+x) rises."""
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    x, y, z = half
    return (x * cos, 0.0, x * sin), (0.0, y, 0.0), (-z * sin, 0.0, z * cos)


def vector(values: np.ndarray) -> Vector:
    x, y, z = (float(value) for value in values)
    return x, y, z


# --- Intersections in the frame of the unit shape ---------------------------------------------------------------


def enter(solid: Solid, o: Components, d: Components) -> np.ndarray:
    """Where rays o + t d enter a solid: t, NEVER for those that miss."""
    if solid.kind == "ball":
        return enter_ball(o, d)
    return enter_cylinder(o, d) if solid.kind == "cylinder" else enter_block(o, d, solid.taper)


def enter_ball(o: Components, d: Components) -> np.ndarray:
    """|o + t d|² = 1, the smaller root."""
    a, b = dot(d, d), dot(o, d)
    under = b * b - a * (dot(o, o) - 1)
    return np.where(under > 0, (-b - np.sqrt(np.maximum(under, 0))) / a, NEVER)


def enter_cylinder(o: Components, d: Components) -> np.ndarray:
    """The later of entering the infinite cylinder and entering between the two end planes."""
    a = np.maximum(d[0] * d[0] + d[1] * d[1], np.float32(1e-12))
    b = o[0] * d[0] + o[1] * d[1]
    under = b * b - a * (o[0] * o[0] + o[1] * o[1] - 1)
    root = np.sqrt(np.maximum(under, 0))
    end_in, end_out = between(o[2], d[2])
    near = np.maximum((-b - root) / a, end_in)
    return np.where((under > 0) & (near < np.minimum((root - b) / a, end_out)), near, NEVER)


def enter_block(o: Components, d: Components, taper: tuple[float, float]) -> np.ndarray:
    """The last of six planes that the ray enters, if it leaves none before."""
    near, far = between(o[2], d[2])
    for axis, shrink in enumerate(taper):
        if not shrink:
            first, last = between(o[axis], d[axis])
            near, far = np.maximum(near, first), np.minimum(far, last)
            continue
        slant = np.float32(shrink / 2)
        start, step = np.float32(1) - slant - slant * o[2], slant * d[2]
        for position, way in ((o[axis], d[axis]), (-o[axis], -d[axis])):
            slope = apart_from_zero(way + step)
            crossing = (start - position) / slope
            near = np.maximum(near, np.where(slope < 0, crossing, -NEVER))
            far = np.minimum(far, np.where(slope < 0, NEVER, crossing))
    return np.where(near < far, near, NEVER)


def between(o: np.ndarray, d: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where a ray enters and leaves −1 ≤ o + t d ≤ 1."""
    step = apart_from_zero(d)
    middle, half = -o / step, np.abs(1 / step)
    return middle - half, middle + half


def outward(solid: Solid, p: Components) -> Components:
    """Normals at points on the surface of a solid, of any length."""
    x, y, z = p
    if solid.kind == "ball":
        return p
    if solid.kind == "cylinder":
        lid = z * z > x * x + y * y
        return np.where(lid, 0, x), np.where(lid, 0, y), np.where(lid, z, 0)
    across, along = (np.float32(shrink / 2) for shrink in solid.taper)
    face = np.stack([np.abs(x) + across * (z + 1), np.abs(y) + along * (z + 1), np.abs(z)]).argmax(0)
    upward = np.where(face == 0, across, np.where(face == 1, along, np.sign(z)))
    return np.where(face == 0, np.sign(x), 0), np.where(face == 1, np.sign(y), 0), upward


def dot(a: Components, b: Components) -> np.ndarray:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def apart_from_zero(values: np.ndarray) -> np.ndarray:
    """A ray that is parallel to a plane meets it very far away."""
    return np.where(np.abs(values) < 1e-9, np.float32(1e-9), values)


# --- Camera and visible surfaces --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Camera:
    """A pinhole camera for square images; `focal` is the distance of the image plane in half image widths."""

    position: np.ndarray
    forward: np.ndarray
    right: np.ndarray
    up: np.ndarray
    focal: float

    @classmethod
    def looking_at(cls, target: Vector, position: np.ndarray, focal: float) -> Camera:
        forward = unit(np.array(target) - position)
        right = unit(np.cross(forward, (0.0, 0.0, 1.0)))
        return cls(position, forward, right, np.cross(right, forward), focal)

    def project(self, points: np.ndarray, side: int) -> np.ndarray:
        """World points (n, 3) → pixel coordinates (n, 2) as column and row."""
        away = points - self.position
        depth = (away * self.forward).sum(1)
        across, down = ((away * axis).sum(1) / depth * self.focal for axis in (self.right, -self.up))
        return np.stack([across + 1, down + 1], 1) * (side / 2)

    def offsets(self, side: int) -> np.ndarray:
        """Pixel centres along one axis, relative to the image centre at depth 1: (side,)."""
        return ((np.arange(side) + 0.5) * 2 / side - 1) / self.focal


def unit(values: np.ndarray) -> np.ndarray:
    return values / math.sqrt(float((values * values).sum()))


@dataclass(frozen=True, eq=False)
class Surface:
    """What each pixel shows: depth (NEVER for nothing), shade, and the unit normal (3, side, side) in the world."""

    depth: np.ndarray
    shade: np.ndarray
    normal: np.ndarray

    @property
    def shown(self) -> np.ndarray:
        return self.depth < NEVER


def cast(solids: Sequence[Solid], camera: Camera, side: int) -> Surface:
    """The nearest solid in each pixel."""
    depth = np.full((side, side), NEVER, np.float32)
    shade = np.zeros((side, side), np.float32)
    normal = np.zeros((3, side, side), np.float32)
    steps = camera.offsets(side).astype(np.float32)
    for solid in solids:
        rows, columns = window(camera.project(solid.corners, side), side)
        o = single(solid.inverse @ (camera.position - np.array(solid.centre)))
        d = directions(solid.inverse, camera, steps[columns], -steps[rows])
        t = enter(solid, o, d)
        nearer = t < depth[rows, columns]
        depth[rows, columns][nearer] = t[nearer]
        shade[rows, columns][nearer] = solid.shade
        x, y, z = (a + t[nearer] * b[nearer] for a, b in zip(o, d, strict=True))
        normal[:, rows, columns][:, nearer] = to_world(solid, outward(solid, (x, y, z)))
    return Surface(depth, shade, normal)


def window(points: np.ndarray, side: int) -> tuple[slice, slice]:
    """Rows and columns of the pixels around projected corners (8, 2)."""
    low = np.clip(np.floor(points.min(0)), 0, side).astype(int)
    high = np.clip(np.ceil(points.max(0)) + 1, 0, side).astype(int)
    return slice(low[1], high[1]), slice(low[0], high[0])


def directions(back: np.ndarray, camera: Camera, across: np.ndarray, up: np.ndarray) -> Components:
    """Rays through a window of pixels, in the frame of the unit shape."""
    f, r, u = ((back @ axis).astype(np.float32) for axis in (camera.forward, camera.right, camera.up))
    x, y, z = ((f[k] + across * r[k])[None, :] + (up * u[k])[:, None] for k in range(3))
    return x, y, z


def to_world(solid: Solid, normal: Components) -> np.ndarray:
    """Unit normals (3, n) in the world from normals in the frame of the unit shape."""
    turned = solid.inverse.T.astype(np.float32)
    x, y, z = (turned[k, 0] * normal[0] + turned[k, 1] * normal[1] + turned[k, 2] * normal[2] for k in range(3))
    return np.stack([x, y, z]) / np.sqrt(x * x + y * y + z * z)


def single(values: np.ndarray) -> Components:
    x, y, z = values.astype(np.float32)
    return x, y, z


def shadow(solids: Sequence[Solid], light: np.ndarray, reach: float, side: int) -> np.ndarray:
    """Which points of the ground, a square of ± `reach` around the origin, the solids hide from the light.

    `light` points towards it. → bool (side, side), indexed by x and y.
    """
    dark = np.zeros((side, side), bool)
    places = (((np.arange(side) + 0.5) * 2 / side - 1) * reach).astype(np.float32)
    for solid in solids:
        on_ground = solid.corners - solid.corners[:, 2:] / light[2] * light
        columns, rows = window((on_ground[:, :2] / reach + 1) * (side / 2), side)
        back = solid.inverse.astype(np.float32)
        start = single(solid.inverse @ -np.array(solid.centre))
        x, y = places[rows][:, None], places[columns][None, :]
        px, py, pz = (start[k] + x * back[k, 0] + y * back[k, 1] for k in range(3))
        dark[rows, columns] |= enter(solid, (px, py, pz), single(solid.inverse @ light)) < NEVER
    return dark


def turned(solid: Solid, degrees: float) -> Solid:
    """A solid rotated about the vertical axis, counter-clockwise seen from above."""
    sin, cos = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))

    def turn(point: Vector) -> Vector:
        x, y, z = point
        return round(cos * x - sin * y, 9), round(sin * x + cos * y, 9), z

    first, second, third = (turn(axis) for axis in solid.axes)
    return replace(solid, centre=turn(solid.centre), axes=(first, second, third))
