"""Routing by hand: any registered algorithm on a few votes in the plane.

The numbers come from the algorithm itself and from its trace. Learnt parameters have initial values that suit votes of
this size, the same for every request, and all lower capsules are active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from capsnet.errors import UserError
from capsnet.lab.options import Control, checked, controls
from capsnet.routing.base import ALL, ROUTINGS, Routing, Sizes, Trace

PLANE = 2  # dimensions of all poses
SEED = 0
SPREAD = 0.3  # of votes that agree roughly; the page draws votes of length about 1


@dataclass(frozen=True)
class Offer:
    """A routing algorithm that can be tried by hand, as the page shows it."""

    name: str
    summary: str
    couplings: str
    own_activations: bool
    learnt: bool
    options: list[Control]


def offers() -> list[Offer]:
    """The registered algorithms that can route given votes to two upper capsules."""
    return [found for name in ROUTINGS.names() if (found := offer(name)) is not None]


def offer(name: str) -> Offer | None:
    try:
        routing = prepared(name, {}, lower=2, upper=2)
    except UserError:  # it cannot be imported, or not run on such votes
        return None
    learnt = any(True for _ in routing.parameters())
    about = (routing.couplings, routing.own_activations, learnt, controls(routing.options))
    return Offer(name, summary(type(routing)), *about)


def summary(algorithm: type[Routing]) -> str:
    """What an algorithm does: the first paragraph of its docstring."""
    return " ".join((algorithm.__doc__ or "").strip().split("\n\n")[0].split())


def prepared(name: str, options: Mapping[str, Any], lower: int, upper: int) -> Routing:
    """An algorithm with initial parameters for that many capsules."""
    algorithm = ROUTINGS.get(name)
    if algorithm.route is Routing.route:
        raise UserError(f"the routing '{name}' cannot be run on votes alone: choose another one.")
    routing = algorithm(**checked(algorithm.Options(), options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        routing.build(Sizes(lower, PLANE, upper, PLANE, types=lower))
        routing.reset_parameters()
        routing.expect_spread(SPREAD)
    return routing.eval()


@torch.inference_mode()
def by_hand(votes: Sequence[Sequence[Sequence[float]]], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """An algorithm on votes (i, j, 2) that somebody has drawn: every number of every step, without the batch axis."""
    u_hat = torch.tensor(votes, dtype=torch.float32)
    trace = prepared(name, options, *u_hat.shape[:2]).route(u_hat[None], None, ALL, trace=True).trace
    if trace is None:
        raise UserError(f"the routing '{name}' returns no trace: choose another one.")
    found = steps(trace)
    if not all(tensor.isfinite().all() for tensor in found.values()):
        raise UserError(f"the routing '{name}' overflows with these votes and options: use smaller numbers.")
    return {key: tensor.tolist() for key, tensor in found.items()}


def steps(trace: Trace) -> dict[str, Tensor]:
    """The trace of the only example, and what lines 5 and 7 of Procedure 1 compute from it."""
    traced = {"couplings": trace.couplings, "outputs": trace.outputs, "activations": trace.activations}
    traced |= {key: x for key in ("logits", "variances", "oscillators") if (x := getattr(trace, key)) is not None}
    sums = torch.einsum("tbij,bijq->tbjq", trace.couplings, trace.votes)
    agreement = torch.einsum("bijq,tbjq->tbij", trace.votes, trace.outputs)
    return {key: x[:, 0] for key, x in (traced | {"sums": sums, "agreement": agreement}).items()}
