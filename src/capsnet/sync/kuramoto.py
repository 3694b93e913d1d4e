"""Oscillators on a grid with a learnt coupling kernel (Kuramoto 1975; coupled through features as in Muzellec, Alamia,
Serre and VanRullen 2025, "Enhancing deep neural networks through complex-valued representations and Kuramoto
synchronization dynamics").

A unit in channel d at position x has an amplitude m, given by the image and constant, and a phase φ that starts at a
learnt value, at first the same everywhere in its channel, and moves K steps:

    φ_d(x) ← φ_d(x) + γ Σ_{c, δ} J_dc(δ) m_c(x + δ) sin(φ_c(x + δ) − φ_d(x))

Units with a positive coupling J fall into phase, those with a negative one out of phase; silent units have no effect.
The sum is one convolution of m cos φ and m sin φ with the kernel J, because

    Σ J m sin(φ' − φ) = cos φ · (J ★ m sin φ) − sin φ · (J ★ m cos φ)

Phases are angles throughout, so nothing has to be normalised. Deviations: there are no natural frequencies, and initial
phases are learnt instead of drawn at random, so a prediction is a function of the image alone.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.sync.waves import Waves


class Oscillations(NamedTuple):
    """What the oscillators did."""

    amplitude: Tensor  # (b, c, h, w)
    phases: Tensor  # (t, b, c, h, w) in radians: at the start and after every step

    def mean_field(self) -> Waves:
        """The mean over the channels at each position, where amplitudes are the weights: (t, b, h, w), |z| ≤ 1."""
        total = self.amplitude.sum(1) + 1e-6
        waves = Waves.polar(self.amplitude, self.phases)
        assert waves.im is not None
        return Waves(waves.re.sum(2) / total, waves.im.sum(2) / total)


class KuramotoLayer(nn.Module):
    """Amplitudes (b, c, h, w) → units with amplitude and phase after K steps.

    >>> layer = KuramotoLayer(3, (5, 6), kernel=3, steps=4)
    >>> z, oscillations = layer(torch.rand(2, 3, 5, 6), trace=True)
    >>> z.re.shape, oscillations.phases.shape
    (torch.Size([2, 3, 5, 6]), torch.Size([5, 2, 3, 5, 6]))
    """

    def __init__(
        self, channels: int, grid: tuple[int, int], kernel: int = 7, steps: int = 8, step: float = 0.5, **where: Any
    ) -> None:
        super().__init__()
        if kernel % 2 == 0:
            raise UserError(f"a coupling kernel of {kernel} positions has no centre: use an odd number.")
        self.steps, self.step = steps, step
        self.coupling = nn.Parameter(torch.empty(channels, channels, kernel, kernel, **where))
        self.start = nn.Parameter(torch.empty(channels, *grid, **where))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Neighbours attract each other, almost equally; each channel starts at a phase of its own.

        Where phases start at random at every position, the layers above see noise first and learn much more slowly.
        """
        channels, fan = len(self.start), self.coupling[0].numel()
        nn.init.normal_(self.coupling, mean=2 / fan, std=0.1 / math.sqrt(fan))
        with torch.no_grad():
            evenly = torch.arange(channels, dtype=self.start.dtype, device=self.start.device) * (2 * math.pi / channels)
            self.start.copy_(evenly[:, None, None].expand_as(self.start))

    def pull(self, amplitude: Tensor, phase: Tensor) -> Tensor:
        """Σ J m sin(φ' − φ) for every unit. (b, c, h, w) → (b, c, h, w)."""
        cos, sin = phase.cos(), phase.sin()
        fields = torch.cat([amplitude * cos, amplitude * sin])
        of_cos, of_sin = (
            F.conv2d(fields, self.coupling, padding=self.coupling.shape[-1] // 2).unflatten(0, (2, -1)).unbind()
        )
        return cos * of_sin - sin * of_cos

    def forward(self, amplitude: Tensor, trace: bool = False) -> tuple[Waves, Oscillations | None]:
        """The units after the last step and, if asked, the phases of all steps."""
        phase = self.start.expand_as(amplitude)
        phases = [phase]
        for _ in range(self.steps):
            phase = phase + self.step * self.pull(amplitude, phase)
            phases.append(phase)
        history = Oscillations(amplitude, torch.stack(phases)) if trace else None
        return Waves.polar(amplitude, phase), history

    def extra_repr(self) -> str:
        return f"steps={self.steps}, step={self.step}"
