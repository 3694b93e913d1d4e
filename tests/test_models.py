"""The networks: the paper's sizes, any other sizes, prediction, compilation, and a safe way to disk and back."""

from __future__ import annotations

import copy
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import prune

import capsnet
from capsnet import checkpoint
from capsnet.config import PRESETS, CapsNetConfig, CNNConfig, Config, LossConfig, from_dict, get_preset, to_dict
from capsnet.data import Batch
from capsnet.errors import UserError
from capsnet.functional import mask, one_hot
from capsnet.layers import DenseCaps
from capsnet.losses import margin_loss, reconstruction_loss
from capsnet.models import CNN, CapsNet, build
from capsnet.pretrained import create_model
from capsnet.training import judged_lengths, labelled_loss

TINY = CapsNetConfig(
    (1, 12, 12), 3, stem_channels=(8,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    class_dim=6, decoder=(16,),
)  # fmt: skip
TINY_CNN = CNNConfig((1, 12, 12), 3, channels=(4, 4), kernels=(3, 3), pool=(2, 1), hidden=(8,))


def tiny(**changes: Any) -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(replace(TINY, **changes))


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


# --- Branches ----------------------------------------------------------------------------------------------------

BRANCHED = replace(
    TINY, stem_channels=(4, 6, 6), stem_kernels=(3, 3, 1), stem_strides=(1, 1, 1), stem_norm=True, branches=2, trunk=1
)


def test_branches_share_the_trunk_and_nothing_else() -> None:
    """What one branch is asked for reaches its own weights and the trunk's, and never the other branch's."""
    model = CapsNet(BRANCHED)
    output = model(torch.rand(4, 1, 12, 12))
    judged = judged_lengths(model, output).unflatten(0, (2, 4))  # branch b j
    judged[0].sum().backward()
    conv, grouped = model.stem[3], model.stem[6]
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(grouped, nn.Conv2d)
    assert (conv.groups, grouped.groups) == (1, 2)  # the first after the trunk sees all of it
    assert (model.stem[0].weight.grad != 0).any()  # type: ignore[union-attr, operator]
    for weight in (conv.weight, grouped.weight, model.primary.conv.weight):
        mine, others = weight.grad.chunk(2)  # type: ignore[union-attr]
        assert (mine != 0).any()
        assert (others == 0).all()
    assert (model.caps[0].weight.grad[1::2] == 0).all()  # type: ignore[union-attr, index]


def test_a_branched_networks_lengths_are_those_of_its_poses_and_the_mean_of_its_branches() -> None:
    model = CapsNet(BRANCHED).eval()
    output = model(torch.rand(4, 1, 12, 12), trace=True)
    assert output.poses is not None
    assert output.trace is not None
    torch.testing.assert_close(output.lengths, output.poses.norm(dim=-1), atol=1e-4, rtol=0)
    judged = judged_lengths(model, output).unflatten(0, (2, 4))
    torch.testing.assert_close(output.lengths, judged.square().mean(0).sqrt(), atol=1e-4, rtol=0)
    torch.testing.assert_close(output.trace.couplings.sum(-1), torch.ones(3, 4, output.trace.couplings.shape[2]))


def test_the_loss_of_a_branched_network_is_the_mean_of_its_branches_losses() -> None:
    model = CapsNet(BRANCHED)
    images, targets = torch.rand(4, 1, 12, 12), one_hot(torch.tensor([0, 1, 2, 1]), 3)
    output = model(images)
    config = Config(model=BRANCHED, loss=LossConfig(reconstruction=0.0))
    loss = labelled_loss(model, output, Batch(images, targets, targets, torch.arange(4)), config)
    each = [margin_loss(part, targets) for part in judged_lengths(model, output).chunk(2)]
    torch.testing.assert_close(loss.margin, (each[0] + each[1]) / 2)
    assert each[0] != each[1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"trunk": 3}, "use a longer stem or a smaller trunk"),
        ({"hidden_caps": ((4, 4),)}, "leave hidden_caps empty"),
        ({"class_dim": 7}, "class_dim=7 cannot be shared out among 2 branches: choose a multiple of 2"),
        ({"stem_channels": (4, 7, 6)}, "stem_channels=7 cannot be shared out"),
        ({"primary_types": 3}, "primary_types=3 cannot be shared out"),
        ({"branches": 1}, "trunk=1 is for a network with branches"),
    ],
)
def test_branches_that_do_not_fit_are_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        CapsNet(replace(BRANCHED, **changes))


