"""The network as a whole computes the same with kernels as without: outputs, and the gradient of every weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from capsnet import kernels
from capsnet.data import multi_hot
from capsnet.kernels import convolution, routing, stem
from capsnet.models.base import Output
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.losses import margin_loss, reconstruction_loss
from capsnet.routing import DynamicOptions
from samples import sample

# Small, but large enough for every kernel. The larger image has its convolution cut into tiles.
SMALL = CapsNetConfig(stem_channels=(128,), primary_types=16, decoder=(64,))
LARGER = replace(SMALL, image_shape=(1, 36, 36), stem_channels=(64,), primary_types=8)
OPTIONS: list[dict[str, Any]] = [
    {"routing": DynamicOptions(leaky=True)}, {"routing": DynamicOptions(bias=True)},
    {"routing": DynamicOptions(detach=True)}, {"shared": True}, {"primary_factor": True}, {"primary_squash": False},
    {"routing": DynamicOptions(leaky=True, bias=True), "shared": True, "hidden_caps": ((20, 12),)},
    *({"routing": DynamicOptions(iterations=r)} for r in (1, 2, 4)),
]  # fmt: skip

Results = dict[str, Tensor]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kernels that have run, whether called by PyTorch or by a compiled graph."""
    names: set[str] = set()

    def watch(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def watched(*arguments: Any) -> Any:
            names.add(f"{module.__name__.split('.')[-1]}.{name}")
            return function(*arguments)

        monkeypatch.setattr(module, name, watched)

    for module in (stem, convolution):
        watch(module, "multiply")
        watch(module, "multiply_backward")
    watch(routing, "choose")
    return names


def new_model(config: CapsNetConfig, seed: int = 0) -> CapsNet:
    torch.manual_seed(seed)
    return CapsNet(config)


def results(model: CapsNet, forward: Callable[[Tensor], Output] | None = None, b: int = 32) -> Results:
    """What the model says of random images, and the gradients of its loss."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(b, *model.config.image_shape, generator=generator)
    labels = torch.randint(model.config.num_classes, (b,), generator=generator)
    output = (model if forward is None else forward)(images)
    decoded = model.reconstruct(output.poses, labels)
    assert decoded is not None
    loss = margin_loss(output.activations, multi_hot(labels, 10)) + 0.0005 * reconstruction_loss(decoded, images)
    model.zero_grad()
    loss.backward()
    slopes = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(slopes) == len(list(model.parameters()))
    return {
        "activations": output.activations.detach(),
        "poses": output.poses.detach(),
        "decoded": decoded.detach(),
        **slopes,
    }


def plain_results(model: CapsNet) -> Results:
    with kernels.plain():
        return results(model)


def assert_the_same(came: Results, expected: Results) -> None:
    for name, right in expected.items():
        error = (came[name] - right).abs().max() / right.abs().max()
        assert error < (1e-4 if name.startswith("gradient") else 1e-5), (name, float(error))


def every_kernel_of(config: CapsNetConfig) -> set[str]:
    where = "stem" if config.image_shape[1] == 28 else "convolution"
    return {f"{where}.multiply", f"{where}.multiply_backward", "routing.choose"}


@pytest.mark.parametrize(("options", "config"), sample(len(OPTIONS), OPTIONS, [SMALL, LARGER]))
def test_a_network_computes_the_same_with_kernels_as_without(
    config: CapsNetConfig, options: dict[str, Any], taken: set[str]
) -> None:
    model = new_model(replace(config, **options))
    expected = plain_results(model)
    assert not taken
    assert_the_same(results(model), expected)
    assert taken == every_kernel_of(config)


@pytest.mark.parametrize("config", [SMALL, LARGER], ids=["28x28", "36x36"])
def test_new_weights_are_used_at_once(config: CapsNetConfig, taken: set[str]) -> None:
    model = new_model(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    before = results(model)
    optimizer.step()
    after = results(model)
    assert_the_same(after, plain_results(model))
    assert (after["activations"] - before["activations"]).abs().max() > 1e-3
    model.load_state_dict(new_model(config, seed=9).state_dict())
    loaded = results(model)
    assert_the_same(loaded, plain_results(model))
    assert_the_same(loaded, results(new_model(config, seed=9)))
    assert taken == every_kernel_of(config)


@pytest.mark.filterwarnings("ignore")  # the compiler's own deprecations
@pytest.mark.parametrize("config", [SMALL, LARGER], ids=["28x28", "36x36"])
def test_a_compiled_network_is_one_graph_with_the_same_kernels(config: CapsNetConfig, taken: set[str]) -> None:
    model = new_model(config)
    expected = plain_results(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert_the_same(results(model, compiled), expected)
        assert taken == every_kernel_of(config)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected = plain_results(model)
        taken.clear()
