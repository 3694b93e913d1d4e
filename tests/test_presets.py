"""Presets are promises: what their docstrings say is what they do. The whole file takes minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from capsnet.cli import main
from capsnet.config import PROMISES, get_preset
from capsnet.models import build


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("quick", 1_984_272), ("best", 3_600_544), ("paper", 8_215_568), ("baseline-mnist", 35_445_522)],
)
def test_a_preset_has_the_parameters_that_it_names(name: str, parameters: int) -> None:
    assert f"{parameters:,}" in PROMISES[name]
    assert sum(p.numel() for p in build(get_preset(name).model).parameters()) == parameters


@pytest.mark.slow
def test_quick_reaches_its_accuracy_in_its_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--out", str(tmp_path / "quick"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["test"]["n"] == 10_000
    assert result["test"]["accuracy_percent"] >= 99.4  # 99.5 is the promise; one seed on another machine may miss it
    assert result["certificate"]["seconds"] < 120
