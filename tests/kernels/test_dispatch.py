"""The dispatcher takes a fast path only where it computes the same, and never bypasses hooks, pruning or dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from capsnet.kernels import dispatch, plain
from capsnet.kernels.dispatch import primary_capsules
from capsnet.kernels.stem import fused_stem
from capsnet.nn.layers import Conv2d, PrimaryCaps
from samples import sample


def stem_and_primary() -> tuple[nn.Sequential, PrimaryCaps, Tensor]:
    """Sizes for which the kernel is taken."""
    torch.manual_seed(0)
    primary = PrimaryCaps(128, types=16, dim=8)
    return nn.Sequential(Conv2d(1, 128, 9), nn.ReLU(inplace=True)), primary, torch.rand(32, 1, 28, 28)


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The batch sizes for which the kernel was taken."""
    taken: list[int] = []

    def noticed(x: Tensor, *rest: Any) -> Tensor:
        taken.append(len(x))
        return fused_stem(x, *rest)

    monkeypatch.setattr("capsnet.kernels.dispatch.fused_stem", noticed)
    return taken


def test_one_kernel_for_both_convolutions_changes_nothing(fused: list[int]) -> None:
    stem, primary, images = stem_and_primary()
    torch.testing.assert_close(primary_capsules(stem, primary, images), primary(stem(images)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(primary_capsules(stem, primary, images[:1]), primary(stem(images[:1])))
    assert fused == [32]


def test_pruned_weights_stay_pruned(fused: list[int]) -> None:
    """Pruning masks the weight anew in a hook, before each call."""
    for name in ("conv1", "conv2"):
        stem, primary, images = stem_and_primary()
        conv = stem[0] if name == "conv1" else primary.conv
        prune.random_unstructured(conv, "weight", amount=0.5)
        with torch.no_grad():
            conv.weight_orig += 0.1  # type: ignore[operator]
        v = primary_capsules(stem, primary, images)
        torch.testing.assert_close(v, primary(stem(images)))
    assert not fused


@pytest.mark.parametrize(
    ("kind", "k", "b"),
    sample(10, ["forward_pre", "forward", "full_backward_pre", "full_backward"], range(5), [32, 32, 1]),
)
def test_every_hook_fires(kind: str, k: int, b: int) -> None:
    stem, primary, images = stem_and_primary()
    stem[1] = nn.ReLU()  # PyTorch refuses backward hooks before an operation in place
    fired: list[int] = []
    module = (stem, stem[0], stem[1], primary, primary.conv)[k]
    getattr(module, f"register_{kind}_hook")(lambda *_: fired.append(k))
    primary_capsules(stem, primary, images[:b].requires_grad_()).sum().backward()
    assert fired == [k]


def test_a_convolution_of_another_class_is_called() -> None:
    class Doubled(Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    stem, primary, images = stem_and_primary()
    primary.conv = Doubled(128, 128, 9, 2)
    torch.testing.assert_close(primary_capsules(stem, primary, images), primary(stem(images)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stem_of_another_dtype_keeps_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: True)
    stem = nn.Sequential(Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(dtype)
    layer = PrimaryCaps(8, 4, 4, 3).to(dtype)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert primary_capsules(stem, layer, torch.rand(4, 1, 12, 12, dtype=dtype)).dtype in (dtype, torch.bfloat16)


@pytest.mark.parametrize("hardware", [False, True])
def test_a_stem_computes_in_bfloat16_only_where_the_processor_has_it(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "has_bf16", lambda: hardware)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    stem = nn.Sequential(Conv2d(1, 8, 3, bias=False), norm, nn.ReLU(), Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))
    layer, images, seen = PrimaryCaps(8, 4, 4, 3), torch.rand(16, 1, 12, 12), []
    expected = layer(stem(images))
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        u = primary_capsules(stem, layer, images)
    u.square().sum().backward()
    assert seen == [torch.bfloat16 if hardware else torch.float32]
    assert u.dtype == torch.float32
    torch.testing.assert_close(u, expected, rtol=0.1, atol=0.03)
    assert norm.running_var is not None
    assert norm.running_var.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in stem.parameters())
    entered = []
    stem.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0].dtype))
    with plain(), torch.autocast("cpu", torch.bfloat16):
        primary_capsules(stem, layer, images)
    assert entered == [torch.float32]


@pytest.mark.parametrize(
    ("amx", "channels", "taps", "stride", "chosen"),
    [(True, 96, 3, 1, False), (False, 96, 3, 1, True), (True, 128, 5, 1, False), (True, 256, 9, 2, True)],
)
def test_amx_takes_bfloat16_convolutions_plain_where_that_was_faster(monkeypatch, amx, channels, taps, stride, chosen):
    monkeypatch.setattr(dispatch, "has_amx", lambda: amx)
    x, weight = torch.empty(128, channels, 20, 20), torch.empty(channels, channels, taps, taps, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert (dispatch.choose_tile(x, x.shape, weight, stride) is not None) is chosen
    assert dispatch.choose_tile(x, x.shape, weight, stride) is not None  # float32 has no use for AMX
