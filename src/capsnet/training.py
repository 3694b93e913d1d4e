"""The training loop: data → batches → model → loss → step → checkpoint.

Nothing depends on when it was interrupted. Batch, augmentation, dropout and learning rate are functions of (seed,
step), so the state of a training is its weights, the optimiser's moments and one number; killed at any moment it
goes on from its last checkpoint to the very same final weights. What is chosen (early stopping) is chosen on the
validation part; the test set is looked at once, after the last step.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsnet import checkpoint, runs, zoo
from capsnet.config import Config, from_dict, to_dict
from capsnet.data import Batch, Batches, Splits
from capsnet.data import load as load_data
from capsnet.data.datasets import fingerprint
from capsnet.data.progress import notice
from capsnet.data.seeds import generator
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation, evaluate, few
from capsnet.functional import lengths
from capsnet.layers import split_groups
from capsnet.losses import classification_loss, margin_loss, reconstruction_loss, teacher_loss
from capsnet.models.base import Output
from capsnet.models.registry import Model, build
from capsnet.pretrained import check_unseen, start_from
from capsnet.runs import Run, gone_bad, require_finite

LOG_EVERY = 20  # steps between two lines of metrics.jsonl
SHORT = 5.0  # seconds: epochs shorter than this share a checkpoint, for a few images make hundreds of them
# what PyTorch's allocators say, which have no exception of their own on a CPU
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")


class Losses(NamedTuple):
    """What a step minimises, and its parts."""

    total: Tensor
    margin: Tensor
    reconstruction: Tensor
    teacher: Tensor | None = None


def compute_loss(model: Model, batch: Batch, config: Config, teacher: Model | None = None) -> Losses:
    """What the labels ask for, and what a teacher does."""
    output = model(batch.images)
    losses = labelled_loss(model, output, batch, config)
    if teacher is None:
        return losses
    with torch.no_grad():
        taught = teacher(batch.images).lengths
    apart = teacher_loss(output.lengths, taught)
    return losses._replace(total=losses.total + config.loss.teacher * apart, teacher=apart)


def labelled_loss(model: Model, output: Output, batch: Batch, config: Config) -> Losses:
    """Margin loss plus weighted reconstruction from the poses of the TRUE classes; a CNN takes what its config says."""
    zero = output.lengths.new_zeros(())
    c = config.loss
    if output.logits is not None and c.cnn == "entropy":
        loss = classification_loss(output.logits.float(), batch.targets, model.multi_label)
        return Losses(loss, loss, zero)
    judged = judged_lengths(model, output)  # b or, one branch after the other, k·b
    margin = margin_loss(
        judged, batch.targets.repeat(len(judged) // len(batch.targets), 1),
        present=c.present, absent=c.absent, down_weight=c.down_weight, reduction=c.margin_reduction,
    )  # fmt: skip
    painted, wanted = paint(model, output, batch) if c.reconstruction else (None, batch.images)
    error = zero if painted is None else reconstruction_loss(painted.float(), wanted)
    return Losses(margin + c.reconstruction * error, margin, error)


def judged_lengths(model: Model, output: Output) -> Tensor:
    """What the margin loss judges (b, j): a CNN's probabilities, a capsule network's lengths.

    Of several branches each is judged by itself, (k·b, j), so that each learns to name the class alone.
    """
    if output.logits is not None:
        return output.logits.float().sigmoid()
    k = getattr(model.config, "branches", 1)
    if k == 1 or output.poses is None:
        return output.lengths
    return lengths(split_groups(output.poses, k)).flatten(0, 1)


def paint(model: Model, output: Output, batch: Batch) -> tuple[Tensor | None, Tensor]:
    """What the decoder paints from the poses of the TRUE classes, and what it should have painted.

    Where the digits of an image are known one by one, each is painted from its own pose alone (section 6); the second
    of an image that has only one counts nothing. A CNN paints nothing.
    """
    if output.poses is None:
        return None, batch.images
    if batch.parts is None or batch.digits is None or batch.present is None:
        return model.reconstruct_set(output.poses, batch.targets), batch.images  # type: ignore[operator]
    painted = model.reconstruct(output.poses, batch.digits)
    return None if painted is None else painted * batch.present[:, :, None, None, None], batch.parts


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate of a step, out of `steps` in all."""
    if config.schedule == "exponential":
        return max(config.lr * 0.96 ** (step / 2000), 1e-6)
    if config.schedule == "one-cycle":
        peak = max(1, round(config.warmup * steps))
        if step < peak:
            return config.lr * (0.04 + 0.96 * step / peak)
        done = (step - peak) / max(1, steps - peak)
        return config.lr * (0.001 + 0.999 * (1 + math.cos(math.pi * done)) / 2)
    return config.lr


