"""What the Lab computes, for every routing algorithm that is registered."""

from __future__ import annotations

import json

import pytest
import torch

from capsnet.io import export
from capsnet.lab import graphs
from capsnet.lab.inference import encode
from capsnet.lab.models import show
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import build
from capsnet.models.sync import SyncConfig
from capsnet.routing.base import ROUTINGS, options_for

SMALL = {"stem_channels": (4,), "stem_kernels": (9,), "stem_strides": (2,), "primary_types": 2, "primary_dim": 4}


@pytest.mark.parametrize("name", ROUTINGS.names())
def test_every_routing_can_be_shown_and_its_options_changed(name: str) -> None:
    torch.manual_seed(0)
    model = build(CapsNetConfig(**SMALL, class_dim=4, routing=options_for(name))).eval()
    routing = show(model)["routing"]
    assert routing["name"] == name
    json.dumps(routing, allow_nan=False)
    pixels, own = torch.rand(1, 28, 28), {option["name"]: option["value"] for option in routing["options"]}
    header, arrays = encode(model, pixels, json.dumps(own))
    assert header["routing"] == own
    assert all(array.isfinite().all() for array in arrays.values())
    assert arrays["step_activations"].shape == (len(arrays["couplings"]), 10)
    torch.testing.assert_close(arrays["step_activations"][-1], arrays["activations"])
    if "iterations" in own:
        assert len(encode(model, pixels, '{"iterations": 2}')[1]["couplings"]) == 2


def test_a_synchronisation_network_shows_the_phase_of_every_position_at_every_step() -> None:
    torch.manual_seed(0)
    model, pixels = build(SyncConfig((1, 18, 18)).tiny()).eval(), torch.rand(1, 18, 18)
    shown, (_, arrays) = show(model), encode(model, pixels)
    assert shown["phases"]["grid"] == [6, 6]
    assert arrays["field"].shape == (4, 2, 6, 6)
    assert arrays["field"].norm(dim=1).max() <= 1 + 1e-5
    field = model(pixels[None], trace=True).oscillations.mean_field()
    torch.testing.assert_close(arrays["field"], torch.cat([field.re, field.im], 1))


def test_the_graph_of_a_synchronisation_network_has_its_phases() -> None:
    pytest.importorskip("onnxruntime")
    model, pixels = build(SyncConfig((1, 18, 18)).tiny()).eval(), torch.rand(1, 18, 18)
    found = export.load_onnx(graphs.to_graph(model))(pixels[None])
    torch.testing.assert_close(found["output1"], encode(model, pixels)[1]["field"], rtol=1e-3, atol=1e-4)
