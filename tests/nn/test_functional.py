"""The paper's equations hold for any shape, any magnitude and every floating type."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from capsnet.nn.functional import lengths, mask, matrix_votes, squash, votes

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4)
MAGNITUDES = st.one_of(st.just(0.0), st.floats(-20, 15).map(lambda exponent: 10.0**exponent))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
SEEDS = st.integers(0, 2**31 - 1)


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_lengths(v: Tensor) -> Tensor:
    return torch.linalg.vector_norm(v.detach().double(), dim=-1)


def rounding(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("s", [[3.0, 4.0], [0.6, 0.8, 0.0], [-2.0], [1e-2, 0.0], [1e8, -1e8]])
def test_squash_is_equation_1(s: list[float]) -> None:
    n = math.sqrt(sum(x * x for x in s))
    expected = [n**2 / (1 + n**2) * x / n for x in s]
    result = squash(torch.tensor(s, dtype=torch.float64))
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=0)


def test_squash_works_along_any_dimension() -> None:
    s = normal(0, 3, 4, 5)
    for dim in (0, 1, 2, -2):
        torch.testing.assert_close(squash(s, dim=dim), squash(s.movedim(dim, -1)).movedim(-1, dim))


@given(SHAPES, MAGNITUDES, DTYPES, SEEDS)
def test_a_squashed_length_is_a_probability(shape: list[int], magnitude: float, dtype: torch.dtype, seed: int) -> None:
    v = squash((normal(seed, *shape) * magnitude).to(dtype))
    assert v.dtype == dtype
    assert v.shape == torch.Size(shape)
    assert v.isfinite().all()
    assert (exact_lengths(v) <= 1 + rounding(dtype)).all()


@given(SHAPES, st.floats(-15, 15), DTYPES, SEEDS)
def test_squash_keeps_the_direction(shape: list[int], exponent: float, dtype: torch.dtype, seed: int) -> None:
    s = (normal(seed, *shape) * 10.0**exponent).to(dtype)
    v = squash(s).double()
    along = (v * s.double()).sum(-1)
    torch.testing.assert_close(along, exact_lengths(v) * exact_lengths(s), rtol=rounding(dtype), atol=0)


@given(st.integers(1, 8), st.floats(-20, 15), st.floats(0, 10), DTYPES, SEEDS)
def test_a_longer_input_never_gives_a_shorter_output(
    dim: int, exponent: float, more: float, dtype: torch.dtype, seed: int
) -> None:
    s = normal(seed, dim) * 10.0**exponent
    shorter, longer = (exact_lengths(squash(x.to(dtype))) for x in (s, s * (1 + more)))
    assert longer >= shorter * (1 - rounding(dtype))


@given(SHAPES, MAGNITUDES, DTYPES, SEEDS)
def test_the_gradients_of_squash_and_lengths_are_finite(
    shape: list[int], magnitude: float, dtype: torch.dtype, seed: int
) -> None:
    s = (normal(seed, *shape) * magnitude).to(dtype).requires_grad_()
    (squash(s).float().sum() + lengths(squash(s)).sum()).backward()
    assert s.grad is not None
    assert s.grad.isfinite().all()


def test_a_silent_capsule_stays_silent_and_its_gradient_finite() -> None:
    s = torch.zeros(2, 8, requires_grad=True)
    v = squash(s)
    v.sum().backward()
    assert s.grad is not None
    assert torch.equal(v, torch.zeros(2, 8))
    assert s.grad.isfinite().all()


def test_squash_and_lengths_have_the_gradients_of_their_formulas() -> None:
    s = normal(1, 3, 4).double().requires_grad_()
    assert torch.autograd.gradcheck(squash, s)
    assert torch.autograd.gradcheck(lengths, s)


def test_lengths_are_measured_in_float32_even_where_the_capsules_are_bfloat16() -> None:
    v = torch.full((4096,), 0.01, dtype=torch.bfloat16)  # summed in bfloat16 the squares stop adding up at 256
    assert lengths(v).dtype == torch.float32
    assert float(lengths(v)) == pytest.approx(float(v.double().norm()), rel=1e-4)


def test_half_precision_does_not_overflow_where_its_square_would() -> None:
    v = squash(torch.tensor([300.0, 400.0], dtype=torch.float16))
    torch.testing.assert_close(v, torch.tensor([0.6, 0.8], dtype=torch.float16), rtol=2e-3, atol=0)


def test_squash_holds_up_to_lengths_of_1e19() -> None:
    s = torch.full((4,), 5e18, requires_grad=True)
    v = squash(s)
    torch.testing.assert_close(v, torch.full((4,), 0.5))
    v.sum().backward()
    assert s.grad is not None
    assert s.grad.isfinite().all()


@pytest.mark.parametrize("shared", [1, 2, 3, 6])
def test_votes_are_equation_2_with_shared_transformations_taken_in_turn(shared: int) -> None:
    u, W = normal(2, 2, 6, 3), normal(3, shared, 4, 5, 3)
    u_hat = votes(u, W)
    assert u_hat.shape == (2, 6, 4, 5)
    for b in range(2):
        for i in range(6):
            for j in range(4):
                torch.testing.assert_close(u_hat[b, i, j], W[i % shared, j] @ u[b, i])


@pytest.mark.parametrize("shared", [1, 2, 6])
def test_matrix_votes_are_products_of_square_poses_with_square_transformations(shared: int) -> None:
    M, W = normal(2, 2, 6, 9), normal(3, shared, 4, 3, 3)
    V = matrix_votes(M, W)
    assert V.shape == (2, 6, 4, 9)
    for b in range(2):
        for i in range(6):
            for j in range(4):
                torch.testing.assert_close(V[b, i, j].view(3, 3), M[b, i].view(3, 3) @ W[i % shared, j])


def test_the_mask_keeps_the_chosen_poses_and_nothing_else() -> None:
    poses = normal(4, 2, 3, 4)
    kept = mask(poses, torch.tensor([[0, 1, 0], [1, 0, 1]]))
    assert torch.equal(kept[0, 1], poses[0, 1])
    assert torch.equal(kept[1, [0, 2]], poses[1, [0, 2]])
    assert not kept[0, [0, 2]].any()
    assert not kept[1, 1].any()
