"""Each row of `couplings` changes one thing, and the findings are made from the numbers."""

from __future__ import annotations

from dataclasses import fields

import pytest

from capsnet.experiments.core.plan import Record
from capsnet.experiments.couplings import BASE, CHANGES, Couplings
from capsnet.models.registry import parameters

ROWS = {row.method: row.config for row in Couplings().rows("day", seed=0)}


@pytest.mark.parametrize("name", [name for name in CHANGES if name != BASE])
def test_a_row_differs_from_the_base_in_one_setting(name: str) -> None:
    base, row = ROWS[BASE], ROWS[name]
    assert base is not None
    assert row is not None
    pairs = [(row, base), (row.model, base.model)]
    changed = {f.name for a, b in pairs for f in fields(b) if getattr(a, f.name) != getattr(b, f.name)} - {"model"}
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


def test_findings_name_the_sharper_ones_with_a_lower_and_a_higher_error() -> None:
    records = [
        record(method, seed, error + 0.01 * seed, entropy)
        for method, error, entropy in (
            (BASE, 12.0, 99.0), ("em", 14.0, 20.0), ("self-attention", 11.0, 5.0), ("uniform", 13.0, 100.0),
        )
        for seed in range(3)
    ]  # fmt: skip
    (finding,) = Couplings().findings(records)
    assert finding == (
        "The unchanged network's couplings have 99.0 % of the maximum entropy. Sharper than that, with a lower error "
        "beyond chance: self-attention (5.0 %); higher error beyond chance: em (20.0 %)."
    )
