"""The training loop: data → batches → model → loss → step → checkpoint.

Nothing depends on when it was interrupted. Batch, augmentation, dropout and learning rate are functions of (seed,
step), so the state of a training is its weights, the optimiser's moments and one number; killed at any moment it
goes on from its last checkpoint to the very same final weights. What is chosen (early stopping) is chosen on the
validation part; the test set is looked at once, after the last step.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from capsnet import checkpoint
from capsnet.config import Config, from_dict, to_dict
from capsnet.data import Batch, Batches, Splits
from capsnet.data import load as load_data
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation, evaluate
from capsnet.losses import classification_loss, margin_loss, reconstruction_loss
from capsnet.models.baseline import CNN
from capsnet.models.registry import Model, build

LOG_EVERY = 20  # steps between two lines of metrics.jsonl


class Losses(NamedTuple):
    """What a step minimises, and its parts."""

    total: Tensor
    margin: Tensor
    reconstruction: Tensor


def compute_loss(model: Model, batch: Batch, config: Config) -> Losses:
    """Margin loss plus weighted reconstruction from the poses of the TRUE classes; cross-entropy for a CNN."""
    output = model(batch.images)
    zero = output.lengths.new_zeros(())
    if output.logits is not None:
        loss = classification_loss(output.logits, batch.targets, getattr(model, "multi_label", False))
        return Losses(loss, loss, zero)
    c = config.loss
    margin = margin_loss(
        output.lengths, batch.targets, present=c.present, absent=c.absent,
        down_weight=c.down_weight, reduction=c.margin_reduction,
    )  # fmt: skip
    painted = model.reconstruct_set(output.poses, batch.targets) if c.reconstruction else None  # type: ignore[operator]
    error = zero if painted is None else reconstruction_loss(painted.float(), batch.images)
    return Losses(margin + c.reconstruction * error, margin, error)


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
    def stepped(self, run: Run, record: dict[str, Any]) -> None: ...
    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None: ...
    def evaluated(self, done: int, n: int) -> None: ...
    def closed(self) -> None: ...


@dataclass
class Run:
    """A training under way: all that has to survive is in `tensors()` and `record()`."""

    folder: Path
    config: Config
    splits: Splits
    model: Model
    optimizer: torch.optim.Optimizer
    batches: Batches
    step: int = 0
    seconds: float = 0.0
    best_error: float = math.inf
    best_epoch: int = 0
    average: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def steps(self) -> int:
        return self.config.epochs * len(self.batches)

    @property
    def epoch(self) -> int:
        return self.step // len(self.batches)

    def tensors(self) -> dict[str, Tensor]:
        """Weights, averages and the optimiser's moments under stable names."""
        groups = {"model": self.model.state_dict(), "average": self.average, "best": self.best}
        moments = self.optimizer.state_dict()["state"]
        groups |= {f"optimizer.{i}": values for i, values in moments.items()}
        return {f"{group}/{name}": tensor for group, values in groups.items() for name, tensor in values.items()}

    def record(self) -> dict[str, Any]:
        kept = ("step", "seconds", "best_error", "best_epoch")
        state = {name: getattr(self, name) for name in kept}
        if math.isinf(self.best_error):
            state["best_error"] = None  # JSON has no infinity
        return {"config": to_dict(self.config), "state": state}

    def save(self) -> None:
        """Write the state, unless it has gone bad: then the last good one stays."""
        if all(parameter.isfinite().all() for parameter in self.model.parameters()):
            checkpoint.write_tensors(self.folder / checkpoint.STATE_FILE, self.tensors(), self.record())

    def restore(self, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        checkpoint.fill(self.model, groups.get("model", {}), self.folder / checkpoint.STATE_FILE)
        self.average = {k: t.to(self.device) for k, t in groups.get("average", {}).items()}
        self.best = groups.get("best", {})
        moments = {int(g.split(".")[1]): values for g, values in groups.items() if g.startswith("optimizer.")}
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": moments})
        for name, value in record["state"].items():
            setattr(self, name, math.inf if value is None else value)

    def averaged_model(self) -> Model:
        """The model as it stands: with the averaged weights, where weights are averaged."""
        return self._with(self.average)

    def finished_model(self) -> Model:
        """The model to keep: the best on validation if stopping early was asked for, else as it stands."""
        return self._with(self.best or self.average)

    def _with(self, tensors: dict[str, Tensor]) -> Model:
        if not tensors:
            return self.model
        model = copy.deepcopy(self.model)  # class names and all
        model.load_state_dict(tensors)
        return model


@dataclass(frozen=True)
class Result:
    """A finished training."""

    folder: Path
    model: Model
    splits: Splits
    evaluation: Evaluation
    certificate: dict[str, Any]


def start(config: Config, folder: Path) -> Run:
    """A new run in a folder that must not hold one yet."""
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{folder} exists already and is not overwritten: choose another folder with --out, "
            f"or continue that training with --resume {folder}."
        )
    run = prepare(config, folder)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write_json(folder / "config.json", to_dict(run.config))
    run.save()
    return run


def resume(folder: Path) -> Run:
    """The run in a folder, as its last checkpoint left it."""
    if not folder.is_dir():
        raise UserError(f"there is no run {folder} to resume.")
    checkpoint.remove_leftovers(folder)
    if (folder / checkpoint.MODEL_FILE).exists() and not (folder / checkpoint.STATE_FILE).exists():
        raise UserError(f"the training in {folder} has finished: nothing is left to resume.")
    tensors, record = checkpoint.read_tensors(folder / checkpoint.STATE_FILE)
    if "state" not in record:
        raise UserError(f"{folder / checkpoint.STATE_FILE} holds a model, not a training that could go on.")
    run = prepare(from_dict(record["config"]), folder)
    run.restore(tensors, record)
    forget_metrics_after(folder / "metrics.jsonl", run.step)
    return run


