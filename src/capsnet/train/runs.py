"""A run: the state of a training in progress, and the folder that it locks.

config.json is written first; state.safetensors exists while training is in progress; results.json, model.safetensors
and report.html are written at the end, before the state is deleted (a search trial writes the model only). A run can be
resumed from its folder at any moment.
"""

from __future__ import annotations

import copy
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.data import Batches, Splits
from capsnet.errors import UserError
from capsnet.files import LOCK_FILE, Lock, Taken, leftovers, remove_leftovers, write_bytes
from capsnet.group.base import Group, current
from capsnet.io import checkpoint
from capsnet.models.base import Model
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict

CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
KEPT = {"step": int, "seconds": float, "best_error": float, "best_epoch": float}  # the scalars of a state


def claim(folder: Path) -> Lock:
    """Create and lock the folder of a new run; a folder that contains anything is refused."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = Lock(folder)
    try:
        check_free(folder)
    except Taken:
        lock.release()
        raise
    remove_leftovers(folder)
    return lock


def check_free(folder: Path) -> None:
    """Refuse a folder that contains anything but the leftovers of a run that was killed at its start."""
    harmless = {folder / LOCK_FILE, *leftovers(folder)}
    if folder.exists() and set(folder.iterdir()) - harmless:
        raise Taken(
            f"{folder} already exists and is not overwritten: choose another folder with --out, "
            f"or resume that run with --resume {folder}."
        )


def has_finished(folder: Path) -> bool:
    return (folder / checkpoint.MODEL_FILE).exists() and not (folder / checkpoint.STATE_FILE).exists()


def can_go_on(folder: Path) -> bool:
    """Whether a run has started here and has not finished."""
    begun = (folder / CONFIG_FILE).exists() or (folder / checkpoint.STATE_FILE).exists()
    return begun and not has_finished(folder)


def append_metrics(folder: Path, record: dict[str, Any]) -> None:
    with (folder / METRICS_FILE).open("a") as file:
        file.write(json.dumps(record) + "\n")


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl; a truncated last line is ignored."""
    path = folder / METRICS_FILE
    records = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def forget_metrics_after(folder: Path, step: int) -> None:
    """Delete the records after the checkpoint, because those steps are repeated."""
    if (folder / METRICS_FILE).exists():
        kept = [record for record in read_metrics(folder) if record["step"] <= step]
        content = "".join(json.dumps(record) + "\n" for record in kept)
        write_bytes(folder / METRICS_FILE, content.encode())


