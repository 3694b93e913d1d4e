"""Convolutional capsules: a child's couplings sum to one over all its parents, and chunks change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.nn import conv
from capsnet.nn.conv import ClassCaps, ConvCaps, GridParents
from capsnet.nn.functional import Capsules
from capsnet.nn.layers import DenseCaps, PrimaryCaps
from capsnet.routing import em
from capsnet.routing.base import ALL, ROUTINGS, Parents


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


def literal_em(caps: ConvCaps, poses: np.ndarray, a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """EM routing on a padded grid, one child and one parent at a time: cells of the padding have no children."""
    (h, w, n, _), W = poses.shape, caps.weight.detach().numpy()
    beta_u, beta_a = caps.routing.beta_u.detach().numpy(), caps.routing.beta_a.detach().numpy()
    rows, columns = ((side + 2 * caps.padding - caps.kernel) // caps.stride + 1 for side in (h, w))
    votes: dict[tuple[int, ...], dict[tuple[int, ...], np.ndarray]] = {}  # child → parent → vote
    for r, c, dy, dx, t in np.ndindex(rows, columns, caps.kernel, caps.kernel, n):
        y, x = r * caps.stride + dy - caps.padding, c * caps.stride + dx - caps.padding
        if 0 <= y < h and 0 <= x < w:
            for j in range(caps.upper_types):
                vote = W[(dy * caps.kernel + dx) * n + t, j] @ poses[y, x, t]
                votes.setdefault((y, x, t), {})[r, c, j] = vote
    R = {child: dict.fromkeys(parents, 1 / len(parents)) for child, parents in votes.items()}
    upper = list(np.ndindex(rows, columns, caps.upper_types))
    capacity = {parent: sum(R[child].get(parent, 0) for child in votes) for parent in upper}
    mean, variance, active = {}, {}, {}
    for step in range(caps.routing.options.iterations):
        for parent in upper:
            mine = [(R[child][parent] * a[child], vote[parent]) for child, vote in votes.items() if parent in vote]
            S = sum(r for r, _ in mine)
            mean[parent] = sum(r * vote for r, vote in mine) / S
            variance[parent] = sum(r * (vote - mean[parent]) ** 2 for r, vote in mine) / S + em.FLOOR
            cost = (beta_u[parent[2]] + 0.5 * np.log(variance[parent]).mean()) * 16 * S / capacity[parent]
            active[parent] = 1 / (1 + np.exp(-caps.routing.options.temperature(step) * (beta_a[parent[2]] - cost)))
        for child, parents in votes.items():
            fits = {
                parent: active[parent]
                * np.exp(-0.5 * (vote - mean[parent]) ** 2 / variance[parent]).prod()
                / np.sqrt(2 * np.pi * variance[parent]).prod()
                for parent, vote in parents.items()
            }
            R[child] = {parent: fit / sum(fits.values()) for parent, fit in fits.items()}
    shape = (rows, columns, caps.upper_types)
    return np.array([mean[p] for p in upper]).reshape(*shape, -1), np.array([active[p] for p in upper]).reshape(shape)


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_em_on_a_grid_equals_one_child_and_one_parent_at_a_time(padding: int) -> None:
    caps, poses = layer("em", padding), grid(4, 1)
    torch.nn.init.normal_(caps.routing.beta_a)
    a = torch.rand(1, 4, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = literal_em(caps, poses[0].numpy(), a[0].numpy())
    for ours, literally in zip(caps.route(poses, a)[:2], expected, strict=True):
        np.testing.assert_allclose(ours[0].detach().numpy(), literally, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("routing", ["vb", "self-routing"])
def test_a_cell_of_the_padding_casts_no_vote_whatever_its_pose(routing: str) -> None:
    padded, bare = layer(routing, padding=1).eval(), layer(routing).eval()
    bare.load_state_dict(padded.state_dict())
    poses, a = grid(), torch.rand(2, 5, 5, 3, dtype=torch.float64)
    strange = torch.randn(2, 7, 7, 3, 4, dtype=torch.float64)
    strange[:, 1:-1, 1:-1] = poses
    silent = torch.nn.functional.pad(a, (0, 0, 1, 1, 1, 1))
    for one, other in zip(padded.route(poses, a)[:2], bare.route(strange, silent)[:2], strict=True):
        torch.testing.assert_close(one, other)


def test_padding_that_could_fill_a_window_is_refused() -> None:
    with pytest.raises(UserError, match="padding from 0 to kernel - 1"):
        layer(padding=3)


@pytest.mark.parametrize("routing", ["em", "vb"])
def test_a_routing_may_choose_the_scale_of_the_transformations(routing: str) -> None:
    torch.manual_seed(0)
    caps = ConvCaps(8, 16, 8, 16, routing=routing)
    wanted = caps.routing.initial_std()
    assert wanted is not None
    assert abs(caps.weight.std().item() / wanted - 1) < 0.02


def test_the_batch_statistics_of_vb_are_those_of_the_whole_batch_and_updated_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, parts, poses = layer("vb"), layer("vb"), grid(n=4)
    expected = whole.route(poses)
    expected.activations.sum().backward()  # recomputes the routing
    monkeypatch.setattr(conv, "VOTE_BYTES", 1)
    found = parts.route(poses)
    found.activations.sum().backward()
    torch.testing.assert_close(found.activations, expected.activations)
    torch.testing.assert_close(parts.weight.grad, whole.weight.grad)
    with torch.no_grad():
        whole.routing.reset_parameters()
        whole.route(poses)  # without gradients nothing is recomputed
    for name in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(parts.routing, name), getattr(whole.routing, name))


# --- ClassCaps ------------------------------------------------------------------------------------------------


def class_layer(routing: str, matrix: bool, **options: bool) -> ClassCaps:
    torch.manual_seed(0)
    caps = ClassCaps(3, 4, 5, 4, grid=(2, 3), routing=routing, matrix=matrix, **options).double().eval()
    for parameter in caps.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return caps


def literal_votes(poses: np.ndarray, W: np.ndarray, matrix: bool, coordinates: bool) -> np.ndarray:
    """Votes of a grid for classes, one at a time: shared transformations, then row and column are added."""
    (b, h, w, n, _), j = poses.shape, W.shape[1]
    votes = np.zeros((b, h, w, n, j, 4))
    for e, y, x, t, k in np.ndindex(b, h, w, n, j):
        pose = poses[e, y, x, t]
        vote = pose.reshape(2, 2) @ W[t, k] if matrix else W[t, k] @ pose
        if coordinates:
            first, second = ((0, 1), (1, 1)) if matrix else ((0,), (1,))
            vote[first] += (y + 0.5) / h
            vote[second] += (x + 0.5) / w
        votes[e, y, x, t, k] = vote.ravel()
    return votes.reshape(b, h * w * n, j, 4)


@pytest.mark.parametrize("coordinates", [True, False])
@pytest.mark.parametrize("matrix", [False, True])
@pytest.mark.parametrize("routing", ROUTINGS.names())
def test_class_capsules_route_votes_with_shared_transformations_and_coordinates(
    routing: str, matrix: bool, coordinates: bool
) -> None:
    caps = class_layer(routing, matrix, coordinates=coordinates)
    poses = 0.3 * torch.randn(2, 2, 3, 3, 4, dtype=torch.float64)
    V = torch.from_numpy(literal_votes(poses.numpy(), caps.weight.detach().numpy(), matrix, coordinates))
    routed = caps.route(poses, trace=True)
    assert routed.trace is not None
    torch.testing.assert_close(routed.trace.votes, V)
    if routing == "self-routing":  # whose couplings come from the poses
        sent = routed.trace.couplings[0] * poses.norm(dim=-1).flatten(1).clamp(max=1).unsqueeze(-1)
        expected = torch.einsum("bij,bijq->bjq", sent, V) / sent.sum(1).unsqueeze(-1)
        torch.testing.assert_close(routed.poses, expected, rtol=1e-5, atol=1e-7)
        return
    a = poses.norm(dim=-1).flatten(1).clamp(max=1)
    expected = caps.routing.route(V, a, ALL, False)
    torch.testing.assert_close(routed.poses, expected.poses)
    torch.testing.assert_close(routed.activations, expected.activations)


def test_two_capsules_of_equal_pose_vote_alike_but_for_their_places() -> None:
    caps = class_layer("dynamic", False)
    trace = caps.route(torch.ones(1, 2, 3, 3, 4, dtype=torch.float64), trace=True).trace
    assert trace is not None
    votes = trace.votes[0].unflatten(0, (2, 3, 3))
    apart = votes[1, 2] - votes[0, 0]
    torch.testing.assert_close(apart[..., :2], torch.tensor([1 / 2, 2 / 3]).double().expand(3, 5, 2))
    torch.testing.assert_close(apart[..., 2:], torch.zeros(3, 5, 2).double())


def test_coordinates_need_two_dimensions() -> None:
    with pytest.raises(UserError, match="at least two dimensions"):
        ClassCaps(3, 4, 5, 1, grid=(2, 3))


# --- Stacks ---------------------------------------------------------------------------------------------------


def test_layers_stack_in_a_sequential() -> None:
    stack = torch.nn.Sequential(ConvCaps(3, 4, 4, 6, stride=2), ConvCaps(4, 6, 2, 8, kernel=2))
    assert stack(torch.randn(2, 7, 7, 3, 4)).shape == (2, 2, 2, 2, 8)


@pytest.mark.parametrize("routing", ROUTINGS.names())
def test_every_kind_of_layer_stacks_in_a_sequential(routing: str) -> None:
    torch.manual_seed(0)
    own = ROUTINGS.get(routing).own_activations
    stack = torch.nn.Sequential(
        PrimaryCaps(6, 3, 4, kernel_size=3, grid=True, activations=own),
        ConvCaps(3, 4, 4, 4, stride=2, padding=1, routing=routing, matrix=True),
        ConvCaps(4, 4, 3, 6, routing=routing),
        ClassCaps(3, 6, 5, 6, grid=(2, 2), routing=routing),
        DenseCaps(5, 6, 2, 6, routing=routing),
    )
    out = stack(torch.randn(2, 6, 15, 15))
    assert isinstance(out, Capsules if own else Tensor)
    poses = out.poses if isinstance(out, Capsules) else out
    assert poses.shape == (2, 2, 6)
    (poses.sum() + sum(x.sum() for x in out)).backward()
    unused = ("readout", "offset")  # of inverted attention, which ignores the activations of the layer below
    used = [parameter for name, parameter in stack.named_parameters() if not name.endswith(unused)]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in used)


@pytest.mark.parametrize("last", [DenseCaps(36, 4, 5, 4, routing="em"), ClassCaps(4, 4, 5, 4, (3, 3), routing="em")])
def test_activations_reach_the_last_layer(last: DenseCaps) -> None:
    torch.manual_seed(0)
    stack = torch.nn.Sequential(ConvCaps(3, 4, 4, 4, stride=2, routing="em"), last)
    poses, a = torch.randn(2, 7, 7, 3, 4), torch.rand(2, 7, 7, 3)
    out, weaker = stack(Capsules(poses, a)), stack(Capsules(poses, a * torch.rand(3)))
    assert out.poses.shape == (2, 5, 4)
    assert (out.activations - weaker.activations).abs().max() > 1e-4


@pytest.mark.parametrize("shape", [(2, 5, 5, 3), (2, 5, 5, 4, 4), (2, 2, 5, 3, 4)])
def test_a_wrong_shape_is_refused_in_one_sentence(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"ConvCaps expects \(b, h, w, 3, 4\).*and got"):
        layer()(torch.zeros(*shape, dtype=torch.float64))


@pytest.mark.parametrize("shape", [(2, 3, 2, 3, 4), (2, 1, 1, 18, 4), (2, 2, 3, 3, 5)])
def test_class_capsules_refuse_another_grid_than_theirs(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"ClassCaps expects .* and got"):
        ClassCaps(3, 4, 5, 6, grid=(2, 3))(torch.zeros(shape))


def test_a_batch_may_be_empty() -> None:
    assert layer()(grid(n=0)).shape == (0, 2, 2, 2, 5)
    assert layer("em")(Capsules(grid(n=0), grid(n=0)[..., 0])).poses.shape == (0, 2, 2, 2, 5)


def test_a_matrix_pose_that_is_not_square_is_refused() -> None:
    with pytest.raises(UserError, match="matrix poses are square"):
        ConvCaps(3, 8, 2, 8, matrix=True)
