"""Measures of a routing trace: how decided the couplings are, and how well votes and phases agree."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LEAK = 1e-4  # couplings that sum to less than 1 by more than this are leaky


def entropy(couplings: Tensor) -> Tensor:
    """Entropy of each lower capsule's couplings, relative to its maximum: (…, i, j) → (…, i).

    1 for equal couplings to all upper capsules, 0 for all of them to one. In leaky routing the part that goes nowhere
    counts as one more choice. Couplings that sum to more than 1, or are negative, count by their shares.

    >>> entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0], [1.0, 1.0], [1.0, -0.2]]))
    tensor([1., 0., 1., 0.])
    """
    couplings = couplings.clamp(min=0)
    couplings = couplings / couplings.sum(-1, keepdim=True).clamp(min=1)
    leak = (1 - couplings.sum(-1, keepdim=True)).clamp(min=0)
    if leak.numel() and float(leak.max()) > LEAK:
        couplings = torch.cat([couplings, leak], -1)
    return torch.special.entr(couplings).sum(-1) / math.log(max(2, couplings.shape[-1]))


def agreement(couplings: Tensor, votes: Tensor, outputs: Tensor) -> Tensor:
    """Cosine between the votes û_j|i and the output v_j, averaged over i with the couplings as weights.

    Negative couplings count as zero. couplings (t, i, j), votes (i, j, q), outputs (t, j, q) → (t, j)

    >>> c, u_hat = torch.full((1, 2, 1), 0.5), torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])
    >>> agreement(c, u_hat, torch.tensor([[[1.0, 0.0]]]))
    tensor([[0.5000]])
    """
    normalize, couplings = torch.nn.functional.normalize, couplings.clamp(min=0)
    cosine = torch.einsum("ijq,tjq->tij", normalize(votes, dim=-1), normalize(outputs, dim=-1))
    return (couplings * cosine).sum(1) / couplings.sum(1).clamp(min=1e-12)


def coherence(couplings: Tensor, oscillators: Tensor) -> Tensor:
    """Length of the mean phase of the oscillators of each upper capsule, with the couplings as weights.

    1 if all are in phase. couplings (t, i, j), oscillators (t, i, j, q) → (t, j)

    >>> c, x = torch.full((1, 2, 1), 0.5), torch.tensor([[[[1.0, 0.0]], [[-1.0, 0.0]]]])
    >>> coherence(c, x)
    tensor([[0.]])
    """
    mean = torch.einsum("tij,tijq->tjq", couplings, oscillators)
    return mean.norm(dim=-1) / couplings.sum(1).clamp(min=1e-12)
