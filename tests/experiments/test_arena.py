"""The arena: rates are chosen without the test set, differences are paired by seed, and verdicts follow the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capsnet.errors import UserError
from capsnet.experiments.arena import tasks
from capsnet.experiments.arena.compare import Arena, against_control, rates_at_the_edge, verdict
from capsnet.experiments.arena.cost import Costs
from capsnet.experiments.arena.rates import Rates, best_rates
from capsnet.experiments.arena.tasks import ALGORITHMS, CONTROL, TASKS, algorithms_of, config_of
from capsnet.experiments.core.conduct import conduct
from capsnet.experiments.core.plan import Record
from capsnet.experiments.core.results import Place
from capsnet.registry import BUILT_IN
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.train import loop

pytestmark = pytest.mark.usefixtures("forget_plugins")


def record(routing: str, seed: int, error: float, data: str = "MNIST") -> Record:
    outcome = {"error_percent": error}
    shown = {"data": data, "routing": routing}
    return Record(method=f"{data}-{routing}", seed=seed, shown=shown, outcome=outcome)


def test_every_built_in_routing_takes_part() -> None:
    assert set(ALGORITHMS) == {name for name in ROUTINGS.names() if ROUTINGS.origin(name) == BUILT_IN}


def test_the_rate_with_the_lowest_validation_error_is_chosen() -> None:
    rows = [
        Record(shown={"data": "MNIST", "routing": "em", "learning rate": rate}, outcome={"error_percent": error})
        for rate, error in (("0.001", 2.0), ("0.003", 1.5), ("0.006", 1.8))
    ]
    rows.append(Record(shown={"data": "MNIST", "routing": "em", "learning rate": "1"}, outcome={"diverged": "loss"}))
    assert best_rates(rows) == {("MNIST", "em"): 0.003}


def test_a_rate_that_diverges_is_recorded_and_the_others_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("capsnet.experiments.arena.rates.RATES", (0.003, 1e30))
    monkeypatch.setattr(tasks, "ALGORITHMS", (CONTROL,))
    place = Place(tmp_path / "results", tmp_path / "runs")
    rows = conduct(Rates(), "smoke", place=place).rows
    assert ["diverged" in row.outcome for row in rows] == [False, True]
    assert best_rates(rows) == {("MNIST", CONTROL): 0.003}
    (line,) = Rates().table(rows).rows
    assert line[:2] == ["MNIST", CONTROL]
    assert line[3:] == ["diverged", "0.003"]


def test_an_algorithm_of_a_plugin_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ROUTINGS._entries, "mine", ROUTINGS.get("dynamic"))
    monkeypatch.setitem(ROUTINGS._origins, "mine", "mine.py")
    assert algorithms_of("smoke") == [*ALGORITHMS[:2], "mine"]
    assert algorithms_of("day") == [*ALGORITHMS, "mine"]


def test_nothing_changes_between_rows_but_the_routing() -> None:
    for task in TASKS.values():
        configs = [config_of(task, name, 0.003, "day", seed=1) for name in ALGORITHMS]
        same = {replace(config, model=replace(config.model, routing=options_for(CONTROL))) for config in configs}
        assert len(same) == 1
        assert [config.model.routing.algorithm for config in configs] == list(ALGORITHMS)


def test_differences_are_paired_by_seed() -> None:
    records = [record(CONTROL, 0, 2.0), record(CONTROL, 1, 3.0), record("em", 1, 2.5), record("em", 0, 1.0)]
    assert against_control(records[2:], records).differences == (-0.5, -1.0)
    assert against_control(records[:2], records).differences == ()


def test_a_verdict_needs_an_interval_that_excludes_zero() -> None:
    control = [record(CONTROL, seed, 2.0 + 0.1 * seed) for seed in range(3)]
    clear = [record("dynamic", seed, 1.0 + 0.1 * seed) for seed in range(3)]
    noisy = [record("em", seed, error) for seed, error in enumerate((1.0, 3.5, 2.0))]
    worse = [record("vb", seed, 5.0 + 0.1 * seed + 0.01 * seed**2) for seed in range(3)]
    found = verdict("MNIST", [*control, *clear, *noisy, *worse])
    assert found.startswith("MNIST. Better than uniform beyond chance: dynamic; worse than uniform beyond chance: vb; ")
    assert found.endswith("too close to call: em.")


def test_the_claim_for_dynamic_routing_follows_the_paired_interval() -> None:
    control = [record(CONTROL, seed, 2.0 + 0.1 * seed) for seed in range(3)]
    better, worse, noisy = (
        [record("dynamic", seed, error) for seed, error in enumerate(errors)]
        for errors in ((1.0, 1.1, 1.21), (5.0, 5.1, 5.21), (1.0, 3.5, 2.0))
    )
    found = [Arena().claims([*control, *group], "day")[0] for group in (better, worse, noisy)]
    assert [each.verdict for each in found] == ["reproduced", "not reproduced", "too close to call"]
    assert found[0].ours == "1.10 ± 0.11 % vs. 2.10 ± 0.10 %"
    assert found[0].seeds == 3
    assert Arena().claims(control, "day") == []


def test_one_seed_decides_nothing() -> None:
    assert "Too close to call: em" in verdict("MNIST", [record(CONTROL, 0, 9.0), record("em", 0, 1.0)])


def test_a_rate_at_the_edge_of_the_grid_is_reported() -> None:
    chosen = [
        replace(record(name, 0, 1.0), outcome={"learning_rate": rate}) for name, rate in (("em", 0.003), ("vb", 0.006))
    ]
    assert rates_at_the_edge(chosen) == ["In 1 of 2 cases the chosen learning rate is the largest of the grid."]
    assert rates_at_the_edge(chosen[:1]) == []


def test_it_runs_and_no_rate_is_chosen_on_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "ALGORITHMS", (CONTROL, "self-attention"))
    place = Place(tmp_path / "results", tmp_path / "runs")
    with monkeypatch.context() as patch:
        patch.setattr(loop, "finish", lambda *_: pytest.fail("the test set was looked at"))
        rates = conduct(Rates(), "smoke", place=place)
    assert {row.outcome["n"] for row in rates.rows} == {500}
    costs = conduct(Costs(), "smoke", place=place).rows[0].outcome
    results = conduct(Arena(), "smoke", place=place)
    assert [row.shown["routing"] for row in results.rows] == [CONTROL, "self-attention"]
    assert all(0 <= row.outcome["entropy_percent"] <= 100.1 for row in results.rows)
    arena = Arena()
    assert arena.table(results.rows).rows[1][8] == "–"  # not measured by this object
    arena.consult(place, "smoke")
    table = arena.table(results.rows)
    assert table.rows[1][8] == f"{costs['self-attention']['peak_mb']:,.0f}"
    assert len(table.rows) == 2
    assert all(len(line) == len(table.columns) for line in table.rows)
    assert (tmp_path / "results" / "arena-smoke" / "arena.png").exists()


def test_only_limits_an_experiment_to_rows_with_a_prefix(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    assert [row.name for row in conduct(Rates(), "smoke", only="mnist-uniform-3", place=place).rows] == [
        "mnist-uniform-30e-4-seed0"
    ]
    with pytest.raises(UserError, match="no row that starts with 'cifar'"):
        conduct(Rates(), "smoke", only="cifar", place=place)
