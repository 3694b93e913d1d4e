"""Ray casting: intersections against rays walked step by step, the nearest solid, normals and shadows."""

from __future__ import annotations

import numpy as np
import pytest

from capsnet.data.synthetic.solids import (
    NEVER,
    Camera,
    Solid,
    ball,
    block,
    cast,
    enter,
    outward,
    rod,
    shadow,
    single,
    turned,
    wing,
)

STEP = 0.01
SOLIDS = {
    "ball": ball((0.1, -0.2, 0.3), (0.5, 0.3, 0.8), pitch=30),
    "rod": rod((-0.4, 0.1, 0.0), (0.5, -0.3, 0.6), 0.3),
    "upright rod": rod((0.0, 0.0, -0.5), (0.0, 0.0, 0.5), 0.4),
    "block": block((0.0, 0.2, 0.1), (0.6, 0.4, 0.3), pitch=-20),
    "tapered block": block((0.0, 0.0, 0.0), (0.6, 0.4, 0.5), taper=(0.6, -0.3)),
    "wing": wing((0.2, 0.0, 0.0), (-0.4, 0.9, 0.2), 0.5, 0.2, taper=0.7),
}


def inside(solid: Solid, point: np.ndarray) -> bool:
    """The definition of a solid, one point at a time."""
    x, y, z = np.linalg.solve(np.array(solid.axes).T, point - np.array(solid.centre))
    if solid.kind == "ball":
        return x * x + y * y + z * z <= 1
    if solid.kind == "cylinder":
        return x * x + y * y <= 1 and abs(z) <= 1
    narrow = [1 - shrink * (z + 1) / 2 for shrink in solid.taper]
    return abs(x) <= narrow[0] and abs(y) <= narrow[1] and abs(z) <= 1


def walked(solid: Solid, start: np.ndarray, way: np.ndarray) -> float:
    """The first step of a ray that is inside the solid."""
    return next((t for t in np.arange(0.5, 3.5, STEP) if inside(solid, start + t * way)), np.inf)


@pytest.mark.parametrize("name", SOLIDS)
def test_a_ray_enters_a_solid_where_a_walk_along_it_does(name: str) -> None:
    solid, random = SOLIDS[name], np.random.default_rng(7)
    hits = 0
    for _ in range(15):
        start = random.normal(size=3)
        start *= 2 / np.linalg.norm(start)
        way = np.array(solid.centre) + random.normal(size=3) * 0.3 - start
        way /= np.linalg.norm(way)
        o, d = single(solid.inverse @ (start - np.array(solid.centre))), single(solid.inverse @ way)
        t, expected = float(enter(solid, o, d)), walked(solid, start, way)
        if np.isinf(expected):
            assert t == NEVER or not inside(solid, start + (t + STEP) * way)  # missed, or touched between two steps
        else:
            hits += 1
            assert expected - STEP - 1e-4 <= t <= expected + 1e-4
    assert hits > 5


@pytest.mark.parametrize("name", SOLIDS)
def test_a_normal_points_out_of_the_solid(name: str) -> None:
    solid, random = SOLIDS[name], np.random.default_rng(3)
    for _ in range(10):
        start = random.normal(size=3) * 4
        way = np.array(solid.centre) - start
        o, d = single(solid.inverse @ (start - np.array(solid.centre))), single(solid.inverse @ way)
        t = enter(solid, o, d)
        point = tuple(np.atleast_1d(a + t * b) for a, b in zip(o, d, strict=True))
        normal = solid.inverse.T @ np.array([float(n[0]) for n in outward(solid, point)])  # type: ignore[arg-type]
        normal *= 0.01 / np.linalg.norm(normal)
        surface = start + float(t) * way
        assert inside(solid, surface - normal)
        assert not inside(solid, surface + normal)


def front_camera() -> Camera:
    return Camera.looking_at((0.0, 0.0, 0.0), np.array([5.0, 0.0, 0.0]), 4.0)


def test_the_nearer_solid_hides_the_other_in_any_order() -> None:
    near, far = ball((0.5, 0.0, 0.0), (0.2, 0.2, 0.2), 0.9), block((-0.5, 0.0, 0.0), (0.1, 0.6, 0.6), 0.3)
    for solids in ([near, far], [far, near]):
        surface = cast(solids, front_camera(), 48)
        assert surface.shade[24, 24] == np.float32(0.9)
        assert surface.shade[24, 32] == np.float32(0.3)
        assert not surface.shown[0, 0]
        assert surface.normal[0, 24, 24] > 0.9  # faces the camera


def test_the_picture_is_upright_and_not_mirrored() -> None:
    high = cast([ball((0.0, 0.0, 0.6), (0.1, 0.1, 0.1))], front_camera(), 48)
    assert np.argwhere(high.shown)[:, 0].max() < 24
    left_of_the_camera = cast([ball((0.0, -0.6, 0.0), (0.1, 0.1, 0.1))], front_camera(), 48)
    assert np.argwhere(left_of_the_camera.shown)[:, 1].max() < 24


def test_a_solid_turns_counter_clockwise_seen_from_above() -> None:
    solid = turned(ball((1.0, 0.0, 0.5), (0.3, 0.1, 0.1)), 90)
    assert solid.centre == (0.0, 1.0, 0.5)
    assert np.allclose(solid.axes[0], (0, 0.3, 0))


def test_a_shadow_falls_on_the_side_away_from_the_light() -> None:
    light = np.array([1.0, 0.0, 1.0]) / np.sqrt(2)
    dark = shadow([ball((0.0, 0.0, 1.0), (0.2, 0.2, 0.2))], light, 3.0, 60)
    x, y = ((np.argwhere(dark) + 0.5) / 10 - 3).mean(0)
    assert x == pytest.approx(-1, abs=0.06)
    assert y == pytest.approx(0, abs=0.06)
