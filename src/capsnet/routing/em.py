"""EM routing (Hinton, Sabour and Frosst 2018, "Matrix capsules with EM routing", Procedure 1).

An upper capsule is a Gaussian with a diagonal covariance, fitted to the votes V_ij of lower capsules that choose it.
Responsibilities start at R_ij = 1/J. Every iteration t has an M-step and, except for the last, an E-step:

    M-step   r_ij = R_ij a_i        S_j = Σ_i r_ij
             μ_j^q = Σ_i r_ij V_ij^q / S_j        (σ_j^q)² = Σ_i r_ij (V_ij^q − μ_j^q)² / S_j
             cost_j^q = (β_u + ln σ_j^q) · S_j        a_j = sigmoid(λ_t (β_a − Σ_q cost_j^q))
    E-step   ln p_ij = −Σ_q [ (V_ij^q − μ_j^q)² / 2(σ_j^q)² + ln σ_j^q + ½ ln 2π ]
             R_ij = softmax_j(ln a_j + ln p_ij)

with λ_t = λ (1 − 0.95^(t+1)), as in the authors' code. The pose of upper capsule j is μ_j; its activation is a_j.

Deviations:
- S_j in the cost is divided by what a parent receives when all its children are active and divide themselves equally
  among their parents (after Gritzman 2019): I/J in a dense layer. Otherwise the cost grows with the number of children
  and activations saturate. Costs are then of the order of 1 instead of the order of I/J, and λ is larger than the
  authors' 0.01 by two orders of magnitude.
- Σ_q is 16 times the mean over q, which for the paper's poses is the same, so that λ suits poses of any size.
- 0.03 is added to σ², because a parent with a single child would have σ = 0. W starts at a standard deviation of 0.3,
  the authors' value for convolutional layers, so that this is about the variance of untrained votes, and
  responsibilities start soft. With the authors' 5e-4 they are almost 0 or 1 from the first step on.
- β_u starts so that costs are about 0, whatever the sizes, and β_a at 0, so that activations start at about ½. The
  authors' values (0.5 to 2 for both) suit their convolutional layers and their λ.
- Means are not damped between iterations. Coordinates are added to the votes by the layer (`ClassCaps`).
- λ, the variance floor and the scale of W were chosen on validation images (research/em_defaults.py).
- Poses may be vectors as well as matrices: the equations see a vote as a list of numbers. Lower activations default to
  the lengths of the poses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.nn.functional import at_least_float32
from capsnet.ranges import MOST, check_range
from capsnet.routing.base import Parents, Routed, Sizes, Trace, register
from capsnet.routing.gaussian import GaussianRouting, Moments
from capsnet.routing.options import IterativeOptions

FLOOR = 0.03  # added to variances
NOBODY = 1e-8  # added to S_j: the mean of a parent that receives nothing would be 0/0
DIMENSIONS = 16  # of the paper's poses
LENGTH = 0.3  # typical length of a lower pose before training; only the initial β_u depends on it


@dataclass(frozen=True)
class EMOptions(IterativeOptions):
    """Options of EM routing."""

    algorithm: ClassVar[str] = "em"

    iterations: int = 3
    """M-steps; training and evaluation should use the same number."""
    inverse_temperature: float = 8.0
    """λ: how sharply an activation depends on its cost; iteration t uses λ (1 − 0.95^(t+1))."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, MOST, "inverse_temperature")

    def temperature(self, t: int) -> float:
        """λ_t of iteration t = 0, 1, …

        >>> round(EMOptions(inverse_temperature=0.01).temperature(0), 6)
        0.0005
        """
        return self.inverse_temperature * (1 - 0.95 ** (t + 1))


class Gaussians(NamedTuple):
    """What an M-step gives: one Gaussian with an activation for each upper capsule."""

    mean: Tensor  # (…, j, q) μ
    variance: Tensor  # (…, j, q) σ²
    log_activation: Tensor  # (…, j) ln a
    activation: Tensor  # (…, j) a


