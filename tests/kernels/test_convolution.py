"""The bilinear convolution is the same function as F.conv2d, whatever the shape, and only where it pays."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet import kernels
from capsnet.errors import UserError
from capsnet.kernels import convolution, dispatch, products, stem
from capsnet.kernels.allocator import keep_memory
from capsnet.kernels.bilinear import PRECISIONS, algorithm, multiply, phase_sizes
from capsnet.kernels.convolution import best_tile, plan_for
from capsnet.kernels.dispatch import conv2d, patches_pay, stem_pays
from samples import sample


@pytest.fixture
def always_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let even the smallest convolution take the bilinear path, in one tile."""
    monkeypatch.setattr(dispatch, "SMALL", 0)
    monkeypatch.setattr(dispatch, "best_tile", lambda b, c, o, out, *_: out if c > 1 else None)


@pytest.fixture
def hardware_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: True)


def tensors(b: int, c: int, o: int, h: int, w: int, kh: int, kw: int, bias: bool = True) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, weight = torch.rand(b, c, h, w), torch.randn(o, c, kh, kw) / (c * kh * kw) ** 0.5
    return [x.requires_grad_(), weight.requires_grad_(), torch.randn(o, requires_grad=True) if bias else None]


def stem_conv2d(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None, s1: int = 1, s2: int = 2
) -> Tensor:
    """Both convolutions by the fused kernel, in the precision that x or autocast asks for."""
    return stem.fused_stem(x, weight1, bias1, weight2, bias2, s1, s2, dispatch.precision_for(x))


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got - expected).abs().max() / expected.abs().max()).item()