def prepare(config: Config, folder: Path) -> Run:
    """Data, network and optimiser for a config; the seed fixes them all."""
    if config.patience and not config.validation:
        raise UserError("stopping early (--patience) needs validation images: set --validation above 0.")
    device = choose_device(config.device)
    splits = load_data(
        config.data, validation=config.validation, validation_choice=config.validation_choice,
        seed=config.seed, image_size=config.image_size or None,
    )  # fmt: skip
    train = splits.train
    shape = replace(config.model, image_shape=train.image_shape, num_classes=len(train.classes))
    config = replace(config, model=shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = build(config.model)
    model = model.to(device)
    model.classes = train.classes
    if isinstance(model, CNN):
        model.multi_label = train.multi_label
    batches = Batches(train.to(device), config.batch_size, config.seed, config.augment)
    return Run(folder, config, splits, model, build_optimizer(model, config), batches)


def build_optimizer(model: Model, config: Config) -> torch.optim.Optimizer:
    """Adam or AdamW in one fused pass; weight decay spares biases and norms."""
    kind = torch.optim.AdamW if config.optimizer == "adamw" else torch.optim.Adam
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return kind(groups, lr=config.lr, fused=model.device.type in ("cpu", "cuda"))


def train(run: Run, watchers: list[Watcher] | None = None) -> Result:
    """Train a run to its end, evaluate it on the test set once, and write model, metrics and results."""
    watchers = watchers or []
    for watcher in watchers:
        watcher.started(run)
    try:
        with stop_between_steps() as stop:
            loop(run, watchers, stop)
        return finish(run, watchers)
    finally:
        for watcher in watchers:
            watcher.closed()


def loop(run: Run, watchers: list[Watcher], stop: Callable[[], bool]) -> None:
    """Steps, epochs and checkpoints until the last step, or until early stopping."""
    saved = started = time.monotonic()
    before = run.seconds
    while run.step < run.steps and not stopped_early(run):
        losses = train_step(run)
        run.seconds = before + time.monotonic() - started
        at_epoch_end = run.step % len(run.batches) == 0
        if run.step % LOG_EVERY == 0 or at_epoch_end:
            tell(run, watchers, step_record(run, losses))
        if at_epoch_end:
            tell(run, watchers, epoch_record(run))
        if stop():
            run.save()
            raise KeyboardInterrupt
        if at_epoch_end or time.monotonic() - saved > run.config.save_every:
            run.save()
            saved = time.monotonic()


def train_step(run: Run) -> Losses:
    """One batch, one step of the optimiser."""
    config, step = run.config, run.step
    torch.manual_seed(config.seed * 1_000_003 + step)  # dropout too is a function of (seed, step)
    run.model.train()
    batch = run.batches.batch(step)
    with torch.autocast(run.device.type, torch.bfloat16, enabled=config.precision == "bf16"):
        losses = compute_loss(run.model, batch, config)
    if not math.isfinite(losses.total.item()):
        raise UserError(
            f"the loss became {losses.total.item()} at step {step}; the last good checkpoint is kept in {run.folder}. "
            f"Try a lower --lr, or --clip 1."
        )
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
    return bool(run.config.patience) and run.epoch - run.best_epoch >= run.config.patience


def step_record(run: Run, losses: Losses) -> dict[str, Any]:
    images = run.step * run.config.batch_size
    return {
        "kind": "train",
        "step": run.step,
        "epoch": round(run.step / len(run.batches), 4),
        "loss": losses.total.item(),
        "margin": losses.margin.item(),
        "reconstruction": losses.reconstruction.item(),
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
    with (run.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    for watcher in watchers:
        (watcher.stepped if record["kind"] == "train" else watcher.epoch_ended)(run, record)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a last line that a kill cut off is left out."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def forget_metrics_after(path: Path, step: int) -> None:
    """Drop what was logged after the checkpoint: those steps are about to be done again."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    checkpoint.write_bytes(path, "".join(json.dumps(record) + "\n" for record in kept).encode())


def finish(run: Run, watchers: list[Watcher]) -> Result:
    """Evaluate once on the test set; write results and model; drop the state that was only for resuming."""
    model = run.finished_model().eval()

    def on_batch(done: int, n: int) -> None:
        for watcher in watchers:
            watcher.evaluated(done, n)

    evaluation = evaluate(model, run.splits.test, on_batch=on_batch)
    parameters = sum(p.numel() for p in model.parameters())
    certificate = checkpoint.certificate(
        to_dict(run.config), run.seconds, parameters=parameters, steps=run.step, epochs=run.epoch,
        training_images=len(run.splits.train), device=str(run.device),
        validation_error_percent=None if math.isinf(run.best_error) else run.best_error,
    )  # fmt: skip
    checkpoint.write_json(run.folder / "results.json", {"test": evaluation.summary(), "certificate": certificate})
    checkpoint.save_model(run.folder / checkpoint.MODEL_FILE, model, certificate)
    (run.folder / checkpoint.STATE_FILE).unlink(missing_ok=True)
    return Result(run.folder, model, run.splits, evaluation, certificate)


def choose_device(name: str) -> torch.device:
    """auto: CUDA or MPS where there is one, else the CPU."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return torch.device(next(kind for kind in ("cuda", "mps", "cpu") if available[kind]))
    kind = name.split(":")[0]
    if not available.get(kind):
        here = ", ".join(kind for kind, there in available.items() if there)
        raise UserError(f"there is no device '{name}' here; the choices are: auto, {here}.")
    return torch.device(name)


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
