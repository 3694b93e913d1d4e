"""capsnet train."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from capsnet import data, plugins
from capsnet.cli.flags import MaybePath, Switch, parse, take_one
from capsnet.errors import UserError
from capsnet.group.base import current
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.io.transfer import starting_from
from capsnet.models.config import ModelConfig
from capsnet.models.registry import MODELS
from capsnet.notice import say
from capsnet.routing import options_for
from capsnet.terminal import error_text
from capsnet.timing import clock
from capsnet.train import loop, precision, runs
from capsnet.train.callbacks import TensorBoard, TrainingBar
from capsnet.train.config import Config
from capsnet.train.presets import get_preset


@dataclass(frozen=True)
class Train:
    """Train a network, evaluate it once on the test set, and write model, metrics and report to a run folder.

    Examples:
      capsnet train                                           the quick preset on MNIST
      capsnet train --preset paper --seed 1 --out runs/paper-1
      capsnet train --data folder:photos --epochs 20          your own images, one subfolder per class
      capsnet train --data folder:photos --init quick-mnist   fine-tune a trained model
      capsnet train --model.routing.iterations 1 --loss.reconstruction 0
      capsnet train --plugin mine.py --model.routing mine     your own routing algorithm (--model NAME: your own model)
      capsnet train --resume runs/paper-1                     continue an interrupted run
      torchrun --nproc-per-node 2 -m capsnet train            two processes (see docs/distributed.md)
    """

    out: MaybePath = None
    """Run folder (default: runs/PRESET-DATA, with a number if it exists)."""
    resume: MaybePath = None
    """Resume the interrupted run in this folder, with its own settings."""
    no_report: Switch = False
    """Do not write report.html (curves, errors, reconstructions, pose dimensions)."""
    no_tensorboard: Switch = False
    """Do not write TensorBoard logs."""
    json: Switch = False
    """Print the result as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


WITH_RESUME = {"--resume", "--no-report", "--no-tensorboard", "--json"}


def train(argv: list[str]) -> int:
    name, rest = take_preset(argv)
    flags = parse(Train, "train", rest, default=Train(config=defaults(name, rest)))
    if flags.resume:
        refuse_settings(argv)
    again = taken_up(flags, name)
    if again and current().from_leader(lambda: runs.has_finished(again)):  # the others may not see its folder
        return show_finished(again, flags.json) if current().leads else 0
    if folder := again or flags.resume:
        return run_to_end(loop.resume(folder), flags)
    if flags.out:
        return run_to_end(loop.start(flags.config, flags.out), flags)
    return run_to_end(start_in_free_folder(flags.config, default_name(flags, name)), flags)


def default_name(flags: Train, preset: str) -> str:
    return f"{preset}-{data.parse(flags.config.data).info.name}"


def taken_up(flags: Train, preset: str) -> Path | None:
    """The folder in which this command began before torchrun restarted it; None if it had not begun, or is new."""
    group = current()
    if not group.restarts:
        return None
    if flags.resume:
        return flags.resume
    found = group.from_leader(lambda: begun_folder(flags, preset))
    return Path(found) if found else None


def begun_folder(flags: Train, preset: str) -> str:
    """The last folder that this command could have chosen and that has its settings; empty if there is none."""
    from capsnet.experiments.core.conduct import same_training

    chosen = [flags.out] if flags.out else itertools.takewhile(Path.exists, folders(default_name(flags, preset)))
    files = [folder / runs.CONFIG_FILE for folder in chosen]
    same = [file.parent for file in files if file.exists() and same_training(checkpoint.read_json(file), flags.config)]
    return str(same[-1]) if same else ""


def take_preset(argv: list[str]) -> tuple[str, list[str]]:
    """The preset, by default the one that suits the dataset, and the other words."""
    name, rest = take_one(argv, "--preset")
    return name or preset_for(rest), rest


def preset_for(argv: list[str]) -> str:
    """The preset that suits the requested data."""
    given = [word for before, word in itertools.pairwise(["", *argv]) if before == "--data"]
    given += [word.removeprefix("--data=") for word in argv if word.startswith("--data=")]
    return data.parse(given[-1]).info.preset if given else "quick"


def defaults(preset: str, argv: list[str]) -> Config:
    """The preset's settings, with the model of --init or --model and the routing of --model.routing."""
    config = get_preset(preset)
    (init, _), (model, _), (routing, _) = (take_one(argv, name) for name in ("--init", "--model", "--model.routing"))
    if init and model:
        raise UserError("--init and --model both select the network: leave one of the two out.")
    if init:
        config = starting_from(config, init)
    if model and model != config.model.kind:
        config = replace(config, model=MODELS.get(model).Config())
    return replace(config, model=with_routing(config.model, routing)) if routing else config