@register("em")
class EMRouting(GaussianRouting):
    """Each upper capsule is a Gaussian fitted to the votes that choose it; a vote chooses the Gaussian that explains it
    best.

    >>> from capsnet.nn.layers import DenseCaps
    >>> poses, activations = DenseCaps(6, 16, 10, 16, routing="em", matrix=True)(torch.randn(2, 6, 16))
    >>> poses.shape, activations.shape
    (torch.Size([2, 10, 16]), torch.Size([2, 10]))
    """

    Options = EMOptions
    options: EMOptions
    own_activations = True
    couplings = "responsibility"

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        self.beta_u = nn.Parameter(torch.empty(sizes.upper, device=device, dtype=dtype))
        self.beta_a = nn.Parameter(torch.empty(sizes.upper, device=device, dtype=dtype))

    def initial_std(self) -> float:
        return 0.3

    def reset_parameters(self, init: str = "default") -> None:
        self.expect_spread(self.initial_std() * LENGTH)
        nn.init.zeros_(self.beta_a)

    def expect_spread(self, spread: float) -> None:
        nn.init.constant_(self.beta_u, -0.5 * math.log(spread**2 + FLOOR))

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def fit(self, moments: Moments, mean: Tensor, capacity: Tensor | float) -> Routed:
        """`route` on moments of the votes instead of the votes themselves."""
        self.check_built()
        precision, k = mean, None
        for t in range(self.options.iterations):
            S, one, two = moments(k, mean, precision)
            inverse = 1 / (S + NOBODY).unsqueeze(-1)
            received, deviation = S.unsqueeze(-1) * inverse, one * inverse  # received: 1 unless the parent has no child
            new = deviation + received * mean
            moved = new - mean
            variance = two * inverse - moved * (2 * deviation - received * moved) + FLOOR
            fitted = self.activate(new, variance, self.share(S, capacity), self.options.temperature(t))
            if t < self.options.iterations - 1:
                k = fitted.log_activation - 0.5 * (2 * math.pi * variance).log().sum(-1)
                mean, precision = new, 1 / variance
        return Routed(fitted.mean, fitted.activation)

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        self.check_built()
        a = u_hat.new_ones(u_hat.shape[:2]) if a is None else a
        last = self.options.iterations - 1
        steps: list[tuple[Tensor, ...]] = []
        R = parents.softmax(torch.zeros_like(u_hat[..., 0]))
        capacity = R.sum(1)
        for t in range(last + 1):
            fitted = self.m_step(u_hat, R * a.unsqueeze(-1), capacity, self.options.temperature(t))
            steps.append((R, fitted.mean, fitted.activation, fitted.variance))
            if t < last:
                R = parents.softmax(fitted.log_activation.unsqueeze(1) + self.log_density(u_hat, fitted))
        if not trace:
            return Routed(fitted.mean, fitted.activation)
        couplings, outputs, activations, variances = (torch.stack(x) for x in zip(*steps, strict=True))
        history = Trace(couplings, outputs, activations, u_hat, variances=variances)
        return Routed(fitted.mean, fitted.activation, history)

    def m_step(self, u_hat: Tensor, r: Tensor, capacity: Tensor, inverse_temperature: float) -> Gaussians:
        """Fit the Gaussians to votes (b, i, j, q) with weights r (b, i, j); capacity (b, j) is as in `share`."""
        S = r.sum(1)  # b j
        weight = r / (S.unsqueeze(1) + NOBODY)
        mean = torch.einsum("bij,bijq->bjq", weight, u_hat)
        variance = self.variance(weight, u_hat, mean)
        return self.activate(mean, variance, self.share(S, capacity), inverse_temperature)

    def activate(self, mean: Tensor, variance: Tensor, share: Tensor, inverse_temperature: float) -> Gaussians:
        """a_j from the cost of describing what parent j receives by its Gaussian."""
        per_dimension = at_least_float32(self.beta_u) + 0.5 * variance.log().mean(-1)
        logit = inverse_temperature * (at_least_float32(self.beta_a) - DIMENSIONS * per_dimension * share)
        return Gaussians(mean, variance, F.logsigmoid(logit), logit.sigmoid())

    def variance(self, weight: Tensor, u_hat: Tensor, mean: Tensor) -> Tensor:
        """σ² with its floor, of votes whose weights sum to 1."""
        return torch.einsum("bij,bijq->bjq", weight, (u_hat - mean.unsqueeze(1)).square()) + FLOOR

    def share(self, S: Tensor, capacity: Tensor | float) -> Tensor:
        """S_j in units of what the parent receives when all children are active and divide themselves equally."""
        return S / capacity

    def log_density(self, u_hat: Tensor, fitted: Gaussians) -> Tensor:
        """ln p_ij (b, i, j) of votes (b, i, j, q): the log of a product of one-dimensional Gaussians."""
        distance = (u_hat - fitted.mean.unsqueeze(1)).square() / fitted.variance.unsqueeze(1)
        return -0.5 * (distance + (2 * math.pi * fitted.variance).log().unsqueeze(1)).sum(-1)
