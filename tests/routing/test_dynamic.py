"""Routing is Procedure 1 of the paper, whichever path computes it, and its trace tells what happened."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from capsnet import kernels
from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.kernels import routing as kernel
from capsnet.nn.functional import lengths, squash, votes
from capsnet.routing import DynamicRouting, Sizes, dynamic_routing
from samples import sample

# b i j p q, and n: how many transformations there are
SIZES = [(1, 1, 1, 1, 1, 1), (2, 6, 3, 4, 5, 6), (3, 12, 10, 2, 4, 3), (2, 8, 2, 1, 3, 1), (1, 5, 7, 3, 1, 5)]


@contextlib.contextmanager
def taking(path: str) -> Iterator[None]:
    """One way to compute: the readable one, or a kernel, even for shapes too small for it to pay.

    "torch" are the kernels for any dtype; "fused" are the compiled loops, which leave all but float32 to those.
    """
    if path == "plain":
        with kernels.plain():
            yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "routing_pays", lambda u, W: True)
        fused = None if path == "torch" else kernel._fused()
        choose = kernel.choose
        patch.setattr(kernel, "_fused", lambda: None)
        if fused is not None:
            patch.setattr(kernel, "choose", lambda u, *rest: (fused if u.dtype == torch.float32 else choose)(u, *rest))
        yield


PATHS = ["plain", "torch", "fused"]


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "fused":
        pytest.importorskip("numba")
    with taking(request.param):
        yield request.param


def test_the_path_is_really_taken(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    chosen = kernel.choose

    def choose(*arguments: object) -> object:
        votes = chosen(*arguments)  # type: ignore[arg-type]
        taken.append(type(votes).__name__)
        return votes

    monkeypatch.setattr(kernel, "choose", choose)
    for n in (6, 3):
        dynamic_routing(*problem((2, 6, 3, 4, 5, n), torch.float32))
    expected = {"plain": [], "torch": ["OwnVotes", "SharedVotes"], "fused": ["FusedVotes"] * 2}
    assert taken == expected[path]


def problem(
    sizes: tuple[int, ...], dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor]:
    b, i, j, p, q, n = sizes
    generator = torch.Generator().manual_seed(seed)
    shapes = [(b, i, p), (n, j, q, p), (j, q)]
    u, W, bias = (scale * torch.randn(shape, generator=generator) for shape in shapes)
    return u.to(dtype), W.to(dtype), bias.to(dtype)


# --- Procedure 1, word for word, on Python's own numbers ------------------------------------------------------


def literal_squash(s: list[float]) -> list[float]:
    length = math.sqrt(sum(x * x for x in s))
    return [length**2 / (1 + length**2) * x / length for x in s]


def literal_softmax(logits: list[float], leaky: bool) -> list[float]:
    total = sum(math.exp(x) for x in logits) + (1.0 if leaky else 0.0)
    return [math.exp(x) / total for x in logits]


def literal_procedure_1(u: list, W: list, bias: list | None, iterations: int, leaky: bool) -> list[list[float]]:
    """One example: u [i][p], W [n][j][q][p], bias [j][q] or None → v [j][q]."""
    lower, upper, dims, types = len(u), len(W[0]), len(W[0][0]), len(W)
    u_hat = [
        [[sum(w * x for w, x in zip(row, u[i], strict=True)) for row in W[i % types][j]] for j in range(upper)]
        for i in range(lower)
    ]
    b = [[0.0] * upper for _ in range(lower)]
    for _ in range(iterations):
        c = [literal_softmax(b[i], leaky) for i in range(lower)]
        v = []
        for j in range(upper):
            s = [sum(c[i][j] * u_hat[i][j][q] for i in range(lower)) for q in range(dims)]
            v.append(literal_squash([x + bias[j][q] for q, x in enumerate(s)] if bias else s))
        for i in range(lower):
            for j in range(upper):
                b[i][j] += sum(x * y for x, y in zip(u_hat[i][j], v[j], strict=True))
    return v


def expected_v(u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool) -> Tensor:
    W_list, bias_list = W.double().tolist(), bias.double().tolist() if bias is not None else None
    every = [literal_procedure_1(x, W_list, bias_list, iterations, leaky) for x in u.double().tolist()]
    return torch.tensor(every, dtype=torch.float64)


@pytest.mark.parametrize(
    ("sizes", "iterations", "with_bias", "leaky"), sample(12, SIZES, [1, 2, 3, 4, 5], [False, True], [False, True])
)
def test_routing_is_procedure_1_word_for_word(
    path: str, sizes: tuple[int, ...], iterations: int, with_bias: bool, leaky: bool
) -> None:
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 3e-5)):
        u, W, bias = problem(sizes, dtype)
        used = bias if with_bias else None
        v = dynamic_routing(u, W, used, iterations=iterations, leaky=leaky).poses
        assert v.dtype == dtype
        expected = expected_v(u, W, used, iterations, leaky)
        torch.testing.assert_close(v.double(), expected, rtol=tolerance, atol=tolerance)


# --- Gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "iterations", "leaky"), sample(4, [4, 2], [1, 2, 3], [False, True]))
def test_gradients_flow_through_every_iteration(path: str, n: int, iterations: int, leaky: bool) -> None:
    inputs = [x.requires_grad_() for x in problem((2, 4, 3, 2, 3, n))]

    def route(u: Tensor, W: Tensor, bias: Tensor) -> Tensor:
        return dynamic_routing(u, W, bias, iterations=iterations, leaky=leaky).poses

    assert torch.autograd.gradcheck(route, inputs)


def last_iteration_only(u: Tensor, W: Tensor, bias: Tensor, iterations: int) -> Tensor:
    """Couplings as constants, then one weighted sum with a gradient."""
    with torch.no_grad():
        trace = dynamic_routing(u, W, bias, iterations=iterations, trace=True).trace
        assert trace is not None
    return squash(torch.einsum("bij,bijq->bjq", trace.couplings[-1], votes(u, W)) + bias)


@pytest.mark.parametrize(("sizes", "iterations"), sample(4, SIZES[1:4], [1, 2, 3, 4]))
def test_detach_lets_the_gradient_through_the_last_iteration_only(
    path: str, sizes: tuple[int, ...], iterations: int
) -> None:
    inputs = [x.requires_grad_() for x in problem(sizes)]
    u, W, bias = inputs
    towards = torch.randn_like(bias)
    v = dynamic_routing(u, W, bias, iterations=iterations, detach=True).poses
    reference = last_iteration_only(u, W, bias, iterations)
    torch.testing.assert_close(v, reference)
    ours = torch.autograd.grad((v * towards).sum(), inputs)
    theirs = torch.autograd.grad((reference * towards).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)


def test_the_module_with_a_bias_is_the_function_with_that_bias(path: str) -> None:
    u, W, bias = problem(SIZES[1])
    module = DynamicRouting(bias=True, iterations=2)
    module.build(Sizes(6, 4, 3, 5, 6), dtype=torch.float64)
    with torch.no_grad():
        module.get_parameter("bias").copy_(bias)
    torch.testing.assert_close(module(u, W).poses, dynamic_routing(u, W, bias, iterations=2).poses)


def test_detach_changes_the_gradient_but_not_the_output(path: str) -> None:
    u, W, _ = problem(SIZES[1])
    W.requires_grad_()
    whole, last = (dynamic_routing(u, W, detach=detach).poses for detach in (False, True))
    torch.testing.assert_close(whole, last)
    of_whole, of_last = (torch.autograd.grad(v.sum(), W)[0] for v in (whole, last))
    assert (of_whole - of_last).abs().max() > 1e-3


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("leaky", [False, True])
def test_shared_transformations_are_the_unshared_ones_repeated_over_the_grid(
    path: str, leaky: bool, detach: bool
) -> None:
    u, W, bias = problem((2, 12, 4, 3, 5, 3))
    own = W.repeat(4, 1, 1, 1).requires_grad_()  # lower capsules lie as (h w n): the types take turns
    W.requires_grad_()
    options = {"leaky": leaky, "detach": detach}
    v_shared, v_own = (dynamic_routing(u, w, bias, **options).poses for w in (W, own))
    torch.testing.assert_close(v_shared, v_own)
    (of_shared,), (of_own,) = (torch.autograd.grad(v.square().sum(), w) for v, w in ((v_shared, W), (v_own, own)))
    torch.testing.assert_close(of_shared, of_own.unflatten(0, (4, 3)).sum(0))


# --- What routing must not depend on ---------------------------------------------------------------------------


def test_a_prediction_does_not_depend_on_its_batch_mates(path: str) -> None:
    u, W, bias = problem((5, 12, 10, 4, 6, 12))
    together = dynamic_routing(u, W, bias).poses
    alone = torch.cat([dynamic_routing(x[None], W, bias).poses for x in u])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_the_order_of_capsules_is_of_no_consequence(path: str) -> None:
    u, W, bias = problem((2, 6, 5, 3, 4, 6))
    lower, upper = torch.randperm(6), torch.randperm(5)
    v = dynamic_routing(u, W, bias).poses
    shuffled = dynamic_routing(u[:, lower], W[lower][:, upper], bias[upper]).poses
    torch.testing.assert_close(shuffled, v[:, upper])


def test_memory_layout_is_of_no_consequence(path: str) -> None:
    u, W, bias = problem((3, 6, 5, 3, 4, 6))
    inputs = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (u, W, bias)]
    assert not any(x.is_contiguous() for x in inputs)
    torch.testing.assert_close(dynamic_routing(*inputs).poses, dynamic_routing(u, W, bias).poses)


def test_routing_leaves_its_inputs_alone(path: str) -> None:
    inputs = problem((3, 6, 5, 3, 4, 6))
    before = [x.clone() for x in inputs]
    dynamic_routing(*inputs)
    assert all(map(torch.equal, inputs, before))


def test_an_empty_batch_gives_an_empty_batch(path: str) -> None:
    _, W, bias = problem((1, 6, 5, 3, 4, 6))
    assert dynamic_routing(torch.zeros(0, 6, 3).double(), W, bias).poses.shape == (0, 5, 4)


# --- Any magnitude, any shape ----------------------------------------------------------------------------------


@given(
    st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5)),
    st.integers(1, 3),
    st.one_of(st.just(0.0), st.floats(-20, 15).map(lambda exponent: 10.0**exponent)),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 4),
    st.sampled_from(PATHS),
    st.tuples(st.booleans(), st.booleans(), st.booleans()),
    st.integers(0, 2**31 - 1),
)
def test_lengths_and_gradients_stay_sane_at_any_magnitude(
    sizes: tuple[int, ...], grid: int, magnitude: float, dtype: torch.dtype, iterations: int,
    path: str, options: tuple[bool, ...], seed: int,
) -> None:  # fmt: skip
    b, types, j, p, q = sizes
    with_bias, leaky, detach = options
    u, W, bias = problem((b, types * grid, j, p, q, types), seed=seed)
    inputs = [x.to(dtype).requires_grad_() for x in (u * magnitude, W, bias)]
    with taking(path):
        v = dynamic_routing(*inputs[: 2 + with_bias], iterations=iterations, leaky=leaky, detach=detach).poses
        lengths(v).sum().backward()
    assert v.isfinite().all()
    assert (torch.linalg.vector_norm(v.detach().double(), dim=-1) <= 1 + 1e-6).all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs[: 2 + with_bias])


def test_silent_lower_capsules_give_silent_upper_capsules(path: str) -> None:
    _, W, _ = problem(SIZES[1])
    assert not dynamic_routing(torch.zeros(2, 6, 4).double(), W).poses.any()


def test_bfloat16_is_routed_in_float32(path: str) -> None:
    u, W, bias = problem((2, 64, 10, 8, 16, 64), torch.bfloat16, scale=0.3)
    v = dynamic_routing(u, W, bias).poses
    assert v.dtype == torch.float32
    torch.testing.assert_close(v, dynamic_routing(u.float(), W.float(), bias.float()).poses)


def test_autocast_does_not_reach_into_routing(path: str) -> None:
    u, W, bias = problem((2, 64, 10, 8, 16, 64), torch.float32, scale=0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = dynamic_routing(u, W, bias).poses
    torch.testing.assert_close(v, dynamic_routing(u, W, bias).poses)


# --- The trace ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sizes", "iterations", "leaky"), sample(8, SIZES, [1, 3, 5], [False, True]))
def test_the_trace_tells_what_happened(sizes: tuple[int, ...], iterations: int, leaky: bool) -> None:
    b, i, j, _, q, _ = sizes
    u, W, bias = problem(sizes)
    v, activations, trace = dynamic_routing(u, W, bias, iterations=iterations, leaky=leaky, trace=True)
    assert trace is not None
    assert trace.logits is not None
    assert trace.variances is None
    assert torch.equal(activations, lengths(v))
    assert torch.equal(trace.activations, lengths(trace.outputs))
    assert trace.logits.shape == trace.couplings.shape == (iterations, b, i, j)
    assert trace.outputs.shape == (iterations, b, j, q)
    assert not trace.logits[0].any()
    assert torch.equal(trace.outputs[-1], v)
    torch.testing.assert_close(trace.votes, votes(u, W))
    shares = trace.couplings.sum(-1)
    if leaky:
        assert (shares < 1).all()
        torch.testing.assert_close(trace.couplings[0], torch.full((b, i, j), 1 / (j + 1)).double())
    else:
        torch.testing.assert_close(shares, torch.ones_like(shares))
    agreements = torch.einsum("bijq,tbjq->tbij", trace.votes, trace.outputs[:-1])
    torch.testing.assert_close(trace.logits.diff(dim=0), agreements)


@pytest.mark.parametrize(
    ("sizes", "options"),
    sample(6, SIZES, [{}, {"leaky": True}, {"detach": True}, {"iterations": 1}, {"iterations": 5}]),
)
def test_asking_for_the_trace_changes_neither_output_nor_gradient(
    path: str, sizes: tuple[int, ...], options: dict
) -> None:
    inputs = [x.requires_grad_() for x in problem(sizes)]
    traced, fast = (dynamic_routing(*inputs, **options, trace=trace) for trace in (True, False))
    assert fast.trace is None
    torch.testing.assert_close(traced.poses, fast.poses)
    weight = torch.randn_like(fast.poses)
    of_traced, of_fast = (torch.autograd.grad((routed.poses * weight).sum(), inputs) for routed in (traced, fast))
    for one, other in zip(of_traced, of_fast, strict=True):
        torch.testing.assert_close(one, other)


# --- Mistakes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", [0, -1])
def test_routing_without_an_iteration_is_refused(iterations: int) -> None:
    u, W, _ = problem(SIZES[1])
    with pytest.raises(UserError, match=f"iterations={iterations} is out of range"):
        dynamic_routing(u, W, iterations=iterations)


@pytest.mark.parametrize("b", [2, 128], ids=["plain", "kernel"])
@pytest.mark.parametrize(
    ("u", "W", "bias"),
    [
        ((1152, 8), (1000, 10, 16, 8), None),  # neither a transformation for each capsule nor for each type
        ((1152, 8), (2304, 10, 16, 8), None),
        ((1152, 8), (1152, 10, 16, 16), None),
        ((1152, 8), (1152, 10, 16, 8), (16, 10)),
    ],
)
def test_shapes_that_do_not_fit_are_refused_before_a_loop_runs_past_its_end(
    b: int, u: tuple[int, ...], W: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    with pytest.raises(UserError, match="routing"):
        dynamic_routing(torch.zeros(b, *u), torch.zeros(*W), None if bias is None else torch.zeros(*bias))


def test_a_bias_for_all_capsules_has_the_same_gradient_either_way() -> None:
    u, W = torch.randn(64, 200, 8), torch.randn(200, 10, 16, 8)
    gradients = []
    for way in (contextlib.nullcontext(), kernels.plain()):
        bias = torch.full((16,), 0.1, requires_grad=True)
        with way:
            dynamic_routing(u, W, bias).poses.square().sum().backward()
        gradients.append(bias.grad)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-4)
