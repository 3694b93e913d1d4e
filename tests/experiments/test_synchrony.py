"""The index of binding: its value in known cases, and the groups that it is computed from."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch

from capsnet.data import Batch
from capsnet.experiments.core.plan import Record
from capsnet.experiments.synchrony.binding import (
    Centres,
    adjusted_rand,
    centres_of,
    limit_of,
    measured_binding,
    routed_cells,
    two_means,
)
from capsnet.experiments.synchrony.compare import NETWORKS, compared, model_of
from capsnet.experiments.synchrony.pictures import cases, hues, some
from capsnet.models.base import Output
from capsnet.models.registry import build, parameters
from capsnet.routing.base import Trace


def literal_index(truth: list[int], found: list[int]) -> float:
    """Hubert and Arabie's index, by going through all pairs of pixels."""
    both = one = other = total = 0
    for a, b in combinations(range(len(truth)), 2):
        same, alike = truth[a] == truth[b], found[a] == found[b]
        both, one, other, total = both + (same and alike), one + same, other + alike, total + 1
    expected = one * other / total
    return (both - expected) / ((one + other) / 2 - expected)


def test_the_index_is_that_of_all_pairs_of_counted_pixels() -> None:
    generator = torch.Generator().manual_seed(0)
    truth, found, counted = (torch.randint(0, 2, (5, 4, 6), generator=generator) for _ in range(3))
    index = adjusted_rand(truth, found, counted.bool())
    for k in range(5):
        kept = counted[k].bool()
        assert float(index[k]) == pytest.approx(literal_index(truth[k][kept].tolist(), found[k][kept].tolist()))


def test_swapped_groups_are_perfect_and_one_group_is_chance() -> None:
    truth, counted = torch.tensor([[[0, 0, 1, 1, 1]]]), torch.ones(1, 1, 5, dtype=torch.bool)
    assert float(adjusted_rand(truth, 1 - truth, counted)) == 1
    assert float(adjusted_rand(truth, torch.zeros_like(truth), counted)) == 0


def test_two_means_finds_two_phases_and_ignores_what_does_not_count() -> None:
    angle = torch.tensor([[0.2, 0.3, 2.0], [1.4, 1.5, 1.6]]).view(1, 2, 3)
    counted = torch.tensor([[[True, True, False], [True, True, True]]])
    points = torch.stack([angle.cos(), angle.sin()], 1)
    groups = two_means(points, counted.float())[0][counted[0]].tolist()
    assert groups in ([0, 0, 1, 1, 1], [1, 1, 0, 0, 0])


def test_a_pixel_takes_the_nearest_unit() -> None:
    centres = Centres((1, 3), stride=2, offset=3.0)
    assert centres.nearest(11, 3)[[0, 3, 5, 7, 10]].tolist() == [0, 0, 1, 2, 2]


def test_the_limit_is_one_if_every_cell_has_one_object() -> None:
    parts = torch.zeros(1, 2, 1, 6, 6)
    parts[0, 0, 0, :3], parts[0, 1, 0, 3:] = 1, 1
    batch = Batch(parts.sum(1), torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.arange(1), parts)
    assert float(limit_of(Centres((2, 2), 3, 1.0), batch)) == 1
    assert float(limit_of(Centres((1, 1), 6, 2.5), batch)) == 0


def test_a_cell_belongs_to_that_active_class_which_it_sends_more_to() -> None:
    class Grid(torch.nn.Module):
        def shown(self) -> dict[str, list[int]]:
            return {"grid": [1, 2]}

    couplings = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.1, 0.3]]).view(1, 1, 2, 3)
    trace = Trace(couplings, torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 3), torch.zeros(1, 2, 3, 2))
    output = Output(torch.tensor([[0.9, 0.1, 0.8]]), primary=torch.ones(1, 2, 4), trace=trace)
    assert routed_cells(Grid(), output)[0, 0, 0].tolist() == [1, 0]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["sync", "dynamic"])
def test_binding_is_measured_for_phases_and_for_couplings(kind: str) -> None:
    torch.manual_seed(0)
    model, parts = build(model_of(kind)).eval(), torch.zeros(3, 2, 1, 36, 36)
    parts[:, 0, 0, 8:14], parts[:, 1, 0, :, 20:24] = 1, 1
    targets = torch.zeros(3, 10).index_fill_(1, torch.tensor([1, 2]), 1)
    found = measured_binding(model, Batch(parts.amax(1), targets, targets.bool(), torch.arange(3), parts))
    assert len(found["index_by_step"]) == (9 if kind == "sync" else 3)
    assert found["index"] == found["index_by_step"][-1]
    assert 0.5 < found["index_limit"] <= 1


def test_a_network_without_phases_binds_nothing() -> None:
    assert centres_of(build(model_of("real"))) is None


def test_all_networks_have_about_the_same_size() -> None:
    sizes = [parameters(model_of(kind)) for kind in NETWORKS]
    assert max(sizes) < 1.02 * min(sizes)


def test_a_comparison_is_made_seed_by_seed() -> None:
    def records(*values: float) -> list[Record]:
        return [Record(seed=seed, outcome={"index": value}) for seed, value in enumerate(values)]

    assert compared(records(0.5, 0.4), records(0.3, 0.3), "index") == "better in all 2 seeds"
    assert (
        compared(records(0.5, 0.2), records(0.3, 0.3), "index") == "better in some of the 2 seeds and worse in others"
    )
    assert compared(records(0.2), records(0.3, 0.3), "index") == "worse in the one seed that both have"


def test_hues_and_cases() -> None:
    red, cyan = hues(torch.tensor([[[0.0, math.pi]]]), torch.ones(1, 1, 2))[0, :, 0].T
    torch.testing.assert_close(red, torch.tensor([1.0, 0.25, 0.25]))
    assert cyan[0] < 0.01
    assert cases(torch.tensor([0.1, 0.5, 0.9, 0.0])).tolist() == [0, 1, 2, 1, 0, 3]
    assert some(9) == [0, 2, 4, 6, 8]
    assert some(3) == [0, 1, 2]
