"""capsnet train and capsnet demo."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from capsnet import checkpoint, training
from capsnet.cli.flags import MaybePath, parse
from capsnet.config import Config, get_preset
from capsnet.terminal import TensorBoard, TrainingBar, clock, say


@dataclass(frozen=True)
class Train:
    """Train a network, evaluate it once on the test set, and write a run's folder with model, metrics and report.

    Examples:
      capsnet train                                           the quick preset on MNIST
      capsnet train --preset paper --seed 1 --out runs/paper-1
      capsnet train --data folder:photos --epochs 20          your own images, one subfolder a class
      capsnet train --model.iterations 1 --loss.reconstruction 0
      capsnet train --resume runs/paper-1                     go on after an interruption
    """

    out: MaybePath = None
    """Folder of the run (default: runs/PRESET-DATA, numbered where that exists)."""
    resume: MaybePath = None
    """Go on with the interrupted run in this folder; its own settings hold."""
    no_report: bool = False
    """Do not write report.html (curves, mistakes, reconstructions, tweaks)."""
    no_tensorboard: bool = False
    """Do not log for TensorBoard."""
    json: bool = False
    """Print the result as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


def train(argv: list[str]) -> int:
    name, rest = take_preset(argv)
    flags = parse(Train, "train", rest, default=Train(config=get_preset(name)))
    folder = flags.resume or flags.out or free_folder(f"{flags.config.preset}-{flags.config.data.split(':')[0]}")
    run = training.resume(folder) if flags.resume else training.start(flags.config, folder)
    return run_to_end(run, flags)


def take_preset(argv: list[str]) -> tuple[str, list[str]]:
    """The preset decides every other default, so it is looked for first."""
    for index, word in enumerate(argv):
        if word == "--preset" and index + 1 < len(argv):
            return argv[index + 1], argv[:index] + argv[index + 2 :]
        if word.startswith("--preset="):
            return word.partition("=")[2], argv[:index] + argv[index + 1 :]
    return "quick", argv


def free_folder(name: str) -> Path:
    """runs/NAME, or runs/NAME-2, -3, … where that is taken."""
    number, folder = 1, Path("runs") / name
    while folder.exists():
        number += 1
        folder = Path("runs") / f"{name}-{number}"
    return folder


def run_to_end(run: training.Run, flags: Train) -> int:
    """Train, evaluate, report; on Ctrl-C say how to go on."""
    watchers: list[training.Watcher] = [TrainingBar()]
    if not flags.no_tensorboard and find_spec("tensorboard"):
        watchers.append(TensorBoard())
    try:
        result = training.train(run, watchers)
    except KeyboardInterrupt:
        say(f"stopped after step {run.step} of {run.steps}; go on with: capsnet train --resume {run.folder}")
        return 130
    if not flags.no_report:
        write_report(result)
    show_result(result, flags.json)
    return 0


def write_report(result: training.Result) -> None:
    """The page of a run, where the pictures' library is installed."""
    if find_spec("matplotlib") is None:
        say("no report.html: it needs matplotlib (pip install 'capsnet[train]').")
        return
    from capsnet.report import write_report as write

    write(
        result.folder, model=result.model, evaluation=result.evaluation, dataset=result.splits.test,
        history=training.read_metrics(result.folder / "metrics.jsonl"), certificate=result.certificate,
    )  # fmt: skip


def show_result(result: training.Result, as_json: bool) -> None:
    summary = result.evaluation.summary()
    if as_json:
        print(json.dumps({"run": str(result.folder), "test": summary, "certificate": result.certificate}))
        return
    low, high = summary["error_percent_interval_95"]
    print(
        f"test error {summary['error_percent']:.2f} % ({summary['errors']} of {summary['n']:,} wrong, "
        f"95 % interval {low:.2f} to {high:.2f} %), trained in {clock(result.certificate['seconds'])}"
    )
    for path in sorted(result.folder.iterdir()):
        if path.name in ("model.safetensors", "report.html", "results.json"):
            print(f"  {path}")


@dataclass(frozen=True)
class Demo:
    """Train the quick preset on the 60,000 digits of MNIST, test it on 10,000 and write a page about it.

    Interrupted, it goes on where it was; done already, it runs again in a folder beside.

    Example:
      capsnet demo
    """


def demo(argv: list[str]) -> int:
    parse(Demo, "demo", argv)
    folder = Path("runs/demo")
    unfinished = (folder / checkpoint.STATE_FILE).exists()
    if not unfinished and folder.exists():
        folder = free_folder("demo")
        say(f"runs/demo is there already; this one goes to {folder}")
    run = training.resume(folder) if unfinished else training.start(get_preset("quick"), folder)
    code = run_to_end(run, Train())
    if code == 0:
        print(
            f"\nWhat to try next:\n"
            f"  open {folder}/report.html                         curves, mistakes, reconstructions, tweaks\n"
            f"  capsnet predict {folder} photo.png                a photo or drawing of a digit\n"
            f"  capsnet reconstruct {folder} --what tweaks        what each number of a pose means\n"
            f"  capsnet train --preset paper                      the paper's own network\n"
            f"  capsnet train --data folder:PATH                  your own images, one subfolder a class"
        )
    return code