def compute(function: Callable[[], Tensor]) -> tuple[Tensor, bool]:
    """The result, and whether one of our operators computed it, compiled or not."""
    taken: list[None] = []

    def noticed(*arguments: Any) -> Any:
        taken.append(None)
        return multiply(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (convolution, stem):
            patch.setattr(module, "multiply", noticed)
        return function(), bool(taken)


def was_fast(function: Callable[[], Tensor]) -> bool:
    return compute(function)[1]


def agree(
    fast: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: list[Tensor | None],
    tolerance: float = 1e-5,
    ours: bool = True,
) -> None:
    """Values and every gradient, against double precision, computed by our operators or, if not ours, by PyTorch."""
    exact = [t if t is None else t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    (y, taken), expected = compute(lambda: fast(*inputs)), plain(*exact)
    assert taken == ours
    assert y.shape == expected.shape
    assert relative(y, expected) < tolerance
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    wanted = [i for i, t in enumerate(inputs) if t is not None and t.requires_grad]
    got = torch.autograd.grad(y, [inputs[i] for i in wanted], grad.to(y.dtype))  # type: ignore[misc]
    for a, e in zip(got, torch.autograd.grad(expected, [exact[i] for i in wanted], grad), strict=True):  # type: ignore[misc]
        assert a.shape == e.shape
        assert relative(a, e) < 10 * tolerance


@pytest.mark.parametrize(
    ("stride", "kernel", "size", "bias", "onednn"),
    sample(
        20, [1, 2, 3], [(1, 1), (3, 3), (4, 5), (9, 9)], [(20, 20), (19, 22), (13, 9)], [True, False], [True, False]
    ),
)
def test_values_and_gradients_are_those_of_plain_convolution(
    always_fast: None,
    monkeypatch: pytest.MonkeyPatch,
    stride: int,
    kernel: tuple[int, int],
    size: tuple[int, int],
    bias: bool,
    onednn: bool,
) -> None:
    monkeypatch.setattr(products, "by_onednn", lambda: onednn)
    inputs = tensors(3, 4, 5, *size, *kernel, bias=bias)
    agree(lambda *a: conv2d(*a, stride=stride), lambda *a: F.conv2d(*a, stride=stride), inputs)


@pytest.mark.parametrize(("stride", "padding", "ours"), [(1, 1, True), (2, 2, True), (1, 1, False), (2, 1, False)])
def test_padding_changes_nothing_but_the_border(
    monkeypatch: pytest.MonkeyPatch, stride: int, padding: int, ours: bool
) -> None:
    monkeypatch.setattr(dispatch, "SMALL", 0)
    monkeypatch.setattr(dispatch, "best_tile", lambda b, c, o, out, *_: out if ours else None)
    inputs = tensors(3, 4, 5, 11, 14, 3, 3)
    options = {"stride": stride, "padding": padding}
    agree(lambda *a: conv2d(*a, **options), lambda *a: F.conv2d(*a, **options), inputs, ours=ours)


@pytest.mark.parametrize(("tile", "stride"), sample(4, [(1, 1), (2, 3), (4, 4), (5, 7)], [1, 2]))
def test_tiles_that_do_not_fit_evenly_change_nothing(
    monkeypatch: pytest.MonkeyPatch, tile: tuple[int, int], stride: int
) -> None:
    monkeypatch.setattr(dispatch, "SMALL", 0)
    monkeypatch.setattr(dispatch, "best_tile", lambda *_: tile)
    inputs = tensors(2, 3, 4, 23, 26, 5, 5)
    agree(lambda *a: conv2d(*a, stride=stride), lambda *a: F.conv2d(*a, stride=stride), inputs)


@pytest.mark.parametrize("onednn", [True, False])
def test_the_papers_primary_convolution_is_exact_to_a_millionth(monkeypatch: pytest.MonkeyPatch, onednn: bool) -> None:
    monkeypatch.setattr(products, "by_onednn", lambda: onednn)
    inputs = tensors(32, 256, 64, 20, 20, 9, 9)
    assert best_tile(32, 256, 64, (6, 6), (9, 9), 2, True)
    agree(lambda *a: conv2d(*a, stride=2), lambda *a: F.conv2d(*a, stride=2), inputs, tolerance=3e-6)


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_any_subset_of_gradients_can_be_asked_for(always_fast: None, wanted: tuple[bool, ...]) -> None:
    inputs = tensors(2, 3, 4, 12, 12, 5, 5)
    for t, want in zip(inputs, wanted, strict=True):
        assert t is not None
        t.requires_grad_(want)
    agree(lambda *a: conv2d(*a, stride=2), lambda *a: F.conv2d(*a, stride=2), inputs)


def test_a_relu_may_work_in_place_on_the_result(always_fast: None) -> None:
    x, weight, bias = tensors(2, 3, 4, 10, 10, 3, 3)
    result, fast = compute(lambda: torch.relu_(conv2d(x, weight, bias)))  # type: ignore[arg-type]
    expected = F.relu(F.conv2d(x, weight, bias))  # type: ignore[arg-type]
    assert fast
    wanted = [x, weight, bias]
    got, right = (torch.autograd.grad(y.square().sum(), wanted) for y in (result, expected))  # type: ignore[arg-type]
    assert all(relative(a, b) < 1e-4 for a, b in zip(got, right, strict=True))


def test_an_updated_weight_is_used_at_once(always_fast: None) -> None:
    x, weight, bias = tensors(2, 3, 4, 12, 12, 5, 5)
    conv2d(x, weight, bias, 2)
    with torch.no_grad():
        weight.mul_(-3).add_(0.1)
    agree(lambda *a: conv2d(*a, stride=2), lambda *a: F.conv2d(*a, stride=2), [x, weight, bias])


def test_strides_in_memory_do_not_matter(always_fast: None) -> None:
    x = torch.rand(13, 11, 6, 2).permute(3, 2, 1, 0)[:, ::2].requires_grad_()
    weight = torch.randn(5, 5, 3, 4).permute(3, 2, 1, 0).requires_grad_()
    agree(lambda *a: conv2d(*a, stride=2), lambda *a: F.conv2d(*a, stride=2), [x, weight, None])
    y = conv2d(x, weight, None, 2)
    grad = torch.randn(y.shape[::-1]).permute(3, 2, 1, 0)
    expected = torch.autograd.grad(F.conv2d(x, weight, None, 2), (x, weight), grad)
    for got, e in zip(torch.autograd.grad(y, (x, weight), grad), expected, strict=True):
        assert relative(got, e) < 1e-4


def test_the_result_is_channels_last_so_that_capsules_are_a_view(always_fast: None) -> None:
    x, weight, bias = tensors(2, 3, 16, 12, 12, 5, 5)
    y = conv2d(x, weight, bias, 2)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert y.permute(0, 2, 3, 1).view(2, -1, 8).data_ptr() == y.data_ptr()


@pytest.mark.parametrize("needs_x", [True, False])
@pytest.mark.parametrize(("c", "k1", "k2", "s1", "s2"), [(1, 9, 9, 1, 2), (3, 3, 5, 2, 1), (2, 4, 3, 1, 3)])
def test_the_fused_stem_is_two_convolutions_with_a_relu_between(
    monkeypatch: pytest.MonkeyPatch, needs_x: bool, c: int, k1: int, k2: int, s1: int, s2: int
) -> None:
    monkeypatch.setattr(dispatch, "SMALL", 0)
    monkeypatch.setattr(dispatch, "best_tile", lambda b, c, o, out, *_: out if c == 6 else None)
    x, weight1, bias1 = tensors(2, c, 6, 28, 25, k1, k1)
    _, weight2, bias2 = tensors(2, 6, 5, 28, 25, k2, k2)
    x = x.detach().requires_grad_(needs_x)

    def plain(x: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, w1, b1, s1)), w2, b2, s2)

    agree(lambda *a: stem_conv2d(*a, s1, s2), plain, [x, weight1, bias1, weight2, bias2])
    agree(lambda *a: stem_conv2d(*a, s1, s2), plain, [x, weight1, None, weight2, None])


