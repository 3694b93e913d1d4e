"""How many routing iterations? (The paper's appendix, Fig. A.1, and its remarks on overfitting in section 5.)"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet import runs
from capsnet.config import CapsNetConfig, get_preset
from capsnet.data import Augment, in_order
from capsnet.experiments.networks import AUTHORS_EPOCHS, shortfalls
from capsnet.experiments.plan import Budget, Experiment, Record, Row, average, by_method, too_close, with_model
from capsnet.experiments.table1 import config_of
from capsnet.layers import DenseCaps
from capsnet.models import CapsNet
from capsnet.training import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONG = 10  # iterations for which a trained network is routed to see how its logits settle
LOOKED_AT = 200  # test images
POINTS = 60  # of a loss curve in the results


class Iterations(Experiment):
    name = "iterations"
    title = "Routing iterations, from 1 to 5"
    question = (
        "What does another routing iteration change? A network is trained with each number of them. Measured: test "
        "error, training loss, how far the routing logits move in each iteration (routing the trained network on for "
        f"{LONG} iterations), and how decided the couplings are (their entropy, as a share of the largest possible)."
    )
    columns = {  # noqa: RUF012
        "error_percent": "test error, %",
        "final_loss": "training loss at the end",
        "last_change": "last change of a logit",
        "entropy_percent": "entropy of the couplings, %",
    }
    decimals = {"error_percent": 2, "final_loss": 4, "last_change": 4, "entropy_percent": 1}  # noqa: RUF012

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        numbers = (1, 3) if budget == "smoke" else (1, 2, 3, 4, 5)
        rows = [mnist_row(r, budget, seed) for r in numbers]
        return [*rows, *(cifar_row(r, seed) for r in numbers)] if budget == "full" else rows

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        assert isinstance(result.model, CapsNet)
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
        kinds = dict.fromkeys(r["shown"]["data"] for r in records)
        name = {"MNIST": "iterations"}
        return {
            name.get(kind, f"iterations-{kind.lower()}"): draw([r for r in records if r["shown"]["data"] == kind], kind)
            for kind in kinds
        }

    def captions(self) -> Mapping[str, str]:
        return {
            "iterations": "Left to right: the loss while training; how far a logit moves in each iteration, on the "
            "average; how undecided the couplings are. The last two are of the trained networks, routed on for "
            f"{LONG} iterations each, whatever number they were trained with."
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for kind in dict.fromkeys(r["shown"]["data"] for r in records):
            groups = by_method([r for r in records if r["shown"]["data"] == kind])
            by_error = sorted(groups, key=lambda g: average(g, "error_percent") or 0.0)
            listed = ", ".join(f"{g[0]['shown']['iterations']}: {average(g, 'error_percent'):.2f} %" for g in groups)
            said.append(
                f"{kind}, test error by iterations: {listed}. The lowest and the highest with "
                f"{by_error[0][0]['shown']['iterations']} and {by_error[-1][0]['shown']['iterations']}"
                f"{too_close(by_error[0], by_error[-1])}."
            )
            undecided = {g[0]["shown"]["iterations"]: average(g, "entropy_percent") or 0.0 for g in groups}
            least = min(undecided, key=lambda r: undecided[r])
            said.append(
                f"{kind}, couplings in the end: at least {undecided[least]:.1f} % of the largest possible entropy "
                f"(least with {least}); 100 % is even shares for all classes."
            )
        return said


def row_iterations(row: Row) -> int:
    assert row.config is not None
    assert isinstance(row.config.model, CapsNetConfig)
    return row.config.model.iterations


def mnist_row(iterations: int, budget: Budget, seed: int) -> Row:
    config = config_of("mnist", iterations, True, budget, seed)
    theirs = {1: 0.29, 3: 0.25}.get(iterations)
    less = ("a toy network",) if budget == "smoke" else shortfalls(budget, config)
    shown = {"data": "MNIST", "iterations": str(iterations)}
    return Row(f"mnist-r{iterations}", config, shown, {} if theirs is None else {"error_percent": theirs}, less)


def cifar_row(iterations: int, seed: int) -> Row:
    """CIFAR-10 as the paper's section 7 has it, but whole images and one model instead of patches and seven."""
    config = replace(
        get_preset("paper"), data="cifar10", validation=0, seed=seed, epochs=AUTHORS_EPOCHS, augment=Augment(shift=2)
    )
    config = with_model(config, image_shape=(3, 32, 32), primary_types=64, leaky=True, iterations=iterations)
    less = ("one model on whole images instead of seven on patches of 24×24",)
    theirs = {"error_percent": 10.6} if iterations == 3 else {}
    return Row(f"cifar10-r{iterations}", config, {"data": "CIFAR-10", "iterations": str(iterations)}, theirs, less)


@torch.inference_mode()
def settle(model: CapsNet, result: Result, iterations: int) -> dict[str, list[float]]:
    """Mean change of a logit from each iteration to the next, and mean entropy of the couplings in each."""
    top = model.caps[-1]
    assert isinstance(top, DenseCaps)
    changes, entropies, n = torch.zeros(iterations - 1), torch.zeros(iterations), 0
    before, top.iterations = top.iterations, iterations
    try:
        for batch in in_order(result.splits.test, 50):
            trace = model(batch.images.to(model.device), trace=True).trace
            assert trace is not None
            changes += trace.logits.diff(dim=0).abs().mean((2, 3)).sum(1).cpu()
            entropies += entropy(trace.couplings, top.leaky).mean(2).sum(1).cpu()
            n += len(batch.images)
            if n >= LOOKED_AT:
                break
    finally:
        top.iterations = before
    return {"changes": (changes / n).tolist(), "entropy": (100 * entropies / n).tolist()}


def entropy(couplings: Tensor, leaky: bool = False) -> Tensor:
    """(t, b, i, j) → (t, b, i): 1 where a capsule sends everywhere alike, 0 where to one only; a leak is one more."""
    if leaky:
        couplings = torch.cat([couplings, (1 - couplings.sum(-1, keepdim=True)).clamp(min=0)], -1)
    return torch.special.entr(couplings).sum(-1) / math.log(couplings.shape[-1])


def draw(records: Sequence[Record], kind: str) -> Figure:
    """Loss, change of the logits and entropy, a curve for each number of iterations (the first seed's)."""
    from capsnet.figures import Line, Panel, lines, shades

    firsts = [group[0] for group in by_method(records)]
    colours = shades(len(firsts))
    loss, change, decided = [], [], []
    t = list(range(1, LONG + 1))
    for colour, r in zip(colours, firsts, strict=True):
        label, on = r["shown"]["iterations"], r["outcome"]["routed_on"]
        curve = smoothed(r["outcome"]["loss_curve"])
        loss.append(Line(label, [x for x, _ in curve], [y for _, y in curve], colour))
        change.append(Line(label, t[1:], on["changes"], colour))
        decided.append(Line(label, t, on["entropy"], colour))
    panels = [
        Panel("Training loss", "epoch", "", loss, log_y=True),
        Panel("Change of a logit", "iteration", "mean |Δb|", change, log_y=True),
        Panel("Entropy of the couplings", "iteration", "% of log j", decided),
    ]
    return lines(f"Routing iterations on {kind}", "One curve for each number of iterations in training.", panels)


def smoothed(curve: Sequence[Sequence[float]], width: int = 3) -> list[tuple[float, float]]:
    """A moving mean, for losses of single steps jump."""
    means = []
    for k, (x, _) in enumerate(curve):
        near = [y for _, y in curve[max(0, k - width) : k + width + 1]]
        means.append((x, sum(near) / len(near)))
    return means
