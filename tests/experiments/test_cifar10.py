"""CIFAR-10 with five heads: the same stem and training for all, and findings that follow the numbers."""

from __future__ import annotations

import torch

from capsnet.experiments.cifar10 import LINEAR, ROUTINGS, Cifar10, compared, line_of
from capsnet.experiments.core.plan import Record
from capsnet.models.registry import build
from capsnet.train.presets import get_preset


def record(head: str, seed: int, error: float, parameters: int = 1000) -> Record:
    made = {"parameters": parameters, "epochs": 12}
    return Record(method=head, seed=seed, outcome={"error_percent": error}, made=made, shown={"head": head})


LINEARS = [record(LINEAR, seed, 8.0 + seed) for seed in range(3)]


def test_every_head_has_the_same_stem_and_training() -> None:
    rows = Cifar10().rows("day", 1)
    assert [row.method for row in rows] == [LINEAR, *ROUTINGS, "cost-day"]
    shapes = set()
    for row in rows[:-1]:
        assert row.config is not None
        assert (row.config.lr, row.config.seed, row.config.validation) == (get_preset("cifar10").lr, 1, 5000)
        state = build(row.config.model, device=torch.device("meta")).state_dict()
        shapes.add(tuple((name, value.shape) for name, value in state.items() if name.startswith("stem.")))
    assert len(shapes) == 1
    assert len({(row.config.epochs, row.config.batch_size, str(row.config.augment)) for row in rows if row.config}) == 1


def test_a_finding_needs_an_interval_that_excludes_zero() -> None:
    worse = [record("dynamic", seed, 9.0 + seed + 0.01 * seed) for seed in range(3)]
    noisy = [record("uniform", seed, error) for seed, error in enumerate((5.0, 12.0, 9.5))]
    assert compared(worse, LINEARS) == "dynamic: 10.01 % against 9.00 %, worse than the linear layer beyond chance."
    assert compared(noisy, LINEARS).endswith("too close to call over 3 seeds.")
    assert compared(worse[:1], LINEARS[:1]).endswith("too close to call over 1 seed.")


def test_cost_and_table_come_from_the_records() -> None:
    slow = [record("dynamic", seed, 8.0, 1100) for seed in range(3)]
    costs = Record(method="cost-day", outcome={LINEAR: 0.1, "dynamic": 0.15})
    every = [*LINEARS, *slow, costs]
    said = Cifar10().findings(every)[-1]
    assert "takes 1.50 times as long" in said
    assert "have 10.0 % more parameters" in said
    assert len(Cifar10().table(every).rows) == 2
    assert line_of(slow, every)[2].startswith("-1.00 (")
    assert line_of(slow, every)[4] == "150"
    assert line_of(LINEARS, every)[2] == "–"
    assert "as long" not in " ".join(Cifar10().findings([*LINEARS, *slow]))


def test_the_steps_of_all_heads_are_measured_in_one_run() -> None:
    seconds = Cifar10().observe(Cifar10().rows("smoke", 0)[-1])
    assert list(seconds) == [LINEAR, "dynamic"]
    assert min(seconds.values()) > 0
