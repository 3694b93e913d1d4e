"""What the Lab computes, for every routing algorithm that is registered."""

from __future__ import annotations

import json

import pytest
import torch

from capsnet.lab.inference import encode
from capsnet.lab.models import show
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import build
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
