"""Routing by hand: four 2-D capsules, two upper ones, every line of Procedure 1 with its numbers and vectors.

Nothing is trained: the numbers are the trace that `dynamic_routing` returns, as it does for a network. The result is a
sequence of pictures; `capsnet reproduce report` puts them on one page.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet.experiments.core.plan import Budget, Experiment, Record, Row
from capsnet.nn.functional import lengths
from capsnet.report.tables import Table
from capsnet.routing import dynamic_routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsnet.report.figures.byhand import Moment, Numbers

ITERATIONS = 3
# pose of each lower capsule, and its votes for A and for B: (degrees, length)
CAPSULES = (
    ((20, 0.8), (62, 1.4), (-150, 0.9)),
    ((75, 0.7), (32, 1.3), (150, 0.8)),
    ((140, 0.9), (92, 1.4), (-35, 0.9)),
    ((-60, 0.6), (-115, 1.2), (85, 1.1)),
)
DISSENTER = 3  # the lower capsule that disagrees with the others on A


class Walkthrough(Experiment):
    name = "walkthrough"
    title = "Routing by hand"
    question = (
        "Procedure 1 of the paper with four small capsules. They vote on the poses of two upper capsules, A and B. "
        "Three agree on A; one does not. Every line of the procedure is shown with its numbers and vectors, as "
        "computed by the routing code of the package."
    )

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [Row("by-hand", None, {"routing": f"{ITERATIONS} iterations, 4 capsules to 2"})]

    def observe(self, row: Row) -> dict[str, Any]:
        u, W = example()
        trace = dynamic_routing(u, W, iterations=ITERATIONS, trace=True).trace
        assert trace is not None
        assert trace.logits is not None
        return {
            "u": u[0].tolist(),
            "W": W.tolist(),
            "votes": trace.votes[0].tolist(),
            "logits": trace.logits[:, 0].tolist(),
            "couplings": trace.couplings[:, 0].tolist(),
            "outputs": trace.outputs[:, 0].tolist(),
        }

    def table(self, records: Sequence[Record]) -> Table:
        """Couplings and lengths per iteration."""
        made = records[0].outcome
        rows = []
        for t, (couplings, outputs) in enumerate(zip(made["couplings"], made["outputs"], strict=True), 1):
            shares = [f"{c[0]:.2f} : {c[1]:.2f}" for c in couplings]
            rows.append([str(t), *shares, *(f"{math.hypot(*v):.2f}" for v in outputs)])
        names = [f"capsule {i + 1}, A : B" for i in range(len(made["u"]))]
        return Table(["iteration", *names, "‖v_A‖", "‖v_B‖"], rows)

    def findings(self, records: Sequence[Record]) -> list[str]:
        made = records[0].outcome
        first, last = (made["couplings"][k][DISSENTER] for k in (0, -1))
        a, b = (math.hypot(*v) for v in made["outputs"][-1])
        return [
            f"In {len(made['couplings'])} iterations the couplings of capsule {DISSENTER + 1} to A and B change from "
            f"{first[0]:.2f} : {first[1]:.2f} to {last[0]:.2f} : {last[1]:.2f}. The final lengths "
            f"are {a:.2f} (A) and {b:.2f} (B)."
        ]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        return sequence(records[0].outcome)

    def captions(self) -> Mapping[str, str]:
        return CAPTIONS

    def chapters(self) -> Mapping[str, tuple[str, str]]:
        return CHAPTERS


def example() -> tuple[Tensor, Tensor]:
    """u (1, i, 2) and W (i, 2, 2, 2): rotations and scalings that map a capsule's pose to its votes."""
    u, W = [], []
    for (angle, length), *votes in CAPSULES:
        u.append(polar(angle, length))
        W.append(torch.stack([rotation(to - angle) * (far / length) for to, far in votes]))
    return torch.stack(u)[None], torch.stack(W)


def polar(degrees: float, length: float) -> Tensor:
    angle = math.radians(degrees)
    return torch.tensor([math.cos(angle), math.sin(angle)]) * length


def rotation(degrees: float) -> Tensor:
    """A rotation matrix."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cos, -sin], [sin, cos]])


CAPTIONS = {
    "00-neuron": "A neuron maps numbers to a number; a capsule maps vectors to a vector.",
    "01-squash": "Dashed: before, blue: after. Long vectors end near the unit circle, short ones near zero.",
    "02-dot-product": "Dark: the output v, coloured: a vote of the same length, with their dot product above.",
    "03-votes": "The pose of a capsule and its two votes have the same colour.",
    "97-one-falls": "The capsule that disagrees on A: its coupling to A falls and its coupling to B rises.",
    "98-attention": "Dark sums are 1 by construction; grey ones are not.",
}


def numbers_in(outcome: Mapping[str, Any]) -> Numbers:
    """The numbers of a record as the figures need them."""
    from capsnet.report.figures.byhand import numbers_of
    from capsnet.routing import Trace

    logits, couplings, outputs = (torch.tensor(outcome[k]).unsqueeze(1) for k in ("logits", "couplings", "outputs"))
    votes = torch.tensor(outcome["votes"]).unsqueeze(0)
    return numbers_of(Trace(couplings, outputs, lengths(outputs), votes, logits))


def sequence(outcome: Mapping[str, Any]) -> dict[str, Figure]:
    """All pictures in order."""
    from capsnet.report.figures import byhand, comparisons

    numbers = numbers_in(outcome)
    steps = {name_of(k, m): byhand.by_hand(numbers, m) for k, m in enumerate(byhand.moments(numbers))}
    return {
        "00-neuron": comparisons.neuron_and_capsule(),
        "01-squash": comparisons.sigmoid_and_squash(),
        "02-dot-product": comparisons.similarity(),
        "03-votes": byhand.lower_capsules(torch.tensor(outcome["u"]), numbers.votes),
        **steps,
        "97-one-falls": comparisons.one_falls(numbers, DISSENTER),
        "98-attention": comparisons.routing_and_attention(numbers.logits[-1]),
    }


def name_of(k: int, moment: Moment) -> str:
    return f"{k + 4:02d}-iteration{moment.iteration}-line{moment.line}"


# the first picture of a section → its heading and text
CHAPTERS = {
    "00-neuron": (
        "Neuron and capsule",
        "Both weight their inputs, sum them and apply a nonlinearity. A capsule does this with vectors, and first maps "
        "each vector to a prediction.",
    ),
    "01-squash": (
        "Sigmoid and squash",
        "A length between 0 and 1 can be read as a probability; the direction is free to encode the pose.",
    ),
    "02-dot-product": (
        "Agreement",
        "The dot product measures the agreement of a vote and an output: it is large if both are long and point in "
        "similar directions.",
    ),
    "03-votes": (
        "The votes",
        "Capsules 1 to 3 predict nearly the same pose for A; capsule 4 predicts the opposite. Their votes for B "
        "differ.",
    ),
    "04-iteration0-line2": (
        "Procedure 1, line by line",
        "The numbers below the vectors show the state after each line; what the line has computed is dark. Couplings "
        "are not weights of the model: they are computed for every image.",
    ),
    "97-one-falls": (
        "One coupling falls, the other rises",
        "The couplings of one capsule over the iterations.",
    ),
    "98-attention": (
        "Routing and attention",
        "Attention has the same ingredients with one difference: which shares sum to one.",
    ),
}
