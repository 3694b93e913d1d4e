"""Each row of `affine-causes` changes one thing and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from capsnet.data import load
from capsnet.experiments import get
from capsnet.experiments.affine_causes import CHANGES
from capsnet.experiments.core.plan import Row

ROWS = {row.method: row for row in get("affine-causes").rows("day", seed=0)}


def differing(row: Row, base: Row) -> set[str]:
    """The settings of a training, and of its network, that differ from the base."""
    pairs = [(row.config, base.config), (row.config.model, base.config.model)]  # type: ignore[union-attr]
    changed = {f.name for a, b in pairs for f in fields(b) if getattr(a, f.name) != getattr(b, f.name)}  # type: ignore[arg-type]
    return changed - {"model"}


@pytest.mark.parametrize("method", [name for name in ROWS if not name.startswith("base")])
def test_a_row_differs_from_the_base_in_one_setting(method: str) -> None:
    name, _, network = method.rpartition("-")
    assert len(differing(ROWS[method], ROWS[f"base-{network}"])) == 1
    assert ROWS[method].shown["changed"] == CHANGES[name].title


def test_the_base_is_the_training_of_affine_so_that_it_runs_once() -> None:
    trained = {row.method: row.config for row in get("affine").rows("day", seed=0)}
    assert {network: ROWS[f"base-{network}"].config for network in ("capsnet", "cnn")} == {
        network: trained[network] for network in ("capsnet", "cnn")
    }


def test_digits_are_shifted_by_no_more_than_asked() -> None:
    near = load("expanded-mnist:shift=2", validation=0).test
    batch = near.gather(near.numbers()[:300])
    assert float(batch.measures["shift"].max()) == pytest.approx(8**0.5)  # 2 px in both directions
    middle = replace(near, room=0)
    assert float(middle.gather(near.numbers()[:50]).measures["shift"].max()) == 0
