"""Reports: importance, Pareto front, the command that trains the best, tables, figures and a page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution
from optuna.trial import create_trial

from capsnet.cli import main
from capsnet.cli.flags import parse
from capsnet.cli.train import Train, take_preset
from capsnet.search import report
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict
from capsnet.train.presets import get_preset

Searched = Callable[..., optuna.Study]
pytestmark = [
    pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning"),
    pytest.mark.usefixtures("forget_plugins"),
]


def row(number: int, seconds: float, error: float, state: str = "complete") -> dict[str, Any]:
    return {"number": number, "state": state, "error_percent": error, "seconds": seconds}


def test_no_trial_of_the_front_is_beaten_by_a_quicker_one() -> None:
    rows = [row(0, 10, 3.0), row(1, 5, 4.0), row(2, 20, 3.0), row(3, 30, 1.0), row(4, 1, 0.1, "pruned"), row(5, 6, 5.0)]
    assert [each["number"] for each in report.front(rows)] == [1, 0, 3]
    assert [each["number"] for each in report.best_first(rows)] == [3, 0, 2, 1, 5]


def complete(lr: float, kind: str, error: float) -> optuna.trial.FrozenTrial:
    ranges = {"lr": FloatDistribution(0.0, 1.0), "kind": CategoricalDistribution(["a", "b"])}
    return create_trial(value=error, params={"lr": lr, "kind": kind}, distributions=ranges)


def test_importance_finds_the_field_that_matters_and_needs_enough_trials() -> None:
    study = optuna.create_study()
    study.add_trials([complete(k / 30, "ab"[k % 2], 1 + k) for k in range(19)])
    assert report.importance(study) == {}
    study.add_trials([complete(k / 30, "ab"[k % 2], 1 + k) for k in range(19, 30)])
    shares = report.importance(study)
    assert list(shares) == ["lr", "kind"]
    assert shares["lr"] > 0.8
    equal = optuna.create_study()
    equal.add_trials([complete(k / 30, "a", 1.0) for k in range(30)])
    assert report.importance(equal) == {}  # every trial is among the best


def test_the_report_of_a_study_holds_together(
    searched: Searched, base: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    study = searched("lr=0.0000001,0.003", "primary_kernel=3,99", trials=4)
    assert main(["search", "--report", "--study", "s"]) == 0
    out = capsys.readouterr().out
    found = json.loads(Path("results/search/s.json").read_text())
    best = min((t for t in study.trials if t.value is not None), key=lambda t: (t.value, t.user_attrs["seconds"]))
    assert found["best"] == best.number
    assert found["counts"] == {"complete": 2, "pruned": 0, "fail": 2}
    assert found["space"] == {"lr": "0.0000001,0.003", "model.primary_kernel": "3,99"}
    preset, rest = take_preset(shlex.split(found["command"])[2:])
    trained = parse(Train, "train", rest, default=Train(config=get_preset(preset))).config
    assert trained.lr == from_dict(best.user_attrs["config"]).lr
    assert found["command"] in out
    assert f"capsnet evaluate {found['network']}" in out
    assert "Failures" in out
    page = Path("results/search/s.html").read_text()
    for part in ("Best trials", "Pareto front", "The test set was not used", "too small", "Train the best"):
        assert part in page
    assert "primary_kernel" not in page.split("Settings of all trials")[1]  # each trial has its own
    assert Path("results/search/s/front.png").stat().st_size > 1000
    assert not [key for key in found if "test" in key]


def test_the_report_keeps_the_keys_of_committed_results(searched: Searched) -> None:
    committed = json.loads((Path(__file__).parents[2] / "results/search/minute.json").read_text())
    found = report.summary(searched(trials=1), "here")
    assert committed.keys() <= found.keys()
    assert found["trials"][0].keys() == committed["trials"][0].keys()
    assert report.table(report.best_first(committed["trials"])[:2]).rows[0][0] == str(committed["best"])
    assert set(report.figures_of(committed)) == {"importance", "front"}


def test_a_study_without_a_complete_trial_has_a_report_too(
    searched: Searched, capsys: pytest.CaptureFixture[str]
) -> None:
    searched()
    assert main(["search", "--report", "--study", "s"]) == 0
    assert "0 trials complete" in capsys.readouterr().out


def test_the_report_of_another_study_is_not_overwritten(searched: Searched, capsys: pytest.CaptureFixture[str]) -> None:
    searched()
    Path("results/search").mkdir(parents=True)
    for other in ([{"config": {}}], {"storage": "sqlite:///other.db"}):
        Path("results/search/s.json").write_text(json.dumps(other))
        assert main(["search", "--report", "--study", "s"]) == 2
        assert "results/search/s.json belongs to another study: choose another name" in capsys.readouterr().err
        assert json.loads(Path("results/search/s.json").read_text()) == other


def test_results_that_cannot_be_written_are_refused_before_the_first_trial(capsys: pytest.CaptureFixture[str]) -> None:
    Path("results").write_text("a file where a folder should be")
    assert main(["search", "--space", "lr=0.001,0.003"]) == 2
    assert "results/search/search.json" in capsys.readouterr().err
    assert not Path("runs").exists()
