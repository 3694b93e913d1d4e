"""The paper's experiments, each by one command: `capsnet reproduce NAME --budget smoke|hour|day|full`.

One file per experiment, or a folder. In `core`, `plan.py` defines what an experiment is, `conduct.py` runs one,
`results.py` stores its records and `page.py` writes the pages of results. `ablation.py` is the experiment behind
`capsnet ablate`, whose rows the user chooses.
"""

from __future__ import annotations

from importlib import import_module

from capsnet.errors import unknown
from capsnet.experiments.core.plan import Experiment

# name → module and class, imported on first use
EXPERIMENTS = {
    "arena": "arena.compare.Arena",
    "arena-rates": "arena.rates.Rates",
    "arena-cost": "arena.cost.Costs",
    "table1": "table1.Table1",
    "multimnist": "multimnist.MultiMnist",
    "figures": "figures.Figures",
    "affine": "affine.Affine",
    "affine-causes": "affine_causes.AffineCauses",
    "iterations": "iterations.Iterations",
    "couplings": "couplings.Couplings",
    "small-data": "small_data.SmallData",
    "parts": "parts.Parts",
    "cifar10": "cifar10.Cifar10",
    "depth": "depth.Depth",
    "viewpoints": "viewpoints.Viewpoints",
    "own-images": "own_images.OwnImages",
    "synchrony": "synchrony.compare.Synchrony",
    "walkthrough": "walkthrough.Walkthrough",
}


def get(name: str) -> Experiment:
    """The experiment of that name; an unknown name shows the nearest."""
    if name not in EXPERIMENTS:
        raise unknown("experiment", name, EXPERIMENTS)
    module, _, kind = EXPERIMENTS[name].rpartition(".")
    return getattr(import_module(f"capsnet.experiments.{module}"), kind)()