def test_batch_one_and_doubles_and_plain_take_no_bilinear_form() -> None:
    x, weight, bias = torch.rand(1, 256, 20, 20), torch.randn(256, 256, 9, 9, requires_grad=True), torch.zeros(256)
    assert not was_fast(lambda: conv2d(x, weight, bias, 2))
    many = x.expand(32, -1, -1, -1)
    small = weight[:64].detach().requires_grad_()
    assert was_fast(lambda: conv2d(many, small, None, 2))
    assert not was_fast(lambda: conv2d(many.double(), small.double(), None, 2))
    with kernels.plain():
        assert not was_fast(lambda: conv2d(many, small, None, 2))


def one_image(b: int = 1, bias: bool = True, side: int = 20) -> list[Tensor | None]:
    """What the primary capsules of the paper's network see of so many images, and their weights."""
    return [t if t is None else t.detach() for t in tensors(b, 256, 256, side, side, 9, 9, bias)]


@pytest.mark.parametrize("b", [1, 4])
@pytest.mark.parametrize("bias", [True, False])
def test_a_single_image_is_a_product_over_patches(b: int, bias: bool) -> None:
    x, weight, offset = one_image(b, bias)
    assert patches_pay(x, weight, 2)
    expected = F.conv2d(x.double(), weight.double(), offset if offset is None else offset.double(), 2)
    y = conv2d(x, weight, offset, 2)
    assert y.shape == expected.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert relative(y, expected) < 1e-6
    weight.mul_(2)  # nothing is remembered from call to call
    assert relative(conv2d(x, weight, None, 2), F.conv2d(x, weight, None, 2)) < 1e-5


def test_patches_are_for_few_places_large_kernels_and_no_gradient() -> None:
    x, weight, _ = one_image()
    assert not patches_pay(x.expand(8, -1, -1, -1), weight, 2)  # more rows than it is good for
    assert not patches_pay(x, weight[:, :, :3, :3], 2)
    assert not patches_pay(x[:, :8], weight[:, :8], 2)
    assert not patches_pay(x.requires_grad_(), weight, 2)
    with torch.no_grad():
        assert patches_pay(x, weight, 2)
        with kernels.plain():
            assert not patches_pay(x, weight, 2)
        assert not patches_pay(x, weight[:16], 2)  # more places than channels: the patches would be the larger copy
        assert not patches_pay(x, weight.contiguous(memory_format=torch.channels_last), 2)
        assert not patches_pay(x.double(), weight.double(), 2)
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            conv2d(x[:, :, :8, :8], weight, None, 2)


@pytest.mark.parametrize("hardware", [False, True])
def test_a_single_image_stays_in_float32_because_rounding_the_weights_would_take_longer(
    monkeypatch: pytest.MonkeyPatch, hardware: bool
) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: hardware)
    x, weight, bias = one_image()
    with torch.autocast("cpu", torch.bfloat16):
        assert patches_pay(x, weight, 2)
        y = conv2d(x, weight, bias, 2)
    assert relative(y, F.conv2d(x, weight, bias, 2)) < 1e-5


