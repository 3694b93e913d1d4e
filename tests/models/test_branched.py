"""Branches: capsule networks after a shared trunk that see nothing of each other and are joined in their capsules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from capsnet.data import Batch, multi_hot
from capsnet.errors import UserError
from capsnet.models.branched import BranchedCapsNet, BranchedConfig
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import LossConfig
from capsnet.nn.losses import margin_loss
from capsnet.routing import DynamicOptions

CONFIG = BranchedConfig(
    (1, 12, 12), 3, stem_channels=(4, 6, 6), stem_kernels=(3, 3, 1), stem_strides=(1, 1, 1), stem_norm=True,
    primary_types=4, primary_dim=4, primary_kernel=3, class_dim=6, decoder=(16,), branches=2, trunk=1,
)  # fmt: skip


def branched(**changes: Any) -> BranchedCapsNet:
    torch.manual_seed(0)
    return BranchedCapsNet(replace(CONFIG, **changes))


def alone(model: BranchedCapsNet, images: torch.Tensor, k: int) -> Any:
    """What one branch says of the trunk's features."""
    return model.branches[k](model.trunk(images), trace=True)


@pytest.mark.parametrize("trunk", [0, 1, 2])
def test_branches_share_the_trunk_and_nothing_else(trunk: int) -> None:
    model = branched(trunk=trunk)
    model.branches[0](model.trunk(torch.rand(4, 1, 12, 12))).activations.sum().backward()
    assert all(p.grad is not None for p in model.trunk.parameters())
    assert all(p.grad is not None for p in model.branches[0].parameters())
    assert all(p.grad is None for p in model.branches[1].parameters())
    assert len(list(model.trunk.parameters())) == 3 * trunk  # a convolution's weight, a norm's scale and shift


@pytest.mark.parametrize("changes", [{}, {"routing": DynamicOptions(leaky=True, bias=True)}, {"shared": True}])
def test_the_class_capsule_is_the_branches_capsules_joined(changes: dict[str, Any]) -> None:
    model, images = branched(**changes).eval(), torch.rand(4, 1, 12, 12)
    output = model(images, trace=True)
    each = [alone(model, images, k) for k in range(2)]
    torch.testing.assert_close(output.poses, torch.cat([part.poses for part in each], -1) / 2**0.5)
    mean = torch.stack([part.activations for part in each]).square().mean(0).sqrt()
    torch.testing.assert_close(output.activations, mean, atol=1e-4, rtol=0)
    assert output.primary.shape == (4, model.grid[0] * model.grid[1] * 4, 4)


def test_the_trace_is_that_of_the_branches_with_their_capsules_in_turn() -> None:
    model, images = branched().eval(), torch.rand(4, 1, 12, 12)
    output = model(images, trace=True)
    for k in range(2):
        trace, mine = alone(model, images, k).trace, slice(3 * k, 3 * k + 3)
        torch.testing.assert_close(output.trace.couplings[:, :, k::2], trace.couplings)
        torch.testing.assert_close(output.trace.logits[:, :, k::2], trace.logits)
        torch.testing.assert_close(output.trace.outputs[..., mine], trace.outputs / 2**0.5)
        torch.testing.assert_close(output.trace.votes[:, k::2, :, mine], trace.votes)
        assert output.trace.votes[:, k::2].count_nonzero() == trace.votes.count_nonzero()
    torch.testing.assert_close(output.trace.outputs[-1], output.poses)


def test_the_loss_is_the_mean_of_the_branches_losses() -> None:
    model, images, targets = branched(), torch.rand(4, 1, 12, 12), multi_hot(torch.tensor([0, 1, 2, 1]), 3)
    output = model.eval()(images)
    loss = model.loss(output, Batch(images, targets, targets, torch.arange(4)), LossConfig(reconstruction=0.0))
    each = [margin_loss(alone(model, images, k).activations, targets) for k in range(2)]
    torch.testing.assert_close(loss.classification, (each[0] + each[1]) / 2)
    assert each[0] != each[1]


def test_options_of_the_routing_reach_every_branch() -> None:
    model, images = branched().eval(), torch.rand(2, 1, 12, 12)
    trace = model(images, trace=True, routing={"iterations": 1}).trace
    assert len(trace.couplings) == 1
    torch.testing.assert_close(trace.couplings, torch.full_like(trace.couplings, 1 / 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"trunk": 3}, "use a longer stem or a smaller trunk"),
        ({"class_dim": 7}, "class_dim=7 cannot be divided among 2 branches: choose a multiple of 2"),
        ({"stem_channels": (4, 7, 6)}, "stem_channels=7 cannot be divided"),
        ({"primary_types": 3}, "primary_types=3 cannot be divided"),
        ({"branches": 0}, "branches=0 is too small"),
    ],
)
def test_branches_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        branched(**changes)


def test_rows_of_the_weights_belong_to_classes() -> None:
    """`--init` carries weights over class by class; without that no branch could be fine-tuned on other classes."""
    model = branched(routing=DynamicOptions(bias=True))
    state = model.state_dict()
    rows = {name for name, tensor in state.items() if model.by_class(name, tensor) is not None}
    assert rows == {"decoder.linears.0.weight"} | {
        f"branches.{k}.caps.0.{name}" for k in range(2) for name in ("weight", "routing.bias")
    }
    for name in rows:
        view = model.by_class(name, state[name])
        assert view is not None
        assert len(view) == 3
        assert view.untyped_storage().data_ptr() == state[name].untyped_storage().data_ptr()


def test_one_branch_without_a_trunk_is_a_capsule_network() -> None:
    model = branched(branches=1, trunk=0)
    plain = CapsNet(model.config.cut()[1])
    plain.load_state_dict(model.branches[0].state_dict())
    images = torch.rand(2, 1, 12, 12)
    torch.testing.assert_close(model.eval()(images).poses, plain.eval()(images).poses)
