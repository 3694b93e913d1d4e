"""The fused loops over a grid of capsules compute what the plain form computes, gradients too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.kernels import dispatch, grid
from capsnet.kernels.grid import Windows
from capsnet.nn import conv
from capsnet.nn.conv import ClassCaps, ConvCaps, GridParents
from capsnet.nn.layers import DenseCaps
from capsnet.routing.em import EMRouting

pytest.importorskip("numba")
Layer = ConvCaps | DenseCaps
CASES: dict[str, tuple[Callable[..., Layer], tuple[int, ...]]] = {  # a layer, and the shape of what it gets
    "overlapping windows": (lambda **o: ConvCaps(3, 16, 5, 16, 3, 1, **o), (3, 5, 4, 3, 16)),
    "stride and padding": (lambda **o: ConvCaps(2, 16, 4, 16, 3, 2, 1, **o), (18, 6, 7, 2, 16)),
    "poses that fill no vector": (lambda **o: ConvCaps(3, 9, 2, 9, 2, 1, **o), (17, 3, 4, 3, 9)),
    "cells that no window sees": (lambda **o: ConvCaps(2, 4, 3, 4, 1, 2, **o), (2, 4, 4, 2, 4)),
    "class capsules": (lambda **o: ClassCaps(3, 16, 7, 16, (4, 3), **o), (5, 4, 3, 3, 16)),
    "dense": (lambda **o: DenseCaps(6, 16, 3, 16, **o), (2, 6, 16)),
}


def results(layer: Layer, poses: Tensor, a: Tensor | None) -> list[Tensor]:
    """Poses and activations, and the gradients on everything."""
    inputs = [x.clone().requires_grad_() for x in (poses, a) if x is not None]
    routed = layer.route(*inputs)
    random = torch.Generator().manual_seed(3)
    terms = [(x * torch.randn(x.shape, generator=random)).sum() for x in routed[:2] if x is not None]
    gradients = torch.autograd.grad(sum(terms), [*inputs, *layer.parameters()])  # type: ignore[arg-type]
    return [routed.poses.detach(), routed.activations.detach(), *gradients]


def problem(case: str, **options: object) -> tuple[Layer, Tensor, Tensor | None]:
    torch.manual_seed(0)
    make, shape = CASES[case]
    layer = make(**options)
    return layer, 0.3 * torch.randn(shape), torch.rand(shape[:-1]) if layer.routing.own_activations else None


@pytest.mark.parametrize("matrix", [True, False])
@pytest.mark.parametrize("routing", ["em", "vb", "dynamic"])
@pytest.mark.parametrize("case", CASES)
def test_the_loops_equal_the_plain_form_with_all_gradients(
    case: str, routing: str, matrix: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, poses, a = problem(case, routing=routing, matrix=matrix)
    with dispatch.plain():
        expected = results(layer, poses, a)
    taken: list[bool] = []
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: not taken.append(True))
    found = results(layer, poses, a)
    assert taken or not (matrix or isinstance(layer, ConvCaps))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("b", [1, 15, 16, 33])
@pytest.mark.parametrize("routing", ["em", "dynamic"])
def test_every_size_of_a_batch_fills_its_tiles(routing: str, b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = ConvCaps(2, 16, 3, 16, 3, 2, routing=routing, matrix=True)
    poses = 0.3 * torch.randn(b, 5, 5, 2, 16)
    a = torch.rand(b, 5, 5, 2) if layer.routing.own_activations else None
    with dispatch.plain():
        expected = results(layer, poses, a)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    for one, other in zip(results(layer, poses, a), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * max(1.0, other.abs().max().item()))


def test_stored_examples_are_counted_by_tiles() -> None:
    assert [dispatch.tiled_examples(b) for b in (1, 15, 16, 17, 32)] == [1, 15, 16, 32, 32]


@pytest.mark.parametrize("routing", ["em", "dynamic"])
def test_tiles_that_share_a_job_keep_their_sums_apart(routing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the gradients on W are large, a job of the backward pass has several tiles of sixteen examples."""
    grid_numba = pytest.importorskip("capsnet.kernels.grid_numba")
    torch.manual_seed(0)
    layer = ConvCaps(2, 16, 3, 16, 3, 2, routing=routing, matrix=True)
    poses = 0.3 * torch.randn(50, 5, 5, 2, 16)
    a = torch.rand(50, 5, 5, 2) if layer.routing.own_activations else None
    with dispatch.plain():
        expected = results(layer, poses, a)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    monkeypatch.setattr(grid_numba, "GRADIENT_BYTES", 0)
    for one, other in zip(results(layer, poses, a), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5 * max(1.0, other.abs().max().item()))


