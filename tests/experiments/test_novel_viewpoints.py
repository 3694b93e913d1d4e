"""The experiment on novel viewpoints: what is trained and tested on, the read-out, and what its records show."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from capsnet import data
from capsnet.data.views import FAMILIAR, FIELDS
from capsnet.experiments import get
from capsnet.experiments.core.networks import parameters
from capsnet.experiments.core.plan import Record
from capsnet.experiments.core.readout import Reading, r_squared
from capsnet.experiments.viewpoints import (
    NETWORKS,
    STOP_AT,
    TARGETS,
    error_curve,
    known_toys,
    model_of,
    pose_targets,
    row_of,
)


def test_every_network_is_trained_alike_and_stops_at_the_same_validation_error() -> None:
    for budget in ("hour", "day"):
        rows = get("viewpoints").rows(budget, seed=1)  # type: ignore[arg-type]
        assert len(rows) == 2 * len(NETWORKS)
        settings = set()
        for row in rows:
            assert row.config is not None
            c = row.config
            assert c.stop_at == STOP_AT
            assert c.validation > 0
            assert c.lr == (0.001 if row.method.startswith("cnn") else 0.003)
            settings.add((c.epochs, c.batch_size, c.schedule, c.optimizer, c.weight_decay, c.seed, c.augment))
        assert len(settings) == 1


def test_the_networks_of_the_em_paper_have_its_sizes() -> None:
    assert parameters(model_of("em")) == 68_754
    assert 4.2e6 < parameters(model_of("cnn")) < 4.3e6


@pytest.mark.parametrize("kind", ["em", "self-attention"])
@pytest.mark.parametrize("what", FAMILIAR)
def test_the_novel_views_and_the_toys_of_the_test_are_in_no_training_or_validation_image(what: str, kind: str) -> None:
    row = row_of(kind, what, "smoke", 0)
    assert row.config is not None
    trained, novel = (data.load(text, validation=10) for text in (row.config.data, row.also))

    def values(part: Any, field: str) -> set[int]:
        return set(part.poses[:, FIELDS.index(field)].tolist())

    for part in (trained.train, trained.validation):
        assert part.n
        assert not values(part, what) & values(novel.test, what)
        assert not values(part, "instance") & (values(novel.test, "instance") | values(trained.test, "instance"))
    assert values(trained.test, what) == values(trained.train, what)
    known = known_toys(row)
    assert values(known, "instance") == values(trained.train, "instance")
    assert values(known, what) == values(novel.test, what)


def test_an_azimuth_is_read_as_sine_and_cosine_and_an_elevation_as_an_angle() -> None:
    poses = torch.tensor([[4, 30, 0, 5], [6, 60, 90, 0]])
    expected = [[0, 1, math.pi / 6], [1, 0, math.pi / 3]]
    torch.testing.assert_close(pose_targets(poses), torch.tensor(expected, dtype=torch.double))


def test_a_pose_is_read_from_the_capsule_of_the_true_class_alone() -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(600) % 5
    azimuths, elevations = (
        torch.randint(0, 360, (600,), generator=random),
        torch.randint(30, 70, (600,), generator=random),
    )
    targets = pose_targets(torch.stack([labels, elevations, azimuths, labels], 1))
    noise = torch.randn(600, 5, 16, generator=random, dtype=torch.double)
    mixed = targets @ torch.randn(3, 16, generator=random, dtype=torch.double)
    true = noise.clone()
    true[torch.arange(600), labels] = mixed
    other = noise.clone()
    other[torch.arange(600), (labels + 1) % 5] = mixed
    for numbers, known in ((true, True), (other, False)):
        halves = (Reading(numbers[k], labels[k], targets[k]) for k in (slice(0, 300), slice(300, 600)))
        found = r_squared(*halves, TARGETS)
        assert all(value > 0.98 if known else value < 0.2 for value in found.values())


def test_a_feature_that_is_silent_in_the_fitted_images_does_not_spoil_the_others() -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(400, 8, generator=random, dtype=torch.double)
    silent = torch.zeros(400, 1, dtype=torch.double)
    silent[:2] = 1e-6  # hardly ever active where it is fitted, and fully where it is judged
    silent[200:] = 1
    targets, labels = numbers[:, :3].clone(), torch.zeros(400, dtype=torch.long)
    numbers = torch.cat([numbers, silent], 1)
    halves = (Reading(numbers[part], labels[part], targets[part]) for part in (slice(0, 200), slice(200, 400)))
    assert all(value > 0.98 for value in r_squared(*halves, {"all": (0, 1, 2)}).values())


def outcome(familiar: list[int], novel: list[int]) -> dict[str, Any]:
    def bins(errors: list[int], shown: list[bool]) -> dict[str, Any]:
        n = [100 * there for there in shown]
        return {"edges": [30.0, 35.0, 40.0, 45.0], "n": n, "errors": errors}

    return {
        "familiar": {"errors_by_elevation": bins(familiar, [True, True, False])},
        "novel": {"errors_by_elevation": bins(novel, [False, False, True])},
    }


def test_a_curve_joins_familiar_and_novel_views() -> None:
    assert error_curve(outcome([2, 4, 0], [0, 0, 30]), "elevation") == ([30, 35, 40], [2, 4, 30])
    around = {"edges": [0.0, 20.0, 320.0, 340.0, 360.0], "n": [10, 0, 0, 10], "errors": [1, 0, 0, 2]}
    empty = {"edges": [0.0, 360.0], "n": [0], "errors": [0]}
    shown = {"familiar": {"errors_by_azimuth": around}, "novel": {"errors_by_azimuth": empty}}
    assert error_curve(shown, "azimuth") == ([-20, 0], [20, 10])


def record(kind: str, what: str, novel: float, validation: float) -> Record:
    summary = {"error_percent": novel, "error_percent_interval_95": [novel - 1, novel + 1]}
    measured = {"novel": summary, "novel_error_percent": novel, "validation_error_percent": validation}
    measured |= {"known": summary, "known_error_percent": novel}
    return Record(name=f"{kind}-{what}-seed0", method=f"{kind}-{what}", outcome=measured)


def test_the_findings_say_what_is_within_chance_and_who_stopped_short() -> None:
    experiment = get("viewpoints")
    records = [record("cnn", what, 30.0, 5.0) for what in FAMILIAR]
    records += [record("em", "azimuth", 20.0, 5.0), record("em", "elevation", 29.5, STOP_AT + 4)]
    known, azimuth, _, elevation, short = experiment.findings(records)
    assert known.startswith("Errors on novel azimuths of known toys: CNN")
    assert "EM routing 20.0 %;" in azimuth
    assert "EM routing 29.5 % (too close to call" in elevation
    assert short == f"em-elevation ended with a validation error of {STOP_AT + 4:.1f} %, short of {STOP_AT:g} %."
    assert [claim.verdict for claim in experiment.claims(records, "day")] == [
        "reproduced", "reproduced", "too close to call", "too close to call",
    ]  # fmt: skip
    assert len(experiment.findings(records[::2])) == 2  # nothing is said about views that no network was trained on
