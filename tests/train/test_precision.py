"""`--precision auto`: bfloat16 where it is in hardware and was measured harmless, said and recorded."""

from __future__ import annotations

import pytest
import torch

from capsnet.train import precision
from capsnet.train.precision import autocast, choose, describe
from capsnet.train.presets import get_preset

CPU = torch.device("cpu")


@pytest.fixture(params=[True, False], ids=["bf16-in-hardware", "without"])
def hardware(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(precision, "has_bf16", lambda: request.param)
    return request.param


def test_auto_takes_bfloat16_only_in_hardware_and_where_it_was_measured(hardware: bool) -> None:
    assert choose("auto", "capsnet", CPU) == ("bf16" if hardware else "fp32")
    assert choose("auto", "matrix", CPU) == "fp32"
    assert choose("auto", "capsnet", torch.device("mps")) == "fp32"


def test_a_precision_that_was_asked_for_is_taken(hardware: bool) -> None:
    assert [choose(asked, "matrix", CPU) for asked in ("fp32", "bf16")] == ["fp32", "bf16"]


def test_what_was_chosen_is_said_in_one_line(hardware: bool) -> None:
    assert describe("fp32", CPU) == ""
    said = describe("bf16", CPU)
    assert "\n" not in said
    assert ("bfloat16" in said) is hardware
    assert "--precision fp32" in said


def test_the_context_is_that_of_the_precision() -> None:
    for name in ("fp32", "bf16"):
        with autocast(name, CPU):  # type: ignore[arg-type]
            assert torch.is_autocast_enabled("cpu") is (name == "bf16")


def test_presets_that_reproduce_the_paper_stay_in_float32() -> None:
    assert [get_preset(name).precision for name in ("paper", "official")] == ["fp32", "fp32"]
    assert get_preset("own-images").precision == "auto"
