"""Routing by hand: four 2-D capsules, two upper ones, every line of Procedure 1 with its numbers and its vectors.

Nothing is trained and nothing computed twice: the numbers are the trace that `dynamic_routing` returns, as it does for
a network. What comes out is a sequence of pictures and one page, walkthrough.html, that holds them all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet.checkpoint import write_bytes
from capsnet.experiments.plan import Budget, Experiment, Record, Row, Table
from capsnet.routing import dynamic_routing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from capsnet.figures.byhand import Moment, Numbers

ITERATIONS = 3
# pose of each lower capsule, and its votes for A and for B: (degrees, length)
CAPSULES = (
    ((20, 0.8), (62, 1.4), (-150, 0.9)),
    ((75, 0.7), (32, 1.3), (150, 0.8)),
    ((140, 0.9), (92, 1.4), (-35, 0.9)),
    ((-60, 0.6), (-115, 1.2), (85, 1.1)),
)
TURNS = 3  # the lower capsule whose couplings part most visibly: the last, which disagrees with the others on A


class Walkthrough(Experiment):
    name = "walkthrough"
    title = "Routing by hand: Procedure 1 with four small capsules"
    question = (
        "Four lower capsules vote on the poses of two upper ones, A and B. Three agree on A; one does not. Each line "
        "of Procedure 1 is shown with its numbers and its vectors, as the routing code itself has computed them."
    )

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [Row("by-hand", None, {"routing": f"{ITERATIONS} iterations, 4 capsules to 2"})]

    def observe(self, row: Row) -> dict[str, Any]:
        u, W = example()
        trace = dynamic_routing(u, W, iterations=ITERATIONS, trace=True).trace
        assert trace is not None
        return {
            "u": u[0].tolist(),
            "W": W.tolist(),
            "votes": trace.votes[0].tolist(),
            "logits": trace.logits[:, 0].tolist(),
            "couplings": trace.couplings[:, 0].tolist(),
            "outputs": trace.outputs[:, 0].tolist(),
        }

    def table(self, records: Sequence[Record]) -> Table:
        """Couplings and lengths, iteration by iteration."""
        made = records[0]["outcome"]
        rows = []
        for t, (couplings, outputs) in enumerate(zip(made["couplings"], made["outputs"], strict=True), 1):
            shares = [f"{c[0]:.2f} : {c[1]:.2f}" for c in couplings]
            rows.append([str(t), *shares, *(f"{math.hypot(*v):.2f}" for v in outputs)])
        names = [f"capsule {i + 1}, A : B" for i in range(len(made["u"]))]
        return Table(["iteration", *names, "‖v_A‖", "‖v_B‖"], rows)

    def findings(self, records: Sequence[Record]) -> list[str]:
        made = records[0]["outcome"]
        first, last = (made["couplings"][k][TURNS] for k in (0, -1))
        a, b = (math.hypot(*v) for v in made["outputs"][-1])
        return [
            f"In {len(made['couplings'])} iterations capsule {TURNS + 1} turns from {first[0]:.2f} : {first[1]:.2f} to "
            f"{last[0]:.2f} : {last[1]:.2f}, and A ends {a:.2f} long, B {b:.2f}."
        ]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        return sequence(records[0]["outcome"])

    def captions(self) -> Mapping[str, str]:
        return CAPTIONS

    def finish(self, records: Sequence[Record], folder: Path) -> None:
        """The page of the walkthrough, with all pictures inside."""
        write_bytes(folder / "walkthrough.html", page_of(self, records, folder).encode())


def example() -> tuple[Tensor, Tensor]:
    """u (1, i, 2), and W (i, 2, 2, 2): each a turn and a stretch that takes a capsule's pose to its vote."""
    u, W = [], []
    for (angle, length), *votes in CAPSULES:
        u.append(polar(angle, length))
        W.append(torch.stack([turn(to - angle) * (far / length) for to, far in votes]))
    return torch.stack(u)[None], torch.stack(W)


def polar(degrees: float, length: float) -> Tensor:
    angle = math.radians(degrees)
    return torch.tensor([math.cos(angle), math.sin(angle)]) * length


