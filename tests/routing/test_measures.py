"""Entropy of couplings and agreement of votes."""

from __future__ import annotations

import pytest
import torch

from capsnet.routing import dynamic_routing
from capsnet.routing.measures import agreement, entropy


def test_equal_couplings_have_the_maximum_entropy_with_a_leak_too() -> None:
    assert float(entropy(torch.full((1, 1, 2, 10), 0.1)).min()) == pytest.approx(1)
    assert float(entropy(torch.full((1, 1, 2, 10), 1 / 11)).min()) == pytest.approx(1)


def test_couplings_to_one_capsule_have_no_entropy() -> None:
    assert entropy(torch.eye(4)).abs().max() < 1e-6


def test_routing_increases_the_agreement_of_the_votes() -> None:
    torch.manual_seed(0)
    trace = dynamic_routing(torch.randn(1, 6, 4), torch.randn(6, 3, 5, 4), iterations=4, trace=True).trace
    assert trace is not None
    found = agreement(trace.couplings[:, 0], trace.votes[0], trace.outputs[:, 0])
    assert found.shape == (4, 3)
    assert (found[-1] > found[0]).all()
    assert (found.abs() <= 1 + 1e-6).all()


def test_agreement_is_a_cosine_even_where_couplings_are_negative() -> None:
    """A learnt bias may make couplings of self-attention routing negative, and their sum zero."""
    couplings = torch.tensor([[[0.5], [-0.5], [0.5]]])
    votes = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]], [[0.0, 1.0]]])
    found = agreement(couplings, votes, torch.tensor([[[1.0, 0.0]]]))
    torch.testing.assert_close(found, torch.tensor([[0.5]]))
    assert agreement(-couplings.abs(), votes, torch.ones(1, 1, 2)).abs().max() <= 1
