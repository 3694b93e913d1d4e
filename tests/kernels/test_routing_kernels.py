"""The routing kernels compute what Procedure 1 says, gradients too, whichever way they take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.kernels import dispatch, private, routing, threads
from capsnet.kernels.routing_torch import OwnVotes, SharedVotes
from capsnet.nn.functional import squash
from samples import sample

WAYS = ["own", "shared", "fused"]


@pytest.fixture(autouse=True, scope="module")
def two_threads() -> Iterator[None]:
    """However few there are otherwise: the loops are shared out among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def reference(
    u: Tensor, W: Tensor, bias: Tensor | None, iterations: int, leaky: bool = False, detach: bool = False
) -> Tensor:
    """Procedure 1, line by line, with everything held in memory."""
    every_W = W.repeat(u.shape[1] // W.shape[0], 1, 1, 1)
    u_hat = torch.einsum("ijqp,bip->bijq", every_W, u)
    b_ij = u_hat.new_zeros(u_hat.shape[:3])
    for t in range(iterations):
        if leaky:
            c_ij = torch.cat([b_ij, torch.zeros_like(b_ij[..., :1])], -1).softmax(-1)[..., :-1]
        else:
            c_ij = b_ij.softmax(-1)
        s_j = (c_ij.unsqueeze(-1) * u_hat).sum(1)
        v_j = squash(s_j if bias is None else s_j + bias)
        if t < iterations - 1:
            agreement = torch.einsum("bijq,bjq->bij", u_hat, v_j)
            b_ij = b_ij + (agreement.detach() if detach else agreement)
    return v_j


def problem(b: int, i: int, n: int, p: int, j: int, q: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """u, W and bias, large enough for couplings that are far from uniform."""
    torch.manual_seed(b + i + j)
    shapes = [((b, i, p), 1.0), ((n, j, q, p), 0.4), ((j, q), 0.2)]
    return [(torch.randn(shape, dtype=dtype) * scale).requires_grad_() for shape, scale in shapes]


def take(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every problem be computed one way, whatever its shape."""
    if way == "fused":
        pytest.importorskip("numba")
        from capsnet.kernels.routing_numba import FusedVotes

        monkeypatch.setattr(routing, "choose", FusedVotes)
    else:
        monkeypatch.setattr(routing, "choose", {"own": OwnVotes, "shared": SharedVotes}[way])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    take(request.param, monkeypatch)
    return request.param


def gradients(function: Callable[..., Tensor], inputs: list[Tensor], *options: object) -> list[Tensor]:
    """The output, and the gradient of its product with something random on every input."""
    v = function(*inputs, *options)
    torch.manual_seed(7)
    return [v.detach(), *torch.autograd.grad(v, inputs, torch.randn(v.shape).to(v.dtype))]


def error(came: Tensor, expected: Tensor) -> float:
    return ((came - expected).norm() / expected.norm().clamp_min(1e-12)).item()


SHAPES = [  # b, i, n, p, j, q; the second and third are not multiples of anything the loops like
    (5, 32, 32, 8, 10, 16),
    (33, 13, 13, 3, 3, 5),
    (18, 10, 10, 9, 7, 1),
    (1, 20, 20, 8, 10, 16),
    (40, 24, 24, 16, 2, 8),
]
SHARED = [(5, 24, 6, 8, 10, 16), (17, 12, 1, 4, 5, 3), (3, 36, 12, 8, 30, 16)]


CASES = [(name, shape) for name in WAYS for shape in SHAPES * (name != "shared") + SHARED * (name != "own")]
OPTIONS = [(False, False), (True, False), (True, True), (False, True)]  # leaky, detach


@pytest.mark.parametrize(("case", "options", "iterations"), sample(32, CASES, OPTIONS, [1, 2, 3, 5]))
def test_outputs_and_gradients_are_those_of_procedure_1(
    case: tuple[str, tuple[int, ...]], options: tuple[bool, bool], iterations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(case[0], monkeypatch)
    inputs = problem(*case[1])
    exact = gradients(reference, [x.detach().double().requires_grad_() for x in inputs], iterations, *options)
    came = gradients(routing.dynamic_routing, inputs, iterations, *options)
    errors = [error(x.double(), y) for x, y in zip(came, exact, strict=True)]
    assert errors[0] < 1e-5
    assert max(errors[1:]) < 1e-4


def test_a_bias_may_be_left_out(way: str) -> None:
    u, W, _ = problem(6, 12, 12, 8, 4, 8)
    came = gradients(lambda u, W: routing.dynamic_routing(u, W, None, 3), [u, W])
    expected = gradients(lambda u, W: reference(u, W, None, 3), [u, W])
    assert max(error(x, y) for x, y in zip(came, expected, strict=True)) < 1e-5


def test_two_runs_give_the_same_bits_whatever_the_number_of_threads(way: str) -> None:
    inputs = problem(37, 48, 48, 8, 10, 16)
    threads_before = torch.get_num_threads()
    runs = []
    try:
        for count in (2, 2, 1):
            torch.set_num_threads(count)
            runs.append(gradients(routing.dynamic_routing, inputs, 3))
    finally:
        torch.set_num_threads(threads_before)
    assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[1], strict=True))
    if way == "fused":  # PyTorch's own matrix products make no such promise
        assert all(torch.equal(x, y) for x, y in zip(runs[0], runs[2], strict=True))


def test_an_example_does_not_depend_on_its_batch_mates(way: str) -> None:
    u, W, bias = problem(19, 32, 32, 8, 10, 16)
    together = routing.dynamic_routing(u, W, bias, 3)
    alone = torch.cat([routing.dynamic_routing(u[k : k + 1], W, bias, 3) for k in range(19)])
    assert (together - alone).abs().max() < 1e-6


def test_a_nan_stays_with_its_example(way: str) -> None:
    u, W, bias = problem(20, 32, 32, 8, 10, 16)
    with torch.no_grad():
        u[3, 5, 2] = torch.nan
    v, g_u, g_W, _ = gradients(routing.dynamic_routing, [u, W, bias], 3)
    others = [k for k in range(20) if k != 3]
    assert v[3].isnan().all()
    assert v[others].isfinite().all()
    assert g_u[3].isnan().all()
    assert g_u[others].isfinite().all()
    assert g_W.isnan().all()


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_silent_and_huge_inputs_have_finite_outputs_and_gradients(way: str, scale: float, leaky: bool) -> None:
    u, W, _ = problem(17, 32, 32, 8, 10, 16)
    scaled = (u.detach() * scale).requires_grad_()
    for x in gradients(lambda u, W: routing.dynamic_routing(u, W, None, 3, leaky), [scaled, W]):
        assert x.isfinite().all()


@pytest.mark.parametrize("chosen", [(0,), (1,), (2,), (0, 2)])
def test_only_what_asks_for_a_gradient_gets_one(way: str, chosen: tuple[int, ...]) -> None:
    inputs = [x.detach().requires_grad_(k in chosen) for k, x in enumerate(problem(5, 12, 12, 8, 4, 8))]
    reference(*inputs, 3).sum().backward()
    expected = [x.grad for x in inputs]
    for x in inputs:
        x.grad = None
    routing.dynamic_routing(*inputs, 3).sum().backward()
    for k, x in enumerate(inputs):
        assert (x.grad is not None) == (k in chosen)
        if k in chosen:
            torch.testing.assert_close(x.grad, expected[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("leaky", [False, True])
@pytest.mark.parametrize("n", [4, 2])
def test_gradients_are_the_slopes_that_finite_differences_find(n: int, leaky: bool) -> None:
    inputs = problem(2, 4, n, 3, 3, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda u, W, bias: routing.dynamic_routing(u, W, bias, 3, leaky), inputs)


def test_small_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in (SHAPES[0], SHARED[0]):
        inputs = problem(*shape)
        monkeypatch.undo()
        whole = gradients(routing.dynamic_routing, inputs, 3)
        monkeypatch.setattr("capsnet.kernels.routing_torch.CACHE_BYTES", 1)
        pieces = gradients(routing.dynamic_routing, inputs, 3)
        assert max(error(x, y) for x, y in zip(pieces, whole, strict=True)) < 1e-5


def test_non_contiguous_inputs_are_as_good_as_others(way: str) -> None:
    u, W, bias = problem(6, 12, 12, 8, 4, 8)
    strange = [x.detach().mT.contiguous().mT.requires_grad_() for x in (u, W, bias)]
    came = gradients(routing.dynamic_routing, strange, 3)
    expected = gradients(routing.dynamic_routing, [u, W, bias], 3)
    assert max(error(x, y) for x, y in zip(came, expected, strict=True)) < 1e-6


def test_the_operator_keeps_pytorchs_rules() -> None:
    for shape in (SHAPES[0], SHARED[0]):
        u, W, bias = problem(*shape)
        for arguments in [(u, W, bias, 3, False, False), (u, W, None, 1, True, True)]:
            torch.library.opcheck(torch.ops.capsnet.dynamic_routing.default, arguments)


@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
def test_it_compiles_without_a_graph_break() -> None:
    inputs = problem(17, 12, 12, 8, 4, 8)
    compiled = torch.compile(
        lambda u, W, bias: routing.dynamic_routing(u, W, bias, 3), fullgraph=True, backend="aot_eager"
    )
    came, expected = gradients(compiled, inputs), gradients(routing.dynamic_routing, inputs, 3)
    assert max(error(x, y) for x, y in zip(came, expected, strict=True)) < 1e-6


@pytest.mark.filterwarnings("ignore")
def test_it_exports_for_any_batch_size() -> None:
    class Route(torch.nn.Module):
        def forward(self, u: Tensor, W: Tensor) -> Tensor:
            assert not dispatch.routing_pays(u, W)  # an exported program takes the plain form by itself
            return routing.dynamic_routing(u, W, None, 3)

    u, W, _ = (x.detach() for x in problem(20, 200, 200, 8, 10, 16))
    assert dispatch.routing_pays(u, W)
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(Route(), (u, W), dynamic_shapes=({0: batch}, None)).module()
    for size in (1, 5, 20):
        torch.testing.assert_close(program(u[:size], W), reference(u[:size], W, None, 3))


def test_autocast_and_half_precision_are_computed_in_float32() -> None:
    u, W, bias = (x.detach() for x in problem(18, 32, 32, 8, 10, 16))
    expected = routing.dynamic_routing(u, W, bias, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(routing.dynamic_routing(u, W, bias, 3), expected)
    half = [x.bfloat16() for x in (u, W, bias)]
    came = routing.dynamic_routing(*half, 3)
    assert came.dtype == torch.float32
    torch.testing.assert_close(came, reference(*(x.float() for x in half), 3))


def test_without_numba_everything_still_works_and_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("numba", "capsnet.kernels.lanes", "capsnet.kernels.routing_numba"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    routing._fused.cache_clear()
    try:
        inputs = problem(20, 12, 12, 8, 4, 8)
        assert isinstance(routing.choose(inputs[0], inputs[1], False), OwnVotes)
        came, expected = gradients(routing.dynamic_routing, inputs, 3), gradients(reference, inputs, 3)
        assert max(error(x, y) for x, y in zip(came, expected, strict=True)) < 1e-5
    finally:
        routing._fused.cache_clear()


@pytest.fixture
def untried() -> Iterator[None]:
    """As if the compiled loops had never been asked for."""
    routing._fused.cache_clear()
    yield
    routing._fused.cache_clear()


@pytest.mark.parametrize("broken", ["_regroup", "_route", "_pull", "_finish"])
def test_a_numba_that_does_not_work_is_said_once_and_done_without(
    broken: str, untried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("numba")

    def fail(*arguments: object) -> None:
        raise TypeError("no vectors here")

    monkeypatch.setattr(f"capsnet.kernels.routing_numba.{broken}", fail)
    inputs = problem(20, 12, 12, 8, 4, 8)
    with pytest.warns(RuntimeWarning, match=r"Numba is installed but does not work here.*no vectors here"):
        came = gradients(routing.dynamic_routing, inputs, 3)
    again = gradients(routing.dynamic_routing, inputs, 3)  # a second warning would be an error
    for others in (again, gradients(reference, inputs, 3)):
        assert max(error(x, y) for x, y in zip(came, others, strict=True)) < 1e-5


def test_the_default_dtype_is_of_no_consequence(untried: None) -> None:
    pytest.importorskip("numba")
    inputs = problem(20, 12, 12, 8, 4, 8)
    torch.set_default_dtype(torch.float64)
    try:
        assert type(routing.choose(inputs[0], inputs[1], False)).__name__ == "FusedVotes"
        v = routing.dynamic_routing(*inputs, 3)
        came = [v.detach(), *torch.autograd.grad(v.sum(), inputs)]
    finally:
        torch.set_default_dtype(torch.float32)
    expected = reference(*inputs, 3)
    for x, y in zip(came, [expected, *torch.autograd.grad(expected.sum(), inputs)], strict=True):
        assert x.dtype == torch.float32
        assert error(x, y.detach()) < 1e-5


JOB = """
import numpy as np
from lanes import LANES, compiled, exp, load, store

@compiled
def job(x, y):
    store(y, 0, exp(load(x, 0)))

x, y = np.zeros(LANES, np.float32), np.zeros(LANES, np.float32)
job(x, y)
print(y[0], *job.stats.cache_hits.values())
"""


def test_loops_compiled_before_a_change_of_what_they_inline_are_not_used_after_it(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    lanes, job = tmp_path / "lanes.py", tmp_path / "job.py"
    source = (Path(routing.__file__).parent / "lanes.py").read_text()
    changed = source.replace("return y * power_of_two(shifted)", "return y + y")
    assert changed != source
    job.write_text(JOB)
    said = []
    for text in (source, source, changed):
        lanes.write_text(text)
        result = subprocess.run([sys.executable, job], capture_output=True, text=True, check=True)
        said.append(result.stdout.split())
    assert said == [["1.0"], ["1.0", "1"], ["2.0"]]


def test_a_second_derivative_is_refused_with_the_way_to_get_it(way: str) -> None:
    inputs = problem(6, 12, 12, 8, 4, 8)
    (slope,) = torch.autograd.grad(routing.dynamic_routing(*inputs, 3).sum(), inputs[1], create_graph=True)
    with pytest.raises(UserError, match=r"routing can be differentiated once.*kernels\.plain\(\)"):
        slope.square().sum().backward()


@pytest.mark.parametrize("n", [1152, 32])
def test_other_devices_take_the_plain_form_until_the_votes_are_too_large(n: int) -> None:
    W = torch.empty(n, 10, 16, 8, device="meta")
    assert not dispatch.routing_pays(torch.empty(128, 1152, 8, device="meta"), W)
    assert dispatch.routing_pays(torch.empty(2000, 1152, 8, device="meta"), W)


def test_votes_too_large_to_hold_are_not_formed_for_however_few_examples() -> None:
    assert dispatch.routing_pays(torch.empty(2, 2**16, 8), torch.empty(2**16, 100, 32, 1, device="meta"))


def test_the_way_is_chosen_by_shape_and_dtype() -> None:
    pytest.importorskip("numba")

    def chosen(b: int, i: int, n: int, j: int, dtype: torch.dtype = torch.float32) -> str:
        u, W = torch.zeros(b, i, 4, dtype=dtype), torch.zeros(n, j, 4, 4, dtype=dtype)
        return type(routing.choose(u, W, False)).__name__

    assert chosen(16, 8, 8, 10) == "FusedVotes"
    assert chosen(16, 8, 4, 10) == "FusedVotes"
    assert chosen(16, 8, 4, 100) == "SharedVotes"
    assert chosen(8, 8, 8, 10) == "FusedVotes"
    assert chosen(7, 8, 8, 10) == "OwnVotes"
    assert chosen(16, 8, 8, 10, torch.float64) == "OwnVotes"


@pytest.mark.parametrize(
    ("b", "n", "worth"), [(7, 1152, False), (8, 1152, True), (128, 1152, True), (1, 32, True), (128, 8, True)]
)
def test_a_few_images_are_left_to_the_plain_version_unless_w_is_shared(b: int, n: int, worth: bool) -> None:
    assert dispatch.routing_pays(torch.empty(b, 1152, 8), torch.empty(n, 10, 16, 8)) == worth
    assert not dispatch.routing_pays(torch.empty(b, 8, 8), torch.empty(min(n, 8), 10, 16, 8))


def test_several_threads_may_route_at_once() -> None:
    inputs = problem(40, 64, 64, 8, 10, 16)
    expected = gradients(routing.dynamic_routing, inputs, 3)

    def once(_: int) -> list[Tensor]:
        v = routing.dynamic_routing(*inputs, 3)
        return [v.detach(), *torch.autograd.grad(v, inputs, seed)]

    torch.manual_seed(7)
    seed = torch.randn(expected[0].shape)
    with ThreadPoolExecutor(4) as pool:
        for came in pool.map(once, range(12)):
            assert all(torch.equal(x, y) for x, y in zip(came, expected, strict=True))


def test_jobs_run_once_each_and_their_exceptions_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(k: int) -> None:
        if k == 3:
            raise ValueError("job 3")

    for openmp in (private.openmp_parallel(), None):
        monkeypatch.setattr(threads, "openmp_parallel", lambda openmp=openmp: openmp)
        done: list[int] = []
        threads.run(done.append, [(k,) for k in range(50)])
        assert sorted(done) == list(range(50))
        with pytest.raises(ValueError, match="job 3"):
            threads.run(fail, [(k,) for k in range(5)])
