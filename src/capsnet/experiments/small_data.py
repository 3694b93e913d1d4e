"""Does a capsule network need less data than a CNN? Test error against the number of training images.

MNIST from 10 images per class to all of them, and a typical use case: 400 grey images of 64 pixels in two classes, read
from a folder. They are synthetic scans: a body with vessels and, in one class, a round lesion.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from capsnet.data import Augment
from capsnet.experiments.core.claims import Claim, lower, measured, too_close
from capsnet.experiments.core.networks import (
    capsule_training,
    cnn_lr,
    cnn_training,
    compact_capsules,
    compact_cnn,
)
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny
from capsnet.experiments.core.results import Place
from capsnet.files import write_bytes
from capsnet.models.registry import parameters
from capsnet.train.config import Config
from capsnet.train.presets import get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALL = 60_000
SIZES = {"smoke": (100,), "hour": (100, 300, 1000, 3000, 10_000, ALL), "full": (100, 300, 1000, 3000, 10_000, ALL)}
CLAIMED = (100, 400)  # images, MNIST and scans, for which the claim is tested
SCANS = "drawn-scans"
SCANS_TRAIN, SCANS_TEST, SCAN_SIDE = 400, 1000, 64


class SmallData(Experiment):
    name = "small-data"
    title = "Small data"
    question = (
        "Does a capsule network need less data than a CNN of similar size? Both are trained on the same images, "
        "balanced over the classes, for the same number of steps: MNIST from 10 images per class to all 60,000, and "
        "400 synthetic scans of 64×64 pixels in two classes (with and without a round lesion), read from a folder."
    )

    def __init__(self) -> None:
        self.scans = Path(SCANS)

    def prepare(self, place: Place, budget: Budget) -> None:
        self.scans = place.runs / (SCANS if budget != "smoke" else f"{SCANS}-smoke")
        write_scans(self.scans, 40 if budget == "smoke" else SCANS_TEST)

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        rows = [row for n in SIZES[budget] for row in digit_rows(n, budget, seed)]
        return [*rows, *scan_rows(self.scans, budget, seed)]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures
        from capsnet.report.figures import Line, Panel

        digits = [group for group in by_method(records) if group[0].shown["data"] == "MNIST"]
        drawn = []
        for name, colour in zip(dict.fromkeys(g[0].shown["network"] for g in digits), figures.PALETTE, strict=False):
            own = [g for g in digits if g[0].shown["network"] == name]
            x = [g[0].made["training_images"] for g in own]
            drawn.append(Line(name, x, [average(g, "error_percent") for g in own], colour))
        ticks = sorted({int(x) for line in drawn for x in line.x})
        panel = Panel("MNIST", "training images", "test error, %", drawn, log_x=True, log_y=True, ticks=ticks)
        note = "Logarithmic axes. With fewer images, each is seen more often."
        return {"small-data": figures.lines(self.title, note, [panel], 260)}

    def captions(self) -> Mapping[str, str]:
        return {
            "small-data": "Both networks see the same images, balanced over the classes, for the same number of steps."
        }

    def findings(self, records: Sequence[Record]) -> list[str]:
        said = []
        for (data, n), pair in compared(records).items():
            a, b = pair.get("CapsNet"), pair.get("CNN of similar size")
            if a and b:
                mine, theirs = average(a, "error_percent") or 0.0, average(b, "error_percent") or 0.0
                said.append(f"{data}, {n:,} images: CapsNet {mine:.2f} %, CNN {theirs:.2f} %{too_close(a, b)}.")
        return said

    def claims(self, records: Sequence[Record], budget: str) -> list[Claim]:
        claims = []
        for (data, n), pair in compared(records).items():
            a, b = pair.get("CapsNet"), pair.get("CNN of similar size")
            if a and b and n in CLAIMED:
                claim = f"{n:,} training images ({data}): CapsNet beats a CNN"
                claims.append(lower(claim, "–", measured(a), measured(b)))
        return claims


def compared(records: Sequence[Record]) -> dict[tuple[str, int], dict[str, list[Record]]]:
    """The records of both networks by dataset and number of images."""
    found: dict[tuple[str, int], dict[str, list[Record]]] = {}
    for group in by_method(records):
        shown, n = group[0].shown, group[0].made["training_images"]
        found.setdefault((shown["data"], n), {})[shown["network"]] = group
    return found


# --- Digits --------------------------------------------------------------------------------------------------


def digit_rows(n: int, budget: Budget, seed: int) -> list[Row]:
    """Both networks on n digits, and at `full` the paper's baseline."""
    capsules = scheduled(capsule_training(budget, 1, seed=seed), n, budget)
    if budget == "smoke":
        capsules = tiny(capsules, n, 25)
    similar = replace(capsules, lr=cnn_lr(capsules), model=compact_cnn(capsules.model))
    if budget == "smoke":
        similar = tiny(similar, n, 25)
    configs = {"capsnet": ("CapsNet", capsules), "cnn": ("CNN of similar size", similar)}
    if budget == "full":
        baseline = scheduled(cnn_training("full", capsules), n, budget)
        configs["baseline"] = ("the paper's baseline CNN", baseline)
    return [
        Row(f"mnist-{n}-{kind}", config, {"data": "MNIST", "network": name}, less=less(budget, config))
        for kind, (name, config) in configs.items()
    ]