# --- Sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (CapsNetConfig(), 8_215_568),
        (CapsNetConfig(routing_bias=True), 8_215_568 + 160),
        (CapsNetConfig(decoder=()), 6_804_224),
        (CapsNetConfig((1, 36, 36)), 11_361_808),
        (CapsNetConfig((1, 36, 36), routing_bias=True), 11_361_808 + 160),
        (get_preset("baseline-mnist").model, 35_445_522),
        (get_preset("baseline-multimnist").model, 24_563_978),
    ],
)
def test_the_papers_networks_have_the_papers_numbers_of_parameters(
    config: CapsNetConfig | CNNConfig, count: int
) -> None:
    assert parameters(build(config, device=torch.device("meta"))) == count


def test_the_papers_network_has_the_papers_shapes() -> None:
    model = create_model("paper", device=torch.device("meta"))
    output = model(torch.empty(2, 1, 28, 28, device="meta"))
    assert output.primary.shape == (2, 1152, 8)
    assert output.poses.shape == (2, 10, 16)
    assert output.lengths.shape == (2, 10)


@given(
    st.tuples(st.integers(1, 4), st.integers(7, 14), st.integers(7, 14)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([(), ((5, 3),), ((4, 2), (3, 7))]),
    st.sampled_from([(), (5,), (6, 7)]),
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("shared", "leaky", "routing_bias", "detach", "stem_norm", "primary_factor")}
    ),
)
@settings(max_examples=30)
def test_any_image_size_channels_classes_and_depth_work(
    image_shape: tuple[int, int, int], classes: int, iterations: int, hidden: tuple, decoder: tuple, flags: dict
) -> None:
    config = replace(
        TINY, image_shape=image_shape, num_classes=classes, iterations=iterations, hidden_caps=hidden,
        decoder=decoder, **flags,
    )  # fmt: skip
    model = CapsNet(config)
    images = torch.rand(2, *image_shape)
    output = model(images, trace=True)
    assert output.lengths.shape == (2, classes)
    assert output.poses is not None
    assert output.poses.shape == (2, classes, 6)
    assert output.trace is not None
    assert output.trace.logits.shape[0] == iterations
    painted = model.reconstruct(output.poses, torch.zeros(2, dtype=torch.long))
    assert (painted is None) == (not decoder)
    if painted is not None:
        assert painted.shape == images.shape
    output.lengths.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("decoder"))


def test_the_choices_of_the_config_reach_the_layers() -> None:
    plain, other = tiny(), tiny(shared=True, hidden_caps=((5, 4),), primary_factor=True, iterations=2, leaky=True)
    assert plain.get_parameter("caps.0.weight").shape == (64, 3, 6, 4)
    assert other.get_parameter("caps.0.weight").shape == (4, 5, 4, 4)
    assert other.get_parameter("caps.1.weight").shape == (5, 3, 6, 4)
    assert (plain.primary.factor, other.primary.factor) == (1, 1 / 4)
    for layer in other.caps:
        assert isinstance(layer, DenseCaps)
        assert (layer.iterations, layer.leaky, layer.detach, layer.bias) == (2, True, False, None)
    for layer in tiny(detach=True, routing_bias=True).caps:
        assert isinstance(layer, DenseCaps)
        assert (layer.iterations, layer.leaky, layer.detach, layer.bias is None) == (3, False, True, False)


@pytest.mark.parametrize("image_shape", [(3, 9, 14), (1, 8, 8)])
@pytest.mark.parametrize("classes", [1, 7])
def test_the_cnn_takes_any_image_size_channels_and_classes(image_shape: tuple[int, int, int], classes: int) -> None:
    model = CNN(replace(TINY_CNN, image_shape=image_shape, num_classes=classes))
    output = model(torch.rand(2, *image_shape))
    torch.testing.assert_close(output.lengths.sum(1), torch.ones(2))
    assert output.logits is not None
    assert output.logits.shape == (2, classes)
    model.multi_label = True
    torch.testing.assert_close(model.eval()(torch.zeros(1, *image_shape)).lengths.logit(),
                               model(torch.zeros(1, *image_shape)).logits)  # fmt: skip