class Watcher:
    """Something that looks on while a model trains: a progress bar, TensorBoard. Every method may be left out."""

    def started(self, run: Run) -> None: ...
    def moved(self, run: Run) -> None: ...
    def stepped(self, run: Run, record: dict[str, Any]) -> None: ...
    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, n: int) -> None: ...
    def finished(self, result: Result) -> None: ...
    def closed(self) -> None: ...


@dataclass(frozen=True)
class Result:
    """A finished training."""

    folder: Path
    model: Model
    splits: Splits
    evaluation: Evaluation
    certificate: dict[str, Any]


def start(config: Config, folder: Path) -> Run:
    """A new run in a folder that must not hold anything yet."""
    runs.check_free(folder)  # before the data are read; `claim` makes sure of it
    run = begin(config, folder)
    run.lock = runs.claim(folder)
    checkpoint.write_json(folder / runs.CONFIG_FILE, to_dict(run.config))
    run.save()
    return run


def resume(folder: Path) -> Run:
    """The run in a folder, as its last checkpoint left it; from the start if it was killed before the first one."""
    if not runs.can_go_on(folder) and not runs.has_finished(folder):
        raise UserError(f"there is no run in {folder} to resume.")
    lock = runs.Lock(folder)
    try:
        run = reopen(folder)
    except BaseException:
        lock.release()
        raise
    run.lock = lock
    return run


def reopen(folder: Path) -> Run:
    """What `resume` does once it has the folder to itself."""
    state = folder / checkpoint.STATE_FILE
    if runs.has_finished(folder):
        raise UserError(f"the training in {folder} has finished: nothing is left to resume.")
    checkpoint.remove_leftovers(folder)
    if not state.exists() and not runs.read_metrics(folder):
        run = begin(from_dict(checkpoint.read_json(folder / runs.CONFIG_FILE)), folder)
        run.save()
    else:
        tensors, record = checkpoint.read_tensors(state)
        if not all(isinstance(record.get(part), dict) for part in ("config", "state")):
            raise UserError(f"{state} holds no training that could go on.")
        run = prepare(from_dict(record["config"]), folder)
        if record.get("taught_by", {}) != run.taught_by:
            raise UserError(f"{run.config.teacher}, from which {folder} learns, is no longer the same: begin anew.")
        if record.get("images", run.images) != run.images:
            raise UserError(
                f"{run.config.data} has changed since {folder} began, and what is tested on may have been learnt: put "
                f"its images back as they were, or begin anew."
            )
        run.restore(tensors, record["state"])
        run.origin = record.get("origin", {})
    runs.forget_metrics_after(folder, run.step)
    return run


def begin(config: Config, folder: Path) -> Run:
    """Everything for a config at its first step, with a trained model's weights where it starts from one."""
    tell_of_what_was_seen(config)
    run = prepare(config, folder)
    if config.init:
        run.model.loaded = report = start_from(run.model, config.init)
        run.origin = report.record()
    return run


def tell_of_what_was_seen(config: Config) -> None:
    """Refuse to stop by images that a model to begin with has learnt, or to test on them; else say that it has."""
    try:
        check_unseen(config, sure=False)
    except UserError as seen:
        if config.patience or config.stop_at or config.data.startswith(("folder:", "csv:")):  # their test part is cut
            raise
        if config.validation:
            notice(f"The validation error will look too good: {seen}")


def input_options(config: Config) -> dict[str, Any]:
    """Size and channels that images are converted to: a trained model's own, where your images start from one."""
    if config.init and not config.image_size and config.data.startswith(("folder:", "csv:")):
        channels, height, width = config.model.image_shape
        return {"image_size": (height, width), "channels": channels}
    return {"image_size": config.image_size or None}


def prepare(config: Config, folder: Path) -> Run:
    """Data, network and optimiser for a config; the seed fixes them all."""
    device = choose_device(config.device)
    with enough_memory(config):
        splits = load_data(
            config.data, validation=config.validation, validation_choice=config.validation_choice,
            seed=config.seed, train_limit=config.train_limit, **input_options(config),
        )  # fmt: skip
    train = splits.train
    if (config.patience or config.stop_at) and not len(splits.validation):
        raise UserError(
            f"stopping early (--patience, --stop-at) needs validation images and {train.name} has none here: "
            f"set --validation above 0."
        )
    shape = replace(config.model, image_shape=train.image_shape, num_classes=len(train.classes))
    config = replace(config, model=shape)
    with enough_memory(config):
        with own_randomness(config.seed, torch.device("cpu")):
            model = build(config.model)
        model = model.to(device)
        model.classes, model.multi_label = train.classes, train.multi_label
        batches = Batches(train.to(device), config.batch_size, config.seed, config.augment, epochs=config.epochs)
    run = Run(folder, config, splits, model, build_optimizer(model, config), batches)
    run.images = fingerprint(splits, config.data)
    if config.teacher:
        run.teacher = open_teacher(config.teacher, model)
        run.taught_by = {"model": config.teacher, "sha256": zoo.sha256(checkpoint.model_file(config.teacher))}
    return run