def turn(degrees: float) -> Tensor:
    """The matrix of a rotation."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return torch.tensor([[cos, -sin], [sin, cos]])


CAPTIONS = {
    "00-neuron": "A neuron takes numbers and gives a number; a capsule takes vectors and gives a vector.",
    "01-squash": "Dashed: before; blue: after. A long vector ends near the circle of radius 1, a short one near zero.",
    "02-dot-product": "Dark: the output v; coloured: a vote of the same length. The number above is their dot product.",
    "03-votes": "A capsule's pose and its two votes share a colour.",
    "97-one-falls": "The capsule that disagrees with the others on A: its coupling to A falls, that to B rises.",
    "98-attention": "Dark sums are 1 by construction; the grey ones are whatever comes out.",
}


def numbers_in(outcome: Mapping[str, Any]) -> Numbers:
    """The numbers of a record as the pictures need them."""
    from capsnet.figures.byhand import numbers_of
    from capsnet.routing import Trace

    logits, couplings, outputs = (torch.tensor(outcome[k]).unsqueeze(1) for k in ("logits", "couplings", "outputs"))
    return numbers_of(Trace(logits, couplings, outputs, torch.tensor(outcome["votes"]).unsqueeze(0)))


def sequence(outcome: Mapping[str, Any]) -> dict[str, Figure]:
    """All pictures in their order."""
    from capsnet.figures import beside, byhand

    numbers = numbers_in(outcome)
    steps = {name_of(k, m): byhand.by_hand(numbers, m) for k, m in enumerate(byhand.moments(numbers))}
    return {
        "00-neuron": beside.capsule_beside_neuron(),
        "01-squash": beside.squash_beside_sigmoid(),
        "02-dot-product": beside.similarity(),
        "03-votes": byhand.lower_capsules(torch.tensor(outcome["u"]), numbers.votes),
        **steps,
        "97-one-falls": beside.one_falls(numbers, TURNS),
        "98-attention": beside.beside_attention(numbers.logits[-1]),
    }


def name_of(k: int, moment: Moment) -> str:
    return f"{k + 4:02d}-iteration{moment.iteration}-line{moment.line}"


def alternatives(outcome: Mapping[str, Any]) -> dict[str, str]:
    """The same in words, for those who cannot see the pictures."""
    from capsnet.figures.byhand import moments

    steps = {name_of(k, m): f"Line {m.line}. {m.says}" for k, m in enumerate(moments(numbers_in(outcome)))}
    return {
        "00-neuron": "The operations of a neuron and of a capsule side by side, with numbers.",
        "01-squash": "Curves of the sigmoid and of the length after squash, and five vectors before and after.",
        "02-dot-product": "Two vectors from opposed to aligned; their dot product goes from −1 over 0 to 1.",
        "03-votes": "The lower capsules' poses, and their votes for A and for B.",
        **steps,
        "97-one-falls": "The two couplings of one capsule over the iterations.",
        "98-attention": "The same logits through a softmax over the upper and one over the lower capsules.",
    }


# picture with which a section of the page begins → its heading and first paragraph
WORDS = {
    "00-neuron": (
        "A capsule beside a neuron",
        "Both weigh what comes in, add it up and squash the sum. A capsule does it with vectors, and before that each "
        "vector is turned into a prediction.",
    ),
    "01-squash": (
        "Squash beside the sigmoid",
        "A length between 0 and 1 can be read as a probability; the direction is free to say how the thing looks.",
    ),
    "02-dot-product": (
        "Agreement",
        "Whether a vote and an output agree is asked by their dot product: the longer both are and the nearer their "
        "directions, the larger.",
    ),
    "03-votes": (
        "The votes",
        "Here is the example. Capsules 1 to 3 predict nearly the same pose for A; capsule 4 predicts the opposite. "
        "On B they differ.",
    ),
    "04-iteration0-line2": (
        "Procedure 1, line by line",
        "Below the vectors, all numbers after each line; what the line has just made is dark. The couplings are no "
        "weights of a model: they are worked out anew for every image.",
    ),
    "97-one-falls": (
        "One coupling falls while the other rises",
        "The same numbers once more, of one capsule alone.",
    ),
    "98-attention": (
        "Routing beside attention",
        "Attention has the same ingredients, and one difference: whose shares sum to one.",
    ),
}


def page_of(experiment: Walkthrough, records: Sequence[Record], folder: Path) -> str:
    """The walkthrough as one HTML page, out of the pictures in a folder."""
    from capsnet import report
    from capsnet.experiments.page import inlined

    sections = [f"<header><h1>{experiment.title}</h1></header>", report.paragraph(experiment.question)]
    chapters: list[tuple[str, list[str]]] = []
    for name, said in alternatives(records[0]["outcome"]).items():
        if name in WORDS:
            chapters.append((WORDS[name][0], [report.paragraph(WORDS[name][1])]))
        chapters[-1][1].append(inlined(folder / f"{name}.png", said, CAPTIONS.get(name, "")))
    sections += [report.section(title, *parts) for title, parts in chapters]
    sections += [report.paragraph(sentence) for sentence in experiment.findings(records)]
    return report.page(experiment.title, sections)
