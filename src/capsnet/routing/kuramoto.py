"""Kuramoto routing: votes are oscillators on a sphere, and upper capsules are what has synchronised.

The direction of a vote is the phase of an oscillator and its length the amplitude. Oscillators that vote for the same
upper capsule pull each other towards their mean field, as in Kuramoto's model on a sphere (Lohe 2009; Miyato, Löwe,
Geiger and Welling 2025, "Artificial Kuramoto Oscillatory Neurons"), and each vote holds its own oscillator back. With
e_ij = û_{j|i} / ‖û_{j|i}‖, from phases x_ij = e_ij and couplings c_ij = 1/J, every iteration computes

    v_j  = squash(Σ_i c_ij ‖û_{j|i}‖ x_ij)                 the mean field: long if its oscillators are in phase
    x_ij ← Π(x_ij + γ Proj_ij(e_ij + κ_j c_ij v_j))        held back by the vote, pulled by the field
    b_ij = κ_j x_ij·v_j                                    how well it is in phase with the field
    c_ij = softmax_j(b_ij)

where Proj_ij(f) = f − (f·x_ij) x_ij is the part of a force along the sphere and Π(x) = x / ‖x‖. The coupling strength
κ_j is learnt. An oscillator feels a field as much as it contributes to it, so a lower capsule falls into phase with one
upper capsule and lets go of the others. With one iteration this is `uniform` routing; with γ = 0 phases stand still and
the logits are agreements that do not accumulate.

This combination is ours. It deviates from Kuramoto's model in the weights c_ij, which let upper capsules compete, and
in having no natural frequencies: a common rotation would change no agreement.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from capsnet.nn.functional import EPS, at_least_float32, lengths, squash
from capsnet.ranges import check_range
from capsnet.routing.base import Parents, Routed, Routing, Sizes, Trace, register
from capsnet.routing.options import IterativeOptions

STRENGTH = 1.0  # κ before training; with 4, trainings collapse: oscillators are pulled together before votes mean much


@dataclass(frozen=True)
class KuramotoOptions(IterativeOptions):
    """Options of Kuramoto routing."""

    algorithm: ClassVar[str] = "kuramoto"

    iterations: int = 3
    """Steps of the oscillators, counting the first mean field; 1 means uniform couplings."""
    step: float = 0.2
    """γ: how far an oscillator moves in one step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 10, "step")


