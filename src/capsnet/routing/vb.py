"""Variational Bayes routing (Ribeiro, Leontidis and Kollias 2020, "Capsule Routing via Variational Bayes").

As in EM routing an upper capsule is a Gaussian fitted to the votes that choose it, but its mean μ_j, its precisions
λ_j^q and the mixing proportions π are random variables with conjugate priors: π has a Dirichlet prior, and
(μ_j^q, λ_j^q) has a Normal-Wishart prior with mean m0 = 0. The priors keep variances from collapsing, so no floor is
needed. Responsibilities start at R_ij = 1/J. Every iteration updates the posterior and, except for the last, the
responsibilities:

    r_ij = R_ij a_i    S_j = Σ_i r_ij    α_j = α0 + S_j    κ_j = κ0 + S_j    ν_j = ν0 + S_j
    m_j^q = Σ_i r_ij V_ij^q / κ_j        1/Ψ_j^q = 1/Ψ0 + Σ_i r_ij (V_ij^q − m_j^q)² + κ0 (m_j^q)²

    E[ln π_j] = ψ(α_j) − ψ(Σ_k α_k)      E[ln λ_j^q] = ψ(ν_j / 2) + ln 2 + ln Ψ_j^q
    ln ρ_ij = E[ln π_j] + ½ Σ_q ( E[ln λ_j^q] − ln 2π − 1/κ_j − ν_j Ψ_j^q (V_ij^q − m_j^q)² )
    R_ij = softmax_j(ln ρ_ij)

The pose of upper capsule j is m_j, and its activation comes from the entropy H_j of its Gaussian:

    H_j = ½ Σ_q ( ln 2πe − E[ln λ_j^q] )      a_j = sigmoid(β_a − β_u · norm(exp E[ln π_j] · H_j))

`norm` is batch normalisation: in training mode it uses the statistics of the batch, so there an activation depends on
its batch mates, and otherwise running statistics, so a prediction does not.

Deviations:
- The paper has sigmoid(norm(β_a − (exp E[ln π_j] · H_j + β_u))), where the norm cancels β_a and β_u; here they are the
  bias and the gain of the norm.
- Covariances are diagonal, which makes the Wishart distribution a product of one-dimensional ones: exactly conjugate,
  and ν0 need not grow with the dimension.
- Poses are not normalised over the batch.
- ψ is a series of basic operations, because ONNX has no digamma.
- As in EM routing, poses may be vectors, and lower activations default to their lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from capsnet.nn.functional import at_least_float32
from capsnet.nn.shares import batch_moments, synchronised
from capsnet.routing.base import Parents, Routed, Sizes, Trace, register
from capsnet.routing.gaussian import GaussianRouting, Moments
from capsnet.routing.options import IterativeOptions

ALPHA, KAPPA, NU, PSI = 1.0, 1.0, 2.0, 1.0  # the priors α0, κ0, ν0 and Ψ0
MOMENTUM, EPS = 0.1, 1e-5  # of the batch norm: those of nn.BatchNorm1d


@dataclass(frozen=True)
class VBOptions(IterativeOptions):
    """Options of variational Bayes routing."""

    algorithm: ClassVar[str] = "vb"

    iterations: int = 3
    """Updates of the posterior; training and evaluation should use the same number."""


class Posterior(NamedTuple):
    """What is believed about the upper capsules, given the responsibilities."""

    log_pi: Tensor  # (b, j) E[ln π]
    kappa: Tensor  # (b, j) κ
    nu: Tensor  # (b, j) ν
    mean: Tensor  # (b, j, q) m
    psi: Tensor  # (b, j, q) Ψ
    log_precision: Tensor  # (b, j, q) E[ln λ]


@register("vb")
class VBRouting(GaussianRouting):
    """EM routing with conjugate priors on its Gaussians, which keep them from collapsing onto a single vote."""

    Options = VBOptions
    options: VBOptions
    own_activations = True
    couplings = "responsibility"
    running_mean: Tensor
    running_var: Tensor

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        self.beta_u = nn.Parameter(torch.empty(sizes.upper, device=device, dtype=dtype))
        self.beta_a = nn.Parameter(torch.empty(sizes.upper, device=device, dtype=dtype))
        self.register_buffer("running_mean", torch.zeros_like(self.beta_u.detach()))
        self.register_buffer("running_var", torch.ones_like(self.beta_u.detach()))

    def initial_std(self) -> float:
        return 1.0  # so that votes are of the size that the prior Ψ0 = 1 expects

    def reset_parameters(self, init: str = "default") -> None:
        nn.init.ones_(self.beta_u)
        nn.init.zeros_(self.beta_a)
        nn.init.zeros_(self.running_mean)
        nn.init.ones_(self.running_var)

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def fit(self, moments: Moments, mean: Tensor, capacity: Tensor | float) -> Routed:
        """`route` on moments of the votes instead of the votes themselves."""
        self.check_built()
        precision, k = mean, None
        for t in range(self.options.iterations):
            S, one, two = moments(k, mean, precision)
            posterior = from_moments(S, one, two, mean)
            if t < self.options.iterations - 1:
                mean, precision, k = posterior.mean, expected_precision(posterior), constant(posterior)
        return Routed(posterior.mean, weighted_entropy(posterior))

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        self.check_built()
        a = u_hat.new_ones(u_hat.shape[:2]) if a is None else a
        steps: list[tuple[Tensor, Posterior]] = []
        R = parents.softmax(torch.zeros_like(u_hat[..., 0]))
        for t in range(self.options.iterations):
            if t:
                R = parents.softmax(log_rho(u_hat, steps[-1][1]))
            steps.append((R, update(u_hat, R * a.unsqueeze(-1))))
        earlier = [self.activate(weighted_entropy(posterior)) for _, posterior in steps[:-1]] if trace else []
        pose, activation = steps[-1][1].mean, weighted_entropy(steps[-1][1])
        activation = activation if parents.partial else self.over_batch(activation)
        if not trace:
            return Routed(pose, activation)
        outputs, variances = (
            torch.stack(x) for x in zip(*((p.mean, 1 / expected_precision(p)) for _, p in steps), strict=True)
        )
        couplings, activations = torch.stack([R for R, _ in steps]), torch.stack([*earlier, activation])
        return Routed(pose, activation, Trace(couplings, outputs, activations, u_hat, variances=variances))

    def over_batch(self, activations: Tensor) -> Tensor:
        """a_j from exp E[ln π_j] · H_j of the last iteration, which running statistics follow. (…, j) → (…, j)."""
        return self.activate(activations.flatten(0, -2), last=True).view_as(activations)

    def activate(self, weighted: Tensor, last: bool = False) -> Tensor:
        """a_j (b, j) from exp E[ln π_j] · H_j."""
        beta_u, beta_a = at_least_float32(self.beta_u), at_least_float32(self.beta_a)
        return (beta_a - beta_u * self.norm(weighted, last)).sigmoid()

    def norm(self, x: Tensor, keep: bool) -> Tensor:
        """Batch normalisation of x (b, j); a single example is normalised by the running statistics."""
        mean, var = at_least_float32(self.running_mean), at_least_float32(self.running_var)
        if self.training and (len(x) > 1 or synchronised()):
            mean, var, _ = batch_moments(x)
            if keep:
                with torch.no_grad():
                    self.running_mean.lerp_(mean.to(self.running_mean.dtype), MOMENTUM)
                    self.running_var.lerp_(var.to(self.running_var.dtype), MOMENTUM)
        return (x - mean) * torch.rsqrt(var + EPS)


def update(u_hat: Tensor, r: Tensor) -> Posterior:
    """The posterior given votes (b, i, j, q) with weights r (b, i, j)."""
    S = r.sum(1)  # b j
    mean = torch.einsum("bij,bijq->bjq", r, u_hat) / (KAPPA + S).unsqueeze(-1)
    scatter = torch.einsum("bij,bijq->bjq", r, (u_hat - mean.unsqueeze(1)).square())
    return posterior_of(S, mean, scatter)


def from_moments(S: Tensor, one: Tensor, two: Tensor, near: Tensor) -> Posterior:
    """The same from moments of d = û − near: Σ r (b, j), Σ r d and Σ r d² (b, j, q)."""
    S_q = S.unsqueeze(-1)
    mean = (one + S_q * near) / (KAPPA + S_q)
    shift = mean - near
    return posterior_of(S, mean, two - 2 * shift * one + S_q * shift.square())


def posterior_of(S: Tensor, mean: Tensor, scatter: Tensor) -> Posterior:
    """From S_j (b, j), m_j and Σ_i r_ij (V_ij − m_j)² (b, j, q)."""
    alpha, kappa, nu = ALPHA + S, KAPPA + S, NU + S
    psi = 1 / (1 / PSI + scatter + KAPPA * mean.square())
    log_pi = digamma(alpha) - digamma(alpha.sum(-1, keepdim=True))
    log_precision = (digamma(nu / 2) + math.log(2)).unsqueeze(-1) + psi.log()
    return Posterior(log_pi, kappa, nu, mean, psi, log_precision)


def log_rho(u_hat: Tensor, posterior: Posterior) -> Tensor:
    """ln ρ_ij (b, i, j): the expected log density of votes (b, i, j, q) under the posterior."""
    distance = expected_precision(posterior).unsqueeze(1) * (u_hat - posterior.mean.unsqueeze(1)).square()
    return constant(posterior).unsqueeze(1) - 0.5 * distance.sum(-1)


def constant(posterior: Posterior) -> Tensor:
    """What ln ρ_ij would be for a vote at the mean (b, j)."""
    log_density = posterior.log_precision - math.log(2 * math.pi) - 1 / posterior.kappa.unsqueeze(-1)
    return posterior.log_pi + 0.5 * log_density.sum(-1)


def expected_precision(posterior: Posterior) -> Tensor:
    """E[λ_j^q] = ν_j Ψ_j^q (b, j, q)."""
    return posterior.nu.unsqueeze(-1) * posterior.psi


def weighted_entropy(posterior: Posterior) -> Tensor:
    """exp E[ln π_j] · H_j (b, j)."""
    return posterior.log_pi.exp() * entropy(posterior)


def entropy(posterior: Posterior) -> Tensor:
    """H_j (b, j) of Gaussians with the expected log precisions."""
    return 0.5 * (math.log(2 * math.pi * math.e) - posterior.log_precision).sum(-1)


def digamma(x: Tensor) -> Tensor:
    """ψ(x) = d ln Γ(x) / dx for x ≥ ½: ψ(x) = ψ(x + 1) − 1/x up to 6, and from there the asymptotic series.

    >>> digamma(torch.tensor(1.0))
    tensor(-0.5772)
    """
    below = sum((1 / (x + k) for k in range(1, 6)), 1 / x)
    y = x + 6
    z = 1 / (y * y)
    return y.log() - 0.5 / y - z * (1 / 12 - z * (1 / 120 - z * (1 / 252 - z * (1 / 240 - z / 132)))) - below
