"""The training loop: data → batches → model → loss → step → checkpoint.

Interruptions do not change the result. Batch, augmentation, dropout and learning rate are functions of (seed, step),
so the state of a run is its weights, the optimiser's moments and the step number; a run that is killed at any moment
and resumed from its last checkpoint ends with bit-identical weights. Early stopping uses the validation split; the test
set is evaluated once, after the last step.

Several processes (`capsnet.group`) all run this loop. Each computes its share of a step's batch, and the gradients are
added up before the optimiser's step, so that the weights are the same everywhere. Rank 0 alone writes files.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.data import Batches, Splits
from capsnet.data import load as load_data
from capsnet.data import parse as parse_data
from capsnet.data.splits import fingerprint
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation, evaluate
from capsnet.files import Lock, remove_leftovers, sha256
from capsnet.group import base as group
from capsnet.io import checkpoint
from capsnet.io.leakage import check_unseen
from capsnet.io.records import Certificate
from capsnet.io.transfer import open_teacher, start_from
from capsnet.models.base import Losses, Model
from capsnet.models.registry import build
from capsnet.nn.shares import prepare as prepare_for_shares
from capsnet.notice import say
from capsnet.routing.base import Routing
from capsnet.train import precision, runs
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict, to_dict
from capsnet.train.facts import facts
from capsnet.train.runs import Run, require_finite
from capsnet.train.steps import learning_rate, own_randomness, train_step

ONE_SIGNAL = 1.0  # seconds within which a second signal counts as the first
LOG_EVERY = 20  # steps per line of metrics.jsonl
SHORT = 5.0  # seconds: shorter epochs share a checkpoint, because small datasets have hundreds of epochs
# messages of PyTorch's CPU allocators, which raise no specific exception
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


class Watcher:
    """A callback of the training loop, such as a progress bar; override any of its methods."""

    def started(self, run: Run) -> None: ...
    def moved(self, run: Run) -> None: ...
    def stepped(self, run: Run, record: dict[str, Any]) -> None: ...
    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, n: int) -> None: ...
    def finished(self, result: Result) -> None: ...
    def closed(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """The result of a finished run."""

    folder: Path
    model: Model
    splits: Splits
    evaluation: Evaluation
    certificate: Certificate


def start(config: Config, folder: Path, *, stem: nn.Module | None = None) -> Run:
    """Start a run in a new or empty folder; `stem` is the stem of a capsule network that is given in Python."""
    group.current().from_leader(lambda: runs.check_free(folder))  # before the data are read; `claim` checks again
    run = begin(config, folder, stem)
    if run.group.leads:
        run.lock = runs.claim(folder)
        checkpoint.write_json(folder / runs.CONFIG_FILE, to_dict(run.config))
    run.save()
    return run


def resume(folder: Path, *, stem: nn.Module | None = None) -> Run:
    """Resume a run from its last checkpoint, or from the start if it was killed before the first one.

    A run that was started with a `stem` needs such a module again.
    """
    with ExitStack() as if_it_fails:
        lock = None
        if group.current().leads:
            if not runs.can_go_on(folder) and not runs.has_finished(folder):
                raise UserError(f"there is no run to resume in {folder}: check the path.")
            lock = Lock(folder)
            if_it_fails.callback(lock.release)
        run = reopen(folder, stem)
        if_it_fails.pop_all()
    run.lock = lock
    return run


def reopen(folder: Path, stem: nn.Module | None = None) -> Run:
    """What `resume` does once the folder is locked. Rank 0 reads the state and tells the other processes."""
    processes = group.current()
    tensors, record = saved_state(folder) if processes.leads else ({}, {})
    record = processes.from_leader(lambda: record)
    tensors = processes.tensors_from_leader(tensors)
    if "state" not in record:
        run = begin(from_dict(record["config"]), folder, stem)
        run.save()
    else:
        run = prepare(from_dict(record["config"]), folder, stem)
        check_unchanged(run, record)
        run.restore(tensors, record["state"])
        run.origin = record.get("origin", {})
        tell_other_size(run, record.get("processes", 1))
    if processes.leads:
        runs.forget_metrics_after(folder, run.step)
    return run


def saved_state(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the record of the last checkpoint; the config alone if there is none yet."""
    state = folder / checkpoint.STATE_FILE
    if runs.has_finished(folder):
        raise UserError(f"the run in {folder} has finished: there is nothing to resume.")
    remove_leftovers(folder)
    if not state.exists() and not runs.read_metrics(folder):
        return {}, {"config": checkpoint.read_json(folder / runs.CONFIG_FILE)}
    tensors, record = checkpoint.read_tensors(state)
    if not all(isinstance(record.get(part), dict) for part in ("config", "state")):
        raise UserError(f"{state} contains no resumable run: start a new one.")
    return tensors, record