@register("kuramoto")
class KuramotoRouting(Routing):
    """Votes are oscillators on a sphere that pull each other into phase; a lower capsule joins the upper capsule with
    which it synchronises."""

    Options = KuramotoOptions
    options: KuramotoOptions
    kappa: nn.Parameter

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        super().build(sizes, device=device, dtype=dtype)
        self.kappa = nn.Parameter(torch.empty(sizes.upper, device=device, dtype=dtype))

    def reset_parameters(self, init: str = "default") -> None:
        nn.init.constant_(self.kappa, STRENGTH)

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        return tensor

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """u_hat (b, i, j, q) → v (b, j, q). Oscillators are only stored for a trace."""
        self.check_built()
        kappa = at_least_float32(self.kappa)
        return self.oscillate(u_hat, kappa, parents) if trace else self.entrain(u_hat, kappa, parents)

    def oscillate(self, u_hat: Tensor, kappa: Tensor, parents: Parents) -> Routed:
        """The equations above, as they are written, with their trace."""
        amplitude = lengths(u_hat)  # b i j
        x = own = u_hat / amplitude.unsqueeze(-1)
        b_ij = u_hat.new_zeros(u_hat.shape[:-1])
        steps: list[tuple[Tensor, ...]] = []
        for t in range(self.options.iterations):
            c_ij = parents.softmax(b_ij)
            v_j = squash(torch.einsum("bij,bijq->bjq", c_ij * amplitude, x))
            steps.append((b_ij, c_ij, v_j, x))
            if t < self.options.iterations - 1:
                field = (kappa.unsqueeze(-1) * v_j).unsqueeze(1)  # b 1 j q
                x = turned(x, own + c_ij.unsqueeze(-1) * field, self.options.step)
                b_ij = (x * field).sum(-1)
        logits, couplings, outputs, oscillators = (torch.stack(x) for x in zip(*steps, strict=True))
        history = Trace(couplings, outputs, lengths(outputs), u_hat, logits, oscillators=oscillators)
        return Routed(v_j, lengths(v_j), history)

    def entrain(self, u_hat: Tensor, kappa: Tensor, parents: Parents) -> Routed:
        """The same with an eighth of the memory or less: x_ij stays in the span of its vote and the fields so far,

            x_ij = α_ij e_ij + Σ_s β_ij^s v_j^s

        so α and β are all that has to be kept, and every inner product follows from e·v^s and v^r·v^s. Numbers of a
        vote are (b, j, i) here, in the order in which sums over i read them.
        """
        u_hat = u_hat.transpose(1, 2).contiguous()  # b j i q
        step, amplitude = self.options.step, lengths(u_hat)
        own = squared = u_hat.square().sum(-1) / amplitude.square()  # e·e and x·x: 1, but for votes of no length
        alpha, betas, fields, e_dot_v = torch.ones_like(amplitude), list[Tensor](), list[Tensor](), list[Tensor]()
        b_ij, kappa = torch.zeros_like(amplitude), kappa.unsqueeze(-1)
        for t in range(self.options.iterations):
            c_ij = parents.softmax(b_ij.transpose(1, 2)).transpose(1, 2).contiguous()
            s_j = ((c_ij * alpha).unsqueeze(-2) @ u_hat).squeeze(-2)
            for beta, v in zip(betas, fields, strict=True):
                s_j = s_j + (c_ij * amplitude * beta).sum(-1, keepdim=True) * v
            v_j = squash(s_j)
            if t == self.options.iterations - 1:
                return Routed(v_j, lengths(v_j))
            fields.append(v_j)
            e_dot_v.append((u_hat @ v_j.unsqueeze(-1)).squeeze(-1) / amplitude)
            pull, v_dot_v = kappa * c_ij, [(v * v_j).sum(-1, keepdim=True) for v in fields]  # v_dot_v: b j 1
            x_dot_e = alpha * own + sum_of(betas, e_dot_v)
            x_dot_v = alpha * e_dot_v[-1] + sum_of(betas, v_dot_v)
            x_dot_f = x_dot_e + pull * x_dot_v
            f_dot_f = own + 2 * pull * e_dot_v[-1] + pull.square() * v_dot_v[-1]
            kept = 1 - step * x_dot_f
            moved = (kept.square() * squared + 2 * step * kept * x_dot_f + step**2 * f_dot_f).clamp(min=0)
            length = torch.sqrt(moved + EPS)
            alpha, squared = (kept * alpha + step) / length, moved / length.square()
            betas = [kept * beta / length for beta in betas] + [step * pull / length]
            b_ij = kappa * (alpha * e_dot_v[-1] + sum_of(betas, v_dot_v))
        raise AssertionError("there is at least one iteration")


def sum_of(betas: list[Tensor], products: list[Tensor]) -> Tensor | float:
    """Σ_s β^s times an inner product with v^s."""
    return sum((beta * product for beta, product in zip(betas, products, strict=False)), start=0.0)


def turned(x: Tensor, force: Tensor, step: float) -> Tensor:
    """Unit vectors x (…, q) after one step along the sphere: Π(x + γ (f − (f·x) x)).

    >>> turned(torch.tensor([1.0, 0.0]), torch.tensor([5.0, 1.0]), 1.0)
    tensor([0.7071, 0.7071])
    """
    moved = x + step * (force - (force * x).sum(-1, keepdim=True) * x)
    return moved / lengths(moved).unsqueeze(-1)