def scheduled(config: Config, n: int, budget: Budget) -> Config:
    """The same number of images in total for every size, at least two epochs."""
    seen, least = (ALL, 2) if budget != "full" else (1_800_000, 30)
    limit = 0 if n == ALL else n
    return replace(config, train_limit=limit, batch_size=min(128, n // 4), epochs=max(least, seen // n))


def less(budget: Budget, config: Config) -> tuple[str, ...]:
    return () if budget == "full" else (f"{parameters(config.model):,} parameters",)


# --- Synthetic scans ---------------------------------------------------------------------------------------------


def scan_rows(folder: Path, budget: Budget, seed: int) -> list[Row]:
    """Both networks on 400 images of a folder."""
    like = replace(
        get_preset("own-images"), data=f"folder:{folder}", validation=0, seed=seed, augment=Augment(shift=4),
        epochs=40, lr=0.001, model=compact_capsules(SCAN_SIDE, classes=2),
    )  # fmt: skip
    cnn = replace(like, model=compact_cnn(like.model))
    configs = {"capsnet": ("CapsNet", like), "cnn": ("CNN of similar size", cnn)}
    rows = []
    for kind, (name, config) in configs.items():
        settings = tiny(config, 40, 20) if budget == "smoke" else config
        rows.append(Row(f"scans-{kind}", settings, {"data": "synthetic scans", "network": name}))
    return rows


def write_scans(folder: Path, most: int = SCANS_TEST) -> None:
    """Write train/ and test/ with a subfolder per class, from fixed seeds; complete folders are kept."""
    for part, n, seed in (("train", SCANS_TRAIN, 1), ("test", SCANS_TEST, 2)):
        write_drawings(folder / part, ("healthy", "lesion"), min(n, most), seed, draw_scan)


def write_drawings(
    folder: Path, classes: Sequence[str], n: int, seed: int, draw: Callable[[np.random.Generator, int], np.ndarray]
) -> None:
    """Write n drawings, a subfolder per class, by `draw(random, label)`; subfolders that are complete are kept."""
    for label, name in enumerate(classes):
        place, count = folder / name, n // len(classes)
        if place.exists() and len(list(place.glob("*.png"))) == count:
            continue
        random = np.random.default_rng([seed, label])
        for k in range(count):
            write_png(place / f"{k:04d}.png", draw(random, label))


def write_png(path: Path, pixels: np.ndarray) -> None:
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "PNG")
    write_bytes(path, content.getvalue())


def draw_scan(random: np.random.Generator, lesion: int) -> np.ndarray:
    """A grey body on black with smooth texture and bright vessels; a lesion is a bright round spot.

    uint8 (side, side).
    """
    side = SCAN_SIDE
    y, x = np.mgrid[0:side, 0:side] / side - 0.5
    angle, wide, high = random.uniform(-0.3, 0.3), random.uniform(0.36, 0.44), random.uniform(0.30, 0.40)
    across, up = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    inside = 1 / (1 + np.exp(40 * (np.hypot(across / wide, up / high) - 1)))
    picture = inside * (0.35 + 0.25 * texture(random, side))
    for _ in range(random.integers(2, 5)):
        picture += inside * vessel(random, x, y)
    if lesion:
        far, turn, size = random.uniform(0, 0.6), random.uniform(0, 2 * np.pi), random.uniform(0.03, 0.06)
        spot = np.hypot(x - far * wide * np.cos(turn), y - far * high * np.sin(turn))
        picture += random.uniform(0.2, 0.4) / (1 + np.exp(90 * (spot - size)))
    return (255 * np.clip(picture + random.normal(0, 0.03, picture.shape), 0, 1)).astype(np.uint8)


def texture(random: np.random.Generator, side: int) -> np.ndarray:
    """Smooth noise between 0 and 1."""
    coarse = Image.fromarray((255 * random.random((8, 8))).astype(np.uint8))
    return np.asarray(coarse.resize((side, side), Image.Resampling.BICUBIC)) / 255


def vessel(random: np.random.Generator, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """A bright curved line, as bright and as wide as a lesion."""
    turn, shift, bend = random.uniform(0, np.pi), random.uniform(-0.25, 0.25), random.uniform(-1, 1)
    along, off = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    return random.uniform(0.15, 0.35) * np.exp(-(((off - shift - bend * along**2) / 0.02) ** 2))
