"""Each row of `couplings` changes one thing, and the findings are made from the numbers."""

from __future__ import annotations

from dataclasses import fields

import pytest

from capsnet.experiments.core.plan import Record
from capsnet.experiments.couplings import BASE, CHANGES, RATE, Couplings
from capsnet.models.registry import parameters

ROWS = {row.method: row.config for row in Couplings().rows("day", seed=0)}


@pytest.mark.parametrize("name", [name for name in CHANGES if name != BASE])
def test_a_row_differs_from_the_base_in_one_setting(name: str) -> None:
    base, row = ROWS[BASE], ROWS[name]
    assert base is not None
    assert row is not None
    pairs = [(row, base), (row.model, base.model)]
    changed = {f.name for a, b in pairs for f in fields(b) if getattr(a, f.name) != getattr(b, f.name)} - {"model"}
    assert row.lr == base.lr == RATE
    kind = CHANGES[name].kind
    assert (
        changed
        == {
            "iterations": {"routing"},
            "routing": {"routing"},
            "training time": {"epochs"},
            "lower capsules": {"primary_types", "primary_dim"},
        }[kind]
    )
    if kind == "iterations":
        assert {**vars(row.model.routing)} == {**vars(base.model.routing)} | {"iterations": int(name[-1])}  # type: ignore[attr-defined]


def test_lower_capsules_have_as_many_numbers_in_all() -> None:
    sizes = {c.model.primary_types * c.model.primary_dim for c in ROWS.values() if c is not None}  # type: ignore[attr-defined]
    assert sizes == {128}
    same = {parameters(ROWS[name].model) for name in (BASE, "iterations-5", "epochs-18")}  # type: ignore[union-attr]
    assert len(same) == 1


def record(method: str, seed: int, error: float, entropy: float) -> Record:
    shown = {"changed": CHANGES[method].kind, "to": CHANGES[method].label}
    return Record(method=method, seed=seed, shown=shown, outcome={"error_percent": error, "entropy_percent": entropy})


def records_of(errors: dict[str, tuple[float, float]], seeds: int = 3) -> list[Record]:
    return [
        record(method, seed, error + 0.01 * seed, entropy)
        for method, (error, entropy) in errors.items()
        for seed in range(seeds)
    ]


def test_findings_say_which_sharper_and_less_sharp_ones_have_which_error() -> None:
    errors = {BASE: (12.0, 99.0), "em": (14.0, 20.0), "self-attention": (11.0, 5.0), "types-4": (12.0, 97.0),
              "uniform": (13.0, 100.0), "epochs-18": (11.0, 98.95)}  # fmt: skip
    assert Couplings().findings(records_of(errors)) == [
        "The unchanged network's couplings have 99.0 % of the maximum entropy.",
        "Changes with sharper couplings, with their entropy. A lower error beyond chance: self-attention (5.0 %); "
        "a higher error beyond chance: em (20.0 %); too close to call: 4 types of 32-D (97.0 %).",
        "Changes with less sharp couplings, with their entropy. A higher error beyond chance: uniform (100.0 %).",
        "Of 5 intervals at 95 %, about 0.2 would exclude zero by chance alone.",
    ]


def test_a_single_seed_is_too_close_to_call_and_nothing_is_said_without_the_base() -> None:
    errors = {BASE: (12.0, 99.0), "em": (14.0, 20.0)}
    assert "with their entropy. Too close to call: em (20.0 %)." in Couplings().findings(records_of(errors, 1))[1]
    assert Couplings().findings(records_of({"em": (14.0, 20.0)})) == []
    assert Couplings().pictures(records_of({"em": (14.0, 20.0)})) == {}