def open_teacher(name: str, model: Model) -> Model:
    """A trained model to learn from: it sees the same images and answers with lengths of the same classes."""
    teacher = checkpoint.load(name, model.device)
    what = [(m.classes, m.config.image_shape, m.multi_label) for m in (teacher, model)]
    if what[0] != what[1]:
        raise UserError(
            f"{name} cannot teach this network: it knows {known(teacher)}, and here are {known(model)}; "
            f"choose another --teacher."
        )
    return teacher


def known(model: Model) -> str:
    """What a network tells apart, in words."""
    channels, height, width = model.config.image_shape
    how = "any of" if model.multi_label else "one of"
    return (
        f"{how} {few(set(model.classes))} on images of {height}×{width} with {channels} channel{'s' * (channels > 1)}"
    )


def build_optimizer(model: Model, config: Config) -> torch.optim.Optimizer:
    """Adam or AdamW in one fused pass; AdamW's decay spares biases and norms; a decoder that is off is left out."""
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    off = () if config.loss.reconstruction else ("decoder.",)
    parameters = [p for name, p in model.named_parameters() if not name.startswith(off)]
    decay = config.weight_decay if config.optimizer == "adamw" else 0.0  # plain Adam's would be no decoupled one
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return kind(groups, lr=config.lr, fused=model.device.type in ("cpu", "cuda"))


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Random numbers by a seed inside, and the caller's own as they were afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def enough_memory(config: Config) -> Iterator[None]:
    """Where memory runs out, say what would take less of it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and not any(w in str(error) for w in NO_MEMORY):
            raise
        raise UserError(
            f"there is not enough memory for this training: start a new run with a --batch-size below "
            f"{config.batch_size}, a smaller --image-size or decoder, or with --model.shared."
        ) from None


def train(run: Run, watchers: list[Watcher] | None = None) -> Result:
    """Train a run to its end, evaluate it on the test set once, and write model, metrics and results."""
    watchers = watchers or []
    with watched(run, watchers):
        with stop_between_steps() as stop:
            loop(run, watchers, stop)
        return finish(run, watchers)


def train_and_validate(run: Run, watchers: list[Watcher] | None = None) -> Evaluation:
    """Train a run to its end and judge it on the validation part; the test set is not looked at and no model kept."""
    watchers = watchers or []
    if not len(run.splits.validation):
        raise UserError(f"judging a training needs validation images, and {run.splits.train.name} has none here.")
    with watched(run, watchers):
        with stop_between_steps() as stop:
            loop(run, watchers, stop)
        model = run.finished_model().eval()
        require_finite(run, model.state_dict())
        return evaluate(model, run.splits.validation)


@contextmanager
def watched(run: Run, watchers: list[Watcher]) -> Iterator[None]:
    """A run with those who watch it; at the end, whatever it is, they are closed and the folder is free."""
    with ExitStack() as at_the_end, enough_memory(run.config):
        if run.lock:
            at_the_end.callback(run.lock.release)
        for watcher in watchers:
            at_the_end.callback(watcher.closed)
        for watcher in watchers:
            watcher.started(run)
        yield


def loop(run: Run, watchers: list[Watcher], stop: Callable[[], bool]) -> None:
    """Steps, epochs and checkpoints until the last step, or until early stopping."""
    saved = started = time.monotonic()
    before = run.seconds
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
        since, at_the_end = time.monotonic() - saved, run.step == run.steps or stopped_early(run)
        if since > run.config.save_every or (at_epoch_end and (since > SHORT or at_the_end)):
            run.save()
            saved = time.monotonic()


def train_step(run: Run) -> Losses:
    """One batch, one step of the optimiser."""
    config, step = run.config, run.step
    run.model.train()
    batch = run.batches.batch(step)
    dropout = generator(config.seed, "dropout", step).initial_seed()
    precision = torch.autocast(run.device.type, torch.bfloat16, enabled=config.precision == "bf16")
    with own_randomness(dropout, run.device), precision:
        losses = compute_loss(run.model, batch, config, run.teacher)
    if not math.isfinite(losses.total.item()):
        raise gone_bad(run, f"the loss became {losses.total.item()} at step {step}")
    run.optimizer.zero_grad(set_to_none=True)
    losses.total.backward()
    if config.clip:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    for group in run.optimizer.param_groups:
        group["lr"] = learning_rate(config, step, run.steps)
    run.optimizer.step()
    run.step += 1
    update_average(run)
    return losses


@torch.no_grad()
def update_average(run: Run) -> None:
    """Exponential moving average of the weights; its horizon grows from 0 so that the start is forgotten."""
    if not run.config.average:
        return
    decay = min(run.config.average, run.step / (run.step + 9))
    for name, value in run.model.state_dict().items():
        if name not in run.average or not value.is_floating_point():
            run.average[name] = value.clone()
        else:
            run.average[name].lerp_(value, 1 - decay)


def stopped_early(run: Run) -> bool:
    """Whether the validation error has come down to where it should, or has not improved for long enough."""
    passes = run.step // len(run.batches)  # whole ones, after which there was a look
    arrived = bool(run.config.stop_at) and run.best_error <= run.config.stop_at
    return arrived or (bool(run.config.patience) and passes - run.best_epoch >= run.config.patience)


def step_record(run: Run, losses: Losses) -> dict[str, Any]:
    images = run.step * run.config.batch_size
    return {
        "kind": "train",
        "step": run.step,
        "epoch": round(run.step / len(run.batches), 4),
        "loss": losses.total.item(),
        "margin": losses.margin.item(),
        "reconstruction": losses.reconstruction.item(),
        **({} if losses.teacher is None else {"teacher": losses.teacher.item()}),
        "lr": learning_rate(run.config, run.step - 1, run.steps),
        "images_per_second": round(images / max(run.seconds, 1e-9), 1),
        "seconds": round(run.seconds, 2),
    }


def epoch_record(run: Run) -> dict[str, Any]:
    """The epoch's end: the error on the validation part, and whether it is the best so far."""
    error = None
    if len(run.splits.validation):
        error = evaluate(run.averaged_model(), run.splits.validation).error_percent
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
    """Append a record to metrics.jsonl and show it to everyone who watches."""
    runs.append_metrics(run.folder, record)
    for watcher in watchers:
        (watcher.stepped if record["kind"] == "train" else watcher.epoch_ended)(run, record)


