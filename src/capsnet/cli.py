"""The command line: verbs, and nothing but verbs. Each parses its flags, calls the library and prints.

A dataclass is a verb's flags, its docstring is the help. A user's mistake is one sentence and exit code 2, never a
traceback; results go to stdout, everything else to stderr.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.conf import Positional, arg

from capsnet import __version__, checkpoint, data, training
from capsnet.config import PRESETS, PROMISES, Config, from_dict, get_preset
from capsnet.data import sources
from capsnet.errors import UserError, unknown
from capsnet.evaluation import evaluate, name_classes
from capsnet.models.registry import Model
from capsnet.terminal import Counter, TensorBoard, TrainingBar, clock, console, print_table, say

Flags = TypeVar("Flags")
VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}


def verb(summary: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    """Add a verb under its function's name."""

    def add(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        VERBS[function.__name__.rstrip("_")] = (summary, function)
        return function

    return add


def parse(flags: type[Flags], name: str, argv: list[str], default: Flags | None = None) -> Flags:
    """A verb's flags from the command line; an unknown one shows its nearest neighbours and exits with 2."""
    shaped = tyro.conf.configure(tyro.conf.AvoidSubcommands, tyro.conf.FlagCreatePairsOff)(flags)
    kwargs = {} if default is None else {"default": default}
    return tyro.cli(shaped, args=argv, prog=f"capsnet {name}", **kwargs)  # type: ignore[call-overload,no-any-return]


# ---------------------------------------------------------------------------------------------------------- train


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

    out: Path | None = None
    """Folder of the run (default: runs/PRESET-DATA, numbered where that exists)."""
    resume: Path | None = None
    """Go on with the interrupted run in this folder; its own settings hold."""
    report: bool = True
    """Write report.html with curves, mistakes, reconstructions and tweaks."""
    tensorboard: bool = True
    """Log for TensorBoard, where it is installed."""
    json: bool = False
    """Print the result as JSON."""
    config: Annotated[Config, arg(name="")] = field(default_factory=Config)


@verb("train a network (the quick preset on MNIST, if you say nothing else)")
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
    if flags.tensorboard and find_spec("tensorboard"):
        watchers.append(TensorBoard())
    try:
        result = training.train(run, watchers)
    except KeyboardInterrupt:
        say(f"stopped after step {run.step} of {run.steps}; go on with: capsnet train --resume {run.folder}")
        return 130
    if flags.report:
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


@verb("train on MNIST, test, and write a report: the whole story in a few minutes")
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


# ------------------------------------------------------------------------------------------------------- evaluate


@dataclass(frozen=True)
class Evaluate:
    """Count a model's errors on a data set it has not been trained on.

    Examples:
      capsnet evaluate runs/demo
      capsnet evaluate runs/demo --data mnist --json
    """

    model: Positional[str]
    """A run's folder or a .safetensors file."""
    data: str | None = None
    """mnist, fashion-mnist, cifar10, folder:PATH or csv:PATH (default: what the model was trained on)."""
    split: Literal["test", "validation", "train"] = "test"
    """Which part of it."""
    top: int | None = None
    """With several labels an image: name this many longest classes (default: all above the threshold)."""
    threshold: float = 0.5
    """With several labels an image: the length from which a class counts as there."""
    batch_size: int = 250
    """Images in a batch; of no consequence for the result."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: bool = False
    """Print JSON: n, errors, error_percent and more."""


@verb("count a model's errors on a data set")
def evaluate_(argv: list[str]) -> int:
    flags = parse(Evaluate, "evaluate", argv)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    dataset = getattr(splits_for(flags.model, flags.data), flags.split)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no {flags.split} part here; choose another --split.")
    with Counter("evaluating") as counter:
        found = evaluate(
            model, dataset, batch_size=flags.batch_size, top=flags.top, threshold=flags.threshold, on_batch=counter
        )
    summary = {"model": flags.model, "split": flags.split, **found.summary()}
    if flags.json:
        print(json.dumps(summary))
        return 0
    low, high = summary["error_percent_interval_95"]
    print(
        f"{flags.model} on {summary['data']} ({flags.split}): {summary['errors']} of {summary['n']:,} wrong, "
        f"error {summary['error_percent']:.2f} % (95 % interval {low:.2f} to {high:.2f} %)"
    )
    if "error_percent_by_class" in summary and len(found.classes) <= 30:
        print_table(["class", "error %"], [(k, f"{v:.2f}") for k, v in summary["error_percent_by_class"].items()])
    return 0


def training_config(model: str) -> Config | None:
    """The config that a model was trained with, from its own header."""
    _, record = checkpoint.read_tensors(checkpoint.model_file(model))
    config = record.get("certificate", {}).get("config")
    return from_dict(config) if config else None


def splits_for(model: str, name: str | None) -> data.Splits:
    """The data set asked for, or the one a model was trained on, split as it was then."""
    config = training_config(model) or Config()
    if name and name != config.data:
        return data.load(name, seed=config.seed, image_size=config.model.image_shape[1])
    return data.load(
        config.data, validation=config.validation, validation_choice=config.validation_choice,
        seed=config.seed, image_size=config.image_size,
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- predict

IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".bmp", ".webp", ".tif", ".tiff", ".pgm", ".ppm"}


@dataclass(frozen=True)
class Predict:
    """Say what is in images: files, folders, or - for one image on stdin.

    For a model of MNIST a photo or drawing is prepared as MNIST was made: grey, inverted if it is dark on light,
    cropped to the ink, scaled into 20×20 and centred by its mass in 28×28. --raw only scales it.

    Examples:
      capsnet predict runs/demo photo.png
      capsnet predict runs/demo scans/ --json
    """

    model: Positional[str]
    """A run's folder or a .safetensors file."""
    images: Positional[tuple[str, ...]]
    """Image files, folders of them, or - for stdin."""
    raw: bool = False
    """Do not prepare images as MNIST was made; only scale them to the model's size."""
    top: int = 1
    """Name this many longest classes."""
    threshold: float | None = None
    """Name all classes that are at least this long instead."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: bool = False
    """Print JSON, one object with a list of predictions."""


@verb("say what is in your images")
def predict(argv: list[str]) -> int:
    flags = parse(Predict, "predict", argv)
    model = checkpoint.load(flags.model, training.choose_device(flags.device))
    config = training_config(flags.model)
    like_mnist = not flags.raw and config is not None and config.data == "mnist"
    names = list_images(flags.images)
    rows, failures = [], []
    with Counter("predicting") as counter:
        for done, name in enumerate(names, 1):
            try:
                rows.append(predict_one(model, name, like_mnist, flags))
            except UserError as error:
                failures.append(str(error))
            counter(done, len(names))
    for failure in failures:
        say(f"capsnet: {failure}")
    if flags.json:
        print(json.dumps({"model": flags.model, "predictions": rows, "errors": failures}))
    elif rows:
        print_table(
            ["image", "is", "length", "next", "length"],
            [(r["file"], " ".join(r["labels"]) or "nothing", *r["shown"]) for r in rows],
        )
        notes = {row["prepared"] for row in rows}
        if like_mnist:
            say(f"prepared as MNIST was made ({'; '.join(sorted(notes))}); --raw turns that off.")
    return 2 if failures else 0


def list_images(names: Sequence[str]) -> list[str]:
    """Files as they are, folders as the images in them."""
    if not names:
        raise UserError("predict needs at least one image: a file, a folder, or - for stdin.")
    found: list[str] = []
    for name in names:
        if name != "-" and Path(name).is_dir():
            inside = sorted(str(p) for p in Path(name).rglob("*") if p.suffix.lower() in IMAGE_SUFFIXES)
            if not inside:
                raise UserError(f"the folder {name} holds no images.")
            found += inside
        else:
            found.append(name)
    return found


def predict_one(model: Model, name: str, like_mnist: bool, flags: Predict) -> dict[str, Any]:
    """Prepare one image, run the model, and say what it saw."""
    image, note = prepare_image(model, name, like_mnist)
    lengths = model.predict(image[None]).lengths
    top = None if flags.threshold is not None else min(flags.top, len(model.classes))
    named = name_classes(lengths, top, flags.threshold or 0.0)[0]
    order = lengths[0].argsort(descending=True).tolist()
    first, second = order[0], order[1] if len(order) > 1 else order[0]
    return {
        "file": name,
        "labels": [model.classes[j] for j in order if named[j]],
        "label": model.classes[first],
        "length": round(float(lengths[0, first]), 4),
        "lengths": {c: round(float(x), 4) for c, x in zip(model.classes, lengths[0], strict=True)},
        "prepared": note,
        "shown": [f"{lengths[0, first]:.3f}", model.classes[second], f"{lengths[0, second]:.3f}"],
    }


def prepare_image(model: Model, name: str, like_mnist: bool) -> tuple[Any, str]:
    """An image file (or - for stdin) as the model's input."""
    from capsnet.data import photo

    picture = photo.read_image(io.BytesIO(sys.stdin.buffer.read()) if name == "-" else name)
    channels, height, width = model.config.image_shape
    if like_mnist:
        prepared = photo.prepare_like_mnist(picture, height)
        return prepared.image, prepared.note
    return photo.fit(picture, channels, height, width), "scaled"


# ---------------------------------------------------------------------------------------------------- reconstruct


@dataclass(frozen=True)
class Reconstruct:
    """Paint what a model sees: reconstructions beside their inputs (Fig. 3), or the tweak grid of a pose (Fig. 4).

    Without images it takes test images of the data that the model was trained on.

    Examples:
      capsnet reconstruct runs/demo
      capsnet reconstruct runs/demo --what tweaks --digit 5
      capsnet reconstruct runs/demo photo.png --what tweaks --out tweaks.svg
    """

    model: Positional[str]
    """A run's folder or a .safetensors file."""
    images: Positional[tuple[str, ...]] = ()
    """Image files or folders; none for test images."""
    what: Literal["reconstructions", "tweaks"] = "reconstructions"
    """Which picture."""
    digit: str | None = None
    """Class to decode (default: the longest capsule; without images also: the first test image of that class)."""
    out: Path | None = None
    """File to write, .png or .svg (default: WHAT.png in the run's folder or here)."""
    raw: bool = False
    """Do not prepare images as MNIST was made."""
    force: bool = False
    """Overwrite the file if it exists."""


@verb("paint reconstructions, or what each number of a pose means")
def reconstruct(argv: list[str]) -> int:
    import torch

    from capsnet import figures

    flags = parse(Reconstruct, "reconstruct", argv)
    model = checkpoint.load(flags.model)
    if getattr(model, "decoder", None) is None:
        raise UserError(f"{flags.model} has no decoder, so there is nothing to paint: train one with a decoder.")
    label = class_index(model, flags.digit)
    out = flags.out or (Path(flags.model) if Path(flags.model).is_dir() else Path()) / f"{flags.what}.png"
    if out.exists() and not flags.force:
        raise UserError(f"{out} exists already: choose another name with --out, or overwrite it with --force.")
    if out.suffix not in (".png", ".svg"):
        raise UserError(f"{out} is neither .png nor .svg, and no other kind of picture is written.")
    config = training_config(flags.model)
    if flags.images:
        like_mnist = not flags.raw and config is not None and config.data == "mnist"
        images = torch.stack([prepare_image(model, n, like_mnist)[0] for n in list_images(flags.images)])
        true = None
    else:
        test = splits_for(flags.model, None).test
        rows = (test.targets[:, label] > 0).nonzero()[:, 0] if label is not None else torch.arange(len(test))
        images, true = test.images[rows[:64]], test.targets[rows[:64]].argmax(1)
    if flags.what == "tweaks":
        figure = figures.tweak_grid(model, images[0], label)
    else:
        figure = figures.reconstructions(model, images, true)
    figures.save(figure, out)
    print(out)
    return 0


def class_index(model: Model, name: str | None) -> int | None:
    """A class by its name."""
    if name is not None and name not in model.classes:
        raise unknown("class", name, model.classes)
    return None if name is None else model.classes.index(name)


# ---------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Models:
    """List what can be loaded (runs in a folder) and what can be trained (presets).

    Example:
      capsnet models
    """

    runs: Path = Path("runs")
    """Folder in which to look for runs."""
    json: bool = False
    """Print JSON."""


@verb("list trained runs and presets")
def models(argv: list[str]) -> int:
    flags = parse(Models, "models", argv)
    runs = [describe_run(path.parent) for path in sorted(flags.runs.glob(f"*/{checkpoint.MODEL_FILE}"))]
    if flags.json:
        print(json.dumps({"runs": runs, "presets": PROMISES}))
        return 0
    if runs:
        columns = ["run", "preset", "data", "parameters", "error_percent", "seconds"]
        print_table(columns, [[str(r.get(c, "?")) for c in columns] for r in runs], title="Trained here")
    else:
        print(f"No finished run in {flags.runs}/ yet; `capsnet train` makes one.")
    print_table(["preset", "promise"], PROMISES.items(), title="\nPresets")
    return 0


def describe_run(folder: Path) -> dict[str, Any]:
    """One line about a run, from its results.json; a damaged run is listed all the same."""
    try:
        results = checkpoint.read_json(folder / "results.json")
        birth, test = results["certificate"], results["test"]
        return {
            "run": str(folder),
            "preset": birth["config"]["preset"],
            "data": birth["config"]["data"],
            "parameters": birth["parameters"],
            "error_percent": test["error_percent"],
            "seconds": birth["seconds"],
        }
    except (UserError, KeyError, TypeError):
        return {"run": str(folder)}


# ------------------------------------------------------------------------------------------------------------ data


@dataclass(frozen=True)
class Data:
    """List the data sets, fetch them into the cache, or verify what is there.

    Examples:
      capsnet data list
      capsnet data fetch mnist
      capsnet data verify
    """

    action: Positional[Literal["list", "fetch", "verify"]] = "list"
    """What to do: list what there is, fetch into the cache, or verify checksums."""
    names: Positional[tuple[str, ...]] = ()
    """Which data sets (default: all for list and verify)."""
    json: bool = False
    """Print JSON."""


@verb("list, fetch and verify data sets")
def data_(argv: list[str]) -> int:
    flags = parse(Data, "data", argv)
    for name in flags.names:
        sources.find(name)
    names = flags.names or tuple(sources.SOURCES)
    if flags.action == "list":
        rows = [{"name": n, "about": about, "cached": n in names and sources.is_cached(n)} for n, about in data.NAMES.items()]
    else:
        if flags.action == "fetch" and not flags.names:
            raise UserError(f"fetch which data set? The choices are: {', '.join(names)}.")
        rows = [check_data(name, fetch=flags.action == "fetch") for name in names]
    if flags.json:
        print(json.dumps({"cache": str(data.cache_folder()), "data": rows}))
    else:
        print_table(list(rows[0]), [[YES_NO.get(v, v) for v in row.values()] for row in rows])
        print(f"cache: {data.cache_folder()}")
    return 0 if all(row.get("good", True) for row in rows) else 2


YES_NO: dict[Any, str] = {True: "yes", False: "no"}


def check_data(name: str, fetch: bool) -> dict[str, Any]:
    """Fetch a data set if it is missing or damaged, or only verify the checksums of what is there."""
    if fetch:
        splits = data.load(name, validation=0)
        return {"name": name, "good": True, "training": f"{len(splits.train):,}", "test": f"{len(splits.test):,}"}
    state = sources.verify(name)
    return {"name": name, "good": state in ("good", "not fetched"), "state": state}


# ----------------------------------------------------------------------------------------------------------- bench


@dataclass(frozen=True)
class Bench:
    """Measure training and inference, plain beside fast, in one run on this machine.

    Examples:
      capsnet bench --quick
      capsnet bench --image-size 36
      capsnet bench --sweep --plot sweep.png
    """

    quick: bool = False
    """Inside 90 seconds: fewer repeats, without the breakdown and the machine's own peak."""
    sweep: bool = False
    """How cost grows with batch, image size, capsules, classes and iterations."""
    plot: Path | None = None
    """With --sweep: write the plot here (.png or .svg)."""
    image_size: int = 28
    """Side of the images; 36 is MultiMNIST's."""
    batch: int = 128
    """Images in a step."""
    repeats: int = 7
    """Turns of each side."""
    json: bool = False
    """Print JSON."""


@verb("measure speed and memory, plain beside fast")
def bench(argv: list[str]) -> int:
    from capsnet import bench as measured

    flags = parse(Bench, "bench", argv)
    if min(flags.image_size, flags.batch, flags.repeats) < 1:
        raise UserError("--image-size, --batch and --repeats need numbers above 0.")
    with Counter("measuring") as counter:
        if flags.sweep:
            rows = measured.sweep(on_tick=counter)
        else:
            shape = replace(get_preset("paper").model, image_shape=(1, flags.image_size, flags.image_size))
            case = measured.Case(shape, flags.batch)
            repeats = 3 if flags.quick else flags.repeats
            result = measured.measure(case, repeats=repeats, details=not flags.quick, on_tick=counter)
            result["certificate"] = checkpoint.certificate({"bench": vars(flags)}, 0.0, cpu=measured.cpu_name())
    if flags.sweep:
        if flags.plot:
            from capsnet import figures

            figures.save(figures.sweep(rows), flags.plot)
        show_sweep(rows, flags.json)
    elif flags.json:
        print(json.dumps(result, default=str))
    else:
        show_bench(result)
    return 0


def show_sweep(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"sweep": rows}))
        return
    print_table(
        ["quantity", "value", "plain s", "fast s", "ratio", "plain MB", "fast MB"],
        [
            (
                r["quantity"], r["value"], f"{r['seconds']['plain']:.3f}", f"{r['seconds']['fast']:.3f}",
                f"{r['seconds']['plain'] / r['seconds']['fast']:.2f}", str(r["peak_mb"]["plain"]), str(r["peak_mb"]["fast"]),
            )
            for r in rows
        ],
    )  # fmt: skip


