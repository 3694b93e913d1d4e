"""Callbacks of the training loop: the progress bar and TensorBoard."""

from __future__ import annotations

import math
import time
import warnings
from typing import Any

import torch
from rich.progress import TextColumn

from capsnet.kernels import plain
from capsnet.models.base import Model
from capsnet.notice import say
from capsnet.terminal import LOG_SECONDS, bar
from capsnet.timing import clock
from capsnet.train.loop import Result, Run, Watcher


class TrainingBar(Watcher):
    """A live bar with epoch, step, loss, images per second and time left, and one line per epoch."""

    def __init__(self) -> None:
        self.progress = bar(TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}"))
        self.task = self.progress.add_task("training", total=None, loss="", rate="")
        self.testing = False
        self.logged = time.monotonic()
        self.began = (0, time.monotonic())

    def started(self, run: Run) -> None:
        self.began = (run.step, time.monotonic())
        parameters = sum(p.numel() for p in run.model.parameters())
        epochs = "1 epoch" if run.config.epochs == 1 else f"{run.config.epochs} epochs"
        steps = "1 step" if len(run.batches) == 1 else f"{len(run.batches)} steps"
        say(
            f"{run.config.preset} on {run.config.data}: {parameters:,} parameters, "
            f"{len(run.splits.train):,} training images, {epochs} of {steps} "
            f"{self.place(run)}"
        )
        self.progress.start()
        self.progress.update(self.task, total=run.steps, completed=run.step)

    def place(self, run: Run) -> str:
        processes = f" in {run.group.size} processes" if run.group.size > 1 else ""
        return f"on {run.device}{processes}, in {run.folder}"

    def moved(self, run: Run) -> None:
        self.progress.update(self.task, completed=run.step)

    def stepped(self, run: Run, record: dict[str, Any]) -> None:
        first, since = self.began
        rate = (run.step - first) * run.batches.batch_size / max(time.monotonic() - since, 1e-9)
        last = math.ceil(run.config.epochs)
        epoch = min(int(run.epoch) + 1, last)
        self.progress.update(
            self.task, completed=run.step, description=f"epoch {epoch}/{last}",
            loss=f"loss {record['loss']:.4f}", rate=f"{rate:,.0f} images/s",
        )  # fmt: skip
        if self.progress.disable and time.monotonic() - self.logged > LOG_SECONDS:
            self.logged = time.monotonic()
            left = (run.steps - run.step) * run.batches.batch_size / max(rate, 1e-9)
            say(
                f"epoch {epoch}/{last}, step {run.step}/{run.steps}, loss {record['loss']:.4f}, "
                f"{rate:,.0f} images/s, {clock(left)} left"
            )

    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None:
        error = record["validation_error_percent"]
        judged = "" if error is None else f", validation error {error:.2f} %"
        best = " (best)" if error is not None and record["epoch"] == run.best_epoch else ""
        say(f"epoch {record['epoch']}/{run.config.epochs} done after {clock(record['seconds'])}{judged}{best}")

    def evaluated(self, done: int, n: int) -> None:
        if not self.testing:
            self.progress.reset(self.task, description="testing", total=n, loss="", rate="")
            self.testing = True
        self.progress.update(self.task, completed=done)

    def closed(self) -> None:
        self.progress.stop()


class TensorBoard(Watcher):
    """Scalars, reconstructions and the computation graph for `tensorboard --logdir RUN/tensorboard`."""

    def started(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.step or None)

    def stepped(self, run: Run, record: dict[str, Any]) -> None:
        for name in ("loss", "classification", "reconstruction", "lr", "images_per_second"):
            self.writer.add_scalar(f"train/{name}", record[name], record["step"])

    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None:
        if record["validation_error_percent"] is not None:
            self.writer.add_scalar("validation/error_percent", record["validation_error_percent"], run.step)
        sample = run.splits.validation if len(run.splits.validation) else run.splits.train
        images = sample.gather(sample.numbers()[:16]).images
        rebuilt = run.model.predict(images).reconstructions
        if rebuilt is not None:
            pairs = torch.stack([images.cpu(), rebuilt.float()], 1).flatten(0, 1)
            pairs = pairs if pairs.shape[1] == 3 else pairs[:, :1]  # TensorBoard shows grey and RGB only
            self.writer.add_images("reconstructions (input, output)", pairs.clamp(0, 1), run.step)

    def finished(self, result: Result) -> None:
        add_graph(self.writer, result.model)  # at the end, because tracing takes as long as many steps

    def closed(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


def add_graph(writer: Any, model: Model) -> None:
    """Write the computation graph from images to activations; the plain path has operations with well-known names."""

    class Activations(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(images).activations

    with plain(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's remarks on shapes
        writer.add_graph(Activations().eval(), torch.zeros(1, *model.config.image_shape, device=model.device))
