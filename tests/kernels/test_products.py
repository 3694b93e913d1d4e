"""Both libraries compute the same products, and the choice between them depends on the kind of processor alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from capsnet.kernels import private, products
from capsnet.kernels.threads import run
from samples import sample


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let oneDNN compute, whatever the processor."""
    monkeypatch.setattr(products, "by_onednn", lambda: True)


def matrix(*size: int, turned: bool = False) -> Tensor:
    """A random matrix, or a stack of them, as rows or as columns in memory."""
    torch.manual_seed(sum(size))
    x = torch.randn(*size[:-2], size[-1], size[-2]).transpose(-1, -2) if turned else torch.randn(*size)
    assert x.shape == size
    return x


TURNED = sample(4, [True, False], [True, False])


@pytest.mark.parametrize(("first", "second"), TURNED)
def test_products_equal_those_in_double_precision(onednn: None, first: bool, second: bool) -> None:
    a, b = matrix(7, 33, turned=first), matrix(33, 5, turned=second)
    out = torch.empty(7, 5)
    assert products.mm(a, b, out=out) is out
    for got in (out, products.mm(a, b)):
        torch.testing.assert_close(got, (a.double() @ b.double()).float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The ranges that are computed one by one."""
    taken: list[tuple[int, int]] = []

    def noticed(job: Callable[..., None], jobs: list[tuple[int, int]]) -> None:
        taken.extend(jobs)
        run(job, jobs)

    monkeypatch.setattr(products, "run", noticed)
    return taken


@pytest.mark.parametrize(("rows", "columns"), [(7, 11), (11, 7)])
def test_large_products_are_computed_in_parts(
    onednn: None, parts: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    monkeypatch.setattr(products, "LONGEST", 4)
    a, b, out = matrix(rows, 33), matrix(33, columns), torch.empty(rows, columns)
    torch.testing.assert_close(products.mm(a, b, out=out), a @ b, rtol=1e-5, atol=1e-5)
    assert parts == [(0, 4), (4, 8), (8, 11)]


def test_many_products_are_divided_among_threads(onednn: None, parts: list[tuple[int, int]]) -> None:
    n = products.MANY + 1
    a, b, out = matrix(n, 7, 33), matrix(n, 33, 5), torch.empty(n, 7, 5)
    torch.testing.assert_close(products.bmm(a, b, out=out), a @ b, rtol=1e-5, atol=1e-5)
    assert parts[-1] == (products.MANY, n)


@pytest.mark.parametrize(("first", "second"), TURNED)
def test_stacks_of_products_equal_those_in_double_precision(onednn: None, first: bool, second: bool) -> None:
    a, b, total = matrix(3, 7, 33, turned=first), matrix(3, 33, 5, turned=second), matrix(3, 7, 5)
    expected, out = a.double() @ b.double(), torch.empty(3, 7, 5)
    torch.testing.assert_close(products.bmm(a, b, out=out), expected.float(), rtol=1e-5, atol=1e-5)
    both = (total.double() + expected).float()
    returned = products.baddbmm_(total, a, b)
    assert returned.data_ptr() == total.data_ptr()
    torch.testing.assert_close(total, both, rtol=1e-5, atol=1e-5)


def test_a_slice_of_a_larger_sum_is_added_to_in_place(onednn: None) -> None:
    whole, a, b = torch.ones(5, 2, 3), matrix(2, 2, 4), matrix(2, 4, 3)
    products.baddbmm_(whole[1:3], a, b)
    torch.testing.assert_close(whole[1:3], 1 + a @ b)
    assert bool((whole[[0, 3, 4]] == 1).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_left_to_pytorch(onednn: None, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr(products, "onednn_linear", None)
    a, b = matrix(4, 6).to(dtype), matrix(6, 5).to(dtype)
    assert torch.equal(products.mm(a, b), a @ b)


@pytest.mark.parametrize(
    ("vendor", "wide", "expected"),
    [("AuthenticAMD", True, True), ("AuthenticAMD", False, False), ("GenuineIntel", True, False), ("", True, False)],
)
def test_onednn_is_for_amd_processors_with_wide_vectors(
    monkeypatch: pytest.MonkeyPatch, vendor: str, wide: bool, expected: bool
) -> None:
    monkeypatch.setattr(private, "processor_vendor", lambda: vendor)
    monkeypatch.setattr(torch.cpu, "_is_avx512_supported", lambda: wide)
    assert private.onednn_is_faster.__wrapped__() == expected
