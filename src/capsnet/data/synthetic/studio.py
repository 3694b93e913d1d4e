"""The studio in which toys are photographed: a pair of cameras, six lightings, and shadows on the ground.

The cameras look at the centre of the toy from azimuth 0; the toy is turned. Lamps are fixed, so that a turned toy is
lit from another side, and the main lamp casts a soft shadow on the ground. Images are rendered at twice their size and
averaged, which gives smooth edges.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np

from capsnet.data.synthetic.solids import Camera, Solid, Surface, cast, shadow, turned
from capsnet.data.synthetic.toys import Toy, ground

SIDE, FINE = 96, 192  # of the images, and of what they are averaged from
DISTANCE, FOCAL, EYES = 6.0, 5.3, (0.25, -0.25)  # camera, in radii of a toy; the left and the right eye
GROUND_REACH, GROUND_SIDE = 3.0, 240  # of the map of shadows around a toy


@dataclass(frozen=True)
class Lighting:
    """A main light that casts shadows, a second light without, light from everywhere, and the ground's brightness.

    Directions are azimuth, counter-clockwise from the camera, and elevation in degrees.
    """

    main: tuple[float, float]
    strength: float
    second: tuple[float, float]
    second_strength: float
    everywhere: float
    ground: float


LIGHTINGS = (
    Lighting((40, 55), 0.75, (-90, 30), 0.15, 0.35, 0.62),
    Lighting((-50, 50), 0.8, (100, 30), 0.1, 0.3, 0.55),
    Lighting((130, 60), 0.7, (0, 30), 0.25, 0.35, 0.68),
    Lighting((-135, 45), 0.75, (20, 40), 0.2, 0.25, 0.5),
    Lighting((0, 80), 0.6, (180, 30), 0.1, 0.5, 0.75),
    Lighting((75, 35), 0.85, (-60, 50), 0.15, 0.15, 0.42),
)
SHADOW = 0.55  # share of the ground's light that a shadow takes


def towards(azimuth: float, elevation: float) -> np.ndarray:
    """The unit vector in a direction given in degrees."""
    a, e = math.radians(azimuth), math.radians(elevation)
    return np.array([math.cos(e) * math.cos(a), math.cos(e) * math.sin(a), math.sin(e)]).round(9)


@cache
def cameras(elevation: float) -> tuple[Camera, ...]:
    """The left and the right eye; both look at the centre of the toy."""
    middle = DISTANCE * towards(0, elevation)
    return tuple(Camera.looking_at((0.0, 0.0, 0.0), middle + np.array([0.0, eye, 0.0]), FOCAL) for eye in EYES)


def render(
    solids: Toy, elevations: Sequence[float], azimuth: float, lightings: Sequence[Lighting] = LIGHTINGS
) -> np.ndarray:
    """Stereo pairs of a toy at one azimuth: uint8 (elevations, lightings, 2, 96, 96).

    >>> from capsnet.data.synthetic.toys import toy
    >>> render(toy(4, 0), [30, 50], azimuth=40).shape
    (2, 6, 2, 96, 96)
    """
    floor, placed = ground(solids), [turned(solid, azimuth) for solid in solids]
    shadows = cast_shadows(placed, floor, lightings)
    images = np.empty((len(elevations), len(lightings), 2, SIDE, SIDE), np.uint8)
    for level, elevation in enumerate(elevations):
        for eye, camera in enumerate(cameras(elevation)):
            surface, place = Shown.of(cast(placed, camera, FINE)), places_on_ground(camera, floor)
            for lamp, light in enumerate(lightings):
                images[level, lamp, eye] = light_up(surface, light, shadows[lamp].ravel()[place])
    return images


def cast_shadows(solids: Sequence[Solid], floor: float, lightings: Sequence[Lighting]) -> list[np.ndarray]:
    """For each lighting the darkness of the ground around a toy, (GROUND_SIDE, GROUND_SIDE) by x and y."""
    standing = [solid.raised(-floor) for solid in solids]
    return [soften(shadow(standing, towards(*light.main), GROUND_REACH, GROUND_SIDE)) for light in lightings]


def soften(dark: np.ndarray) -> np.ndarray:
    """The mean over 5×5 points, float32; there is no shadow at the border."""
    for axis in (0, 1):
        padded = np.pad(dark.astype(np.float32), [(2, 2) if axis == k else (0, 0) for k in (0, 1)])
        dark = np.stack([np.take(padded, range(k, k + dark.shape[axis]), axis) for k in range(5)]).sum(0)
    return dark / np.float32(25)


@lru_cache(maxsize=64)  # for the views of one toy, whose ground is the same at every azimuth
def places_on_ground(camera: Camera, floor: float) -> np.ndarray:
    """Index of the point of the shadow map that each pixel would show without the toy: (96, 96)."""
    steps = camera.offsets(SIDE)
    ray = [f + steps * r for f, r in zip(camera.forward, camera.right, strict=True)]
    x, y, z = (ray[k][None, :] - steps[:, None] * camera.up[k] for k in range(3))
    depth = (floor - camera.position[2]) / np.minimum(z, -1e-3)
    across = [camera.position[k] + depth * way for k, way in ((0, x), (1, y))]
    row, column = (np.clip((p / GROUND_REACH + 1) * (GROUND_SIDE / 2), 0, GROUND_SIDE - 1).astype(int) for p in across)
    return row * GROUND_SIDE + column


@dataclass(frozen=True, eq=False)
class Shown:
    """The pixels of a surface that show a solid, n of them at twice the size of the image.

    place (n,) into the fine image; shade (n,); normal (3, n); ground (96, 96), the share of the ground in each pixel.
    """

    place: np.ndarray
    shade: np.ndarray
    normal: np.ndarray
    ground: np.ndarray

    @classmethod
    def of(cls, surface: Surface) -> Shown:
        place = np.flatnonzero(surface.shown)
        ground = 1 - halved(surface.shown.astype(np.float32))
        return cls(place, surface.shade.ravel()[place], surface.normal.reshape(3, -1)[:, place], ground)


def light_up(surface: Shown, light: Lighting, dark: np.ndarray) -> np.ndarray:
    """An image of 96×96 bytes; Lambert's law for each lamp."""
    x, y, z = surface.normal
    brightness = np.float32(light.everywhere) * (np.float32(0.7) + np.float32(0.3) * z)
    for direction, strength in ((light.main, light.strength), (light.second, light.second_strength)):
        lx, ly, lz = towards(*direction).astype(np.float32)
        brightness += np.float32(strength) * np.maximum(x * lx + y * ly + z * lz, 0)
    fine = np.zeros(FINE * FINE, np.float32)
    fine[surface.place] = np.minimum(surface.shade * brightness, 1)
    ground = np.float32(light.ground) * (1 - np.float32(SHADOW) * dark)
    image = halved(fine.reshape(FINE, FINE)) + surface.ground * ground
    return (image * 255 + np.float32(0.5)).astype(np.uint8)


def halved(fine: np.ndarray) -> np.ndarray:
    """Means of 2×2 pixels."""
    return (fine[::2, ::2] + fine[1::2, ::2] + fine[::2, 1::2] + fine[1::2, 1::2]) / 4
