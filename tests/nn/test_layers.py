"""The layers are ordinary PyTorch modules that compute the paper's equations for any sizes."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.io.transfer import create_model
from capsnet.kernels import dispatch
from capsnet.nn.decoder import Decoder
from capsnet.nn.functional import Capsules, squash
from capsnet.nn.layers import Conv2d, DenseCaps, PrimaryCaps
from capsnet.routing import DynamicOptions, DynamicRouting, Parents, Routed, Routing, dynamic_routing

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
    bias, chosen = layer.routing.bias, layer.routing.options
    expected = dynamic_routing(u, layer.weight, bias, iterations=chosen.iterations, leaky=chosen.leaky, trace=True)
    torch.testing.assert_close(layer(u), expected.poses)
    torch.testing.assert_close(layer.route(u, trace=True).poses, expected.poses)


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
def test_the_decoder_gives_pixels_between_0_and_1_for_any_number_of_leading_dimensions(
    image_shape: tuple[int, int, int],
) -> None:
    decoder = Decoder(4, 3, image_shape, (8,))
    poses = torch.randn(2, 5, 4, 3)
    image = decoder(poses)
    assert image.shape == (2, 5, *image_shape)
    assert image.min() > 0
    assert image.max() < 1
    torch.testing.assert_close(decoder(poses[1, 2]), image[1, 2])


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
    text = repr(DenseCaps(36, 6, 7, 5, shared=4, leaky=True, bias=True, iterations=2))
    for part in ("36×6 → 7×5", "shared=4", "DynamicRouting", "iterations=2", "bias=True", "leaky=True", "detach=False"):
        assert part in text
    assert "matrix" in repr(DenseCaps(36, 9, 7, 9, matrix=True))


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
    assert create_model("official").state_dict()["caps.0.routing.bias"].shape == (10, 16)


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


@pytest.mark.parametrize("shape", [(64, 1152, 16), (64, 1151, 8), (1152, 8), (64, 6, 6, 31, 8)])
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


def test_a_grid_with_other_types_than_those_that_share_transformations_is_refused() -> None:
    with pytest.raises(UserError, match=r"DenseCaps expects \(b, 32, 8\) and got \(2, 2, 2, 8, 8\)"):
        DenseCaps(32, 8, 10, 16, shared=4)(torch.zeros(2, 2, 2, 8, 8))


@pytest.mark.parametrize("shared", [32, 0, -4])
def test_sharing_over_types_that_do_not_divide_the_capsules_is_refused(shared: int) -> None:
    with pytest.raises(UserError, match=rf"over {shared} capsule types, but 100 lower capsules"):
        DenseCaps(100, 8, 10, 16, shared=shared)


def test_an_unknown_routing_is_refused_when_the_layer_is_made() -> None:
    with pytest.raises(UserError, match=r"no routing 'magic'.*dynamic"):
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
    monkeypatch.setattr(dispatch, "has_bf16", lambda: hardware)
    decoder, poses = Decoder(10, 16, (1, 28, 28)), torch.randn(2, 10, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        came = decoder(poses)
    assert came.dtype == (torch.bfloat16 if hardware else torch.float32)
    assert torch.equal(came, decoder(poses)) is not hardware


# --- Routing: by name, by options or as a module ------------------------------------------------------------------


def test_options_can_be_replaced_for_one_call_and_the_layer_keeps_its_own() -> None:
    layer, u = DenseCaps(6, 4, 3, 5), torch.randn(2, 6, 4)
    before = layer(u)
    expected = dynamic_routing(u, layer.weight, iterations=1, leaky=True).poses
    torch.testing.assert_close(layer.route(u, iterations=1, leaky=True).poses, expected)
    assert layer.routing.options == DynamicOptions()
    assert torch.equal(layer(u), before)


def test_with_options_shares_the_parameters_and_leaves_the_routing_untouched() -> None:
    layer = DenseCaps(6, 4, 3, 5, bias=True)
    other = layer.routing.with_options(iterations=1)
    assert (other.options.iterations, layer.routing.options.iterations) == (1, 3)
    assert other.get_parameter("bias") is layer.routing.get_parameter("bias")


def test_a_name_with_options_options_and_a_module_mean_the_same() -> None:
    u, poses = torch.randn(2, 6, 4), []
    for routing, options in (
        ("dynamic", {"iterations": 2, "leaky": True}),
        (DynamicOptions(iterations=2, leaky=True), {}),
        (DynamicRouting(iterations=2, leaky=True), {}),
    ):
        torch.manual_seed(0)
        poses.append(DenseCaps(6, 4, 3, 5, routing=routing, **options)(u))  # type: ignore[arg-type]
    assert torch.equal(poses[0], poses[1])
    assert torch.equal(poses[0], poses[2])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DenseCaps(6, 4, 3, 5, iteration=2), "no option of dynamic routing 'iteration'; did you mean 'iterat"),
        (lambda: DenseCaps(6, 4, 3, 5, routing=DynamicOptions(), leaky=True), "such as leaky go with the name"),
        (lambda: DenseCaps(6, 4, 3, 5).route(torch.rand(1, 6, 4), heads=2), "no option of dynamic routing 'heads'"),
    ],
)
def test_an_option_that_cannot_be_taken_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()


def test_a_routing_belongs_to_one_layer() -> None:
    routing = DynamicRouting(bias=True)
    DenseCaps(6, 4, 3, 5, routing=routing)
    with pytest.raises(UserError, match="already belongs to a layer"):
        DenseCaps(3, 5, 2, 4, routing=routing)


@pytest.mark.parametrize("shared", [None, 3])
def test_matrix_poses_are_multiplied_by_matrices(shared: int | None) -> None:
    torch.manual_seed(0)
    layer = DenseCaps(6, 9, 4, 9, matrix=True, shared=shared)
    assert layer.weight.shape == (shared or 6, 4, 3, 3)
    M = torch.randn(2, 6, 9)
    trace = layer.route(M, trace=True).trace
    assert trace is not None
    for i in range(6):
        for j in range(4):
            expected = M[:, i].view(2, 3, 3) @ layer.weight[i % (shared or 6), j]
            torch.testing.assert_close(trace.votes[:, i, j].view(2, 3, 3), expected)
    layer(M).square().sum().backward()
    assert layer.weight.grad is not None
    assert (layer.weight.grad != 0).all()


@pytest.mark.parametrize("dims", [(8, 8), (16, 9)])
def test_matrix_poses_that_are_not_square_or_not_of_one_size_are_refused(dims: tuple[int, int]) -> None:
    with pytest.raises(UserError, match=f"matrix poses are square .* have {dims[0]} and {dims[1]}"):
        DenseCaps(6, dims[0], 4, dims[1], matrix=True)


class Weighted(Routing):
    """Votes averaged with the lower activations as weights; the upper activation is the mean of the lower ones."""

    name = "weighted"
    own_activations = True

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        weight = u_hat.new_ones(u_hat.shape[:2]) if a is None else a
        poses = torch.einsum("bi,bijq->bjq", weight / weight.sum(1, keepdim=True), u_hat)
        return Routed(poses, weight.mean(1, keepdim=True).expand(-1, u_hat.shape[2]))


def test_activations_of_a_routing_reach_the_next_layer() -> None:
    first, second = DenseCaps(6, 4, 3, 5, routing=Weighted()), DenseCaps(3, 5, 2, 4, routing=Weighted())
    u, a = torch.randn(2, 6, 4), torch.rand(2, 6)
    between = first(Capsules(u, a))
    assert isinstance(between, Capsules)
    torch.testing.assert_close(between.activations, a.mean(1, keepdim=True).expand(2, 3))
    top = nn.Sequential(first, second)(Capsules(u, a))
    torch.testing.assert_close(top.poses, second.route(between.poses, between.activations).poses)
    torch.testing.assert_close(top.activations, a.mean(1, keepdim=True).expand(2, 2))
    assert isinstance(DenseCaps(3, 5, 2, 4)(between), Tensor)  # a layer whose activations are lengths takes them too


def test_primary_capsules_keep_their_grid_when_asked() -> None:
    flat, grid = PrimaryCaps(3, 4, 2, kernel_size=3), PrimaryCaps(3, 4, 2, kernel_size=3, grid=True)
    grid.load_state_dict(flat.state_dict())
    images = torch.randn(2, 3, 9, 9)
    torch.testing.assert_close(grid(images).flatten(1, 3), flat(images))
    assert grid(images).shape == (2, 4, 4, 4, 2)


@pytest.mark.parametrize("grid", [True, False])
def test_primary_capsules_with_activations_are_a_linear_pose_and_a_sigmoid(grid: bool) -> None:
    caps = PrimaryCaps(3, 4, 2, kernel_size=1, stride=1, grid=grid, activations=True)
    images = torch.randn(2, 3, 5, 5)
    poses, a = caps(images)
    channels = caps.conv(images)  # 4 · 2 of poses, then 4 of activations
    y, x, kind = 3, 1, 2
    pose, active = (poses[1, y, x, kind], a[1, y, x, kind]) if grid else (poses[1, 66], a[1, 66])
    torch.testing.assert_close(pose, channels[1, 4:6, y, x])
    torch.testing.assert_close(active, channels[1, 8 + kind, y, x].sigmoid())
