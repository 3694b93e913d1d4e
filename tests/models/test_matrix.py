"""The matrix network: the published numbers of parameters, spread loss with its schedule, and what the tools show."""

from __future__ import annotations

import pytest
import torch

from capsnet.data import Batch, multi_hot
from capsnet.errors import UserError
from capsnet.io import export
from capsnet.lab.inference import encode
from capsnet.lab.models import show
from capsnet.models.config import LossConfig
from capsnet.models.matrix import MatrixCapsNet, MatrixConfig
from capsnet.nn.losses import spread_loss
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.routing.em import EMOptions

TINY = MatrixConfig((1, 17, 17), 3, channels=4, primary_types=2, conv_types=(3, 2))


def parameters(config: MatrixConfig) -> int:
    return sum(p.numel() for p in MatrixCapsNet(config, device=torch.device("meta")).parameters())


def test_it_has_the_published_numbers_of_parameters() -> None:
    assert parameters(MatrixConfig((2, 32, 32), 5)) == 68_754
    assert parameters(MatrixConfig((2, 32, 32), 5, channels=32, primary_types=32, conv_types=(32, 32))) == 317_194


def test_the_number_of_parameters_is_the_sum_that_the_paper_implies() -> None:
    A, B, C, D = 6, 5, 4, 3
    convolutions = 25 * 2 * A + A + A * B * 17 + B * 17
    capsules = 9 * B * C * 16 + 2 * C + 9 * C * D * 16 + 2 * D + D * 5 * 16 + 2 * 5
    config = MatrixConfig((2, 40, 40), 5, channels=A, primary_types=B, conv_types=(C, D))
    assert parameters(config) == convolutions + capsules


def test_the_votes_are_as_many_as_published() -> None:
    primary, first, second = MatrixCapsNet(MatrixConfig((2, 32, 32), 5)).grids
    assert (primary, first, second) == ((14, 14), (6, 6), (4, 4))
    votes = 36 * 9 * 8 * 16 * 16 + 16 * 9 * 16 * 16 * 16 + 16 * 16 * 5 * 16
    assert round(votes / 1e6, 2) == 1.27


def batch(n: int = 4) -> Batch:
    torch.manual_seed(0)
    labels = torch.arange(n) % 3
    return Batch(torch.rand(n, 1, 17, 17), multi_hot(labels, 3), labels, torch.arange(n))


@pytest.mark.parametrize(("progress", "margin"), [(0.0, 0.2), (0.5, 0.55), (1.0, 0.9)])
def test_its_loss_is_the_spread_loss_with_a_margin_that_grows_during_training(progress: float, margin: float) -> None:
    model, examples = MatrixCapsNet(TINY), batch()
    output = model(examples.images)
    expected = spread_loss(output.activations, examples.targets, margin)
    torch.testing.assert_close(model.loss(output, examples, LossConfig(), progress).total, expected)


@pytest.mark.parametrize("routing", ROUTINGS.names())
def test_any_routing_trains_it(routing: str) -> None:
    torch.manual_seed(0)
    model, examples = MatrixCapsNet(MatrixConfig((1, 17, 17), 3, 4, 2, (3, 2), options_for(routing))), batch()
    for name, parameter in model.named_parameters():
        if ".routing.gate" in name:  # at zero, as self-routing starts, nothing below the last gate matters
            torch.nn.init.normal_(parameter)
    model.loss(model(examples.images), examples, LossConfig()).total.backward()
    for name in ("stem.0.weight", "primary.conv.weight", "caps.0.weight", "caps.1.weight"):
        gradient = model.get_parameter(name).grad
        assert gradient is not None
        assert gradient.isfinite().all()
        assert gradient.abs().max() > 0


def test_a_trace_changes_nothing_and_has_the_last_convolutional_capsules_as_children() -> None:
    model = MatrixCapsNet(MatrixConfig((1, 24, 24), 3, 4, 2, (3, 2))).eval()
    images = torch.rand(2, 1, 24, 24)
    plain, traced = model(images), model(images, trace=True)
    torch.testing.assert_close(traced.activations, plain.activations)
    torch.testing.assert_close(traced.poses, plain.poses)
    assert traced.trace is not None
    assert traced.trace.couplings.shape == (3, 2, model.shown()["routed"], 3)
    height, width = model.shown()["routed_grid"]
    assert model.shown()["routed"] == height * width * 2
    once = model(images, routing={"iterations": 1})
    assert (once.activations - plain.activations).abs().max() > 1e-6


def test_a_small_image_is_refused_in_one_sentence() -> None:
    assert MatrixCapsNet(TINY).grids[-1] == (1, 1)
    with pytest.raises(UserError, match="16×16 px is too small for matrix capsules, which need 17×17"):
        MatrixCapsNet(MatrixConfig((1, 16, 16), 3))


def test_it_learns() -> None:
    torch.manual_seed(0)
    model = MatrixCapsNet(MatrixConfig((1, 20, 20), 2, 16, 4, (6, 6)))
    images, labels = torch.rand(16, 1, 20, 20) * 0.2, torch.arange(16) % 2
    images[labels == 1, :, 2:8] += 0.8
    images[labels == 0, :, 12:18] += 0.8
    optimizer, targets = torch.optim.Adam(model.parameters(), 0.01), multi_hot(labels, 2)
    for step in range(25):
        loss = spread_loss(model(images).activations, targets, 0.2 + 0.7 * step / 25)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model(images).activations.argmax(1) == labels).all()


@pytest.mark.slow
def test_it_exports_to_onnx_for_any_batch_size() -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = MatrixCapsNet(MatrixConfig((2, 20, 20), 3, 4, 2, (3, 2), EMOptions(iterations=2))).eval()
    assert max(export.check(model, export.load_onnx(export.to_onnx(model))).values()) < 1e-4


def test_the_lab_shows_its_capsules_and_its_last_routing() -> None:
    model = MatrixCapsNet(MatrixConfig((1, 24, 24), 3, 4, 2, (3, 2))).eval()
    header, arrays = encode(model, torch.rand(1, 24, 24), '{"iterations": 2}')
    shown = model.shown()
    assert arrays["primary"].shape == (shown["grid"][0] * shown["grid"][1] * shown["primary_types"], 16)
    assert arrays["couplings"].shape == (2, shown["routed"], 3)
    assert header["routing"]["iterations"] == 2
    assert show(model)["routing"]["name"] == "em"