def test_an_exported_single_image_takes_no_patches() -> None:
    x, weight, _ = one_image()
    program = torch.export.export(Layer(weight), (x,))
    assert "unfold" not in program.graph_module.code
    assert relative(program.module()(x), F.conv2d(x, weight, None, 2)) < 1e-6


def test_compiled_patches_are_one_graph() -> None:
    x, weight, bias = one_image()
    compiled = torch.compile(conv2d, fullgraph=True, backend="aot_eager")
    assert relative(compiled(x, weight, bias, 2), F.conv2d(x, weight, bias, 2)) < 1e-5


def test_autocast_compiles_without_a_graph_break() -> None:
    inputs = [t.detach() for t in tensors(32, 64, 64, 20, 20, 9, 9) if t is not None]
    compiled = torch.compile(lambda *a: conv2d(*a, stride=2), fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        y = compiled(*inputs)
    assert relative(y, F.conv2d(*inputs, stride=2)) < 0.02


def loss_of(weight: Tensor, x: Tensor) -> Tensor:
    return conv2d(x, weight, None, 2).square().mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch's own
def test_torch_func_and_forward_mode_see_the_plain_convolution(always_fast: None) -> None:
    x, weight = (t.detach() for t in tensors(2, 3, 4, 12, 12, 5, 5, bias=False) if t is not None)
    (expected,) = torch.autograd.grad(F.conv2d(x, weight.requires_grad_(), None, 2).square().mean(), [weight])
    weight = weight.detach()
    torch.testing.assert_close(torch.func.grad(loss_of)(weight, x), expected)
    each = torch.func.vmap(torch.func.grad(loss_of), (None, 0))(weight, x[:, None])
    torch.testing.assert_close(each.mean(0), expected)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones_like(weight))
        slope = torch.autograd.forward_ad.unpack_dual(loss_of(dual, x)).tangent
    torch.testing.assert_close(slope, expected.sum())


def test_plain_in_two_threads_leaves_the_switch_as_it_was() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with kernels.plain():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with kernels.plain():
        thread.start()
        inside.wait()
    assert not kernels.enabled()
    leave.set()
    thread.join()
    assert kernels.enabled()


def test_a_single_large_image_is_not_cut_into_a_thousand_tiles() -> None:
    assert best_tile(1, 64, 64, (222, 222), (5, 5), 1, False) is None  # measured: 0.6 times as fast as plain
    assert best_tile(1, 128, 128, (56, 56), (3, 3), 1, True) is None  # 0.3 times
    assert best_tile(16, 256, 256, (20, 20), (9, 9), 2, True) is not None  # 3 times


def test_double_precision_keeps_its_precision(always_fast: None) -> None:
    x, weight, bias = (t.detach().double() for t in tensors(2, 3, 4, 12, 12, 5, 5) if t is not None)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert torch.equal(conv2d(x, weight, bias, 2), F.conv2d(x, weight, bias, 2))


def test_a_wrong_number_of_channels_is_refused_as_pytorch_refuses_it(always_fast: None) -> None:
    with pytest.raises(RuntimeError, match="channels"):
        conv2d(torch.rand(2, 3, 12, 12), torch.rand(4, 5, 3, 3))


def test_compilation_sees_one_graph_for_each_batch() -> None:
    compiled = torch.compile(lambda *a: conv2d(*a, stride=2), fullgraph=True, backend="aot_eager")
    for b, ours in ((32, True), (48, True), (1, False)):
        agree(compiled, lambda *a: F.conv2d(*a, stride=2), tensors(b, 64, 64, 20, 20, 9, 9), ours=ours)


