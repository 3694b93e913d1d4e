"""The number of routing iterations (Fig. A.1 of the paper, and its remarks on overfitting in section 5)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from capsnet.data import Augment, in_order
from capsnet.experiments.core.claims import Claim, Measured, Verdict, lower, too_close
from capsnet.experiments.core.networks import AUTHORS_EPOCHS, shortfalls
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, values, with_model
from capsnet.experiments.table1 import config_of
from capsnet.models.base import Model
from capsnet.routing.measures import entropy
from capsnet.routing.options import DynamicOptions
from capsnet.train import runs
from capsnet.train.loop import Result
from capsnet.train.presets import get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONG = 10  # iterations after training, to see whether the logits settle
LOOKED_AT = 200  # test images
POINTS = 60  # of a loss curve in the results
NEAR = 3  # points on either side that a smoothed curve averages over


class Iterations(Experiment):
    name = "iterations"
    title = "Routing iterations"
    question = (
        "What does another routing iteration change? One network is trained with each number of iterations. Measured "
        f"are test error, training loss, the change of the routing logits per iteration (over {LONG} iterations of the "
        "trained network), and the entropy of the couplings relative to its maximum."
    )
    columns = {  # noqa: RUF012
        "error_percent": "test error, %",
        "final_loss": "final training loss",
        "last_change": "last logit change",
        "entropy_percent": "entropy of couplings, %",
    }
    decimals = {"error_percent": 2, "final_loss": 4, "last_change": 4, "entropy_percent": 1}  # noqa: RUF012

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        numbers = (1, 3) if budget == "smoke" else (1, 2, 3, 4, 5)
        rows = [mnist_row(r, budget, seed) for r in numbers]
        return [*rows, *(cifar_row(r, seed) for r in numbers)] if budget == "full" else rows

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        losses = [r for r in runs.read_metrics(result.folder) if r["kind"] == "train"]
        tail = [r["loss"] for r in losses[-max(1, len(losses) // 20) :]]
        own = settle(result.model, result, row_iterations(row))
        long = settle(result.model, result, LONG)
        return {
            **result.evaluation.summary(),
            "final_loss": sum(tail) / len(tail),
            "loss_curve": [[r["epoch"], r["loss"]] for r in losses[:: max(1, len(losses) // POINTS)]],
            "last_change": own["changes"][-1] if own["changes"] else None,
            "entropy_percent": own["entropy"][-1],
            "routed_on": long,
        }

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        kinds = dict.fromkeys(r.shown["data"] for r in records)
        name = {"MNIST": "iterations"}
        return {
            name.get(kind, f"iterations-{kind.lower()}"): draw([r for r in records if r.shown["data"] == kind], kind)
            for kind in kinds
        }

    def captions(self) -> Mapping[str, str]:
        return {
            "iterations": "Training loss, mean change of a logit per iteration, and entropy of the couplings. "
            f"The last two are of the trained networks, each routed for {LONG} iterations."
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for kind in dict.fromkeys(r.shown["data"] for r in records):
            groups = by_method([r for r in records if r.shown["data"] == kind])
            by_error = sorted(groups, key=lambda g: average(g, "error_percent") or 0.0)
            listed = ", ".join(f"{g[0].shown['iterations']}: {average(g, 'error_percent'):.2f} %" for g in groups)
            said.append(
                f"{kind}, test error by number of iterations: {listed}. Lowest with "
                f"{by_error[0][0].shown['iterations']}, highest with {by_error[-1][0].shown['iterations']}"
                f"{too_close(by_error[0], by_error[-1])}."
            )
            undecided = {g[0].shown["iterations"]: average(g, "entropy_percent") or 0.0 for g in groups}
            least = min(undecided, key=lambda r: undecided[r])
            said.append(
                f"{kind}, final couplings: at least {undecided[least]:.1f} % of the maximum entropy (lowest with "
                f"{least} iterations); 100 % means equal couplings to all classes."
            )
        return said

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        groups = {group[0].method: group for group in by_method(records)}
        if not {"mnist-r1", "mnist-r3"} <= set(groups):
            return []
        one, three = (loss_of(groups[name]) for name in ("mnist-r1", "mnist-r3"))
        first, later = (mean_change(groups["mnist-r3"], iteration) for iteration in (2, 5))
        settled: Verdict = "reproduced" if later < first / 2 else "not reproduced"
        ours = f"{first:.4f} in iteration 2, {later:.4f} in iteration 5"
        return [
            lower("Final training loss: lower with three iterations than with one", "lower", three, one),
            Claim("Changes of the routing logits fade within five iterations", "yes", ours, three.seeds, settled),
        ]


def loss_of(group: Sequence[Record]) -> Measured:
    """Final training loss with the range over seeds, which one seed leaves open."""
    found = values(group, "final_loss")
    low, high = (min(found), max(found)) if len(found) > 1 else (0.0, math.inf)
    return Measured(sum(found) / len(found), low, high, len(found), unit="", decimals=4)


def mean_change(group: Sequence[Record], iteration: int) -> float:
    """Mean change of a logit in an iteration, counted from 1."""
    changes = [record.outcome["routed_on"]["changes"][iteration - 2] for record in group]
    return float(sum(changes) / len(changes))


def row_iterations(row: Row) -> int:
    assert row.config is not None
    return getattr(row.config.model.routing, "iterations", 1)  # type: ignore[attr-defined]


def mnist_row(iterations: int, budget: Budget, seed: int) -> Row:
    config = config_of("mnist", iterations, True, budget, seed)
    theirs = {1: 0.29, 3: 0.25}.get(iterations)
    shown = {"data": "MNIST", "iterations": str(iterations)}
    return Row(
        f"mnist-r{iterations}",
        config,
        shown,
        {} if theirs is None else {"error_percent": theirs},
        shortfalls(budget, config),
    )


def cifar_row(iterations: int, seed: int) -> Row:
    """CIFAR-10 as in section 7 of the paper, but one model on whole images instead of seven on patches."""
    config = replace(
        get_preset("paper"), data="cifar10", validation=0, seed=seed, epochs=AUTHORS_EPOCHS, augment=Augment(shift=2)
    )
    config = with_model(
        config, image_shape=(3, 32, 32), primary_types=64, routing=DynamicOptions(leaky=True, iterations=iterations)
    )
    less = ("one model on whole images instead of seven on patches of 24×24",)
    theirs = {"error_percent": 10.6} if iterations == 3 else {}
    return Row(f"cifar10-r{iterations}", config, {"data": "CIFAR-10", "iterations": str(iterations)}, theirs, less)


@torch.inference_mode()
def settle(model: Model, result: Result, iterations: int) -> dict[str, list[float]]:
    """Mean change of a logit per iteration, and mean entropy of the couplings in each."""
    changes, entropies, n = torch.zeros(iterations - 1), torch.zeros(iterations), 0
    for batch in in_order(result.splits.test, 50):
        trace = model(batch.images.to(model.device), trace=True, routing={"iterations": iterations}).trace
        assert trace is not None
        assert trace.logits is not None
        changes += trace.logits.diff(dim=0).abs().mean((2, 3)).sum(1).cpu()
        entropies += entropy(trace.couplings).mean(2).sum(1).cpu()
        n += len(batch.images)
        if n >= LOOKED_AT:
            break
    return {"changes": (changes / n).tolist(), "entropy": (100 * entropies / n).tolist()}


def draw(records: Sequence[Record], kind: str) -> Figure:
    """Loss, logit change and entropy: one curve per number of iterations, of the first seed."""
    from capsnet.report.figures import Line, Panel, lines, shades

    firsts = [group[0] for group in by_method(records)]
    colours = shades(len(firsts))
    loss, change, decided = [], [], []
    t = list(range(1, LONG + 1))
    for colour, r in zip(colours, firsts, strict=True):
        label, on = r.shown["iterations"], r.outcome["routed_on"]
        curve = smoothed(r.outcome["loss_curve"])
        loss.append(Line(label, [x for x, _ in curve], [y for _, y in curve], colour))
        change.append(Line(label, t[1:], on["changes"], colour))
        decided.append(Line(label, t, on["entropy"], colour))
    panels = [
        Panel("Training loss", "epoch", "", loss, log_y=True),
        Panel("Change of the logits", "iteration", "mean |Δb|", change, log_y=True),
        Panel("Entropy of the couplings", "iteration", "% of log j", decided),
    ]
    return lines(f"Routing iterations on {kind}", "One curve per number of iterations in training.", panels)


def smoothed(curve: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """A moving average, because losses of single steps are noisy."""
    means = []
    for k, (x, _) in enumerate(curve):
        near = [y for _, y in curve[max(0, k - NEAR) : k + NEAR + 1]]
        means.append((x, sum(near) / len(near)))
    return means
