"""The fused forms of EM and variational Bayes routing compute what the plain ones do, gradients too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from capsnet import kernels
from capsnet.errors import UserError
from capsnet.kernels import dispatch, moments
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import Routed

pytest.importorskip("numba")

SHAPES = [  # b, i, n, p, j, q; most are not multiples of anything that the loops like
    (5, 32, 32, 8, 10, 16),
    (33, 13, 13, 3, 3, 5),
    (18, 10, 10, 9, 7, 1),
    (1, 1, 1, 1, 1, 1),
    (17, 24, 6, 8, 10, 16),
    (3, 12, 1, 4, 5, 3),
]


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two threads, and the kernel even where it does not pay."""
    monkeypatch.setattr(dispatch, "routing_pays", lambda u, W: dispatch.enabled())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layer_of(shape: tuple[int, ...], iterations: int = 3, routing: str = "em") -> DenseCaps:
    _, i, n, p, j, q = shape
    torch.manual_seed(i)
    layer = DenseCaps(i, p, j, q, routing=routing, shared=n if n < i else None, iterations=iterations)
    torch.nn.init.normal_(layer.weight, std=0.3)  # responsibilities far from uniform
    return layer


def problem(shape: tuple[int, ...], scale: float = 0.5) -> tuple[Tensor, Tensor]:
    b, i, _, p, *_ = shape
    generator = torch.Generator().manual_seed(b)
    u, a = scale * torch.randn(b, i, p, generator=generator), torch.rand(b, i, generator=generator)
    return u.requires_grad_(), a.requires_grad_()


def everything(layer: DenseCaps, u: Tensor, a: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of their product with something random on all inputs and parameters."""
    routed = layer.route(u, a)
    generator = torch.Generator().manual_seed(7)
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in routed[:2])
    return [routed.poses, routed.activations, *torch.autograd.grad(total, [u, a, *layer.parameters()])]  # type: ignore[list-item]


@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("routing", ["em", "vb"])
def test_the_kernel_equals_the_plain_form(routing: str, shape: tuple[int, ...], iterations: int) -> None:
    layers, (u, a) = [layer_of(shape, iterations, routing) for _ in range(2)], problem(shape)
    found = [*everything(layers[0], u, a), *layers[0].buffers()]
    with kernels.plain():
        expected = [*everything(layers[1], u, a), *layers[1].buffers()]
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-6


def test_the_kernel_is_really_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, (u, a) = layer_of(SHAPES[0]), problem(SHAPES[0])

    def route(*_: object) -> Routed:
        raise AssertionError("the plain form")

    monkeypatch.setattr(type(layer.routing), "route", route)
    layer.route(u, a)
    with pytest.raises(AssertionError, match="the plain form"), kernels.plain():
        layer.route(u, a)
    with pytest.raises(AssertionError, match="the plain form"):
        layer.route(u, a, trace=True)


def test_large_votes_keep_their_small_variances() -> None:
    """Votes that agree on a mean of 100 with a spread of 0.1: a naive difference of squares loses the variance."""
    layer = layer_of((20, 40, 1, 4, 3, 4))
    with torch.no_grad():
        layer.weight.copy_(torch.eye(4).expand(1, 3, 4, 4))
    u = 100 + 0.1 * torch.randn(20, 40, 4, generator=torch.Generator().manual_seed(0))
    a = torch.ones(20, 40)
    with kernels.plain():
        expected = layer.double().route(u.double(), a.double())
    found = layer.float().route(u, a)
    torch.testing.assert_close(found.activations.double(), expected.activations, rtol=1e-3, atol=1e-3)


def test_two_runs_give_the_same_bits_whatever_the_number_of_threads() -> None:
    layer, (u, a) = layer_of(SHAPES[0]), problem(SHAPES[0])
    runs = []
    for count in (2, 2, 1):
        torch.set_num_threads(count)
        runs.append(everything(layer, u, a))
    assert all(torch.equal(x, y) and torch.equal(x, z) for x, y, z in zip(*runs, strict=True))


def test_a_nan_stays_with_its_example() -> None:
    layer, (u, a) = layer_of(SHAPES[0]), problem(SHAPES[0])
    with torch.no_grad():
        u[1, 3, 2] = torch.nan
    poses = layer.route(u, a).poses
    assert poses[1].isnan().any()
    assert poses[[0, 2, 3, 4]].isfinite().all()


def test_the_operators_are_registered_correctly() -> None:
    b, i, n, p, j, q = SHAPES[1]
    shapes = [(b, i, p), (n, j, q, p), (b, i), (b, j), (b, j, q), (b, j, q)]
    inputs = [torch.rand(shape).requires_grad_() for shape in shapes]
    torch.library.opcheck(moments.moments, tuple(inputs))


def test_a_second_derivative_is_refused_with_the_way_to_get_it() -> None:
    layer, (u, a) = layer_of(SHAPES[0]), problem(SHAPES[0])
    (g_u,) = torch.autograd.grad(layer.route(u, a).poses.sum(), u, create_graph=True)
    with pytest.raises(UserError, match=r"kernels\.plain"):
        g_u.sum().backward()
