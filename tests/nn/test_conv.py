"""Convolutional capsules: a child's couplings sum to one over all its parents, and chunks change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.nn import conv
from capsnet.nn.conv import ConvCaps, GridParents
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import Parents


def layer(routing: str = "dynamic", padding: int = 0, **options: int) -> ConvCaps:
    torch.manual_seed(0)
    made = ConvCaps(3, 4, 2, 5, kernel=3, stride=2, padding=padding, routing=routing, **options)
    return made.double()


def grid(side: int = 5, n: int = 2) -> Tensor:
    return torch.randn(n, side, side, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def literal(poses: np.ndarray, W: np.ndarray, kernel: int, stride: int, iterations: int) -> np.ndarray:
    """Dynamic routing on a grid, one child and one parent at a time."""
    b, h, w, n, _ = poses.shape
    _, j, q, _ = W.shape
    rows, columns = (h - kernel) // stride + 1, (w - kernel) // stride + 1
    upper = np.zeros((b, rows, columns, j, q))
    for e in range(b):
        votes: dict[tuple[int, ...], dict[tuple[int, ...], np.ndarray]] = {}  # child → parent → vote
        for r in range(rows):
            for c in range(columns):
                for dy in range(kernel):
                    for dx in range(kernel):
                        for t in range(n):
                            y, x, number = r * stride + dy, c * stride + dx, (dy * kernel + dx) * n + t
                            for k in range(j):
                                vote = W[number, k] @ poses[e, y, x, t]
                                votes.setdefault((y, x, t), {})[r, c, k] = vote
        logits = {child: dict.fromkeys(parents, 0.0) for child, parents in votes.items()}
        for _ in range(iterations):
            s = np.zeros((rows, columns, j, q))
            for child, parents in votes.items():
                total = sum(np.exp(logits[child][parent]) for parent in parents)
                for parent, vote in parents.items():
                    s[parent] += np.exp(logits[child][parent]) / total * vote
            squared = (s**2).sum(-1, keepdims=True)
            v = s * np.sqrt(squared + 1e-9) / (1 + squared)
            for child, parents in votes.items():
                for parent, vote in parents.items():
                    logits[child][parent] += vote @ v[parent]
        upper[e] = v
    return upper


def test_it_equals_routing_one_child_and_one_parent_at_a_time() -> None:
    caps, poses = layer(iterations=3), grid()
    expected = literal(poses.numpy(), caps.weight.detach().numpy(), 3, 2, 3)
    np.testing.assert_allclose(caps(poses).detach().numpy(), expected, rtol=1e-9, atol=1e-12)


def guard_a_child_divides_itself_among_all_its_parents(parents: Parents) -> None:
    """The centre of a 5×5 grid lies in all four windows of 3×3: its couplings to them sum to one."""
    b_ij = torch.randn(4, 9 * 3, 2, generator=torch.Generator().manual_seed(2))
    c_ij = parents.softmax(b_ij).unflatten(1, (9, 3))
    centre = sum(c_ij[window, offset] for window, offset in enumerate((8, 6, 2, 0)))
    torch.testing.assert_close(centre.sum(-1), torch.ones(3))  # type: ignore[union-attr]


def test_a_child_divides_itself_among_the_parents_at_all_positions() -> None:
    guard_a_child_divides_itself_among_all_its_parents(GridParents((5, 5), 3, 2, 3))


def test_normalising_each_window_by_itself_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_a_child_divides_itself_among_all_its_parents(Parents())


def test_extremes_reach_over_all_windows_of_a_child() -> None:
    parents = GridParents((5, 5), 3, 2, 1)
    x = torch.zeros(4, 9, 2)
    x[0, 8, 1], x[3, 0, 0] = 7.0, -5.0  # both are the centre, seen by the first and by the last window
    assert parents.amax(x)[2, 2].item() == 7
    assert parents.amin(x)[1, 6].item() == -5


def test_one_window_is_a_dense_layer() -> None:
    caps = ConvCaps(3, 4, 2, 5, kernel=5).double()
    dense = DenseCaps(75, 4, 2, 5).double()
    dense.weight.data.copy_(caps.weight.data)
    poses = grid()
    torch.testing.assert_close(caps(poses)[:, 0, 0], dense(poses.flatten(1, 3)))


def gradients(caps: ConvCaps, poses: Tensor) -> tuple[Tensor, ...]:
    poses = poses.clone().requires_grad_()
    output = caps(poses)
    assert isinstance(output, Tensor)
    output.square().sum().backward()
    assert poses.grad is not None
    assert caps.weight.grad is not None
    found = output.detach(), poses.grad, caps.weight.grad.clone()
    caps.weight.grad = None
    return found


def test_chunks_of_examples_change_neither_outputs_nor_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    caps, poses = layer(padding=1), grid(n=5)
    whole = gradients(caps, poses)
    monkeypatch.setattr(conv, "VOTE_BYTES", 1)
    for one, other in zip(whole, gradients(caps, poses), strict=True):
        torch.testing.assert_close(one, other)


def test_votes_are_recomputed_in_the_backward_pass() -> None:
    caps, poses = layer(), grid(n=4).requires_grad_()
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        caps(poses)
    votes = 4 * 4 * 27 * 2 * 5
    assert max(kept, default=0) < votes


def test_padding_keeps_the_size_and_its_capsules_say_nothing() -> None:
    caps = ConvCaps(3, 4, 2, 5, kernel=3, padding=1).double()
    poses = grid()
    padded = torch.nn.functional.pad(poses, (0, 0, 0, 0, 1, 1, 1, 1))
    caps_without = ConvCaps(3, 4, 2, 5, kernel=3).double()
    caps_without.weight.data.copy_(caps.weight.data)
    assert caps(poses).shape == (2, 5, 5, 2, 5)
    torch.testing.assert_close(caps(poses), caps_without(padded))


def test_layers_stack_in_a_sequential() -> None:
    stack = torch.nn.Sequential(ConvCaps(3, 4, 4, 6, stride=2), ConvCaps(4, 6, 2, 8, kernel=2))
    assert stack(torch.randn(2, 7, 7, 3, 4)).shape == (2, 2, 2, 2, 8)


@pytest.mark.parametrize("shape", [(2, 5, 5, 3), (2, 5, 5, 4, 4), (2, 2, 5, 3, 4)])
def test_a_wrong_shape_is_refused_in_one_sentence(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"ConvCaps expects \(b, h, w, 3, 4\).*and got"):
        layer()(torch.zeros(*shape, dtype=torch.float64))


def test_a_matrix_pose_that_is_not_square_is_refused() -> None:
    with pytest.raises(UserError, match="matrix poses are square"):
        ConvCaps(3, 8, 2, 8, matrix=True)