def test_biases_of_dynamic_routing_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, _ = problem("overlapping windows", routing="dynamic", bias=True)
    torch.nn.init.normal_(layer.routing.bias)
    with dispatch.plain():
        expected = results(layer, poses, None)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    for one, other in zip(results(layer, poses, None), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("option", ["leaky", "detach"])
def test_what_the_loops_cannot_do_is_left_to_the_plain_form(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, _ = problem("overlapping windows", routing="dynamic", **{option: True})
    with dispatch.plain():
        expected = results(layer, poses, None)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    for one, other in zip(results(layer, poses, None), expected, strict=True):
        assert torch.equal(one, other)


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, a = problem("stride and padding", routing="em", matrix=True)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            found.append(results(layer, poses, a))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_few_examples_and_other_precisions_take_the_plain_form() -> None:
    W, windows = torch.zeros(9 * 8, 16, 4, 4), GridParents((14, 14), 3, 2, 8).windows()
    u = torch.zeros(64, 196 * 8, 16)
    assert dispatch.grid_pays(u, W, windows)
    assert not dispatch.grid_pays(u[:2], W, windows)
    assert not dispatch.grid_pays(u.double(), W.double(), windows)
    with dispatch.plain():
        assert not dispatch.grid_pays(u, W, windows)


def test_a_second_derivative_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, a = problem("overlapping windows", routing="em", matrix=True)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    poses.requires_grad_()
    (gradient,) = torch.autograd.grad(layer.route(poses, a).poses.sum(), poses, create_graph=True)
    with pytest.raises(UserError, match="differentiated once"):
        gradient.square().sum().backward()


def test_a_window_at_the_border_counts_its_own_cells_only() -> None:
    """A 3×3 grid seen by four windows of 2×2: corners belong to one, edges to two, the centre to four."""
    windows = GridParents((3, 3), 2, 1, 5).windows()
    torch.testing.assert_close(windows.shares(), torch.full((4,), 1 + 2 / 2 + 1 / 4))
    assert Windows.one(6).shares().item() == 6


def test_activations_outside_0_and_1_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, a = problem("overlapping windows", routing=EMRouting(), matrix=True)
    assert a is not None
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    with pytest.raises(UserError, match="lower activations are in"):
        layer.route(poses, a + 1)


def test_memory_is_not_that_of_the_votes() -> None:
    """What the forward pass keeps for the backward pass of EM is far less than the votes, which it never holds."""
    torch.manual_seed(0)
    layer, kept = ConvCaps(8, 16, 16, 16, 3, 1, routing="em", matrix=True), list[int]()
    poses, a = torch.randn(16, 8, 8, 8, 16).requires_grad_(), torch.rand(16, 8, 8, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer.route(poses, a)
    assert grid.fused() is not None
    assert sum(kept) < 16 * 36 * 72 * 16 * 16  # votes of the batch


@pytest.mark.parametrize("lanes", [1, 5, 16])
@pytest.mark.parametrize("equal", [True, False])
def test_the_operators_keep_pytorchs_rules_for_operators(equal: bool, lanes: int) -> None:
    torch.manual_seed(0)
    u, W, windows = torch.randn(1, 6, 1, 4, lanes), torch.randn(2, 3, 4, 4), Windows.one(3)
    a, k, V, P = (torch.rand(1, *size, lanes) for size in ((6,), (1, 3), (1, 3, 4), (1, 3, 4)))
    places = (windows.starts, windows.window, windows.block)
    known = (k, V, P) if equal else tuple(x.requires_grad_() for x in (k, V, P))
    torch.library.opcheck(grid.moments, (u.requires_grad_(), W.requires_grad_(), a, *known, *places, equal))
    torch.library.opcheck(grid.attend, (u, W, known[1], *places, equal))


def test_few_examples_keep_no_more_than_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile is filled up inside the loops, not in what is kept for the backward pass."""
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    layer = ConvCaps(2, 16, 4, 16, 3, 1, routing="em", matrix=True)
    kept: dict[int, int] = {}
    for b in (1, 16, 17):
        numbers: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, n=numbers: n.append(t.numel()) or t, lambda t: t):
            layer.route(torch.randn(b, 6, 6, 2, 16).requires_grad_(), torch.rand(b, 6, 6, 2))
        kept[b] = sum(numbers)
    assert kept[1] < kept[16] / 8 < kept[17] / 12  # two tiles are full


def test_large_layers_recompute_their_iterations_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, poses, a = problem("overlapping windows", routing="em", matrix=True)
    monkeypatch.setattr(dispatch, "grid_pays", lambda *_: True)
    expected = results(layer, poses, a)
    monkeypatch.setattr(conv, "UPPER_BYTES", 0)
    for one, other in zip(results(layer, poses, a), expected, strict=True):
        torch.testing.assert_close(one, other)
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        layer.route(poses.requires_grad_(), a)
    assert sum(kept) <= 2 * (poses.numel() + layer.weight.numel() + layer.routing.beta_u.numel())
