"""The synchronisation network: its size, its control without phases, its export and the loss that guides it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from capsnet.data import Batch
from capsnet.errors import UserError
from capsnet.io import export
from capsnet.models.config import LossConfig
from capsnet.models.registry import build, parameters
from capsnet.models.sync import SyncConfig, SyncNet, asynchrony, gabor, masks
from capsnet.sync import Oscillations

TINY = replace(SyncConfig().tiny(), image_shape=(1, 18, 18), num_classes=4)


def pairs(b: int = 4) -> Batch:
    """A bright row and a bright column, which overlap in one pixel."""
    parts = torch.zeros(b, 2, 1, 18, 18)
    parts[:, 0, :, 4:6], parts[:, 1, ..., 13:15] = 0.9, 0.8
    parts = parts * torch.linspace(0.7, 1, b)[:, None, None, None, None]  # in several brightnesses
    targets = torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(b, 4)
    return Batch(parts.sum(1).clamp(max=1), targets, targets.bool(), torch.arange(b), parts)


def test_a_network_and_its_control_have_the_same_parameters_at_most_200_thousand() -> None:
    assert parameters(SyncConfig()) == parameters(SyncConfig(phases=False)) <= 200_000


@pytest.mark.parametrize("phases", [True, False])
def test_every_parameter_learns(phases: bool) -> None:
    torch.manual_seed(0)
    model, batch = SyncNet(replace(TINY, phases=phases)), pairs()
    model.loss(model(batch.images), batch, LossConfig()).total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if "norm" not in name}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())
    assert gradients["oscillators.coupling"].any()  # type: ignore[union-attr]


def test_phases_decide_about_the_classes() -> None:
    torch.manual_seed(0)
    model, images = SyncNet(TINY).eval(), pairs().images
    before = model(images).logits
    torch.nn.init.zeros_(model.oscillators.start)
    assert not torch.allclose(before, model(images).logits, atol=1e-3)


def test_a_trace_changes_nothing_and_has_every_step() -> None:
    model, images = SyncNet(TINY).eval(), pairs().images
    plain, traced = model(images), model(images, trace=True)
    torch.testing.assert_close(plain.logits, traced.logits)
    assert plain.oscillations is None
    assert traced.oscillations.phases.shape == (4, 4, 4, 6, 6)


@pytest.mark.parametrize("phases", [True, False])
def test_a_network_is_exported(phases: bool) -> None:
    """ONNX is written from a program of `torch.export`, so both formats are covered."""
    pytest.importorskip("onnxruntime")
    model = build(replace(TINY, phases=phases)).eval()
    export.check(model, export.load_onnx(export.to_onnx(model)))


def test_blank_images_are_finite() -> None:
    model = SyncNet(TINY)
    blank = torch.zeros(2, 1, 18, 18)
    output = model(blank)
    output.logits.sum().backward()
    assert output.logits.isfinite().all()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_gabor_functions_have_length_one_and_different_orientations() -> None:
    filters = gabor(8).flatten(1)
    torch.testing.assert_close(filters.norm(dim=1), torch.ones(8))
    assert ((filters @ filters.T).abs() - torch.eye(8)).max() < 0.95


def test_masks_leave_out_the_background_and_the_overlap() -> None:
    found = masks(pairs(1).parts, (6, 6))[0]  # type: ignore[arg-type]
    assert found[0, 1].tolist() == [1, 1, 1, 1, 0, 1]
    assert found[1, :, 4].tolist() == [1, 0, 1, 1, 1, 1]
    assert found.sum() == 10


@pytest.mark.parametrize(("between", "expected"), [(math.pi, 0.0), (0.0, 0.5), (math.pi / 2, 0.25)])
def test_asynchrony_is_low_if_each_object_has_a_phase_of_its_own(between: float, expected: float) -> None:
    objects = masks(pairs(1).parts, (6, 6))  # type: ignore[arg-type]
    phases = (objects[:, 1] * between).expand(1, 1, 3, 6, 6)
    found = asynchrony(Oscillations(torch.ones(1, 3, 6, 6), phases), objects)
    assert float(found) == pytest.approx(expected, abs=1e-3)


def test_guidance_teaches_the_phases_of_the_objects() -> None:
    torch.manual_seed(0)
    model, batch = SyncNet(replace(TINY, guidance=5.0)), pairs()
    assert batch.parts is not None
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    apart = []
    for _ in range(60):
        output = model(batch.images)
        apart.append(float(asynchrony(output.oscillations, masks(batch.parts, model.grid)).detach()))
        optimizer.zero_grad()
        model.loss(output, batch, LossConfig()).total.backward()
        optimizer.step()
    assert min(apart) < 0.6 * apart[0]  # how far it gets in so few steps depends on rounding


def test_configs_that_make_no_sense_are_refused() -> None:
    with pytest.raises(UserError, match="guidance acts on phases"):
        SyncConfig(phases=False, guidance=1.0)
    with pytest.raises(UserError, match="one number for each complex convolution"):
        SyncConfig(channels=(8,))
    with pytest.raises(UserError, match="a kernel of 4 positions has no centre"):
        SyncConfig(kernels=(4, 3))
    with pytest.raises(UserError, match="images of at least 7×7 px"):
        SyncConfig(image_shape=(1, 6, 9))
