"""capsnet train and capsnet demo."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from tyro.conf import arg

from capsnet import checkpoint, runs, training
from capsnet.cli.flags import MaybePath, Switch, parse
from capsnet.config import Config, get_preset
from capsnet.errors import UserError
from capsnet.experiments.conduct import same_training
from capsnet.pretrained import starting_from
from capsnet.terminal import TensorBoard, TrainingBar, clock, say


@dataclass(frozen=True)
class Train:
    """Train a network, evaluate it once on the test set, and write a run's folder with model, metrics and report.

    Examples:
      capsnet train                                           the quick preset on MNIST
      capsnet train --preset paper --seed 1 --out runs/paper-1
      capsnet train --data folder:photos --epochs 20          your own images, one subfolder a class
      capsnet train --data folder:photos --init quick-mnist   the same, beginning with a trained model
      capsnet train --model.iterations 1 --loss.reconstruction 0
      capsnet train --resume runs/paper-1                     go on after an interruption
    """

    out: MaybePath = None
    """Folder of the run (default: runs/PRESET-DATA, numbered where that exists)."""
    resume: MaybePath = None
    """Go on with the interrupted run in this folder; its own settings hold."""
    no_report: Switch = False
    """Do not write report.html (curves, mistakes, reconstructions, tweaks)."""
    no_tensorboard: Switch = False
    """Do not log for TensorBoard."""
    json: Switch = False
    """Print the result as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


WITH_RESUME = {"--resume", "--no-report", "--no-tensorboard", "--json"}


def train(argv: list[str]) -> int:
    name, rest = take_preset(argv)
    flags = parse(Train, "train", rest, default=Train(config=defaults(name, rest)))
    if flags.resume:
        refuse_settings(argv)
        return run_to_end(training.resume(flags.resume), flags)
    if flags.out:
        return run_to_end(training.start(flags.config, flags.out), flags)
    return run_to_end(start_beside(flags.config, f"{name}-{flags.config.data.split(':')[0]}"), flags)


def take_preset(argv: list[str]) -> tuple[str, list[str]]:
    """The preset decides every other default, so it is looked for first."""
    names, rest, words = [], [], iter(argv)
    for word in words:
        if word.startswith("--preset="):
            names.append(word.partition("=")[2])
        elif word == "--preset" and (name := next(words, None)) is not None:
            names.append(name)
        else:
            rest.append(word)
    if len(names) > 1:
        raise UserError(f"--preset is given {len(names)} times ({', '.join(names)}) and a run starts from one.")
    return (names or [preset_for(rest)])[0], rest


PRESET_FOR = {  # where no preset is named, by what --data says before its colon
    "folder": "own-images",
    "csv": "own-images",
    "multimnist": "multimnist",
    "expanded-mnist": "expanded",
    "affine-mnist": "expanded",
}


def preset_for(argv: list[str]) -> str:
    """The preset that suits the data asked for."""
    given = [word for before, word in itertools.pairwise(["", *argv]) if before == "--data"]
    given += [word.removeprefix("--data=") for word in argv if word.startswith("--data=")]
    return PRESET_FOR.get(given[-1].partition(":")[0], "quick") if given else "quick"


def defaults(preset: str, argv: list[str]) -> Config:
    """The preset's settings; with --init, whose last one counts, the network is that of the trained model."""
    config, words = get_preset(preset), [*argv, ""]
    given = [word.partition("=")[2] for word in words if word.startswith("--init=")]
    given += [after for word, after in itertools.pairwise(words) if word == "--init" and after[:1] not in ("", "-")]
    return starting_from(config, given[-1]) if given else config


def refuse_settings(argv: list[str]) -> None:
    """A run goes on as it began, so settings beside --resume would be lost without a word."""
    words = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    if lost := [word for word in words if word not in WITH_RESUME]:
        raise UserError(
            f"--resume goes on with the run's own settings, which {lost[0]} cannot change: leave it out, "
            f"or start a new run with it."
        )


def start_beside(config: Config, name: str) -> training.Run:
    """A new run in runs/NAME, or in runs/NAME-2, -3, … where that is taken."""
    for number in itertools.count(1):
        try:
            return training.start(config, Path("runs") / (name if number == 1 else f"{name}-{number}"))
        except runs.Taken:
            continue
    raise AssertionError("there is always a next number")


def run_to_end(run: training.Run, flags: Train) -> int:
    """Train, evaluate, report; on Ctrl-C say how to go on."""
    watchers: list[training.Watcher] = [TrainingBar()]
    if not flags.no_tensorboard and find_spec("tensorboard"):
        watchers.append(TensorBoard())
    if not flags.no_report:
        watchers.append(Page())
    if run.model.loaded:
        say(f"starting {run.model.loaded}")
    try:
        result = training.train(run, watchers)
    except KeyboardInterrupt:
        say(f"stopped after step {run.step} of {run.steps}; go on with: capsnet train --resume {run.folder}")
        return 130
    show_result(result, flags.json)
    return 0


class Page(training.Watcher):
    """Writes report.html before the training counts as finished: cut off, it is written when the run is resumed."""

    def finished(self, result: training.Result) -> None:
        write_report(result)


def write_report(result: training.Result) -> None:
    """The page of a run, where the pictures' library is installed."""
    if find_spec("matplotlib") is None:
        say("no report.html: it needs matplotlib (pip install 'capsnet[train]').")
        return
    from capsnet.report import write_report as write

    write(
        result.folder, model=result.model, evaluation=result.evaluation, dataset=result.splits.test,
        history=runs.read_metrics(result.folder), certificate=result.certificate,
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
    quick, file = get_preset("quick"), folder / runs.CONFIG_FILE
    begun = runs.can_go_on(folder) and file.exists() and same_training(checkpoint.read_json(file), quick)
    run = training.resume(folder) if begun else start_beside(quick, "demo")
    if run.folder != folder:
        say(f"{folder} is there already; this one goes to {run.folder}")
        folder = run.folder
    code = run_to_end(run, Train())
    if code == 0:
        print(next_steps(folder))
    return code


def next_steps(folder: Path) -> str:
    """What to try next, with the command as it can be typed here."""
    capsnet = "capsnet" if shutil.which("capsnet") else os.path.relpath(sys.argv[0])
    steps = {
        f"open {folder}/report.html": "curves, mistakes, reconstructions, tweaks",
        f"{capsnet} lab {folder}": "draw a digit and watch this network think",
        f"{capsnet} predict {folder} photo.png": "a photo or drawing of a digit",
        f"{capsnet} reconstruct {folder} --what tweaks": "what each number of a pose means",
        f"{capsnet} train --preset paper": "the paper's own network",
        f"{capsnet} train --data folder:PATH": "your own images, one subfolder a class",
    }
    width = max(map(len, steps))
    return "\nWhat to try next:\n" + "\n".join(f"  {step:<{width}}  {why}" for step, why in steps.items())