def check_unchanged(run: Run, record: dict[str, Any]) -> None:
    """Refuse to continue with another teacher or other images than the run started with."""
    if record.get("taught_by", {}) != run.taught_by:
        raise UserError(f"{run.config.teacher}, the teacher of the run in {run.folder}, has changed: start a new run.")
    if record.get("images", run.images) != run.images:
        raise UserError(
            f"{run.config.data} has changed since the run in {run.folder} started, so it may have trained on test "
            f"images: restore the images, or start a new run."
        )


def tell_other_size(run: Run, before: int) -> None:
    """Say that a run continues with another number of processes."""
    if before != run.group.size:
        say(
            f"This run had {counted(before)} until step {run.step} and continues with {run.group.size}: the steps are "
            f"the same up to rounding, so the final weights will not be bit-identical."
        )


def counted(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"


def begin(config: Config, folder: Path, stem: nn.Module | None = None) -> Run:
    """A run at its first step, with the weights of --init if given."""
    check_unseen(config, strict=False)
    run = prepare(config, folder, stem)
    if config.init:
        run.model.loaded = report = start_from(run.model, config.init)
        run.origin = report.record()
    run.group.align(run.model)  # processors of different kinds may round differently
    return run


def input_options(config: Config) -> dict[str, Any]:
    """Size and channels that images are converted to: those of --init for images of any size, such as a folder's."""
    if config.init and not config.image_size and parse_data(config.data).info.image_shape is None:
        channels, height, width = config.model.image_shape
        return {"image_size": (height, width), "channels": channels}
    return {"image_size": config.image_size or None}


def prepare(config: Config, folder: Path, stem: nn.Module | None = None) -> Run:
    """Data, network and optimiser for a config; the seed determines all of them."""
    choose_device(config.device)  # fail before the data are read
    with enough_memory(config):
        splits = load_data(
            config.data, validation=config.validation, validation_choice=config.validation_choice,
            seed=config.seed, train_limit=config.train_limit, **input_options(config),
        )  # fmt: skip
    run = assemble(config, folder, splits, stem)
    run.images = fingerprint(splits, config.data)
    if run.group.size > 1:
        run.group.agree(facts(run))
    return run


def assemble(config: Config, folder: Path, splits: Splits, stem: nn.Module | None = None) -> Run:
    """Network and optimiser for data that are in memory already; `config.data` is only a name then."""
    device, train = choose_device(config.device), splits.train
    if (config.patience or config.stop_at) and not len(splits.validation):
        raise UserError(
            f"early stopping (--patience, --stop-at) needs validation images, and {train.name} has none: "
            f"set --validation above 0."
        )
    shape = replace(config.model, image_shape=train.image_shape, num_classes=len(train.classes))
    config = replace(config, model=shape, precision=precision.choose(config.precision, shape.kind, device))
    if config.batch_size > len(train) > 0:
        say(f"Batches have {len(train)} images instead of {config.batch_size}: {train.name} has no more to train on.")
    with enough_memory(config):
        with own_randomness(config.seed, torch.device("cpu")):
            model = build(config.model, stem=stem)
        config = replace(config, model=model.config)
        model = model.to(device)
        model.classes, model.multi_label = train.classes, train.multi_label
        batches = Batches(train.to(device), config.batch_size, config.seed, config.augment, epochs=config.epochs)
    run = Run(folder, config, splits, model, build_optimizer(model, config), batches)
    share_batches(run)
    if config.teacher:
        run.teacher = open_teacher(config.teacher, model)
        run.taught_by = {"model": config.teacher, "sha256": sha256(checkpoint.model_file(config.teacher))}
    return run


def share_batches(run: Run) -> None:
    """Make a run ready for batches that are computed in parts or by several processes."""
    several = run.group.size > 1
    run.group.shares(run.batches.batch_size, run.config.accumulate)  # refuses batches that are too small
    if several or run.config.accumulate > 1:
        prepare_for_shares(run.model)
    if several:
        run.gradients = run.group.gradients(list(run.learnt().values()))


def build_optimizer(model: Model, config: Config) -> torch.optim.Optimizer:
    """Fused Adam or AdamW; no weight decay on biases, norms and routing; unused or frozen parts are left out."""
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    off = () if config.loss.reconstruction else ("decoder.",)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad and not name.startswith(off)}
    decayed = decayed_parameters(model) & parameters.keys()
    decay = config.weight_decay if config.optimizer == "adamw" else 0.0  # Adam's would not be decoupled
    groups = [
        {"params": [(name, p) for name, p in parameters.items() if name in decayed], "weight_decay": decay},
        {"params": [(name, p) for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return kind(groups, lr=config.lr, fused=model.device.type in ("cpu", "cuda"))


def decayed_parameters(model: Model) -> set[str]:
    """Names of the parameters that weight decay applies to: weights of two or more axes.

    A routing algorithm names its own in `Routing.decayed`, because the shape of a parameter does not tell a bias
    (j, q) from a weight.
    """
    found = set()
    for prefix, module in model.named_modules():
        for name, p in module.named_parameters(prefix, recurse=False):
            is_weight = name.rpartition(".")[2] in module.decayed if isinstance(module, Routing) else p.dim() > 1
            if is_weight:
                found.add(name)
    return found


@contextmanager
def enough_memory(config: Config) -> Iterator[None]:
    """Turn an out-of-memory error into advice on what needs less memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(w in str(error) for w in NO_MEMORY):
            raise
        raise UserError(
            f"there is not enough memory for this run: start a new one with --accumulate {2 * config.accumulate}, a "
            f"--batch-size below {config.batch_size}, a smaller --image-size or decoder, or with --model.shared."
        ) from None


def train(run: Run, watchers: list[Watcher] | None = None) -> Result:
    """Train a run to the end, evaluate it once on the test set, and write model, metrics and results."""
    watchers = watchers or []
    with watched(run, watchers):
        train_weights(run, watchers)
        return finish(run, watchers)


def train_and_validate(run: Run, watchers: list[Watcher] | None = None) -> Evaluation:
    """Train a run to the end and evaluate it on the validation split, without the test set; no model is saved."""
    watchers = watchers or []
    if not len(run.splits.validation):
        raise UserError(f"{run.splits.train.name} has no validation images to evaluate on: set --validation above 0.")
    with watched(run, watchers):
        train_weights(run, watchers)
        model = checked_model(run)
        run.group.align(model)
        return evaluate(model, run.splits.validation)


def train_weights(run: Run, watchers: list[Watcher]) -> None:
    """Run the remaining steps; a signal stops them after a complete one."""
    with stop_between_steps() as stop:
        loop(run, watchers, stop)


def checked_model(run: Run) -> Model:
    """The model to keep, in evaluation mode; refused if a weight is not finite."""
    model = run.finished_model().eval()
    require_finite(run, model.state_dict())
    return model


@contextmanager
def watched(run: Run, watchers: list[Watcher]) -> Iterator[None]:
    """Start the callbacks; at the end, also after an error, close them and unlock the folder."""
    if not run.group.leads:
        watchers.clear()
    with ExitStack() as at_the_end, enough_memory(run.config):
        if run.lock:
            at_the_end.callback(run.lock.release)
        for watcher in watchers:
            at_the_end.callback(watcher.closed)
        for watcher in watchers:
            watcher.started(run)
        yield


def loop(run: Run, watchers: list[Watcher], stop: Callable[[], bool]) -> None:
    """Run steps, epochs and checkpoints until the last step or early stopping."""
    saved = started = time.monotonic()
    before = run.seconds

    def since(seconds: float) -> bool:
        return time.monotonic() - saved > seconds

    every, short = run.config.save_every, SHORT
    stop, due, worthwhile = run.group.together(stop, lambda: since(every), lambda: since(short))
    while run.step < run.steps and not stopped_early(run):
        losses = train_step(run)
        run.seconds = before + time.monotonic() - started
        for watcher in watchers:
            watcher.moved(run)
        at_epoch_end = run.step % len(run.batches) == 0 or run.step == run.steps
        if run.step % LOG_EVERY == 0 or at_epoch_end:
            tell(run, watchers, step_record(run, losses))
        if at_epoch_end:
            tell(run, watchers, epoch_record(run))
        if stop():
            run.save()
            raise KeyboardInterrupt
        at_the_end = run.step == run.steps or stopped_early(run)
        if due() or (at_epoch_end and (worthwhile() or at_the_end)):
            run.save()
            saved = time.monotonic()


def stopped_early(run: Run) -> bool:
    """Whether the validation error has reached --stop-at, or has not improved for --patience epochs."""
    passes = run.step // len(run.batches)  # complete epochs, each of which was validated
    arrived = bool(run.config.stop_at) and run.best_error <= run.config.stop_at
    return arrived or (bool(run.config.patience) and passes - run.best_epoch >= run.config.patience)


def step_record(run: Run, losses: Losses) -> dict[str, Any]:
    images = run.step * run.batches.batch_size
    return {
        "kind": "train",
        "step": run.step,
        "epoch": round(run.step / len(run.batches), 4),
        "loss": losses.total.item(),
        "classification": losses.classification.item(),
        "reconstruction": losses.reconstruction.item(),
        **({} if losses.teacher is None else {"teacher": losses.teacher.item()}),
        "lr": learning_rate(run.config, run.step - 1, run.steps),
        "images_per_second": round(images / max(run.seconds, 1e-9), 1),
        "seconds": round(run.seconds, 2),
    }


def epoch_record(run: Run) -> dict[str, Any]:
    """The record of an epoch: the validation error; the best weights are kept for early stopping."""
    error = None
    if len(run.splits.validation):
        model = run.averaged_model()
        run.group.align(model)
        error = evaluate(model, run.splits.validation).error_percent
        if error < run.best_error:
            run.best_error, run.best_epoch = error, run.epoch
            if run.config.patience:
                source = run.average or run.model.state_dict()
                run.best = {name: tensor.detach().cpu().clone() for name, tensor in source.items()}
    return {
        "kind": "epoch",
        "epoch": run.epoch,
        "step": run.step,
        "validation_error_percent": error,
        "seconds": round(run.seconds, 2),
    }


def tell(run: Run, watchers: list[Watcher], record: dict[str, Any]) -> None:
    """Append a record to metrics.jsonl and pass it to the callbacks."""
    if not run.group.leads:
        return
    runs.append_metrics(run.folder, record)
    for watcher in watchers:
        (watcher.stepped if record["kind"] == "train" else watcher.epoch_ended)(run, record)


def finish(run: Run, watchers: list[Watcher]) -> Result:
    """Evaluate once on the test set, write results and model, and finally delete the state kept for resuming."""
    model = checked_model(run)

    def on_batch(done: int, n: int) -> None:
        for watcher in watchers:
            watcher.evaluated(done, n)

    run.group.align(model)
    evaluation = evaluate(model, run.splits.test, on_batch=on_batch)
    certificate = birth_certificate(run)
    result = Result(run.folder, model, run.splits, evaluation, certificate)
    if run.group.leads:
        with group.member_of(group.ONE):
            write_results(result, watchers)
    run.group.barrier()  # the files of a finished run are there for all
    return result


def write_results(result: Result, watchers: list[Watcher]) -> None:
    folder, certificate = result.folder, result.certificate
    checkpoint.write_json(
        folder / "results.json", {"test": result.evaluation.summary(), "certificate": certificate.to_json()}
    )
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, result.model, certificate)
    for watcher in watchers:
        watcher.finished(result)
    (folder / checkpoint.STATE_FILE).unlink(missing_ok=True)


def birth_certificate(run: Run) -> Certificate:
    """What was trained, on which data, for how long, and its validation error."""
    return replace(
        checkpoint.certificate(to_dict(run.config), run.seconds),
        parameters=sum(p.numel() for p in run.model.parameters()),
        steps=run.step,
        epochs=run.epoch,
        training_images=len(run.splits.train),
        device=str(run.device),
        processes=run.group.size if run.group.size > 1 else None,
        validation_error_percent=run.best_error if run.best else last_validation_error(run),
        images=run.images or None,
        started_from=run.origin or None,
        taught_by=run.taught_by or None,
    )


def last_validation_error(run: Run) -> float | None:
    """The validation error of the last epoch."""
    epochs = [record for record in runs.read_metrics(run.folder) if record["kind"] == "epoch"]
    return epochs[-1]["validation_error_percent"] if epochs else None


def choose_device(name: str) -> torch.device:
    """A device by name; auto chooses CUDA or MPS if available, otherwise the CPU."""
    cuda, mps = torch.cuda.device_count(), int(torch.backends.mps.is_available())
    available = {"cuda": cuda, "mps": mps, "cpu": 1}
    if name == "auto":
        return group.device_of(next(kind for kind, number in available.items() if number))
    try:
        device = torch.device(name)
    except RuntimeError:  # a name that PyTorch does not know
        device = torch.device("meta")
    if (device.index or 0) >= available.get(device.type, 0):
        here = ", ".join(kind for kind, number in available.items() if number)
        raise UserError(f"there is no device '{name}' here; the choices are: auto, {here}.")
    return group.device_of(name) if device.index is None else device


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Delay Ctrl-C and SIGTERM to the end of the step, so the checkpoint is complete; a second signal acts at once.

    `timeout` and schedulers send theirs twice in a row, to the process and to its group, which counts as one.
    """
    requested = 0.0

    def request(number: int, frame: Any) -> None:
        nonlocal requested
        if requested and time.monotonic() > requested + ONE_SIGNAL:
            raise KeyboardInterrupt
        requested = requested or time.monotonic()

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested > 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