def with_routing(model: ModelConfig, name: str) -> ModelConfig:
    """A model's config with the default options of another routing algorithm; the same algorithm keeps its options."""
    options = getattr(model, "routing", None)
    if options is None:
        raise UserError(f"the model {model.kind} has no routing: leave --model.routing out, or choose another --model.")
    chosen = options_for(name)
    return model if options.algorithm == name else replace(model, routing=chosen)  # type: ignore[call-arg]


def refuse_settings(argv: list[str]) -> None:
    """Refuse settings that --resume would silently ignore."""
    words = [word.partition("=")[0].replace("_", "-") for word in argv if word.startswith("--")]
    if lost := [word for word in words if word not in WITH_RESUME]:
        raise UserError(
            f"--resume continues a run with its own settings, so {lost[0]} would have no effect: leave it out, "
            f"or start a new run."
        )


def start_in_free_folder(config: Config, name: str) -> loop.Run:
    """Start a run in runs/NAME, or in runs/NAME-2, -3, … if that exists."""
    for folder in folders(name):
        free = current().from_leader(lambda folder=folder: is_free(folder))  # type: ignore[misc]
        if free:
            try:
                return loop.start(config, folder)
            except runs.Taken:  # another process was faster
                if current().size > 1:
                    raise
    raise AssertionError("there is always a next number")


def folders(name: str) -> Iterator[Path]:
    """runs/NAME, runs/NAME-2, runs/NAME-3, …"""
    yield Path("runs") / name
    yield from (Path("runs") / f"{name}-{number}" for number in itertools.count(2))


def is_free(folder: Path) -> bool:
    try:
        runs.check_free(folder)
    except runs.Taken:
        return False
    return True


def run_to_end(run: loop.Run, flags: Train) -> int:
    """Train, evaluate and report; on Ctrl-C say how to resume."""
    watchers: list[loop.Watcher] = [TrainingBar()]
    if not flags.no_tensorboard and find_spec("tensorboard"):
        watchers.append(TensorBoard())
    if not flags.no_report:
        watchers.append(Page())
    if run.model.loaded:
        say(f"starting {run.model.loaded}")
    if chosen := precision.describe(run.config.precision, run.device):
        say(chosen)
    try:
        result = loop.train(run, watchers)
    except KeyboardInterrupt:
        again = command_in_group("train", "--resume", str(run.folder))
        say(f"stopped after step {run.step} of {run.steps}; resume with: {again}")
        return 130
    if run.group.leads:
        show_result(result.folder, result.evaluation.summary(), result.certificate, flags.json)
    return 0


def command_in_group(*words: str) -> str:
    """A command for the user to copy, for as many processes as there are now."""
    command, size = plugins.command(*words), current().size
    return command if size == 1 else command.replace("capsnet", f"torchrun --nproc-per-node {size} -m capsnet", 1)


class Page(loop.Watcher):
    """Writes report.html before the run counts as finished, so a resumed run writes it if it was interrupted here."""

    def finished(self, result: loop.Result) -> None:
        write_report(result)


def write_report(result: loop.Result) -> None:
    """Write report.html if matplotlib is installed."""
    if find_spec("matplotlib") is None:
        say("report.html is not written, because it needs matplotlib: pip install 'capsnet[train]'.")
        return
    from capsnet.report.html import write_report as write

    write(
        result.folder, model=result.model, evaluation=result.evaluation, dataset=result.splits.test,
        history=runs.read_metrics(result.folder), certificate=result.certificate,
    )  # fmt: skip


def show_finished(folder: Path, as_json: bool) -> int:
    """Show the result of a run that had finished when torchrun restarted the group."""
    if current().leads:
        record = checkpoint.read_json(folder / "results.json")
        show_result(folder, record["test"], Certificate.from_json(record["certificate"]), as_json)
    return 0


def show_result(folder: Path, summary: dict[str, Any], certificate: Certificate, as_json: bool) -> None:
    if as_json:
        print(json.dumps({"run": str(folder), "test": summary, "certificate": certificate.to_json()}))
        return
    print(f"test error {error_text(summary)}, trained in {clock(certificate.seconds)}")
    for path in sorted(folder.iterdir()):
        if path.name in ("model.safetensors", "report.html", "results.json"):
            print(f"  {path}")
