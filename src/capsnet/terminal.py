"""What a person sees while something runs: bars with the time left, one line an epoch, tables.

Everything goes to stderr, so that stdout belongs to results and `--json`. Without a terminal there are no bars but
a plain line now and then, which is what a log file wants.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from capsnet.training import Run, Watcher

LOG_SECONDS = 15.0  # between two lines where there is no terminal
console = Console(stderr=True, highlight=False)


def say(text: str) -> None:
    """A line for the person at the terminal."""
    console.print(text, markup=False, emoji=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None) -> None:
    """A table on stdout: aligned and coloured for people, cut nowhere when piped into a file."""
    out = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    table = Table(title=title, title_justify="left", header_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # as it is: a file may be called m[/b].png
    out.print(table)


class Left(ProgressColumn):
    """The time left; at the end, the time that it took."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        if task.finished:
            return Text(f"in {clock(task.finished_time or 0.0)}", style="progress.elapsed")
        left = "…" if task.time_remaining is None else clock(task.time_remaining)
        return Text(f"{left} left", style="progress.remaining")


def bar(*columns: Any) -> Progress:
    """A progress bar with the time left, which is not drawn where there is no terminal."""
    return Progress(
        TextColumn("[bold]{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), *columns,
        Left(), console=console, disable=not console.is_terminal,
    )  # fmt: skip


class Counter:
    """A bar for a loop that reports `(done, n)`: evaluation, reading images, drawing.

    >>> with Counter("evaluating") as counter:
    ...     counter(250, 10_000)
    """

    def __init__(self, description: str) -> None:
        self.progress = bar()
        self.task = self.progress.add_task(description, total=None, start=True)

    def __enter__(self) -> Counter:
        self.progress.start()
        return self

    def __call__(self, done: int, n: int) -> None:
        self.progress.update(self.task, completed=done, total=n)

    def __exit__(self, *error: object) -> None:
        self.progress.stop()


class TrainingBar(Watcher):
    """Epoch, step, loss, images a second and time left, live; one line for each epoch stays on the screen."""

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
        say(
            f"{run.config.preset} on {run.config.data}: {parameters:,} parameters, "
            f"{len(run.splits.train):,} training images, {epochs} of {len(run.batches)} steps, "
            f"{run.device}, in {run.folder}"
        )
        self.progress.start()
        self.progress.update(self.task, total=run.steps, completed=run.step)

    def moved(self, run: Run) -> None:
        self.progress.update(self.task, completed=run.step)

    def stepped(self, run: Run, record: dict[str, Any]) -> None:
        first, since = self.began
        rate = (run.step - first) * run.config.batch_size / max(time.monotonic() - since, 1e-9)
        last = math.ceil(run.config.epochs)
        epoch = min(int(run.epoch) + 1, last)
        self.progress.update(
            self.task, completed=run.step, description=f"epoch {epoch}/{last}",
            loss=f"loss {record['loss']:.4f}", rate=f"{rate:,.0f} images/s",
        )  # fmt: skip
        if self.progress.disable and time.monotonic() - self.logged > LOG_SECONDS:
            self.logged = time.monotonic()
            left = (run.steps - run.step) * run.config.batch_size / max(rate, 1e-9)
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
        if run.step == 0:
            add_graph(self.writer, run)

    def stepped(self, run: Run, record: dict[str, Any]) -> None:
        for name in ("loss", "margin", "reconstruction", "lr", "images_per_second"):
            self.writer.add_scalar(f"train/{name}", record[name], record["step"])

    def epoch_ended(self, run: Run, record: dict[str, Any]) -> None:
        if record["validation_error_percent"] is not None:
            self.writer.add_scalar("validation/error_percent", record["validation_error_percent"], run.step)
        sample = run.splits.validation if len(run.splits.validation) else run.splits.train
        images = sample.gather(sample.numbers()[:16]).images
        painted = run.model.predict(images).reconstructions
        if painted is not None:
            pairs = [images.cpu(), painted.float()]
            strip = [row for both in zip(*pairs, strict=True) for row in both]
            self.writer.add_images("reconstructions (input, painted)", strip_of(strip), run.step)

    def closed(self) -> None:
        if hasattr(self, "writer"):
            self.writer.close()


def strip_of(images: list[Any]) -> Any:
    import torch

    return torch.stack(images).clamp(0, 1)


def add_graph(writer: Any, run: Run) -> None:
    """The computation graph from images to lengths, by the plain path whose operations have names people know."""
    import warnings

    import torch

    from capsnet.kernels import plain

    class Lengths(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = run.model

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.model(images).lengths

    with plain(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's remarks on shapes are not the user's to mend
        writer.add_graph(Lengths().eval(), torch.zeros(1, *run.config.model.image_shape, device=run.device))


def clock(seconds: float) -> str:
    """Seconds as people say them.

    >>> clock(75), clock(9), clock(7322)
    ('1:15', '9 s', '2:02:02')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
