"""Routing: how lower capsules decide which upper capsules to send their output to.

Every algorithm has one signature, so that a layer can take any of them:

    algorithm(u, W, bias=None, *, iterations, leaky, detach, trace) -> Routed

lower outputs `u` (b, i, p) and transformations `W` (n, j, q, p) in, upper outputs `v` (b, j, q) out. An algorithm
is free never to form the votes. `register` adds one by name:

    @register("mine")
    def my_routing(u, W, bias=None, *, iterations=3, leaky=False, detach=False, trace=False): ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from capsnet.errors import unknown


class Trace(NamedTuple):
    """What happened inside, for every iteration t. Figures, tests and pages read it; nothing is computed twice.

    Of a layer with groups: see `capsnet.layers.join_groups`.
    """

    logits: Tensor  # (t, b, i, j) b_ij going into the softmax
    couplings: Tensor  # (t, b, i, j) c_ij that came out; sums to 1 over j, to less where the routing is leaky
    outputs: Tensor  # (t, b, j, q) v_j that they gave
    votes: Tensor  # (b, i, j, q) û_{j|i}


class Routed(NamedTuple):
    """Upper capsules, and how they came about when that was asked for."""

    v: Tensor  # (b, j, q)
    trace: Trace | None = None


RoutingAlgorithm = Callable[..., Routed]
ALGORITHMS: dict[str, RoutingAlgorithm] = {}


def register(name: str) -> Callable[[RoutingAlgorithm], RoutingAlgorithm]:
    """Add a routing algorithm under a name that configs and checkpoints can refer to."""

    def add(algorithm: RoutingAlgorithm) -> RoutingAlgorithm:
        ALGORITHMS[name] = algorithm
        return algorithm

    return add


def get(name: str) -> RoutingAlgorithm:
    """The algorithm of that name; an unknown name lists the choices."""
    if name not in ALGORITHMS:
        raise unknown("routing algorithm", name, ALGORITHMS)
    return ALGORITHMS[name]


from capsnet.routing.dynamic import dynamic_routing  # noqa: E402  (it registers itself above)

__all__ = ["ALGORITHMS", "Routed", "Trace", "dynamic_routing", "get", "register"]