def test_the_compiled_stem_is_one_graph_too(always_fast: None) -> None:
    x, weight1, bias1 = tensors(2, 1, 6, 20, 20, 5, 5)
    _, weight2, bias2 = tensors(2, 6, 5, 20, 20, 5, 5)
    compiled = torch.compile(stem_conv2d, fullgraph=True, backend="aot_eager")

    def plain(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
        return F.conv2d(F.relu(F.conv2d(x, w1, b1)), w2, b2, 2)

    agree(compiled, plain, [x, weight1, bias1, weight2, bias2])


class Layer(torch.nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x: Tensor) -> Tensor:
        return conv2d(x, self.weight, None, 2)


def test_an_exported_program_runs_without_this_package(always_fast: None) -> None:
    x, weight, _ = tensors(2, 3, 4, 12, 12, 5, 5)
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(Layer(weight.detach()), (x.detach(),), dynamic_shapes=({0: batch},))
    assert "capsnet" not in program.graph_module.code
    more = torch.rand(7, 3, 12, 12)
    assert relative(program.module()(more), F.conv2d(more, weight, None, 2)) < 1e-5


@pytest.mark.parametrize("keep", [[True, True], [True, False], [False, True], [False, False]])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_operators_keep_pytorchs_rules_for_operators(precision: str, keep: list[bool]) -> None:
    x, weight, bias = tensors(2, 3, 4, 20, 20, 9, 9)
    weight.requires_grad_(keep[0]), x.requires_grad_(keep[1])
    torch.library.opcheck(convolution._conv, (x, weight, bias, 2, [6, 6], precision, keep))
    x, weight, bias = (t.requires_grad_(keep[1]) for t in tensors(2, 3, 4, 22, 22, 3, 3))
    _, weight2, bias2 = tensors(2, 4, 4, 20, 20, 9, 9)
    weight2.requires_grad_(keep[0])
    torch.library.opcheck(stem._stem, (x, weight, bias, weight2, bias2, [1, 2], precision, keep))


def test_the_transform_of_the_filters_is_kept_in_bfloat16_only() -> None:
    x, weight = torch.randn(3, 8, 12, 12), torch.randn(6, 8, 3, 3)
    for precision, kept in (("exact", False), ("bf16", True)):
        U = convolution._conv(x, weight, None, 2, [5, 5], precision, [True, True])[2]
        assert (U.numel() > 0) == kept


def test_a_second_backward_pass_gives_the_same_gradients(always_fast: None) -> None:
    """What the forward pass keeps is not overwritten."""
    x, weight1, bias1 = tensors(2, 3, 4, 9, 9, 5, 5)
    _, weight2, bias2 = tensors(2, 4, 4, 9, 9, 3, 3)
    for y in (conv2d(x, weight1, bias1), stem_conv2d(x, weight1, bias1, weight2, bias2)):
        first = torch.autograd.grad(y.square().sum(), [x, weight1], retain_graph=True)
        second = torch.autograd.grad(y.square().sum(), [x, weight1])
        assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_a_second_derivative_is_refused_with_the_way_to_get_it(always_fast: None) -> None:
    x, weight1, bias1 = tensors(2, 3, 4, 9, 9, 5, 5)
    _, weight2, bias2 = tensors(2, 4, 4, 9, 9, 3, 3)
    for y in (conv2d(x, weight1, bias1), stem_conv2d(x, weight1, bias1, weight2, bias2)):
        (slope,) = torch.autograd.grad(y.square().sum(), weight1, create_graph=True)
        with pytest.raises(UserError, match=r"kernels\.plain\(\)"):
            slope.square().sum().backward()
    with kernels.plain():
        (slope,) = torch.autograd.grad(conv2d(x, weight1, bias1).square().sum(), weight1, create_graph=True)
        assert torch.autograd.grad(slope.square().sum(), weight1)[0].isfinite().all()


def test_the_default_dtype_is_of_no_consequence(always_fast: None) -> None:
    inputs = tensors(2, 3, 4, 12, 12, 5, 5)
    torch.set_default_dtype(torch.float64)
    try:
        grads = torch.autograd.grad(conv2d(*inputs, 2).sum(), inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {g.dtype for g in grads} == {torch.float32}


def test_the_fused_stem_pays_for_the_papers_network_and_leaves_errors_to_pytorch() -> None:
    x, weight1, weight2 = torch.empty(32, 1, 28, 28), torch.empty(256, 1, 9, 9), torch.empty(256, 256, 9, 9)
    assert stem_pays(x, weight1, weight2)
    assert not stem_pays(x[:1], weight1, weight2)
    assert not stem_pays(x.expand(-1, 3, -1, -1), weight1, weight2)
    with kernels.plain():
        assert not stem_pays(x, weight1, weight2)


def test_a_pytorch_that_tells_nothing_of_bfloat16_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cpu", object())
    monkeypatch.delenv("CAPSNET_EMULATE_BF16", raising=False)
    assert dispatch.has_bf16() is False


def test_without_hardware_bfloat16_is_computed_in_float32(always_fast: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: False)
    x, weight, bias = (t.detach() for t in tensors(2, 3, 4, 12, 12, 5, 5) if t is not None)
    expected = F.conv2d(x, weight, bias, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv2d(x, weight, bias, 2)
    assert y.dtype == torch.float32
    assert relative(y, expected) < 1e-5
    half = conv2d(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), 2)
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "fused"),
    sample(8, [(11, 9), (15, 9), (20, 9), (24, 9), (28, 9), (40, 9), (36, 25), (47, 32)], [False, True]),
)
def test_without_hardware_bfloat16_is_rough_and_far_more_exact_than_bfloat16(
    shape: tuple[int, int], fused: bool, always_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, kernel = shape
    monkeypatch.setattr(dispatch, "has_bf16", lambda: False)
    stride = 2 if kernel == 9 else 1
    inputs = tensors(4, 32, 16, size, size, kernel, kernel)
    if fused:
        image, weight1, bias1 = tensors(4, 1, 32, size + 2, size + 2, 3, 3)
        inputs = [image, weight1, bias1, *inputs[1:]]

    def fast(*tensors: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return stem_conv2d(*tensors, 1, stride) if fused else conv2d(*tensors, stride)

    def plain(*tensors: Tensor) -> Tensor:
        *first, weight, bias = tensors
        x = F.conv2d(*first).relu() if fused else first[0]
        return F.conv2d(x, weight, bias, stride)

    agree(fast, plain, inputs, tolerance=5e-4)


@pytest.mark.parametrize(("hardware", "precision"), [(False, "rough"), (True, "bf16")])
def test_who_asks_for_bfloat16_gets_what_the_processor_does_best(
    hardware: bool, precision: str, always_fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(dispatch, "has_bf16", lambda: hardware)
    monkeypatch.setattr(convolution, "plan_for", lambda *a: asked.append(a[-1]) or plan_for(*a))
    inputs = [t.detach() for t in tensors(2, 3, 4, 20, 20, 9, 9) if t is not None]
    conv2d(*inputs, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        conv2d(*inputs, 2)
    assert asked == ["exact", precision]


def test_a_rough_convolution_takes_a_quarter_fewer_products_for_the_papers_network() -> None:
    rough, exact = (sum(m for m, _ in phase_sizes((9, 9), 2, (6, 6), how)) for how in ("rough", "exact"))
    assert (rough, exact) == (361, 481)


def test_an_image_without_a_batch_is_convolved_in_bfloat16_too(hardware_bf16: None) -> None:
    image, weight = torch.rand(3, 9, 9), torch.rand(4, 3, 3, 3)
    with torch.autocast("cpu", torch.bfloat16):
        single, batch = conv2d(image, weight), conv2d(image[None], weight)
    assert torch.allclose(single, batch[0], rtol=0.02)


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_in_hardware_is_within_two_percent(always_fast: None, hardware_bf16: None, autocast: bool) -> None:
    x, weight, bias = tensors(4, 32, 16, 20, 20, 9, 9)
    if autocast:

        def fast(*inputs: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return conv2d(*inputs, 2)
    else:

        def fast(*inputs: Tensor) -> Tensor:
            return conv2d(*(t.bfloat16() for t in inputs), 2).float()

    agree(fast, lambda *a: F.conv2d(*a, stride=2), [x, weight, bias], tolerance=0.02)


@pytest.mark.parametrize(
    ("kernel", "stride", "tile"),
    [((9, 9), 2, (6, 6)), ((5, 3), 2, (3, 4)), ((2, 2), 3, (2, 3)), ((3, 3), 1, (4, 7)), ((1, 9), 2, (1, 5))],
)
def test_the_costs_count_the_products_that_there_are(
    kernel: tuple[int, int], stride: int, tile: tuple[int, int]
) -> None:
    for precision in PRECISIONS:
        phases = algorithm(kernel, stride, tile, precision).phases
        assert phase_sizes(kernel, stride, tile, precision) == [tuple(phase.B.shape) for phase in phases]


def test_keeping_memory_says_whether_it_did(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    assert keep_memory() is False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc is asked for a setting")
def test_keeping_memory_takes_effect_in_a_process_of_its_own() -> None:
    code = "from capsnet.kernels.allocator import keep_memory; print(keep_memory())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == str(platform.libc_ver()[0] == "glibc")
