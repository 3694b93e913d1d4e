"""What every registered routing algorithm promises, whatever its equations.

The sweep runs over the registry, so a new algorithm is covered as soon as it is registered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from capsnet.cli import main
from capsnet.data import Batch
from capsnet.errors import UserError
from capsnet.io import checkpoint, export
from capsnet.io.records import Certificate
from capsnet.kernels import dispatch
from capsnet.models.base import Output
from capsnet.models.branched import BranchedCapsNet, BranchedConfig
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, LossConfig
from capsnet.models.registry import model_from_dict, model_to_dict, parameters
from capsnet.nn.conv import ConvCaps
from capsnet.nn.functional import Capsules
from capsnet.nn.layers import DenseCaps
from capsnet.routing.base import ROUTINGS, Routed, Sizes, create, options_for
from capsnet.routing.options import RoutingOptions

NAMES = ROUTINGS.names()
ITERATIVE = [name for name in NAMES if any(f.name == "iterations" for f in fields(options_for(name)))]
SAMPLED = ("dynamic", "self-attention")  # compiled and exported in the normal tier; all others in the slow one
TRACED = [pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.slow) for name in NAMES]
WITHOUT_ITERATIONS = [name for name in NAMES if name not in ITERATIVE]
NEEDS_TWO = {"max-min", "self-routing"}  # their couplings or activations say nothing about a single upper capsule
LAYERS: dict[str, dict[str, Any]] = {"own": {}, "shared": {"shared": 4}, "matrix": {"matrix": True}}
TINY = CapsNetConfig(
    (1, 10, 10), 3, stem_channels=(6,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    class_dim=4, decoder=(12,),
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=LAYERS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["plain", "fast"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The readable form, and the kernels even where they do not pay."""
    if request.param == "plain":
        with dispatch.plain():
            yield request.param
    else:
        monkeypatch.setattr(dispatch, "routing_pays", lambda u, W: True)
        yield request.param


def dense(name: str, kind: str = "own", upper: int = 3, dtype: torch.dtype = torch.float32) -> DenseCaps:
    """12 lower capsules of 4 dimensions; all parameters are random, also those that start at zero."""
    torch.manual_seed(0)
    layer = DenseCaps(12, 4, upper, 4, routing=name, dtype=dtype, **LAYERS[kind]).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer


