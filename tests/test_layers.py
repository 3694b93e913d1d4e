"""The layers are ordinary PyTorch modules that compute the paper's equations for any sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune

from capsnet.errors import UserError
from capsnet.functional import squash
from capsnet.kernels import convolution, plain
from capsnet.kernels.routing import worth_it
from capsnet.kernels.stem import stem_conv2d
from capsnet.layers import Conv2d, Decoder, DenseCaps, PrimaryCaps
from capsnet.pretrained import create_model
from capsnet.routing import dynamic_routing

OF_TWO_SIGMA = 0.87962566  # standard deviation of a standard normal that is cut off at ±2


def hand_made_primary_caps(layer: PrimaryCaps, x: Tensor) -> Tensor:
    """Capsule by capsule: at one place of the grid, `dim` neighbouring CHANNELS of the convolution, squashed."""
    weight, bias, stride = layer.conv.weight, layer.conv.bias, layer.conv.stride[0]
    assert bias is not None
    k = weight.shape[-1]
    height, width = ((side - k) // stride + 1 for side in x.shape[2:])
    capsules = []
    for y in range(height):
        for z in range(width):
            patch = x[:, :, y * stride : y * stride + k, z * stride : z * stride + k]
            pixels = torch.einsum("bchw,ochw->bo", patch, weight) * layer.factor + bias
            for kind in range(layer.types):
                capsules.append(squash(pixels[:, kind * layer.dim : (kind + 1) * layer.dim]))
    return torch.stack(capsules, 1)


@pytest.mark.parametrize("factor", [1.0, 0.25])
@pytest.mark.parametrize(
    ("channels", "types", "dim", "kernel", "stride", "side"),
    [(3, 4, 2, 3, 2, (7, 9)), (1, 1, 1, 1, 1, (2, 2)), (2, 3, 8, 5, 1, (6, 5)), (16, 32, 8, 9, 2, (20, 20))],
)
def test_a_primary_capsule_is_made_of_channels_at_one_place_not_of_pixels(
    channels: int, types: int, dim: int, kernel: int, stride: int, side: tuple[int, int], factor: float
) -> None:
    torch.manual_seed(0)
    layer = PrimaryCaps(channels, types, dim, kernel, stride, factor=factor)
    x = torch.randn(2, channels, *side)
    torch.testing.assert_close(layer(x), hand_made_primary_caps(layer, x), rtol=1e-4, atol=1e-5)


def test_a_disturbed_channel_reaches_its_own_type_of_capsule_only() -> None:
    layer = PrimaryCaps(2, types=3, dim=4, kernel_size=3, stride=2)
    x = torch.randn(1, 2, 7, 7)
    before = layer(x).unflatten(1, (3, 3, 3))  # b h w type p
    with torch.no_grad():
        layer.conv.weight[5] += 1  # channel 5 belongs to type 1
    changed = (layer(x).unflatten(1, (3, 3, 3)) != before).any(-1)[0]
    assert changed[:, :, 1].all()
    assert not changed[:, :, [0, 2]].any()


@pytest.mark.parametrize(("kernel", "stride"), [(9, 1), (9, 2), (5, 2), (3, 1), (1, 1), (2, 3)])
def test_the_convolution_is_pytorchs_own(kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    layer = Conv2d(3, 8, kernel, stride)
    x = torch.randn(2, 3, 20, 17, requires_grad=True)
    expected = F.conv2d(x, layer.weight, layer.bias, stride)
    result = layer(x)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    towards = torch.randn_like(expected)
    inputs = [x, *layer.parameters()]
    ours, theirs = (torch.autograd.grad((y * towards).sum(), inputs) for y in (result, expected))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"leaky": True}, {"shared": 4}, {"iterations": 1}])
def test_dense_caps_is_routing_with_its_own_weights(options: dict) -> None:
    torch.manual_seed(0)
    layer = DenseCaps(12, 4, 5, 6, **options)
    u = torch.randn(3, 12, 4)
    expected = dynamic_routing(
        u, layer.weight, layer.bias, iterations=layer.iterations, leaky=layer.leaky, trace=True
    ).v
    torch.testing.assert_close(layer(u), expected)
    torch.testing.assert_close(layer.route(u, trace=True).v, expected)


def test_capsule_layers_stack_and_all_of_them_learn() -> None:
    stack = nn.Sequential(
        PrimaryCaps(3, types=4, dim=6, kernel_size=3), DenseCaps(36, 6, 7, 5, shared=4), DenseCaps(7, 5, 4, 3),
        DenseCaps(4, 3, 2, 9, bias=True),
    )  # fmt: skip
    v = stack(torch.randn(2, 3, 8, 8))
    assert v.shape == (2, 2, 9)
    v.square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in stack.parameters())


@pytest.mark.parametrize("image_shape", [(1, 28, 28), (3, 5, 7)])
def test_the_decoder_paints_pixels_between_0_and_1_for_any_number_of_leading_dimensions(
    image_shape: tuple[int, int, int],
) -> None:
    decoder = Decoder(4, 3, image_shape, (8,))
    poses = torch.randn(2, 5, 4, 3)
    painted = decoder(poses)
    assert painted.shape == (2, 5, *image_shape)
    assert painted.min() > 0
    assert painted.max() < 1
    torch.testing.assert_close(decoder(poses[1, 2]), painted[1, 2])


def test_the_decoder_is_linear_relu_linear_relu_linear_sigmoid() -> None:
    decoder = Decoder(2, 3, (1, 2, 2), (5, 7))
    first, second, third = decoder.linears
    x = torch.randn(4, 2, 3)
    expected = torch.sigmoid(third(torch.relu(second(torch.relu(first(x.reshape(4, 6)))))))
    torch.testing.assert_close(decoder(x), expected.reshape(4, 1, 2, 2))


# --- Ordinary modules --------------------------------------------------------------------------------------------


def layers(**factory: object) -> list[tuple[nn.Module, tuple[int, ...], tuple[int, ...]]]:
    """One of each, with the shape that goes in and the shape that comes out."""
    return [
        (PrimaryCaps(3, 4, 6, 3, **factory), (2, 3, 8, 8), (2, 36, 6)),  # type: ignore[arg-type]
        (DenseCaps(36, 6, 7, 5, bias=True, **factory), (2, 36, 6), (2, 7, 5)),  # type: ignore[arg-type]
        (DenseCaps(36, 6, 7, 5, shared=4, **factory), (2, 36, 6), (2, 7, 5)),  # type: ignore[arg-type]
        (Decoder(7, 5, (3, 4, 5), (6,), **factory), (2, 7, 5), (2, 3, 4, 5)),  # type: ignore[arg-type]
    ]


def test_layers_are_made_where_and_as_asked() -> None:
    for layer, shape, result in layers(dtype=torch.float64):
        assert all(p.dtype == torch.float64 for p in layer.parameters())
        v = layer(torch.randn(shape, dtype=torch.float64))
        assert v.dtype == torch.float64
        assert v.shape == result


def test_layers_work_on_the_meta_device_where_only_shapes_exist() -> None:
    for layer, shape, result in layers(device="meta"):
        assert all(p.is_meta for p in layer.parameters())
        v = layer(torch.empty(shape, device="meta"))
        assert v.is_meta
        assert v.shape == result


@pytest.mark.parametrize("init", ["default", "official"])
def test_reset_parameters_gives_the_same_weights_for_the_same_seed(init: str) -> None:
    for layer, _, _ in layers(init=init):
        torch.manual_seed(5)
        layer.reset_parameters()  # type: ignore[operator]
        first = copy.deepcopy(layer.state_dict())
        torch.manual_seed(5)
        layer.reset_parameters()  # type: ignore[operator]
        assert all(torch.equal(layer.state_dict()[name], first[name]) for name in first)
        torch.manual_seed(6)
        layer.reset_parameters()  # type: ignore[operator]
        assert any(not torch.equal(layer.state_dict()[name], first[name]) for name in first)


def test_a_copy_is_independent_and_gives_the_same() -> None:
    for layer, shape, _ in layers():
        x = torch.randn(shape)
        twin = copy.deepcopy(layer)
        torch.testing.assert_close(twin(x), layer(x))
        with torch.no_grad():
            next(twin.parameters()).add_(1)
        assert not torch.equal(next(twin.parameters()), next(layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_layer_moved_to_another_dtype_still_computes_the_same(dtype: torch.dtype) -> None:
    for layer, shape, _ in layers():
        x = torch.randn(shape)
        expected = layer(x)
        v = layer.to(dtype)(x.to(dtype))
        v.sum().backward()
        torch.testing.assert_close(v.float(), expected, rtol=0.1, atol=0.03 if dtype == torch.bfloat16 else 1e-5)
        assert all(p.grad is not None and p.grad.dtype == dtype for p in layer.parameters())


def test_autocast_to_bfloat16_works_forwards_and_backwards() -> None:
    for layer, shape, result in layers():
        x = torch.randn(shape, requires_grad=True)
        expected = layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v = layer(x)
        assert v.shape == result
        torch.testing.assert_close(v.float(), expected, rtol=0.1, atol=0.03)
        v.float().square().sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


def test_layers_say_what_they_are() -> None:
    assert "types=4, dim=6, factor=1" in repr(PrimaryCaps(3, 4, 6, 3))
    told = repr(DenseCaps(36, 6, 7, 5, shared=4, leaky=True, bias=True, iterations=2))
    for part in ("36×6 → 7×5", "routing=dynamic", "iterations=2", "bias=True", "shared=4", "leaky"):
        assert part in told
    assert "detach" not in told
    assert "detach" in repr(DenseCaps(36, 6, 7, 5, detach=True))


def test_the_names_of_the_weights_never_change() -> None:
    names = {name: tuple(tensor.shape) for name, tensor in create_model("paper").state_dict().items()}
    assert names == {
        "stem.0.weight": (256, 1, 9, 9),
        "stem.0.bias": (256,),
        "primary.conv.weight": (256, 256, 9, 9),
        "primary.conv.bias": (256,),
        "caps.0.weight": (1152, 10, 16, 8),
        "decoder.linears.0.weight": (512, 160),
        "decoder.linears.0.bias": (512,),
        "decoder.linears.1.weight": (1024, 512),
        "decoder.linears.1.bias": (1024,),
        "decoder.linears.2.weight": (784, 1024),
        "decoder.linears.2.bias": (784,),
    }


# --- The convolution before the primary capsules, in one kernel with theirs ----------------------------------------


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
        return stem_conv2d(x, *rest)

    monkeypatch.setattr("capsnet.layers.stem_conv2d", noticed)
    return taken


def test_one_kernel_for_both_convolutions_changes_nothing(fused: list[int]) -> None:
    stem, primary, images = stem_and_primary()
    torch.testing.assert_close(primary.after(stem, images), primary(stem(images)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(primary.after(stem, images[:1]), primary(stem(images[:1])))
    assert fused == [32]


def test_pruned_weights_stay_pruned(fused: list[int]) -> None:
    """Pruning masks the weight anew in a hook, before each call."""
    for name in ("conv1", "conv2"):
        stem, primary, images = stem_and_primary()
        conv = stem[0] if name == "conv1" else primary.conv
        prune.random_unstructured(conv, "weight", amount=0.5)
        with torch.no_grad():
            conv.weight_orig += 0.1  # type: ignore[operator]
        v = primary.after(stem, images)
        torch.testing.assert_close(v, primary(stem(images)))
    assert not fused


@pytest.mark.parametrize("b", [32, 1])
@pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward_pre", "full_backward"])
def test_every_hook_fires(kind: str, b: int) -> None:
    for k in range(5):
        stem, primary, images = stem_and_primary()
        stem[1] = nn.ReLU()  # PyTorch refuses backward hooks before an operation in place
        fired: list[int] = []
        module = (stem, stem[0], stem[1], primary, primary.conv)[k]
        getattr(module, f"register_{kind}_hook")(lambda *_, k=k, fired=fired: fired.append(k))
        primary.after(stem, images[:b].requires_grad_()).sum().backward()
        assert fired == [k]


def test_a_convolution_of_ones_own_is_called() -> None:
    class Doubled(Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    stem, primary, images = stem_and_primary()
    primary.conv = Doubled(128, 128, 9, 2)
    torch.testing.assert_close(primary.after(stem, images), primary(stem(images)))


# --- Initial weights ---------------------------------------------------------------------------------------------


def test_the_official_initialisation_is_the_authors() -> None:
    torch.manual_seed(0)
    model = create_model("official")
    sigmas = {"stem": 0.05, "primary": 0.1, "caps": 0.1, "decoder": 0.1}
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            assert (tensor == 0.1).all(), name
            continue
        sigma = sigmas[name.split(".")[0]]
        assert tensor.abs().max() <= 2 * sigma, name
        assert tensor.std().item() == pytest.approx(OF_TWO_SIGMA * sigma, rel=0.02), name
        assert abs(tensor.mean().item()) < 4 * sigma / math.sqrt(tensor.numel()), name
    assert model.primary.factor == 1 / 32  # type: ignore[union-attr]


@pytest.mark.parametrize(("lower", "upper"), [(1152, 10), (64, 10), (1152, 100), (288, 5)])
def test_class_capsules_start_awake_whatever_the_number_of_capsules(lower: int, upper: int) -> None:
    torch.manual_seed(0)
    u = squash(torch.randn(8, lower, 8))
    sizes = DenseCaps(lower, 8, upper, 16, iterations=1)(u).square().sum(-1).sqrt()
    assert 0.2 < sizes.mean() < 0.8


# --- Mistakes are named ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 1152, 16), (64, 1151, 8), (1152, 8), (64, 6, 6, 32, 8)])
def test_dense_caps_repeats_the_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    layer = DenseCaps(1152, 8, 10, 16, device="meta")  # type: ignore[arg-type]
    with pytest.raises(UserError) as error:
        layer(torch.empty(shape, device="meta"))
    assert "(b, 1152, 8)" in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(2, 4, 20, 20), (2, 3, 8, 20), (3, 20, 20), (2, 3, 20, 4)])
def test_primary_caps_repeats_the_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError) as error:
        PrimaryCaps(3, 4, 8)(torch.zeros(shape))
    assert "3" in str(error.value)
    assert str(shape) in str(error.value)


@pytest.mark.parametrize("shape", [(2, 10, 8), (2, 9, 16), (160,)])
def test_the_decoder_repeats_the_shape_that_does_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError) as error:
        Decoder(10, 16, (1, 4, 4), (8,))(torch.zeros(shape))
    assert "10, 16" in str(error.value)
    assert str(shape) in str(error.value)


def test_sharing_over_types_that_do_not_divide_the_capsules_is_refused() -> None:
    with pytest.raises(UserError, match=r"over 32 capsule types and got 100 lower capsules"):
        DenseCaps(100, 8, 10, 16, shared=32)


def test_an_unknown_routing_algorithm_is_refused_when_the_layer_is_made() -> None:
    with pytest.raises(UserError, match=r"no routing algorithm 'magic'.*dynamic"):
        DenseCaps(10, 8, 10, 16, routing="magic")


@pytest.mark.parametrize("layer", [lambda **k: PrimaryCaps(3, **k), lambda **k: DenseCaps(10, 8, 10, 16, **k),
                                   lambda **k: Decoder(10, 16, (1, 4, 4), **k)])  # fmt: skip
def test_an_unknown_initialisation_is_refused(layer: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match=r"no initialisation 'offical'; did you mean 'official'\?"):
        layer(init="offical")


@pytest.mark.parametrize(
    ("lower", "upper", "shared"),
    [(1152, 10, None), (288, 10, None), (20, 10, None), (1152, 200, None), (1152, 2, None), (8192, 200, 32)],
)
def test_fresh_class_capsules_are_neither_dead_nor_saturated(lower: int, upper: int, shared: int | None) -> None:
    torch.manual_seed(0)
    images = torch.rand(4, 1, 8) * 0.3 + torch.rand(4, lower, 8) * 0.1  # what the places of one image see is alike
    lengths = DenseCaps(lower, 8, upper, 16, shared=shared)(images).norm(dim=-1)
    assert 0.001 < lengths.mean() < 0.9


@pytest.mark.parametrize("hardware", [False, True])
def test_a_decoder_never_emulates_bfloat16(hardware: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "has_bf16", lambda: hardware)
    decoder, poses = Decoder(10, 16, (1, 28, 28)), torch.randn(2, 10, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        came = decoder(poses)
    assert came.dtype == (torch.bfloat16 if hardware else torch.float32)
    assert torch.equal(came, decoder(poses)) is not hardware


# --- Groups: branches that do not see each other ------------------------------------------------------------------


def test_a_primary_capsule_sees_the_channels_of_its_own_group_only() -> None:
    torch.manual_seed(0)
    layer, x = PrimaryCaps(6, types=9, dim=4, kernel_size=3, groups=3), torch.randn(2, 6, 7, 7)
    other = x.clone()
    other[:, 2:4] += 1  # the channels of group 1
    changed = (layer(x) != layer(other)).any(-1).any(0)
    assert changed.tolist() == [i % 3 == 1 for i in range(layer(x).shape[1])]


@pytest.mark.parametrize("shared", [None, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_each_group_is_routed_by_itself_and_the_parts_are_joined(shared: int | None, bias: bool) -> None:
    torch.manual_seed(0)
    k, u = 3, torch.randn(2, 24, 4)
    layer = DenseCaps(24, 4, 5, 12, shared=shared, groups=k, bias=bias)
    if layer.bias is not None:
        nn.init.normal_(layer.bias)
    v, trace = layer.route(u, trace=True)
    assert trace is not None
    lengths = []
    for g in range(k):
        alone = DenseCaps(8, 4, 5, 4, shared=shared and shared // k, bias=bias)
        with torch.no_grad():
            alone.weight.copy_(layer.weight[g::k])
            if alone.bias is not None and layer.bias is not None:
                alone.bias.copy_(layer.bias[:, 4 * g : 4 * g + 4])
        part, how = alone.route(u[:, g::k], trace=True)
        assert how is not None
        mine = slice(4 * g, 4 * g + 4)
        torch.testing.assert_close(v[..., mine], part / math.sqrt(k))
        torch.testing.assert_close(trace.logits[:, :, g::k], how.logits)
        torch.testing.assert_close(trace.couplings[:, :, g::k], how.couplings)
        torch.testing.assert_close(trace.outputs[..., mine], how.outputs / math.sqrt(k))
        torch.testing.assert_close(trace.votes[:, g::k, :, mine], how.votes)
        assert trace.votes[:, g::k].count_nonzero() == how.votes.count_nonzero()
        lengths.append(part.norm(dim=-1))
    torch.testing.assert_close(v.norm(dim=-1), torch.stack(lengths).square().mean(0).sqrt())
    torch.testing.assert_close(layer(u), v)


def test_groups_that_do_not_come_out_even_are_refused() -> None:
    for make in (
        lambda: PrimaryCaps(6, types=4, groups=3),
        lambda: PrimaryCaps(4, types=6, groups=3),
        lambda: DenseCaps(12, 4, 5, 16, groups=3),
        lambda: DenseCaps(10, 4, 5, 12, groups=3),
        lambda: DenseCaps(12, 4, 5, 12, groups=3, shared=4),
    ):
        with pytest.raises(UserError, match="cannot be divided into 3 groups: choose a multiple of 3"):
            make()


def test_iterations_and_leak_can_be_others_for_once() -> None:
    layer, u = DenseCaps(6, 4, 3, 5), torch.randn(2, 6, 4)
    expected = dynamic_routing(u, layer.weight, iterations=1, leaky=True).v
    torch.testing.assert_close(layer.route(u, iterations=1, leaky=True).v, expected)
    assert (layer.iterations, layer.leaky) == (3, False)


# --- bfloat16 between the layers of a stem ------------------------------------------------------------------------


def test_a_large_batch_is_routed_in_groups_by_the_kernel_as_by_the_plain_form() -> None:
    torch.manual_seed(0)
    layer, found = DenseCaps(384, 8, 10, 24, groups=3, bias=True), []
    u = torch.randn(48, 384, 8, requires_grad=True)
    assert worth_it(u[:, ::3], layer.weight[::3])
    for way in (nullcontext(), plain()):
        with way:
            v = layer(u)
            v.square().sum().backward()
        found.append((v.detach(), u.grad, layer.weight.grad))
        u.grad = layer.weight.grad = None
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-4)


def test_fresh_capsules_of_a_group_are_as_long_as_without_groups() -> None:
    torch.manual_seed(0)
    u = torch.randn(8, 384, 8) * 0.2
    grouped, alone = DenseCaps(384, 8, 10, 24, groups=3), DenseCaps(128, 8, 10, 8)
    assert grouped.weight.std().item() == pytest.approx(alone.weight.std().item(), rel=0.05)
    assert grouped(u).norm(dim=-1).mean().item() == pytest.approx(alone(u[:, ::3]).norm(dim=-1).mean().item(), rel=0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_stem_of_another_dtype_keeps_it(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "has_bf16", lambda: True)
    stem = nn.Sequential(Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(dtype)
    layer = PrimaryCaps(8, 4, 4, 3).to(dtype)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            assert layer.after(stem, torch.rand(4, 1, 12, 12, dtype=dtype)).dtype in (dtype, torch.bfloat16)


@pytest.mark.parametrize("hardware", [False, True])
def test_a_stem_computes_in_bfloat16_only_where_the_processor_has_it(
    hardware: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "has_bf16", lambda: hardware)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    stem = nn.Sequential(Conv2d(1, 8, 3, bias=False), norm, nn.ReLU(), Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8))
    layer, images, seen = PrimaryCaps(8, 4, 4, 3), torch.rand(16, 1, 12, 12), []
    expected = layer(stem(images))
    norm.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        u = layer.after(stem, images)
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
        layer.after(stem, images)
    assert entered == [torch.float32]
