"""capsnet demo."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from capsnet.cli.flags import parse
from capsnet.cli.train import Train, run_to_end, start_in_free_folder
from capsnet.experiments.core.conduct import same_training
from capsnet.io import checkpoint
from capsnet.notice import say
from capsnet.train import loop, runs
from capsnet.train.presets import get_preset


@dataclass(frozen=True)
class Demo:
    """Train the quick preset on MNIST's 60,000 digits, evaluate it on 10,000 and write a report.

    Run it again to resume an interrupted demo; after a finished one, it starts a new run.

    Example:
      capsnet demo
    """


def demo(argv: list[str]) -> int:
    parse(Demo, "demo", argv)
    folder = Path("runs/demo")
    quick, file = get_preset("quick"), folder / runs.CONFIG_FILE
    begun = runs.can_go_on(folder) and file.exists() and same_training(checkpoint.read_json(file), quick)
    run = loop.resume(folder) if begun else start_in_free_folder(quick, "demo")
    if run.folder != folder:
        say(f"{folder} already exists; this run is written to {run.folder}")
        folder = run.folder
    code = run_to_end(run, Train())
    if code == 0:
        print(next_steps(folder))
    return code


def next_steps(folder: Path) -> str:
    """What to try next, with the command as it can be typed here."""
    capsnet = "capsnet" if shutil.which("capsnet") else os.path.relpath(sys.argv[0])
    steps = {
        f"open {folder}/report.html": "curves, errors, reconstructions, pose dimensions",
        f"{capsnet} lab {folder}": "draw a digit and watch this network classify it",
        f"{capsnet} predict {folder} photo.png": "a photo or drawing of a digit",
        f"{capsnet} reconstruct {folder} --what tweaks": "the effect of each pose dimension",
        f"{capsnet} train --preset paper": "the paper's network",
        f"{capsnet} train --data folder:PATH": "your own images, one subfolder per class",
    }
    width = max(map(len, steps))
    return "\nWhat to try next:\n" + "\n".join(f"  {step:<{width}}  {why}" for step, why in steps.items())