@dataclass
class Run:
    """A training in progress, with its folder locked; `tensors()` and `record()` are what a checkpoint contains."""

    folder: Path
    config: Config
    splits: Splits
    model: Model
    optimizer: torch.optim.Optimizer
    batches: Batches
    step: int = 0
    seconds: float = 0.0
    best_error: float = math.inf
    best_epoch: float = 0
    average: dict[str, Tensor] = field(default_factory=dict)
    best: dict[str, Tensor] = field(default_factory=dict)
    lock: Lock | None = None
    origin: dict[str, Any] = field(default_factory=dict)  # the model it was fine-tuned from, for the certificate
    teacher: Model | None = None
    taught_by: dict[str, Any] = field(default_factory=dict)  # name and checksum of the teacher
    images: dict[str, int] = field(default_factory=dict)  # checksums of user images, which may change
    group: Group = field(default_factory=current)  # the processes that train together
    gradients: Any = None  # what adds their gradients up

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def steps(self) -> int:
        return max(1, round(self.config.epochs * len(self.batches)))

    @property
    def epoch(self) -> float:
        """Passes over the training images so far; an integer after a complete epoch."""
        whole, more = divmod(self.step, len(self.batches))
        return round(whole + more / len(self.batches), 4) if more else whole

    def tensors(self) -> dict[str, Tensor]:
        """Weights, averages and the optimiser's moments under stable names."""
        groups = {"model": self.model.state_dict(), "average": self.average, "best": self.best}
        return flatten(groups | (self.moments() if self.step else {}))

    def learnt(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimiser by name, in its order."""
        groups = self.optimizer.param_groups
        return {name: p for group in groups for name, p in zip(group["param_names"], group["params"], strict=True)}

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """The optimiser's state of each parameter.

        A parameter that has had no gradient yet has no state; zeros are the state that its first gradient finds.
        """
        return {
            f"optimizer.{name}": self.optimizer.state.get(p)
            or {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            for name, p in self.learnt().items()
        }

    def expected_tensors(self) -> dict[str, Tensor]:
        """Tensors with the names and shapes of `tensors()` at this step."""
        weights = self.model.state_dict()
        groups = {"model": weights}
        if self.step and self.config.average:
            groups["average"] = weights
        if self.best_epoch and self.config.patience:
            groups["best"] = weights
        for name, p in self.learnt().items() if self.step else ():
            groups[f"optimizer.{name}"] = {"step": torch.zeros(()), "exp_avg": p, "exp_avg_sq": p}
        return flatten(groups)

    def record(self) -> dict[str, Any]:
        state = {name: getattr(self, name) for name in KEPT}
        if math.isinf(self.best_error):
            state["best_error"] = None  # JSON has no infinity
        processes = self.group.size if self.group.size > 1 else 0
        others = {"origin": self.origin, "taught_by": self.taught_by, "images": self.images, "processes": processes}
        return {"config": to_dict(self.config), "state": state} | {name: of for name, of in others.items() if of}

    def save(self) -> None:
        """Write a checkpoint, on rank 0; if a value is not finite, raise and keep the last good one."""
        tensors = self.tensors()
        require_finite(self, tensors)
        if not self.group.leads:
            return
        checkpoint.write_tensors(self.folder / checkpoint.STATE_FILE, tensors, self.record())

    def restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Restore everything from a checkpoint, after checking that it is complete and fits."""
        file = self.folder / checkpoint.STATE_FILE
        for name, value in check_state(state, self.steps, file).items():
            setattr(self, name, value)
        groups: dict[str, dict[str, Tensor]] = {}
        for name, tensor in checkpoint.fit(tensors, self.expected_tensors(), file).items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = tensor
        self.model.load_state_dict(groups.pop("model"))
        self.average = {name: tensor.to(self.device) for name, tensor in groups.pop("average", {}).items()}
        self.best = groups.pop("best", {})
        moments = [groups[f"optimizer.{name}"] for name in self.learnt()] if groups else []
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": dict(enumerate(moments))})

    def averaged_model(self) -> Model:
        """The current model, with averaged weights if they are averaged."""
        return self._with(self.average)

    def finished_model(self) -> Model:
        """The model to keep: the best on validation with early stopping, otherwise the current one."""
        return self._with(self.best or self.average)

    def _with(self, tensors: dict[str, Tensor]) -> Model:
        if not tensors:
            return self.model
        model = copy.deepcopy(self.model)  # including class names
        model.load_state_dict(tensors)
        return model


def flatten(groups: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{group}/{name}": tensor for group, values in groups.items() for name, tensor in values.items()}


def check_state(state: dict[str, Any], steps: int, file: Path) -> dict[str, Any]:
    """The scalars of a checkpoint, after checking names, types and ranges."""
    values = {name: math.inf if name == "best_error" and value is None else value for name, value in state.items()}
    known = values.keys() == KEPT.keys()
    if not known or not all(type(values[name]) in (int, kind) and values[name] >= 0 for name, kind in KEPT.items()):
        raise UserError(f"{file} is damaged, because its progress cannot be read: start a new run.")
    if values["step"] > steps:
        raise UserError(
            f"{file} is at step {values['step']} of {steps}, so the dataset has changed: restore the images, or start "
            f"a new run."
        )
    return values


def require_finite(run: Run, tensors: dict[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.isfinite().all():
            raise gone_bad(run, f"{name} is not finite after step {run.step}")


class GoneBad(UserError):
    """A value is not finite; `what` says which, without advice."""

    what: str


def gone_bad(run: Run, what: str) -> GoneBad:
    error = GoneBad(
        f"{what}, and the last good checkpoint is kept in {run.folder}: start a new run with an --lr below "
        f"{run.config.lr:g}, or with --clip 1."
    )
    error.what = what
    return error
