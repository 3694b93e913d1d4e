"""The networks: the paper's sizes, any other sizes, prediction, compilation and learning."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from capsnet.data import multi_hot
from capsnet.errors import UserError
from capsnet.io.transfer import create_model
from capsnet.models.capsnet import CapsNet
from capsnet.models.cnn import CNN
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig, ModelConfig
from capsnet.models.registry import build, parameters
from capsnet.nn.functional import Capsules, lengths, mask, squash
from capsnet.nn.layers import DenseCaps
from capsnet.nn.losses import margin_loss, reconstruction_loss
from capsnet.routing import DynamicOptions, options_for
from capsnet.train.presets import get_preset
from tiny_models import TINY, TINY_CNN, tiny

# --- Sizes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (CapsNetConfig(), 8_215_568),
        (CapsNetConfig(routing=DynamicOptions(bias=True)), 8_215_568 + 160),
        (CapsNetConfig(decoder=()), 6_804_224),
        (CapsNetConfig((1, 36, 36)), 11_361_808),
        (CapsNetConfig((1, 36, 36), routing=DynamicOptions(bias=True)), 11_361_808 + 160),
        (get_preset("baseline-mnist").model, 35_445_522),
        (get_preset("baseline-multimnist").model, 24_563_978),
    ],
)
def test_the_papers_networks_have_the_papers_numbers_of_parameters(config: ModelConfig, count: int) -> None:
    assert parameters(config) == count


def test_the_papers_network_has_the_papers_shapes() -> None:
    model = create_model("paper", device=torch.device("meta"))
    output = model(torch.empty(2, 1, 28, 28, device="meta"))
    assert output.primary.shape == (2, 1152, 8)
    assert output.poses.shape == (2, 10, 16)
    assert output.activations.shape == (2, 10)


@given(
    st.tuples(st.integers(1, 4), st.integers(7, 14), st.integers(7, 14)),
    st.integers(1, 5),
    st.integers(1, 4),
    st.sampled_from([(), ((5, 3),), ((4, 2), (3, 7))]),
    st.sampled_from([(), (5,), (6, 7)]),
    st.fixed_dictionaries(
        {name: st.booleans() for name in ("shared", "stem_norm", "primary_factor", "primary_squash")}
    ),
    st.fixed_dictionaries({name: st.booleans() for name in ("leaky", "bias", "detach")}),
)
@settings(max_examples=30)
def test_any_image_size_channels_classes_and_depth_work(
    image_shape: tuple[int, int, int],
    classes: int,
    iterations: int,
    hidden: tuple,
    decoder: tuple,
    flags: dict,
    routing: dict,
) -> None:
    config = replace(
        TINY, image_shape=image_shape, num_classes=classes, hidden_caps=hidden, decoder=decoder,
        routing=DynamicOptions(iterations=iterations, **routing), **flags,
    )  # fmt: skip
    model = CapsNet(config)
    images = torch.rand(2, *image_shape)
    output = model(images, trace=True)
    assert output.activations.shape == (2, classes)
    assert output.poses is not None
    assert output.poses.shape == (2, classes, 6)
    assert output.trace is not None
    assert output.trace.logits.shape[0] == iterations
    decoded = model.reconstruct(output.poses, torch.zeros(2, dtype=torch.long))
    assert (decoded is None) == (not decoder)
    if decoded is not None:
        assert decoded.shape == images.shape
    output.activations.sum().backward()
    assert all(p.grad is not None for name, p in model.named_parameters() if not name.startswith("decoder"))


def test_primary_capsules_keep_the_lengths_of_the_convolution_unless_they_are_squashed() -> None:
    squashed, free = tiny(), tiny(primary_squash=False)
    free.load_state_dict(squashed.state_dict())
    images = 9 * torch.rand(2, *TINY.image_shape)
    found = free(images).primary
    assert found is not None
    assert found.norm(dim=-1).detach().max() > 1
    torch.testing.assert_close(squash(found), squashed(images).primary)
    assert "not squashed" in free.describe()
    assert "not squashed" not in squashed.describe()


@pytest.mark.parametrize("name", ["em", "vb", "self-routing"])
def test_long_primary_capsules_are_as_active_as_squashed_ones(name: str) -> None:
    model = tiny(primary_squash=False, routing=options_for(name))
    images = 9 * torch.rand(2, *TINY.image_shape)
    primary = model.primary_capsules(images)
    seen = model.with_activations(primary)
    assert isinstance(seen, Capsules)
    torch.testing.assert_close(seen.activations, lengths(squash(primary)))
    assert seen.activations.detach().max() < 1 < primary.norm(dim=-1).detach().max()
    expected = model.caps[0].route(primary, seen.activations).activations  # type: ignore[operator, union-attr]
    for found in (model(images), model(images, trace=True)):
        torch.testing.assert_close(found.activations, expected)


def test_the_choices_of_the_config_reach_the_layers() -> None:
    routing = DynamicOptions(iterations=2, leaky=True, bias=True)
    plain, other = tiny(), tiny(shared=True, hidden_caps=((5, 4),), primary_factor=True, routing=routing)
    assert plain.get_parameter("caps.0.weight").shape == (64, 3, 6, 4)
    assert other.get_parameter("caps.0.weight").shape == (4, 5, 4, 4)
    assert other.get_parameter("caps.1.weight").shape == (5, 3, 6, 4)
    assert other.get_parameter("caps.1.routing.bias").shape == (3, 6)
    assert (plain.primary.factor, other.primary.factor) == (1, 1 / 4)
    for layer in other.caps:
        assert isinstance(layer, DenseCaps)
        assert layer.routing.options == routing


def test_options_of_the_routing_can_be_replaced_for_one_pass() -> None:
    model, images = tiny(hidden_caps=((5, 4),)), torch.rand(2, 1, 12, 12)
    once = tiny(hidden_caps=((5, 4),), routing=DynamicOptions(iterations=1))
    output = model(images, trace=True, routing={"iterations": 1})
    torch.testing.assert_close(output.poses, once(images).poses)
    assert output.trace is not None
    assert len(output.trace.couplings) == 1
    assert model.config.routing == DynamicOptions()
    torch.testing.assert_close(model(images).poses, tiny(hidden_caps=((5, 4),))(images).poses)


@pytest.mark.parametrize("image_shape", [(3, 9, 14), (1, 8, 8)])
@pytest.mark.parametrize("classes", [1, 7])
def test_the_cnn_takes_any_image_size_channels_and_classes(image_shape: tuple[int, int, int], classes: int) -> None:
    model = CNN(replace(TINY_CNN, image_shape=image_shape, num_classes=classes))
    output = model(torch.rand(2, *image_shape))
    torch.testing.assert_close(output.activations.sum(1), torch.ones(2))
    assert output.logits is not None
    assert output.logits.shape == (2, classes)
    model.multi_label = True
    torch.testing.assert_close(model.eval()(torch.zeros(1, *image_shape)).activations.logit(),
                               model(torch.zeros(1, *image_shape)).logits)  # fmt: skip


def test_an_unknown_preset_lists_the_choices() -> None:
    with pytest.raises(UserError, match=r"no preset or model 'papr'; did you mean 'paper'\?.*official.*quick"):
        create_model("papr")


def test_create_model_adapts_a_preset_to_the_data() -> None:
    model = create_model("quick", num_classes=4, image_shape=(3, 32, 24), dtype=torch.float64)
    output = model(torch.rand(1, 3, 32, 24, dtype=torch.float64))
    assert output.activations.shape == (1, 4)
    assert output.activations.dtype == torch.float64


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (replace(TINY, image_shape=(1, 4, 12)), "4×12 px is too small"),
        (replace(TINY, stem_kernels=(3, 3)), "one number for each convolution"),
        (replace(TINY_CNN, image_shape=(1, 1, 12)), "1×12 px is too small"),
        (replace(TINY_CNN, kernels=(3,)), "one number for each convolution"),
        (replace(TINY_CNN, kernels=(3, 4)), "use an odd one"),
    ],
)
def test_a_network_that_cannot_be_is_refused_in_words(config: ModelConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(config)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: CapsNetConfig(pose="matrx"), "no pose 'matrx'; did you mean 'matrix'"),  # type: ignore[arg-type]
        (lambda: LossConfig(kind="spred"), "no loss 'spred'; did you mean 'spread'"),  # type: ignore[arg-type]
    ],
)
def test_a_misspelt_choice_is_refused_and_not_taken_for_the_default(make: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make()


def test_a_prediction_does_not_depend_on_its_batch_mates() -> None:
    for model in (tiny(stem_norm=True).eval(), CNN(TINY_CNN).eval()):
        images = torch.rand(4, 1, 12, 12)
        alone = torch.cat([model(image[None]).activations for image in images])
        torch.testing.assert_close(model(images).activations, alone)


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
        torch.testing.assert_close(one, model.decoder(mask(poses, multi_hot(classes[:, k], 3))))


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


def test_a_model_without_a_decoder_reconstructs_nothing() -> None:
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
    assert prediction.activations.shape == (n, 3)
    assert prediction.poses is not None
    assert prediction.poses.shape == (n, 3, 6)
    assert prediction.reconstructions is not None
    assert prediction.reconstructions.shape == (n, *image_shape)
    assert prediction.trace is None
    with torch.no_grad():
        torch.testing.assert_close(prediction.activations, model(images.reshape(n, *image_shape)).activations)


@pytest.mark.parametrize("way", [np.asarray, torch.from_numpy, mirrored, read_only])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64])
def test_predict_takes_bytes_and_floats_from_arrays_and_tensors(way: Callable, dtype: type) -> None:
    model = tiny()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 12, 12)).astype(np.uint8)
    images = way(pixels if dtype == np.uint8 else (pixels / 255).astype(dtype))
    expected = model.predict(torch.from_numpy(pixels).float() / 255)
    torch.testing.assert_close(model.predict(images).activations, expected.activations, rtol=1e-3, atol=1e-4)
    if dtype == np.uint8:
        torch.testing.assert_close(model.predict(images).activations, expected.activations)


def test_predict_names_the_longest_the_two_longest_or_all_that_are_long_enough() -> None:
    model, images = tiny(), torch.rand(4, 12, 12)
    activations = model.predict(images).activations
    assert torch.equal(model.predict(images).labels, activations.argmax(1))
    two = model.predict(images, top=2)
    assert torch.equal(two.labels, activations.argsort(1, descending=True)[:, :2])
    assert two.reconstructions is not None
    assert two.reconstructions.shape == (4, 2, 1, 12, 12)
    torch.testing.assert_close(two.reconstructions[:, 0], model.predict(images).reconstructions)
    between = float(activations.median())
    many = model.predict(images, threshold=between)
    assert torch.equal(many.labels, activations >= between)
    assert model.predict(images, top=99).labels.shape == (4, 3)


@pytest.mark.parametrize("kind", [tiny, lambda: CNN(TINY_CNN)])
def test_a_multi_label_model_names_all_that_are_there_unless_told_otherwise(kind: Callable) -> None:
    model, images = kind(), torch.rand(4, 1, 12, 12)
    assert not model.multi_label
    model.multi_label = True
    activations = model.predict(images).activations
    assert torch.equal(model.predict(images).labels, activations >= 0.5)
    assert torch.equal(model.predict(images, top=1).labels, activations.argmax(1))
    assert torch.equal(model.predict(images, threshold=0.1).labels, activations >= 0.1)


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
    assert whole.trace.variances is parts.trace.variances is None
    for one, other in zip(whole.trace[:5], parts.trace[:5], strict=True):
        torch.testing.assert_close(one, other)
    assert whole.trace.outputs.shape == (3, 7, 3, 6)
    torch.testing.assert_close(whole.trace.outputs[-1], whole.poses)


@pytest.mark.parametrize("training", [True, False])
def test_predict_evaluates_and_then_restores_the_mode(training: bool) -> None:
    for model in (tiny(stem_norm=True), CNN(TINY_CNN)):
        model.train(training)
        before = copy.deepcopy(model.state_dict())
        images = torch.rand(4, 12, 12)
        torch.testing.assert_close(model.predict(images).activations, model.predict(images).activations)  # no dropout
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
        torch.testing.assert_close(prediction.activations.float(), expected.activations, rtol=0.1, atol=0.02)


@pytest.mark.parametrize("shape", [(28, 28), (2, 3, 12, 12), (12, 12, 3), (12,), (1, 2, 1, 12, 12), (4, 12, 13)])
def test_a_wrong_shape_is_repeated_with_the_one_that_was_expected(shape: tuple[int, ...]) -> None:
    for model in (tiny(), CNN(TINY_CNN)):
        with pytest.raises(UserError) as error:
            model.predict(np.zeros(shape, np.float32))
        assert "(b, 1, 12, 12)" in str(error.value)
        assert str(shape) in str(error.value)


def test_whole_numbers_other_than_bytes_are_refused_because_their_range_is_unknown() -> None:
    with pytest.raises(UserError, match=r"uint8 \(0 to 255\) or float .*int64"):
        tiny().predict(np.full((12, 12), 255, np.int64))


# --- Compilation and export --------------------------------------------------------------------------------------


def check_compiled(model: nn.Module, backend: str) -> None:
    images = torch.rand(2, 1, 12, 12)
    expected = model(images)
    result = torch.compile(model, fullgraph=True, backend=backend)(images)
    torch.testing.assert_close(result.activations, expected.activations, rtol=1e-4, atol=1e-5)
    weights = [p for name, p in model.named_parameters() if not name.startswith("decoder")]
    ours, theirs = (torch.autograd.grad(y.activations.square().sum(), weights) for y in (result, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.fixture
def _fresh_compiler() -> Any:
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "changes", [{}, {"shared": True, "routing": DynamicOptions(leaky=True, bias=True)}, {"stem_norm": True}]
)
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
            torch.testing.assert_close(program.module()(images).activations, model(images).activations)


# --- Learning ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared": True},
        {"routing": DynamicOptions(bias=True, leaky=True)},
        {"routing": DynamicOptions(detach=True)},
    ],
)
def test_one_batch_can_be_learnt_by_heart(changes: dict) -> None:
    model = tiny(**changes)
    generator = torch.Generator().manual_seed(1)
    images, labels = torch.rand(9, 1, 12, 12, generator=generator), torch.arange(9) % 3
    targets = multi_hot(labels, 3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(150):
        output = model(images)
        margin = margin_loss(output.activations, targets)
        decoded = model.reconstruct(output.poses, labels)
        assert decoded is not None
        loss = margin + 0.0005 * reconstruction_loss(decoded, images)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert margin.item() < 0.02
    assert torch.equal(model.predict(images).labels, labels)


# --- As modules --------------------------------------------------------------------------------------------------


def test_the_class_capsules_are_called_so_that_hooks_and_pruning_work() -> None:
    model, fired = create_model("quick"), []
    model.caps[-1].register_forward_hook(lambda *_: fired.append(1))
    prune.random_unstructured(model.caps[-1], "weight", amount=0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):  # the second time the mask has to be laid over the weight anew
        model(torch.rand(2, 1, 28, 28)).activations.sum().backward()
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


def test_poses_may_be_matrices() -> None:
    config = CapsNetConfig(
        (1, 10, 10), 3, stem_channels=(6,), stem_kernels=(3,), primary_types=2, primary_dim=16, primary_kernel=3,
        decoder=(), pose="matrix", routing=options_for("em"),
    )  # fmt: skip
    model = CapsNet(config)
    assert model.caps[0].weight.shape == (18, 3, 4, 4)
    assert model(torch.rand(2, 1, 10, 10)).poses.shape == (2, 3, 16)
    with pytest.raises(UserError, match="matrix poses are square and of one size"):
        CapsNet(replace(config, class_dim=15))


def test_strides_instead_of_max_pooling_keep_every_shape() -> None:
    pooled = CNNConfig((1, 40, 40), 10, (4, 5, 6), (5, 5, 3), (2, 2, 2), (7,))
    models = [build(config) for config in (pooled, replace(pooled, strided=True))]
    shapes = [[tuple(p.shape) for p in model.parameters()] for model in models]
    assert shapes[0] == shapes[1]
    assert not any(isinstance(module, torch.nn.MaxPool2d) for module in models[1].modules())
    assert models[1](torch.rand(2, 1, 40, 40)).activations.shape == (2, 10)
    assert "stride 2" in models[1].describe()
    odd = replace(pooled, image_shape=(1, 29, 28), strided=True)  # a padded convolution rounds up
    assert build(odd)(torch.rand(2, 1, 29, 28)).activations.shape == (2, 10)
