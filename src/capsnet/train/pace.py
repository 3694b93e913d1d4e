"""How many epochs fit into a given time, measured on the first steps of a run."""

from __future__ import annotations

import math

from capsnet.evaluate import evaluate
from capsnet.timing import mean_seconds
from capsnet.train import loop, steps
from capsnet.train.runs import Run


def epochs_within(minutes: float, run: Run) -> float:
    """Epochs that fit into the time if each takes what its first steps suggest.

    The steps are real ones and change the weights of `run`, so train another one.
    """
    with loop.enough_memory(run.config):
        step = mean_seconds(lambda: steps.train_step(run), min(3 * minutes, 3 + minutes / 2, 30))
        look = mean_seconds(lambda: validate(run), 0)
    epochs = (60 * minutes - 2 * look) / (len(run.batches) * step + look)  # two more looks come at the end
    return max(0.001, math.floor(1000 * epochs) / 1000)


def validate(run: Run) -> None:
    if len(run.splits.validation):
        evaluate(run.averaged_model().eval(), run.splits.validation)