def poses(b: int = 2, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return scale * torch.randn(b, 12, 4, dtype=dtype, generator=torch.Generator().manual_seed(1))


def lower_activations(b: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(b, 12, dtype=dtype, generator=torch.Generator().manual_seed(2))


def assert_sane(routed: Routed, inputs: list[Tensor]) -> None:
    """Finite poses, activations in [0, 1], finite gradients."""
    assert routed.poses.isfinite().all()
    assert ((routed.activations >= 0) & (routed.activations <= 1 + 1e-5)).all()
    gradients = torch.autograd.grad(routed.poses.sum() + routed.activations.sum(), inputs, allow_unused=True)
    assert gradients[0] is not None
    assert all(gradient.isfinite().all() for gradient in gradients if gradient is not None)


def assert_same(found: Routed, expected: Routed, tolerance: float = 1e-9) -> None:
    for one, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


# --- What an output may depend on ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_permuting_lower_capsules_changes_nothing_above(name: str, path: str, given: bool) -> None:
    layer, u = dense(name, dtype=torch.float64), poses(dtype=torch.float64)
    a = lower_activations(2, torch.float64) if given else None
    before = layer.route(u, a)
    order = torch.randperm(12)
    with torch.no_grad():
        for parameter in layer.parameters():  # those of a lower capsule move along with it
            if parameter.dim() and len(parameter) == 12:
                parameter.copy_(parameter[order].clone())
    assert_same(layer.route(u[:, order], None if a is None else a[:, order]), before)


def test_a_prediction_does_not_depend_on_its_batch_mates(name: str, path: str, kind: str) -> None:
    layer, u, a = dense(name, kind, dtype=torch.float64), poses(5, dtype=torch.float64), lower_activations(5).double()
    together = layer.route(u, a)
    alone = [layer.route(u[k : k + 1], a[k : k + 1]) for k in range(5)]
    joined = Routed(torch.cat([r.poses for r in alone]), torch.cat([r.activations for r in alone]))
    assert_same(joined, together)


def test_routing_leaves_its_inputs_alone(name: str, path: str) -> None:
    layer, u, a = dense(name), poses(), lower_activations(2)
    before = u.clone(), a.clone()
    layer.route(u, a)
    assert torch.equal(u, before[0])
    assert torch.equal(a, before[1])


def test_nothing_synchronises_the_device(name: str) -> None:
    """A tensor on the meta device has no values, so reading one of them on the host fails."""
    layer = DenseCaps(12, 4, 3, 4, routing=name, device=torch.device("meta"))
    routed = layer.route(torch.empty(2, 12, 4, device="meta"), torch.empty(2, 12, device="meta"), trace=True)
    assert routed.poses.shape == (2, 3, 4)
    with pytest.raises(RuntimeError, match="meta"):
        float(routed.poses.sum())


# --- Values -------------------------------------------------------------------------------------------------------


def test_zeros_huge_and_tiny_poses_give_finite_outputs_and_gradients(name: str, path: str, kind: str) -> None:
    layer = dense(name, kind)
    for scale, a in product((0.0, 1e-20, 1.0, 1e4), (None, lower_activations(2))):
        u = poses(scale=scale).requires_grad_()
        assert_sane(layer.route(u, a), [u, *layer.parameters()])


@pytest.mark.parametrize("a", [0.0, 1.0])
def test_silent_and_certain_lower_capsules_give_finite_outputs_and_gradients(name: str, a: float) -> None:
    layer, u = dense(name), poses().requires_grad_()
    assert_sane(layer.route(u, torch.full((2, 12), a)), [u, *layer.parameters()])


@pytest.mark.parametrize("training", [False, True])
def test_autocast_gives_finite_float32_outputs_and_gradients(name: str, path: str, training: bool) -> None:
    layer, u = dense(name).train(training), poses().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routed = layer.route(u.bfloat16(), lower_activations(2).bfloat16())
    assert routed.poses.dtype == routed.activations.dtype == torch.float32
    assert_sane(routed, [u, *layer.parameters()])


def test_autocast_does_not_reach_into_routing(name: str, path: str) -> None:
    layer, u = dense(name), poses()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer.route(u)
    assert_same(found, layer.route(u), 1e-6)


def test_weights_in_bfloat16_are_routed_in_float32(name: str, path: str) -> None:
    layer, u = dense(name).bfloat16(), poses().bfloat16().requires_grad_()
    routed = layer.route(u)
    assert routed.poses.dtype == torch.float32
    assert_sane(routed, [u, *layer.parameters()])


def test_an_empty_batch_gives_an_empty_batch(name: str) -> None:
    assert dense(name).route(poses()[:0]).poses.shape == (0, 3, 4)


@pytest.mark.parametrize("upper", [1, 7])
def test_any_number_of_upper_capsules_works_or_is_refused_in_one_sentence(name: str, path: str, upper: int) -> None:
    if upper == 1 and name in NEEDS_TWO:
        with pytest.raises(UserError, match=rf"^{name}.* needs at least two upper capsules.*choose another routing"):
            dense(name, upper=upper)
        return
    layer, u = dense(name, upper=upper), poses().requires_grad_()
    assert_sane(layer.route(u), [u, *layer.parameters()])


# --- The trace ----------------------------------------------------------------------------------------------------


def test_the_trace_tells_what_happened_at_every_step(name: str, kind: str) -> None:
    layer, u, a = dense(name, kind), poses(), lower_activations(2)
    routed = layer.route(u, a, trace=True)
    assert routed.trace is not None
    steps = len(routed.trace.couplings)
    assert routed.trace.couplings.shape == (steps, 2, 12, 3)
    assert routed.trace.outputs.shape == (steps, 2, 3, 4)
    assert routed.trace.activations.shape == (steps, 2, 3)
    assert routed.trace.votes.shape == (2, 12, 3, 4)
    assert steps == getattr(layer.routing.options, "iterations", 1)
    assert_same(Routed(routed.trace.outputs[-1], routed.trace.activations[-1]), routed, 1e-6)
    assert_same(layer.route(u, a), routed, 1e-5)


def test_couplings_sum_to_what_the_algorithm_declares(name: str, kind: str) -> None:
    trace = dense(name, kind).route(poses(), lower_activations(2), trace=True).trace
    assert trace is not None
    sums = trace.couplings[-1].sum(-1)
    if ROUTINGS.get(name).couplings_sum_to_one:
        torch.testing.assert_close(sums, torch.ones(2, 12))
    else:
        assert (sums - 1).abs().max() > 0.05


@pytest.mark.parametrize("iterations", [2.5, "3", None])
def test_iterations_are_an_integer(iterations: object) -> None:
    with pytest.raises(UserError, match="should be an integer"):
        options_for("em", iterations=iterations)


@pytest.mark.parametrize("name", ITERATIVE)
def test_iterations_can_be_changed_for_one_call(name: str) -> None:
    layer = dense(name)
    trace = layer.route(poses(), trace=True, iterations=5).trace
    assert trace is not None
    assert len(trace.couplings) == 5
    assert layer.routing.options.iterations == options_for(name).iterations  # type: ignore[attr-defined]


# --- Layers and networks ------------------------------------------------------------------------------------------


def test_layers_stack_and_pass_their_activations_on(name: str) -> None:
    torch.manual_seed(0)
    hidden, top = DenseCaps(12, 4, 5, 6, routing=name), DenseCaps(5, 6, 3, 4, routing=name)
    u = poses().requires_grad_()
    found = top(hidden(u))
    assert isinstance(found, Capsules) == ROUTINGS.get(name).own_activations
    assert_sane(
        top.route(*(below if isinstance(below := hidden(u), Capsules) else (below,))), [u, *hidden.parameters()]
    )


@pytest.mark.parametrize("matrix", [False, True])
def test_capsules_on_a_grid(name: str, matrix: bool) -> None:
    torch.manual_seed(0)
    layer = ConvCaps(3, 4, 5, 4, kernel=3, stride=2, routing=name, matrix=matrix)
    u = torch.randn(2, 7, 7, 3, 4, requires_grad=True)
    routed = layer.route(u)
    assert routed.poses.shape == (2, 3, 3, 5, 4)
    assert_sane(routed, [u, *layer.parameters()])


NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stacked": {"hidden_caps": ((5, 6), (4, 5))},
    "shared": {"shared": True},
    "seven classes": {"num_classes": 7},
}


def network(name: str, **changes: Any) -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(replace(TINY, **{"routing": options_for(name), **changes}))


def short(name: str) -> RoutingOptions:
    """Options with two iterations, because every iteration is compiled by itself."""
    return options_for(name, iterations=2) if name in ITERATIVE else options_for(name)


def rows(classes: int, multi_label: bool = False) -> Batch:
    """Images whose class can be seen: a bright row at its own height; with several labels, two of them."""
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(4 * classes) % classes
    targets = torch.eye(classes)[labels]
    if multi_label:
        targets = (targets + targets.roll(1, 1)).clamp(max=1)
    images = 0.1 * torch.rand(len(labels), 1, 10, 10, generator=generator)
    images[:, 0, :classes] += 0.9 * targets[:, :, None]
    return Batch(images, targets, targets, torch.arange(len(labels)))


@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("loss", ["margin", "entropy", "spread"])
def test_every_loss_trains_every_algorithm(name: str, loss: Any, multi_label: bool) -> None:
    model, batch, config = network(name), rows(3, multi_label), LossConfig(kind=loss)
    model.multi_label = multi_label
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(25):
        total = model.loss(model(batch.images), batch, config).total
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    assert losses[-1] < (0.9 if multi_label else 0.8) * losses[0]  # those of self-routing share a sum of 1


@pytest.mark.parametrize("changes", NETWORKS)
def test_networks_of_any_shape_take_a_step(name: str, changes: str) -> None:
    model = network(name, **NETWORKS[changes])
    batch = rows(model.config.num_classes)
    output = model(batch.images)
    assert output.activations.shape == (len(batch.images), model.config.num_classes)
    model.loss(output, batch, LossConfig()).total.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    assert gradients["stem.0.weight"].any()
    assert gradients[f"caps.{len(model.caps) - 1}.weight"].any()


def test_the_trace_of_a_network_is_the_networks_prediction(name: str) -> None:
    model, images = network(name, hidden_caps=((5, 6),)).eval(), rows(3).images
    plain, traced = model(images), model(images, trace=True)
    torch.testing.assert_close(traced.activations, plain.activations)
    torch.testing.assert_close(traced.poses, plain.poses)


def test_a_branched_network_joins_its_branches(name: str) -> None:
    torch.manual_seed(0)
    own = {field.name: getattr(TINY, field.name) for field in fields(TINY)}
    config = BranchedConfig(**{**own, "routing": options_for(name)}, branches=2, trunk=0)
    model, batch = BranchedCapsNet(config).eval(), rows(3)
    output = model(batch.images, trace=True)
    assert output.trace is not None
    torch.testing.assert_close(output.trace.activations[-1], output.activations)
    assert ((output.activations >= 0) & (output.activations <= 1)).all()
    model.loss(output, batch, LossConfig()).total.backward()
    assert all(model.branches[k].primary.conv.weight.grad.any() for k in range(2))  # type: ignore[union-attr]


def test_what_belongs_to_a_class_can_be_transferred_class_by_class(name: str) -> None:
    three, four = network(name), network(name, num_classes=4)
    for key, tensor in three.state_dict().items():
        if tensor.shape != four.state_dict()[key].shape:
            view = three.by_class(key, tensor)
            assert view is not None, key
            assert len(view) == 3, key


def test_parameters_are_counted_without_memory_for_them(name: str) -> None:
    model = network(name)
    assert parameters(model.config) == sum(p.numel() for p in model.parameters())


# --- Compiled, exported, saved, trained by the command line --------------------------------------------------------


@pytest.mark.parametrize("name", TRACED)
def test_a_layer_compiles_for_any_batch(name: str) -> None:
    layer = DenseCaps(12, 4, 3, 4, routing=short(name))
    compiled = torch.compile(layer.route, backend="aot_eager", fullgraph=True, dynamic=True)
    for b in (2, 5):
        u, a = poses(b).requires_grad_(), lower_activations(b)
        found, expected = compiled(u, a), layer.route(u, a)
        assert_same(found, expected, 1e-5)
        (one,), (other,) = (torch.autograd.grad(routed.poses.square().sum(), u) for routed in (found, expected))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRACED)
