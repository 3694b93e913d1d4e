"""The paper's experiments: each runs at smoke, resumes after a kill, and ends in a table, claims and pictures."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from capsnet import __version__, experiments, load_plugin
from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.experiments import small_data, walkthrough
from capsnet.experiments.core import networks, page
from capsnet.experiments.core import results as kept
from capsnet.experiments.core.claims import Measured, at_most, higher, lower
from capsnet.experiments.core.conduct import (
    Show,
    conduct,
    expected_seconds,
    find_finished,
    is_done,
    is_trained,
    plan,
    same_training,
)
from capsnet.experiments.core.plan import Experiment, Record, Row, tiny
from capsnet.experiments.core.results import Place, Results, read
from capsnet.io import checkpoint
from capsnet.models.registry import parameters
from capsnet.routing import dynamic_routing, options_for
from capsnet.train import loop
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from pictures import write_folder

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = ("parts", "arena", "arena-rates", "arena-cost")  # they have test files of their own
NAMES = [name for name in experiments.EXPERIMENTS if name not in ELSEWHERE]
Ran = Callable[[str], Results]

pytestmark = pytest.mark.usefixtures("forget_plugins")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("reproduce")
    return Place(folder / "results", folder / "runs")


@pytest.fixture(scope="module")
def ran(place: Place) -> Ran:
    """Each experiment at smoke, run once and then looked up; they share their networks as they do for a user."""
    done: dict[str, Results] = {}

    def run(name: str) -> Results:
        if name not in done:
            done[name] = conduct(experiments.get(name), "smoke", place=place)
        return done[name]

    return run


class Short(Experiment):
    """Two rows of a toy network."""

    name = "short"
    title = "Short"
    question = "Does it go on?"

    def rows(self, budget: str, seed: int) -> list[Row]:
        config = tiny(networks.capsule_training("smoke", 1, 36, "multimnist:test=300", seed), 128)
        other = replace(config, lr=0.001)
        return [Row("one", config, {"method": "one"}), Row("two", other, {"method": "two"}, {"error_percent": 0.25})]


class Stops(Show):
    """Ctrl-C when a row begins."""

    def __init__(self, at: int) -> None:
        self.left = at

    def started(self, row: Row) -> list[loop.Watcher]:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt
        return []


class Counts(Show):
    def __init__(self) -> None:
        self.rows: list[str] = []
        self.expected: float | None = None
        self.moved: Path | None = None

    def planned(self, rows: object, left: object, seconds: float | None) -> None:
        self.expected = seconds

    def started(self, row: Row) -> list[loop.Watcher]:
        self.rows.append(row.name)
        return []

    def set_aside(self, kept: Path) -> None:
        self.moved = kept


# --- Every experiment ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_an_experiment_runs_at_smoke_and_keeps_what_came_out(name: str, ran: Ran, place: Place) -> None:
    results, experiment = ran(name), experiments.get(name)
    assert [row.name for row in plan(experiment, "smoke", 1)] == [record.name for record in results.rows]
    table = experiment.table(results.rows)
    assert table.rows
    assert all(len(row) == len(table.columns) for row in table.rows)
    assert json.loads(json.dumps([row.to_json() for row in results.rows], allow_nan=False))
    pictures = sorted(place.pictures(name, "smoke").glob("*.png"))
    assert pictures
    assert not list(place.pictures(name, "smoke").glob("*.svg"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "walkthrough"])
def test_a_row_names_its_network_data_seed_and_cost_and_what_it_had_less(name: str, ran: Ran) -> None:
    trained = [record for record in ran(name).rows if not record.name.startswith("cost-")]
    assert trained
    for record in trained:
        made = record.made
        assert made["parameters"] > 0
        assert "→" in made["architecture"]
        assert made["epochs"] >= 1
        assert made["data"]
        assert record.seconds >= 0
        assert record.certificate.config["seed"] == record.seed == 0
        assert record.less or "scans" in record.name  # the paper has no scans to fall short of


PLANNED = [(name, budget) for name in experiments.EXPERIMENTS for budget in experiments.get(name).budgets]


@pytest.mark.parametrize(("name", "budget"), [(name, budget) for name, budget in PLANNED if budget != "smoke"])
def test_every_row_of_every_budget_can_be_built(name: str, budget: str) -> None:
    experiment = experiments.get(name)
    rows = plan(experiment, budget, 2)  # type: ignore[arg-type]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert re.fullmatch(r"[\w-]+", row.name)
        assert row.config is None or parameters(row.config.model) > 0


def test_the_full_budget_has_the_networks_of_the_paper() -> None:
    sizes = {r.method: parameters(r.config.model) for r in plan(experiments.get("table1"), "full", 1) if r.config}
    assert sizes["mnist-r3-rec"] == 8_215_568
    assert sizes["mnist-cnn"] == 35_445_522
    assert sizes["multimnist-r3-rec"] == 11_361_808
    assert sizes["multimnist-cnn"] == 24_563_978


def test_the_cnn_beside_a_compact_network_has_as_many_parameters() -> None:
    for side in (28, 36, 48, 64):
        capsules = networks.compact_capsules(side)
        size = parameters(capsules)
        assert abs(parameters(networks.compact_cnn(capsules)) - size) < 0.01 * size


def test_experiments_share_networks_that_are_trained_alike(ran: Ran, place: Place) -> None:
    for name in ("table1", "iterations", "figures"):
        ran(name)
    settings = [json.loads(path.read_text()) for path in place.runs.glob("*/*/config.json")]
    alike = [json.dumps(config | {"preset": ""}, sort_keys=True) for config in settings]
    assert len(set(alike)) == len(alike)


# --- Interruptions, seeds, versions ----------------------------------------------------------------------------


def test_an_interrupted_experiment_goes_on_and_runs_no_row_twice(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    with pytest.raises(KeyboardInterrupt):
        conduct(Short(), "smoke", place=place, show=Stops(2))
    again = Counts()
    results = conduct(Short(), "smoke", place=place, show=again)
    assert again.rows == ["two-seed0"]
    assert [row.name for row in results.rows] == ["one-seed0", "two-seed0"]
    nothing = Counts()
    conduct(Short(), "smoke", place=place, show=nothing)
    assert nothing.rows == []


class Wanting(Experiment):
    """Two measurements, each after one that it requires."""

    name = title = question = "wanting"
    requires = ("wanted",)
    methods = ("a-seed0", "b-seed0")

    def rows(self, budget: str, seed: int) -> list[Row]:
        return [Row(method, None, {"row": method}) for method in self.methods]

    def observe(self, row: Row) -> dict[str, float]:
        return {"error_percent": 1.0}


class Wanted(Wanting):
    name, requires, methods = "wanted", (), ("a-rate", "b-rate")


def test_only_limits_the_rows_that_are_required_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiments, "get", lambda _: Wanted())
    show = Counts()
    conduct(Wanting(), "smoke", only="a-seed0", place=Place(tmp_path / "results", tmp_path / "runs"), show=show)
    assert show.rows == ["a-rate", "a-seed0"]


def test_a_row_that_is_validated_is_never_taken_from_another_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("capsnet.experiments.core.conduct.find_finished", lambda *_: Path("runs/other"))
    row = Short().rows("smoke", 0)[0]
    assert is_trained(row, "short", "smoke", Place())
    assert not is_trained(replace(row, validated=True), "short", "smoke", Place())


def test_a_killed_experiment_comes_to_the_same_results(
    ran: Ran, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [sys.executable, "-m", "capsnet", "reproduce", "iterations", "--budget", "smoke", "--json"]
    first = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("runs/reproduce/*/mnist-r1*/state.safetensors")) and first.poll() is None:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    monkeypatch.chdir(tmp_path)
    assert main(command[3:]) == 0
    outcomes = [row["outcome"] for row in json.loads(capsys.readouterr().out)["rows"]]
    undisturbed = [row.outcome for row in ran("iterations").rows]
    assert [o["errors"] for o in outcomes] == [o["errors"] for o in undisturbed]
    assert [o["final_loss"] for o in outcomes] == [o["final_loss"] for o in undisturbed]


def test_a_training_that_ended_without_being_measured_is_only_measured(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    before = conduct(Short(), "smoke", place=place)
    place.file("short", "smoke").unlink()
    weights = [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/*/*/model.safetensors"))]
    after = conduct(Short(), "smoke", place=place)
    assert [path.stat().st_mtime_ns for path in sorted(tmp_path.glob("runs/*/*/model.safetensors"))] == weights
    assert [row.outcome for row in after.rows] == [row.outcome for row in before.rows]


def test_a_row_that_is_defined_anew_is_run_anew_and_the_old_training_stays(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    conduct(Short(), "smoke", place=place)

    class Other(Short):
        def rows(self, budget: str, seed: int) -> list[Row]:
            return [replace(row, config=replace(row.config, lr=0.01)) for row in super().rows(budget, seed)[:1]]  # type: ignore[type-var]

    again = Counts()
    results = conduct(Other(), "smoke", place=place, show=again)
    assert again.rows == ["one-seed0"]
    found = results.find("one-seed0")
    assert found is not None
    assert found.certificate.config["lr"] == 0.01
    assert [row.name for row in results.rows] == ["one-seed0", "two-seed0"]  # in the table where it was
    assert (tmp_path / "runs" / "short-smoke" / "one-seed0.old-1").exists()


def test_a_seed_that_was_trained_otherwise_does_not_count_in_the_mean(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    conduct(Short(), "smoke", 2, place=place)

    class Other(Short):
        def rows(self, budget: str, seed: int) -> list[Row]:
            return [replace(row, config=replace(row.config, lr=0.01)) for row in super().rows(budget, seed)]  # type: ignore[type-var]

    results = conduct(Other(), "smoke", 1, place=place)
    assert [row.name for row in results.rows] == ["one-seed0", "two-seed0"]


def test_seeds_become_a_mean_with_its_deviation(tmp_path: Path) -> None:
    results = conduct(Short(), "smoke", 2, place=Place(tmp_path / "results", tmp_path / "runs"))
    assert [row.seed for row in results.rows] == [0, 0, 1, 1]
    table = Short().table(results.rows)
    assert len(table.rows) == 2
    assert "±" in table.rows[0][1]
    assert table.rows[1][2] == "0.25"  # the paper's, beside ours


def test_no_seed_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        plan(Short(), "smoke", 0)


def test_results_of_another_version_are_kept_and_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("capsnet.experiments.core.conduct.find_spec", lambda name: None)  # draw nothing
    place = Place()
    conduct(experiments.get("walkthrough"), "smoke", place=place)
    path = place.file("walkthrough", "smoke")
    old = json.loads(path.read_text()) | {"capsnet": "0.0.1"}
    checkpoint.write_json(path, old)
    assert main(["reproduce", "report"]) == 0
    assert "Measured with capsnet 0.0.1" in (tmp_path / "docs" / "results" / "walkthrough.md").read_text()
    again = Counts()
    conduct(experiments.get("walkthrough"), "smoke", place=place, show=again)
    assert again.moved == place.results / "walkthrough-smoke.by-0.0.1.json"
    assert json.loads(again.moved.read_text()) == old
    assert json.loads(path.read_text())["capsnet"] == __version__


def test_a_damaged_results_file_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "x-smoke.json").write_text('{"rows": 3}')
    with pytest.raises(UserError, match="does not contain results"):
        kept.read(tmp_path / "x-smoke.json")


def test_the_time_to_expect_grows_with_the_epochs() -> None:
    row = Short().rows("smoke", 0)[0]
    assert row.config is not None
    longer = replace(row, config=replace(row.config, epochs=100_000))
    assert expected_seconds([longer]) > 3 * expected_seconds([row]) > 0


def test_a_record_of_other_settings_is_not_this_row(ran: Ran) -> None:
    record = ran("table1").rows[0]
    row = plan(experiments.get("table1"), "smoke", 1)[0]
    assert is_done(record, row)
    assert isinstance(row.config, Config)
    assert not is_done(record, replace(row, config=replace(row.config, epochs=7)))
    assert not is_done(None, row)


def test_a_training_is_not_reused_when_the_images_have_changed(tmp_path: Path) -> None:
    photos = write_folder(tmp_path / "photos", ("red", "green"))
    config = replace(tiny(networks.capsule_training("smoke", 1)), data=f"folder:{photos}", image_size=28, batch_size=20)
    config, place = replace(config, validation=4, train_limit=20), Place(tmp_path / "results", tmp_path / "runs")
    folder = place.run("short", "smoke", "one")
    result = loop.train(loop.start(config, folder))
    record = Record(name="one", certificate=result.certificate)
    assert find_finished(config, folder, place) == folder
    assert is_done(record, Row("one", config, {}))
    for photo in (photos / "red").iterdir():
        Image.open(photo).rotate(90).save(photo)
    assert find_finished(config, folder, place) is None
    assert not is_done(record, Row("one", config, {}))


@pytest.mark.usefixtures("forget_plugins")
def test_a_training_with_another_version_of_a_plugin_is_another_training(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent.parent / "plugins" / "my_routing.py", tmp_path)
    load_plugin(tmp_path / "my_routing.py")
    config = tiny(networks.capsule_training("smoke", 1))
    config = replace(config, model=replace(config.model, routing=options_for("sharp")))  # type: ignore[call-arg]
    record = to_dict(config)
    assert same_training(record, config)
    record["plugins"][0]["sha256"] = "0" * 64
    assert not same_training(record, config)


@pytest.mark.parametrize("name", ["table1", "iterations", "affine", "multimnist", "parts"])
def test_the_results_that_are_here_are_of_the_trainings_that_are_planned(name: str) -> None:
    file = ROOT / "results" / "reproduce" / f"{name}-hour.json"
    records = {row.name: row for row in read(file).rows}
    rows = plan(experiments.get(name), "hour", 1)
    assert rows
    assert [row.name for row in rows if not is_done(records.get(row.name), row)] == []


# --- What they measure -----------------------------------------------------------------------------------------


def test_the_walkthrough_shows_what_routing_itself_computes(ran: Ran, place: Place) -> None:
    outcome = ran("walkthrough").rows[0].outcome
    u, W = walkthrough.example()
    v = dynamic_routing(u, W, iterations=walkthrough.ITERATIONS).poses[0]
    assert torch.allclose(torch.tensor(outcome["outputs"][-1]), v, atol=1e-5)
    couplings = torch.tensor(outcome["couplings"])
    assert torch.allclose(couplings.sum(-1), torch.ones(couplings.shape[:-1]))
    falls, rises = couplings[:, walkthrough.DISSENTER].T
    assert (falls.diff() < 0).all()
    assert (rises.diff() > 0).all()


def test_one_iteration_couples_evenly_and_more_of_them_decide(ran: Ran) -> None:
    first = ran("iterations").rows[0].outcome
    assert first["entropy_percent"] == pytest.approx(100, abs=1e-3)
    assert first["last_change"] is None  # one iteration moves no logit
    entropies = first["routed_on"]["entropy"]
    assert entropies[-1] <= entropies[0]
    assert len(first["routed_on"]["changes"]) == len(entropies) - 1


def test_the_overlap_curve_counts_every_pair_and_the_wide_canvas_reaches_no_overlap(ran: Ran) -> None:
    for record in ran("multimnist").rows:
        outcome = record.outcome
        bins = outcome["errors_by_overlap"]
        assert sum(bins["n"]) == outcome["n"]
        assert sum(bins["errors"]) == outcome["errors"]
        assert outcome["pairs_per_second"] > 0
        assert (bins["n"][0] > 0) == record.name.startswith("wide")


def test_affine_accuracy_is_told_apart_by_rotation_shear_and_scale(ran: Ran) -> None:
    for record in ran("affine").rows:
        outcome = record.outcome
        for name in ("rotation", "shear", "scale_across", "scale_down"):
            assert sum(outcome["affine"][f"errors_by_{name}"]["n"]) == outcome["affine"]["n"] == 10_000
        assert outcome["expanded"]["n"] == 10_000
        assert record.certificate.config["stop_at"] == 0.8


def test_drawn_scans_are_the_same_every_time_and_only_lesions_differ(tmp_path: Path) -> None:
    small_data.write_scans(tmp_path / "a", 40)
    small_data.write_scans(tmp_path / "b", 40)
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*.png"))
    assert len(files) == 80
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files[::8])


# --- The command and the pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "nearest"),
    [(["tabel1"], "table1"), (["table1", "--budget", "hours"], "hour"), (["raport"], "report")],
)
def test_an_unknown_name_shows_the_nearest(words: list[str], nearest: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words]) == 2
    assert f"did you mean '{nearest}'?" in capsys.readouterr().err


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "--list"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in experiments.EXPERIMENTS)


def test_an_interrupted_experiment_says_how_to_resume_the_same_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> Results:
        raise KeyboardInterrupt

    monkeypatch.setattr("capsnet.cli.reproduce.conduct", interrupted)
    words = ["reproduce", "table1", "--budget", "smoke", "--seeds", "2", "--only", "mnist-"]
    assert main(words) == 130
    assert capsys.readouterr().err.endswith(f"resume with: capsnet {' '.join(words)}\n")


def test_a_missing_checkpoint_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "figures", "--model", "runs/nowhere"]) == 2
    assert "no checkpoint" in capsys.readouterr().err


def test_the_figures_work_from_any_checkpoint(ran: Ran, place: Place, tmp_path: Path) -> None:
    ran("table1")
    rows = {row.method: row.config for row in plan(experiments.get("table1"), "smoke", 1)}
    runs = {method: find_finished(config, place.runs, place) for method, config in rows.items() if config}
    for data, wanted in (("mnist", "fig3"), ("multimnist", "fig5")):
        run = runs[f"{data}-r3-rec"]
        assert main(["reproduce", "figures", "--model", str(run), "--out", str(tmp_path / data)]) == 0
        assert f"{wanted}.png" in {path.name for path in (tmp_path / data).iterdir()}
    assert main(["reproduce", "figures", "--model", str(runs["mnist-cnn"]), "--out", str(tmp_path)]) == 2


def test_the_report_has_the_claims_on_one_page_and_a_page_per_experiment(
    ran: Ran, place: Place, tmp_path: Path
) -> None:
    for name in NAMES:
        ran(name)
    summary, index, *pages = page.write(place, tmp_path)
    claims = [claim for name in NAMES for claim in experiments.get(name).claims(ran(name).rows, "smoke")]
    assert claims
    text = summary.read_text()
    plain = text.replace("<br>", " ").replace("\u00a0", " ")
    assert all(f"[{claim.claim}](" in plain and f"| {claim.paper} | {claim.ours} |" in plain for claim in claims)
    assert text == index.read_text().replace("](", "](docs/results/")
    assert {path.stem for path in pages} == set(NAMES)
    for path in pages:
        content = path.read_text()
        assert content.startswith(f"# {experiments.get(path.stem).title}\n")
        shown = re.findall(r"!\[[^]]*\]\(([^)]+)\)", content)
        assert len(shown) == len(list(place.pictures(path.stem, "smoke").glob("*.png")))
        assert all((path.parent / target).exists() for target in shown)
    error = ran("table1").rows[0].outcome["error_percent"]
    assert f"{error:.2f}" in (tmp_path / "docs" / "results" / "table1.md").read_text()


def test_a_claim_is_decided_only_where_the_intervals_are_apart() -> None:
    low, high, between = Measured(1, 0.5, 1.5, 1), Measured(3, 2.5, 3.5, 2), Measured(2, 1.4, 2.6, 1)
    assert lower("x", "–", low, high).verdict == "reproduced"
    assert lower("x", "–", high, low).verdict == "not reproduced"
    assert lower("x", "–", low, between).verdict == lower("x", "–", between, high).verdict == "too close to call"
    assert higher("x", "–", high, low).verdict == "reproduced"
    assert lower("x", "–", low, high).seeds == 1
    assert at_most("x", 9, low).verdict == "reproduced"
    assert at_most("x", 0.6, low).verdict == "too close to call"
    assert at_most("x", 0.4, low).verdict == "not reproduced"
    assert low.complement == Measured(99, 98.5, 99.5, 1)


def test_a_claim_comes_from_the_largest_budget_that_has_its_rows() -> None:
    hour = kept.read(Place(ROOT / "results" / "reproduce").file("table1", "hour"))
    few = Results("table1", "full", Path(), [row for row in hour.rows if row.name.startswith("mnist-r")])
    found = {claim.claim: results.budget for claim, results in page.all_claims([few, hour])}
    assert found["MNIST: three routing iterations beat one"] == "full"
    assert found["MNIST: test error of CapsNet"] == "full"
    assert found["MultiMNIST: three routing iterations beat one"] == "hour"


def test_a_report_of_nothing_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run an experiment first"):
        page.write(Place(tmp_path, tmp_path), tmp_path)


def test_smoke_results_give_way_to_better_ones() -> None:
    def made(budget: str) -> Results:
        return Results("table1", budget, Path(), [Record(name="x")])

    assert [r.budget for r in page.ordered([made("smoke"), made("hour"), made("full")])] == ["full", "hour"]
    assert [r.budget for r in page.ordered([made("smoke")])] == ["smoke"]