def show_bench(result: dict[str, Any]) -> None:
    """The measured sides as a table, the ratios as sentences."""
    print(result["case"])
    columns = ["side", "train s", "train images/s", "inference images/s", "one image ms"]
    rows = []
    for side, seconds in result["train_seconds"].items():
        steps = f"{seconds['median']:.3f} ({seconds['quartile_low']:.3f} to {seconds['quartile_high']:.3f})"
        one = 1e3 * result["single_image_seconds"][side]["median"]
        rates = (result["train_images_per_second"][side], result["inference_images_per_second"][side])
        rows.append((side, steps, *(f"{rate:,.0f}" for rate in rates), f"{one:.1f}"))
    print_table(columns, rows)
    for name, value in result.items():
        if name.startswith(("train_ratio", "inference_ratio", "peak", "gemm", "share", "breakdown")):
            print(f"  {name.replace('_', ' ')}: {value}")


# ------------------------------------------------------------------------------------------------------------ main


def overview() -> str:
    """What `capsnet` alone prints."""
    verbs = "\n".join(f"  {name:<12} {summary}" for name, (summary, _) in VERBS.items())
    return (
        f"capsnet {__version__}: dynamic routing between capsules\n\n"
        f"usage: capsnet VERB …, and capsnet VERB --help for its flags\n\n{verbs}\n\n"
        f"examples:\n"
        f"  capsnet demo                          train on MNIST, test, write a report\n"
        f"  capsnet train --data folder:photos    train on your own images\n"
        f"  capsnet predict runs/demo photo.png   say what is in an image\n\n"
        f"presets: {', '.join(PRESETS)}"
    )


def main(argv: list[str] | None = None) -> int:
    """Run a verb; a user's mistake is a sentence and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "version"):
        print(f"capsnet {__version__}")
        return 0
    try:
        if words[0] not in VERBS:
            raise unknown("verb", words[0], VERBS)
        return VERBS[words[0]][1](words[1:])
    except UserError as error:
        console.print(f"capsnet: {error}", markup=False, style="red", soft_wrap=True)
        return 2
    except BrokenPipeError:  # the reader of a pipe has gone: no reason to complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        console.print(f"capsnet: {error.strerror}: {error.filename}", markup=False, style="red", soft_wrap=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