def finish(run: Run, watchers: list[Watcher]) -> Result:
    """Evaluate once on the test set; write results and model; last, drop the state that was only for resuming."""
    model = run.finished_model().eval()
    require_finite(run, model.state_dict())

    def on_batch(done: int, n: int) -> None:
        for watcher in watchers:
            watcher.evaluated(done, n)

    evaluation = evaluate(model, run.splits.test, on_batch=on_batch)
    certificate = birth_certificate(run)
    checkpoint.write_json(run.folder / "results.json", {"test": evaluation.summary(), "certificate": certificate})
    checkpoint.save_model(run.folder / checkpoint.MODEL_FILE, model, certificate)
    result = Result(run.folder, model, run.splits, evaluation, certificate)
    for watcher in watchers:
        watcher.finished(result)
    (run.folder / checkpoint.STATE_FILE).unlink(missing_ok=True)
    return result


def birth_certificate(run: Run) -> dict[str, Any]:
    """What was trained on what, for how long, and how well it does on the validation part."""
    return checkpoint.certificate(
        to_dict(run.config), run.seconds, parameters=sum(p.numel() for p in run.model.parameters()), steps=run.step,
        epochs=run.epoch, training_images=len(run.splits.train), device=str(run.device),
        validation_error_percent=run.best_error if run.best else last_validation_error(run),
        **({"images": run.images} if run.images else {}),
        **({"started_from": run.origin} if run.origin else {}),
        **({"taught_by": run.taught_by} if run.taught_by else {}),
    )  # fmt: skip


def last_validation_error(run: Run) -> float | None:
    """In the last epoch, of the weights that are kept unless the best were."""
    epochs = [record for record in runs.read_metrics(run.folder) if record["kind"] == "epoch"]
    return epochs[-1]["validation_error_percent"] if epochs else None


def choose_device(name: str) -> torch.device:
    """auto: CUDA or MPS where there is one, else the CPU."""
    cuda, mps = torch.cuda.device_count(), int(torch.backends.mps.is_available())
    available = {"cuda": cuda, "mps": mps, "cpu": 1}
    if name == "auto":
        return torch.device(next(kind for kind, number in available.items() if number))
    try:
        device = torch.device(name)
    except RuntimeError:  # PyTorch's own list of devices is longer than ours
        device = torch.device("meta")
    if (device.index or 0) >= available.get(device.type, 0):
        here = ", ".join(kind for kind, number in available.items() if number)
        raise UserError(f"there is no device '{name}' here; the choices are: auto, {here}.")
    return device


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Ctrl-C and SIGTERM wait for the end of the step, so that the checkpoint is whole; a second Ctrl-C does not."""
    requested = False

    def request(number: int, frame: Any) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: requested
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