def test_create_model_adapts_a_preset_to_the_data() -> None:
    model = create_model("quick", num_classes=4, image_shape=(3, 32, 24), dtype=torch.float64)
    output = model(torch.rand(1, 3, 32, 24, dtype=torch.float64))
    assert output.lengths.shape == (1, 4)
    assert output.lengths.dtype == torch.float64


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(TINY, image_shape=(1, 4, 12)), "4×12 px is too small"),
        (replace(TINY, stem_kernels=(3, 3)), "one number for each convolution"),
        (replace(TINY, routing="magic"), "no routing algorithm 'magic'"),
        (replace(TINY_CNN, image_shape=(1, 1, 12)), "too small"),
        (replace(TINY_CNN, kernels=(3,)), "one number for each convolution"),
        (replace(TINY_CNN, kernels=(3, 4)), "use an odd one"),
    ],
)
def test_a_network_that_cannot_be_is_refused_in_words(config: CapsNetConfig | CNNConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(config)


def test_a_prediction_does_not_depend_on_its_batch_mates() -> None:
    for model in (tiny(stem_norm=True).eval(), CNN(TINY_CNN).eval()):
        images = torch.rand(4, 1, 12, 12)
        alone = torch.cat([model(image[None]).lengths for image in images])
        torch.testing.assert_close(model(images).lengths, alone)


# --- Reconstruction ----------------------------------------------------------------------------------------------


def test_one_class_or_several_are_decoded_each_by_itself() -> None:
    model = tiny()
    assert model.decoder is not None
    poses, classes = torch.randn(2, 3, 6), torch.tensor([[2, 0], [1, 1]])
    several = model.reconstruct(poses, classes)
    assert several is not None
    assert several.shape == (2, 2, 1, 12, 12)
    for k in range(2):
        one = model.reconstruct(poses, classes[:, k])
        torch.testing.assert_close(one, several[:, k])
        torch.testing.assert_close(one, model.decoder(mask(poses, one_hot(classes[:, k], 3))))


def test_a_decoding_sees_nothing_of_the_other_classes() -> None:
    model, poses = tiny(), torch.randn(1, 3, 6)
    other = poses.clone()
    other[:, [0, 2]] = 9
    before, after = (model.reconstruct(x, torch.tensor([1])) for x in (poses, other))
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


def test_a_set_of_classes_is_decoded_together() -> None:
    model, poses = tiny(), torch.randn(2, 3, 6)
    one = model.reconstruct(poses, torch.tensor([2, 0]))
    torch.testing.assert_close(model.reconstruct_set(poses, torch.tensor([[0.0, 0, 1], [1, 0, 0]])), one)
    assert model.decoder is not None
    torch.testing.assert_close(model.reconstruct_set(poses, torch.ones(2, 3)), model.decoder(poses))


def test_tweaks_move_one_dimension_a_row_over_the_span() -> None:
    model, pose = tiny(), torch.randn(6)
    rows = model.tweaks(pose, label=1)
    assert rows.shape == (6, 11, 1, 12, 12)
    poses = torch.zeros(1, 3, 6)
    poses[0, 1] = pose
    untouched = model.reconstruct(poses, torch.tensor([1]))
    assert untouched is not None
    torch.testing.assert_close(rows[:, 5], untouched.expand(6, -1, -1, -1))
    poses[0, 1, 4] -= 0.25 - 2 * 0.05
    torch.testing.assert_close(rows[4, 2], model.reconstruct(poses, torch.tensor([1]))[0])  # type: ignore[index]
    assert model.tweaks(pose, 0, span=1.0, steps=3).shape == (6, 3, 1, 12, 12)


def test_a_model_without_a_decoder_paints_nothing() -> None:
    model = tiny(decoder=())
    poses = torch.randn(1, 3, 6)
    assert model.reconstruct(poses, torch.tensor([0])) is None
    assert model.reconstruct_set(poses, torch.ones(1, 3)) is None
    assert model.predict(torch.rand(1, 12, 12)).reconstructions is None
    with pytest.raises(UserError, match="no decoder"):
        model.tweaks(poses[0, 0], 0)


# --- Prediction --------------------------------------------------------------------------------------------------


def mirrored(x: np.ndarray) -> np.ndarray:
    return np.flip(np.flip(x, -1).copy(), -1)


def read_only(x: np.ndarray) -> np.ndarray:
    y = x.copy()
    y.flags.writeable = False
    return y


@pytest.mark.parametrize(
    ("image_shape", "shape", "n"),
    [
        ((1, 12, 10), (12, 10), 1),
        ((1, 12, 10), (5, 12, 10), 5),
        ((1, 12, 10), (1, 12, 10), 1),
        ((1, 12, 10), (5, 1, 12, 10), 5),
        ((1, 12, 10), (0, 1, 12, 10), 0),
        ((3, 12, 10), (3, 12, 10), 1),
        ((3, 12, 10), (2, 3, 12, 10), 2),
    ],
)
def test_predict_takes_one_image_or_many(image_shape: tuple[int, int, int], shape: tuple[int, ...], n: int) -> None:
    model = tiny(image_shape=image_shape).eval()
    images = torch.rand(shape)
    prediction = model.predict(images)
    assert prediction.labels.shape == (n,)
    assert prediction.lengths.shape == (n, 3)
    assert prediction.poses is not None
    assert prediction.poses.shape == (n, 3, 6)
    assert prediction.reconstructions is not None
    assert prediction.reconstructions.shape == (n, *image_shape)
    assert prediction.trace is None
    with torch.no_grad():
        torch.testing.assert_close(prediction.lengths, model(images.reshape(n, *image_shape)).lengths)


@pytest.mark.parametrize("way", [np.asarray, torch.from_numpy, mirrored, read_only])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_predict_takes_bytes_and_floats_from_arrays_and_tensors(way: Callable, dtype: type) -> None:
    model = tiny()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 12)).astype(np.uint8)
    images = way(pixels if dtype == np.uint8 else (pixels / 255).astype(dtype))
    expected = model.predict(torch.from_numpy(pixels).float() / 255)
    torch.testing.assert_close(model.predict(images).lengths, expected.lengths, rtol=1e-3, atol=1e-4)
    if dtype == np.uint8:
        torch.testing.assert_close(model.predict(images).lengths, expected.lengths)


