"""Efficient-CapsNet: the paper's parameter count, and a network that learns."""

from __future__ import annotations

import pytest
import torch

from capsnet.errors import UserError
from capsnet.models.efficient import DepthwiseCaps, EfficientCapsNet, EfficientConfig
from capsnet.nn.functional import lengths
from capsnet.routing.self_attention import squash_exp


def test_it_has_the_published_number_of_parameters_without_the_decoder() -> None:
    assert sum(p.numel() for p in EfficientCapsNet(EfficientConfig(decoder=())).parameters()) == 161_824


def test_relu_comes_before_batch_norm() -> None:
    kinds = [type(layer).__name__ for layer in EfficientCapsNet(EfficientConfig()).stem]
    assert kinds == ["Conv2d", "ReLU", "BatchNorm2d"] * 4


def test_sixteen_capsules_of_eight_channels_each_see_the_whole_image() -> None:
    model = EfficientCapsNet(EfficientConfig())
    primary = model(torch.rand(2, 1, 28, 28)).primary
    assert primary is not None
    assert primary.shape == (2, 16, 8)
    assert model.shown()["receptive"]["size"] >= 27


def test_a_capsule_is_made_of_neighbouring_channels() -> None:
    caps = DepthwiseCaps(types=2, dim=3, kernel_size=1, stride=1)
    torch.nn.init.ones_(caps.conv.weight)
    torch.nn.init.zeros_(caps.conv.bias)  # type: ignore[arg-type]
    maps = torch.arange(1.0, 7.0).view(1, 6, 1, 1)
    directions = torch.nn.functional.normalize(caps(maps), dim=-1)
    torch.testing.assert_close(directions, torch.nn.functional.normalize(maps.view(1, 2, 3), dim=-1))
    assert (lengths(caps(maps)) < 1).all()


def test_larger_images_give_a_grid_of_capsules() -> None:
    model = EfficientCapsNet(EfficientConfig(image_shape=(3, 36, 36), num_classes=4))
    assert model(torch.rand(2, 3, 36, 36)).activations.shape == (2, 4)
    assert model.grid == (5, 5)


def test_the_factor_multiplies_the_depthwise_convolution_before_its_bias() -> None:
    plain, scaled = (EfficientCapsNet(EfficientConfig(primary_factor=on)).eval() for on in (False, True))
    scaled.load_state_dict(plain.state_dict())
    maps = torch.randn(2, 128, 9, 9)
    bias = plain.primary.conv.bias
    assert bias is not None
    expected = squash_exp(((plain.primary.conv(maps) - bias.view(-1, 1, 1)) / 16 + bias.view(-1, 1, 1)).view(2, 16, 8))
    torch.testing.assert_close(scaled.primary(maps), expected)


def test_the_authors_initialisation_reaches_every_layer() -> None:
    torch.manual_seed(0)
    model = EfficientCapsNet(EfficientConfig(init="official"))
    biases = {name: p for name, p in model.named_parameters() if name.endswith(("conv.bias", "stem.0.bias"))}
    assert len(biases) == 2
    assert all((bias == 0.1).all() for bias in biases.values())
    assert model.primary.conv.weight.abs().max() <= 0.2  # truncated at two standard deviations of 0.1
    assert model.stem[0].weight.abs().max() <= 0.1  # type: ignore[operator, union-attr]


def test_channels_that_do_not_make_up_the_capsules_are_refused() -> None:
    with pytest.raises(UserError, match="need 256 channels of the last convolution"):
        EfficientConfig(primary_types=32)


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = EfficientCapsNet(EfficientConfig(num_classes=2, decoder=()))
    images, labels = torch.rand(16, 1, 28, 28) * 0.2, torch.arange(16) % 2
    images[labels == 1, :, 4:12] += 0.8
    images[labels == 0, :, 16:24] += 0.8
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for _ in range(12):
        activations = model(images).activations
        loss = torch.nn.functional.cross_entropy(5 * activations, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(images).activations.argmax(1) == labels).all()