def test_a_network_is_exported(name: str) -> None:
    """ONNX is written from a program of `torch.export`, so both formats are covered."""
    pytest.importorskip("onnxruntime")
    model = network(name, decoder=(), routing=short(name)).eval()
    export.check(model, export.load_onnx(export.to_onnx(model)))


def test_a_network_is_saved_and_reloaded(name: str, tmp_path: Path) -> None:
    model = network(name, routing=short(name)).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    checkpoint.save_model(tmp_path / "model.safetensors", model, Certificate())
    again = checkpoint.load(tmp_path)
    assert again.config == model.config == model_from_dict(model_to_dict(model.config))
    images = rows(3).images
    one, other = (part(images) for part in (model, again))
    assert isinstance(other, Output)
    assert torch.equal(one.activations, other.activations)
    assert torch.equal(one.poses, other.poses)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of 24 images of 28×28 px in three classes."""
    folder = tmp_path_factory.mktemp("photos")
    random = np.random.default_rng(0)
    for k in range(24):
        image = random.integers(0, 60, (28, 28))
        image[8 * (k % 3) : 8 * (k % 3) + 4] += 180
        (folder / "abc"[k % 3]).mkdir(exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(folder / "abc"[k % 3] / f"{k}.png")
    return folder


def train(name: str, photos: Path, out: Path, *flags: str) -> int:
    words = ["train", "--preset", "quick", "--data", f"folder:{photos}", "--model.routing", name, "--epochs", "2"]
    return main([*words, "--batch-size", "8", "--no-report", "--no-tensorboard", "--out", str(out), *flags])


def test_the_command_line_trains_with_it(name: str, photos: Path, tmp_path: Path) -> None:
    assert train(name, photos, tmp_path / "run") == 0
    assert checkpoint.load(tmp_path / "run").config.routing.algorithm == name


# --- Bad input: one sentence, exit code 2 --------------------------------------------------------------------------


def fails(capsys: pytest.CaptureFixture[str], code: int, *expected: str) -> None:
    error = capsys.readouterr().err
    assert code == 2
    assert len(error.strip().splitlines()) == 1
    assert all(text in error for text in expected), error


def test_an_unknown_option_is_refused(
    name: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=f"no option of {name} routing 'sharpnes'"):
        DenseCaps(12, 4, 3, 4, routing=name, sharpnes=1)
    fails(capsys, train(name, photos, tmp_path / "run", "--model.routing.sharpnes", "1"), "--model.routing.sharpnes")


@pytest.mark.parametrize("name", ITERATIVE)
def test_no_iteration_is_refused(name: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="iterations=0 is out of range"):
        options_for(name, iterations=0)
    code = train(name, photos, tmp_path / "run", "--model.routing.iterations", "0")
    fails(capsys, code, "iterations=0 is out of range")


@pytest.mark.parametrize("name", sorted(NEEDS_TWO))
def test_the_command_line_refuses_one_upper_capsule(
    name: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train(name, photos, tmp_path / "run", "--model.hidden-caps", "1", "4")
    fails(capsys, code, "needs at least two upper capsules")


@pytest.mark.parametrize("name", WITHOUT_ITERATIONS)
def test_an_algorithm_of_one_pass_has_no_iterations(name: str) -> None:
    with pytest.raises(UserError, match=f"no option of {name} routing 'iterations'"):
        options_for(name, iterations=3)


@pytest.mark.parametrize("wrong", [-0.5, 1.5])
def test_activations_outside_zero_and_one_are_refused(name: str, path: str, wrong: float) -> None:
    a = lower_activations(2)
    a[1, 3] = wrong
    with pytest.raises(UserError, match=rf"lower activations are in \[0, 1\] and these go from .*{wrong}"):
        dense(name).route(poses(), a)


def test_activations_of_a_wrong_shape_are_refused(name: str, path: str) -> None:
    with pytest.raises(UserError, match=r"lower activations are \(b, i\), here \(2, 12\), and got \(2, 3\)"):
        dense(name).route(poses(), torch.rand(2, 3))


def test_poses_that_do_not_fit_the_transformations_are_refused(name: str, path: str) -> None:
    routing = create(name)
    routing.build(Sizes(12, 4, 3, 4, 12))
    with pytest.raises(UserError, match="routing expects u"):
        routing(torch.randn(2, 11, 4), torch.randn(12, 3, 4, 4))


def test_a_module_belongs_to_one_layer(name: str) -> None:
    layer = dense(name)
    with pytest.raises(UserError, match="already belongs to a layer"):
        DenseCaps(12, 4, 3, 4, routing=layer.routing)