def test_predict_names_the_longest_the_two_longest_or_all_that_are_long_enough() -> None:
    model, images = tiny(), torch.rand(4, 12, 12)
    lengths = model.predict(images).lengths
    assert torch.equal(model.predict(images).labels, lengths.argmax(1))
    two = model.predict(images, top=2)
    assert torch.equal(two.labels, lengths.argsort(1, descending=True)[:, :2])
    assert two.reconstructions is not None
    assert two.reconstructions.shape == (4, 2, 1, 12, 12)
    torch.testing.assert_close(two.reconstructions[:, 0], model.predict(images).reconstructions)
    between = float(lengths.median())
    many = model.predict(images, threshold=between)
    assert torch.equal(many.labels, lengths >= between)
    assert model.predict(images, top=99).labels.shape == (4, 3)


@pytest.mark.parametrize("kind", [tiny, lambda: CNN(TINY_CNN)])
def test_a_multi_label_model_names_all_that_are_there_unless_told_otherwise(kind: Callable) -> None:
    model, images = kind(), torch.rand(4, 1, 12, 12)
    assert not model.multi_label
    model.multi_label = True
    lengths = model.predict(images).lengths
    assert torch.equal(model.predict(images).labels, lengths >= 0.5)
    assert torch.equal(model.predict(images, top=1).labels, lengths.argmax(1))
    assert torch.equal(model.predict(images, threshold=0.1).labels, lengths >= 0.1)


@pytest.mark.parametrize("options", [{"top": 0}, {"batch_size": 0}])
def test_a_prediction_of_nothing_is_refused(options: dict) -> None:
    with pytest.raises(UserError, match="at least 1"):
        tiny().predict(torch.rand(12, 12), **options)


def test_the_batch_size_of_a_prediction_does_not_matter() -> None:
    model, images = tiny(hidden_caps=((5, 4),)), torch.rand(7, 12, 12)
    whole, parts = (model.predict(images, trace=True, top=2, batch_size=size) for size in (7, 3))
    assert torch.equal(whole.labels, parts.labels)
    for one, other in zip(whole[1:4], parts[1:4], strict=True):
        torch.testing.assert_close(one, other)
    assert whole.trace is not None
    assert parts.trace is not None
    for one, other in zip(whole.trace, parts.trace, strict=True):
        torch.testing.assert_close(one, other)
    assert whole.trace.outputs.shape == (3, 7, 3, 6)
    torch.testing.assert_close(whole.trace.outputs[-1], whole.poses)


