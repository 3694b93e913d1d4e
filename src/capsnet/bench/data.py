"""The benchmark of data: training on images in memory and on images in the cache, which may be larger than memory.

A folder of images is drawn. A separate process for each of these ways trains on it, in alternation:

    memory  every image decoded at the start, as one tensor
    disk    images decoded into the cache, and read from there through a memory map
    cold    the same, but the operating system drops the file from its memory before every turn

The peak of the resident set of each process is reported, from its start and with decoding, above that of a process
that trains the same network on a few images. The resident set counts the pages of files that a process has touched
(`file`), which the operating system can take back at any time, and its own memory (`own`), which it cannot. Other pages
of the images that the operating system keeps in memory do not count.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from capsnet.bench.network import peak_megabytes, spread
from capsnet.data import Batches, Dataset, Splits, cache_folder, image_cache, load
from capsnet.data.mapped import Stored
from capsnet.errors import UserError
from capsnet.helper_process import Helper, serve
from capsnet.kernels.allocator import keep_memory
from capsnet.terminal import Counter
from capsnet.timing import timed
from capsnet.train import loop, steps
from capsnet.train.presets import get_preset

WAYS = ("memory", "disk", "cold")
CLASSES, SIDE, CHANNELS = 10, 64, 3
STEPS = 20  # of training in one turn
FEW = 1000  # images of the process that shows what the network needs
FILE_BYTES = 4096  # on the disk, of a drawn image


@dataclass(frozen=True)
class DataSpeed:
    """One way to read the data."""

    way: str
    start_seconds: float
    """From the start of the process to its first step, with decoding."""
    training: dict[str, float]
    """Images per second: median and quartiles."""
    ratio: float
    """Of the medians, to the way `memory`."""
    batches: float
    """Images per second of an epoch of batches, augmented but without training."""
    peak_mb: float
    above_network_mb: float
    own_mb: float | None
    file_mb: float | None


@dataclass(frozen=True)
class DataResult:
    """All ways, on the same images."""

    images: int
    shape: tuple[int, int, int]
    batch: int
    cache_gb: float
    drawing_seconds: float
    reopening_seconds: float
    """To list the files and open their cache in a new process."""
    ways: tuple[DataSpeed, ...]


# ---------------------------------------------------------------------------------------- inside a worker process


class Reader:
    """A training on the data in one way."""

    def __init__(self, way: str, data: str, batch: int) -> None:
        keep_memory()
        began = time.perf_counter()
        image_cache.IN_MEMORY = 0 if way == "disk" else 2**62
        splits = few_images() if way == "network" else load(data)
        self.loading = time.perf_counter() - began
        config = replace(get_preset("quick"), data=data, batch_size=batch, precision="auto", epochs=10_000)
        self.run = loop.assemble(config, Path(), splits)
        self.train(1)
        self.start = time.perf_counter() - began

    def train(self, number: int) -> float:
        """Seconds of some training steps."""
        return sum(timed(lambda: steps.train_step(self.run), number))

    def epoch(self) -> float:
        """Seconds of the batches of an epoch."""
        batches: Batches = self.run.batches
        began = time.perf_counter()
        for step in range(len(batches)):
            batches.batch(step)
        return time.perf_counter() - began

    def forget(self) -> None:
        """Let the operating system drop the file from its memory; the pages that this process has touched first."""
        dataset = self.run.batches.dataset
        assert isinstance(dataset, Stored)
        dataset.images.release()
        for path in image_cache.caches().glob("*/pixels-*"):
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def memory(self) -> dict[str, float | None]:
        """Megabytes: the peak of the resident set, and the parts of the present one."""
        status = Path("/proc/self/status")
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
        parts = {"own": "RssAnon", "file": "RssFile"}
        now = {name: int(lines[key].split()[0]) / 1024 if key in lines else None for name, key in parts.items()}
        return {"peak": peak_megabytes(), **now}

    def answer(self, request: dict[str, Any]) -> Any:
        if request.get("cold"):
            self.forget()
        if request["do"] == "train":
            return self.train(request["steps"])
        if request["do"] == "epoch":
            return self.epoch()
        if request["do"] == "memory":
            return self.memory()
        epoch = len(self.run.batches) * self.run.config.batch_size
        return {"start": self.start, "loading": self.loading, "epoch": epoch}


def few_images() -> Splits[Dataset]:
    images = torch.randint(0, 256, (FEW, CHANNELS, SIDE, SIDE), dtype=torch.uint8)
    few = Dataset(images, torch.arange(FEW) % CLASSES, tuple(map(str, range(CLASSES))), "few images")
    return Splits(few, few.subset(torch.arange(0)), few)


def work() -> None:
    """The process of one way."""
    way, data, batch = sys.argv[1:]
    serve(Reader(way, data, int(batch)).answer)


# -------------------------------------------------------------------------------------------------- in the parent


def compare(images: int, batch: int, repeats: int) -> DataResult:
    """Draw the images, and measure every way."""
    if images < max(20 * CLASSES, 2 * batch):
        raise UserError(f"--images should be at least {max(20 * CLASSES, 2 * batch)}, not {images}.")
    with workplace(images) as place, ExitStack() as stack:
        began = time.perf_counter()
        draw(place / "images", images)
        drawing = time.perf_counter() - began
        sides = {way: started(stack, way, place, batch) for way in ("network", "memory", "disk")}
        size = sum(path.stat().st_size for path in place.glob("decoded/*/pixels-*"))
        starts = {way: side.ask(do="ready") for way, side in sides.items()}
        possible = WAYS if hasattr(os, "posix_fadvise") else WAYS[:2]
        speeds = measured({way: sides["disk" if way == "cold" else way] for way in possible}, repeats)
        sides["network"].ask(do="train", steps=STEPS)
        memory = {way: side.ask(do="memory") for way, side in sides.items()}
        reopening = started(stack, "disk", place, batch).ask(do="ready")["loading"]
    ways = tuple(summed_up(way, starts, speeds, memory, batch) for way in possible)
    return DataResult(images, (CHANNELS, SIDE, SIDE), batch, size / 1e9, drawing, reopening, ways)


@contextmanager
def workplace(images: int) -> Iterator[Path]:
    """A temporary folder in the cache, which is on a disk; /tmp may be in memory."""
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    needed = images * (FILE_BYTES + CHANNELS * SIDE * SIDE)
    if shutil.disk_usage(folder).free < needed:
        raise UserError(f"{needed / 1e9:.1f} GB are needed in {folder}: free some space, or lower --images.")
    with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as place:
        yield Path(place)


def draw(folder: Path, n: int) -> None:
    """Smooth random images as JPEG files, in folders by class."""
    from PIL import Image

    random = np.random.default_rng(0)
    for label in range(CLASSES):
        (folder / str(label)).mkdir(parents=True)
    with Counter("drawing images", n) as report:
        for k in range(n):
            blots = Image.fromarray(random.integers(0, 256, (6, 6, CHANNELS), dtype=np.uint8))
            blots.resize((SIDE, SIDE), Image.Resampling.BICUBIC).save(folder / str(k % CLASSES) / f"{k:07}.jpg")
            report(k + 1)


def started(stack: ExitStack, way: str, place: Path, batch: int) -> Helper:
    """A process that has loaded the data and trained a step; it shows its own progress."""
    helper = Helper(
        way, "from capsnet.bench.data import work; work()", way, f"folder:{place / 'images'}", str(batch),
        env={**os.environ, "CAPSNET_DATA": str(place)}, advice="try a smaller --batch or fewer --images",
    )  # fmt: skip
    stack.callback(helper.close)
    helper.ask(do="ready")
    return helper


Seconds = dict[str, list[float]]


def measured(sides: dict[str, Helper], repeats: int) -> dict[str, Seconds]:
    """Seconds of an epoch of batches, and of turns of training in alternation, of which the first is a warm-up."""
    epochs = {way: [side.ask(do="epoch", cold=way == "cold")] for way, side in sides.items()}
    training: Seconds = {way: [] for way in sides}
    with Counter("measuring", (repeats + 1) * len(sides)) as report:
        for turn in range(repeats + 1):
            for number, (way, side) in enumerate(sides.items(), 1):
                seconds = side.ask(do="train", steps=STEPS, cold=way == "cold")
                training[way] += [seconds] if turn else []
                report(turn * len(sides) + number)
    return {"epoch": epochs, "training": training}


def summed_up(
    way: str, starts: dict[str, Any], speeds: dict[str, Seconds], memory: dict[str, Any], batch: int
) -> DataSpeed:
    side = "disk" if way == "cold" else way
    training = {each: [STEPS * batch / seconds for seconds in speeds["training"][each]] for each in ("memory", way)}
    peak, known = memory[side]["peak"], memory[side]["own"] is not None
    return DataSpeed(
        way, round(starts[side]["start"], 1), spread(training[way]),
        round(statistics.median(training[way]) / statistics.median(training["memory"]), 3),
        round(starts[side]["epoch"] / speeds["epoch"][way][0], 1),
        round(peak, 1), round(peak - memory["network"]["peak"], 1),
        round(memory[side]["own"], 1) if known else None, round(memory[side]["file"], 1) if known else None,
    )  # fmt: skip
