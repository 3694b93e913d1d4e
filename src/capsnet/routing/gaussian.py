"""What EM and variational Bayes routing share: an upper capsule is a Gaussian fitted to the votes that choose it.

With d = û_{j|i} − μ_j, an iteration of either needs no more of the votes than three sums, in which the responsibilities
have a Gaussian form as well:

    R_ij = softmax_j(k_j − ½ Σ_q P_j^q (d^q)²)        r_ij = R_ij a_i
    S_j = Σ_i r_ij        one_j = Σ_i r_ij d        two_j = Σ_i r_ij d²

Kernels compute them without storing the votes (`capsnet.kernels.moments` and `capsnet.kernels.grid`), and an algorithm
turns them into μ, P and k of the next iteration in `fit`. `route` remains its readable form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from capsnet.kernels import dispatch
from capsnet.nn.functional import at_least_float32, without_autocast
from capsnet.routing.base import Routed, Routing, check_activations, lower_activations

Moments = Callable[[Tensor | None, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class GaussianRouting(Routing):
    """Base class of algorithms that need only moments of the votes."""

    def fit(self, moments: Moments, mean: Tensor, capacity: Tensor | float) -> Routed:
        """The algorithm on `moments(k, μ, P)` → S, one and two, starting from means (…, j, q) of zero.

        k is (…, j), or None before the first iteration, where responsibilities are equal, and P is (…, j, q).
        `capacity` is what a parent receives when all its children are active and divide themselves equally.
        `over_batch` is left to the caller.
        """
        raise NotImplementedError

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        routed = self.on_grid(u, W, a, dispatch.one_window(u, W)) if self.matrix else self.by_moments(u, W, a)
        return routed and Routed(routed.poses, self.over_batch(routed.activations))

    def by_moments(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        """A dense layer of vector poses by its kernel."""
        if (moments := dispatch.moments(u, W)) is None:
            return None
        a, zeros = lower_activations(u, a), u.new_zeros(len(u), *W.shape[1:3])

        def from_zeros(k: Tensor | None, mean: Tensor, P: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return moments(u, W, a, zeros[..., 0] if k is None else k, mean, P)

        return self.fit(from_zeros, zeros, u.shape[1] / W.shape[1])

    def on_grid(self, u: Tensor, W: Tensor, a: Tensor | None, windows: Any) -> Routed | None:
        with without_autocast(u):
            u, W = at_least_float32(u), at_least_float32(W)
            if (votes := dispatch.grid_votes(u, W, self.matrix, windows)) is None:
                return None
            if a is not None:
                check_activations(u, a)
            found = self.fit(partial(votes.moments, lower_activations(u, a)), votes.zeros(), votes.capacity())
            return Routed(votes.untiled(found.poses), votes.untiled(found.activations))