@pytest.mark.parametrize("training", [True, False])
def test_predict_evaluates_and_then_restores_the_mode(training: bool) -> None:
    for model in (tiny(stem_norm=True), CNN(TINY_CNN)):
        model.train(training)
        before = copy.deepcopy(model.state_dict())
        images = torch.rand(4, 12, 12)
        torch.testing.assert_close(model.predict(images).lengths, model.predict(images).lengths)  # no dropout
        assert model.training == training
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        with pytest.raises(UserError):
            model.predict(torch.rand(4, 5, 5))
        assert model.training == training


def test_a_cnn_predicts_too_without_poses_or_trace() -> None:
    prediction = CNN(TINY_CNN).predict(np.zeros((2, 12, 12), np.uint8), trace=True)
    assert prediction.labels.shape == (2,)
    assert prediction[2:] == (None, None, None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_predicts(dtype: torch.dtype) -> None:
    for model in (tiny(), CNN(TINY_CNN)):
        images = torch.rand(3, 12, 12)
        expected = model.predict(images)
        prediction = model.to(dtype).predict(images)
        torch.testing.assert_close(prediction.lengths.float(), expected.lengths, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("shape", [(28, 28), (2, 3, 12, 12), (12, 12, 3), (12,), (1, 2, 1, 12, 12), (4, 12, 13)])
def test_a_wrong_shape_is_repeated_with_the_one_that_was_expected(shape: tuple[int, ...]) -> None:
    for model in (tiny(), CNN(TINY_CNN)):
        with pytest.raises(UserError) as error:
            model.predict(np.zeros(shape, np.float32))
        assert "(b, 1, 12, 12)" in str(error.value)
        assert str(shape) in str(error.value)


def test_whole_numbers_other_than_bytes_are_refused_because_their_range_is_unknown() -> None:
    with pytest.raises(UserError, match=r"uint8 \(0 to 255\) or floats .*int64"):
        tiny().predict(np.full((12, 12), 255, np.int64))


# --- Compilation and export --------------------------------------------------------------------------------------


def check_compiled(model: nn.Module, backend: str) -> None:
    images = torch.rand(2, 1, 12, 12)
    expected = model(images)
    result = torch.compile(model, fullgraph=True, backend=backend)(images)
    torch.testing.assert_close(result.lengths, expected.lengths, rtol=1e-4, atol=1e-5)
    weights = [p for name, p in model.named_parameters() if not name.startswith("decoder")]
    ours, theirs = (torch.autograd.grad(y.lengths.square().sum(), weights) for y in (result, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.fixture
def _fresh_compiler() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("changes", [{}, {"shared": True, "leaky": True, "routing_bias": True}, {"stem_norm": True}])
def test_the_capsule_network_compiles_without_a_break_in_the_graph(changes: dict) -> None:
    check_compiled(tiny(**changes).eval(), "aot_eager")


@pytest.mark.usefixtures("_fresh_compiler")
def test_the_cnn_compiles_without_a_break_in_the_graph() -> None:
    check_compiled(CNN(TINY_CNN).eval(), "aot_eager")


@pytest.mark.slow
@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_capsule_network_compiles_to_machine_code() -> None:
    check_compiled(tiny().eval(), "inductor")


@pytest.mark.parametrize("make", [tiny, lambda: tiny(shared=True, hidden_caps=((5, 4),)), lambda: CNN(TINY_CNN)])
def test_an_exported_network_takes_any_batch_and_gives_the_same(make: Callable[[], nn.Module]) -> None:
    model = make().eval()
    shapes = {"images": {0: torch.export.Dim("b")}}
    program = torch.export.export(model, (torch.rand(3, 1, 12, 12),), dynamic_shapes=shapes)
    for n in (1, 3, 8):
        images = torch.rand(n, 1, 12, 12)
        with torch.no_grad():
            torch.testing.assert_close(program.module()(images).lengths, model(images).lengths)


# --- Learning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"shared": True}, {"routing_bias": True, "leaky": True}, {"detach": True}])
def test_one_batch_can_be_learnt_by_heart(changes: dict) -> None:
    model = tiny(**changes)
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(9, 1, 12, 12, generator=generator), torch.arange(9) % 3
    targets = one_hot(labels, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        output = model(images)
        margin = margin_loss(output.lengths, targets)
        painted = model.reconstruct(output.poses, labels)
        assert painted is not None
        loss = margin + 0.0005 * reconstruction_loss(painted, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert margin.item() < 0.02
    assert torch.equal(model.predict(images).labels, labels)


# --- Config ------------------------------------------------------------------------------------------------------


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_the_way_through_json(name: str) -> None:
    config = get_preset(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.preset == name


def test_every_field_survives_the_way_through_json() -> None:
    model = replace(TINY, hidden_caps=((5, 4), (3, 2)), shared=True, init="official", stem_channels=(), stem_kernels=())
    config = Config(data="folder:x", image_size=64, epochs=2, lr=1, precision="bf16", model=model)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("epohcs",), 3, "Config has fields .* epohcs"),
        (("model", "depth"), 3, "CapsNetConfig has fields .* depth"),
        (("loss", "weird"), 3, "LossConfig has fields .* weird"),
        (("augment", "weird"), 3, "Augment has fields .* weird"),
        (("model", "kind"), "capsnt", "no kind of model 'capsnt'; did you mean 'capsnet'"),
        (("epochs",), "ten", "Config.epochs is 'ten'"),
        (("epochs",), True, "Config.epochs is True"),
        (("batch_size",), 1.5, "Config.batch_size is 1.5"),
        (("schedule",), "sometimes", "Config.schedule is 'sometimes'"),
        (("model", "image_shape"), [1, 28], "image_shape is"),
        (("model", "hidden_caps"), [[5, 4, 3]], "hidden_caps is"),
        (("model", "leaky"), 1, "leaky is 1"),
        (("loss", "present"), None, "present is None"),
        (("model",), None, "Config has no model"),
    ],
)
def test_a_config_that_does_not_fit_is_named_by_its_field(path: tuple[str, ...], value: object, said: str) -> None:
    record = to_dict(get_preset("paper"))
    inside = record
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    with pytest.raises(UserError, match=said):
        from_dict(record)


@pytest.mark.parametrize("name", ["model", "loss", "augment"])
def test_a_config_with_a_part_missing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"Config has no {name}"):
        from_dict(without(to_dict(get_preset("paper")), name))


def test_an_unknown_preset_lists_the_choices() -> None:
    with pytest.raises(UserError, match=r"no preset or model 'papr'; did you mean 'paper'\?.*official.*quick"):
        create_model("papr")


def test_a_field_without_help_does_not_exist() -> None:
    for kind in (CapsNetConfig, CNNConfig, Config):
        source = inspect.getsource(kind)
        for field in fields(kind):
            after = source.split(f"\n    {field.name}:")[1].split("\n")[1].strip()
            assert after.startswith('"""'), f"{kind.__name__}.{field.name}"


# --- To disk and back --------------------------------------------------------------------------------------------


def saved(folder: Path, model: CapsNet | CNN | None = None) -> Path:
    path = folder / checkpoint.MODEL_FILE
    checkpoint.save_model(path, model or tiny(), {"why": "test"})
    return path


def rewritten(path: Path, change: Callable[[dict, dict], object]) -> Path:
    """The file with its tensors or its record changed."""
    tensors, record = checkpoint.read_tensors(path)
    change(tensors, record)
    checkpoint.write_tensors(path, tensors, record)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        capsnet.load(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("make", [tiny, lambda: tiny(stem_norm=True, hidden_caps=((5, 4),)), lambda: CNN(TINY_CNN)])
def test_a_saved_model_comes_back_the_same(tmp_path: Path, make: Callable[[], CapsNet | CNN]) -> None:
    model = make()
    model.classes = ("apple", "pear", "Käse ☂")
    images = torch.rand(3, 12, 12)
    path = saved(tmp_path, model)
    for place in (tmp_path, path, str(path)):
        loaded = capsnet.load(place)
        assert loaded.classes == model.classes
        assert loaded.config == model.config
        assert not loaded.training
        assert torch.equal(loaded.predict(images).lengths, model.predict(images).lengths)


def test_a_cnn_for_several_labels_stays_one(tmp_path: Path) -> None:
    model = CNN(TINY_CNN)
    model.multi_label = True
    images = torch.rand(2, 12, 12)
    loaded = capsnet.load(saved(tmp_path, model))
    assert torch.equal(loaded.predict(images).lengths, model.predict(images).lengths)


def test_a_checkpoint_is_readable_by_everyone_who_may_read_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    assert saved(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 0.3, 0.5, 0.999, -1])
def test_half_a_file_is_refused(tmp_path: Path, cut: float) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    at = int(cut * len(whole)) if 0 < cut < 1 else int(cut)
    path.write_bytes(whole[:at])
    assert "damaged or only half there" in refusal(path)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" + b"x" * 500, b"{}", b"\xff" * 4096])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert "damaged" in refusal(path)


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Payload()))
    assert "damaged" in refusal(path)
    torch.save(tiny().state_dict(), path)
    assert "damaged" in refusal(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = tiny()
    with torch.no_grad():
        model.get_parameter("caps.0.weight")[0, 0, 0, 0] = value
    assert "caps.0.weight that are not finite" in refusal(saved(tmp_path, model))


def renamed(tensors: dict[str, Tensor], record: dict) -> None:
    tensors["stem.0.wait"] = tensors.pop("stem.0.weight")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors, record: record["model"].update(class_dim=7),
            r"\(64, 3, 6, 4\) in the file and \(64, 3, 7, 4\)",
        ),
        (lambda tensors, record: tensors.pop("stem.0.bias"), "stem.0.bias is missing or too many"),
        (lambda tensors, record: tensors.update(more=torch.ones(1)), "more is missing or too many"),
        (renamed, "stem.0.wait"),
        (lambda tensors, record: record["model"].update(weird=1), "weird"),
        (lambda tensors, record: record["model"].update(num_classes="x"), "num_classes"),
        (lambda tensors, record: record["model"].update(image_shape=[1, -4, 12]), "too small"),
        (lambda tensors, record: record["model"].update(class_dim=-1), "describe a network"),
        (lambda tensors, record: record.update(model=3), "describe a network"),
        (lambda tensors, record: record.update(classes=["one"]), "3 classes"),
        (lambda tensors, record: record.pop("classes"), "3 classes"),
        (lambda tensors, record: record.pop("model"), "not a model"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable, said: str) -> None:
    assert re.search(said, refusal(rewritten(saved(tmp_path), change)))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    safetensors.torch.save_file({"x": torch.ones(1)}, path)
    assert "not written by this version" in refusal(path)


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no checkpoint" in refusal(tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match="no checkpoint"):
        capsnet.load(tmp_path)
    (tmp_path / checkpoint.STATE_FILE).write_bytes(b"")
    with pytest.raises(UserError, match="has not finished"):
        capsnet.load(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from capsnet import checkpoint
from capsnet.config import CapsNetConfig
from capsnet.models import CapsNet
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the system refuses to write more, as a full disk does
try:
    checkpoint.save_model(Path(sys.argv[1]), CapsNet(CapsNetConfig((1, 28, 28), 3, primary_types=2, decoder=())), {})
except checkpoint.UserError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_full_disk_leaves_the_previous_file_good(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert "refused" in done.stderr, done.stderr
    assert str(path) in done.stderr
    assert "The previous file is still good" in done.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert capsnet.load(path).classes == ("0", "1", "2")


def test_a_kill_while_writing_leaves_the_previous_file_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, tiny(class_dim=9))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_is_replaced_in_one_stroke_and_never_rewritten(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        saved(tmp_path, tiny(class_dim=9))
        assert reader.read() == before  # whoever reads the old one reads it whole
    assert path.read_bytes() != before


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"could not write .*file"):
        saved(tmp_path / "file")


def test_the_class_capsules_are_called_so_that_hooks_and_pruning_work() -> None:
    model, fired = create_model("quick"), []
    model.caps[-1].register_forward_hook(lambda *_: fired.append(1))
    prune.random_unstructured(model.caps[-1], "weight", amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # the second time the mask has to be laid over the weight anew
        model(torch.rand(2, 1, 28, 28)).lengths.sum().backward()
        optimizer.step()
    assert len(fired) == 2


def test_a_part_that_is_frozen_stays_so_when_something_is_predicted() -> None:
    model = create_model("quick").train()
    model.stem.eval()
    model.predict(torch.rand(2, 28, 28))
    assert model.training
    assert model.caps.training
    assert not any(module.training for module in model.stem.modules())


def test_a_head_can_be_trained_on_predicted_poses() -> None:
    poses = create_model("quick").predict(torch.rand(2, 28, 28)).poses
    head = nn.Linear(160, 3)
    head(poses.flatten(1)).sum().backward()
    assert head.weight.grad is not None
