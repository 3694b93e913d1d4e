"""Which network suits a small folder of images? Five candidates on three folders, judged on validation images.

The folders are synthetic scans (400 grey images in two classes, as in `small-data`), photographs (a tenth of CIFAR-10)
and drawn shapes (400 colour images in four classes). All candidates are trained with the settings of the `own-images`
preset. The test images are not used, so that the preset can be chosen by this experiment and tested afterwards.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw

from capsnet.data import Augment, load
from capsnet.experiments.core.networks import compact_capsules, compact_cnn
from capsnet.experiments.core.plan import Budget, Experiment, Record, Row, average, by_method, tiny, values, with_model
from capsnet.experiments.core.results import Place
from capsnet.experiments.small_data import draw_scan, write_drawings, write_png
from capsnet.models.config import ModelConfig
from capsnet.models.resnet import ResNetConfig
from capsnet.train.config import Config
from capsnet.train.presets import OWN_IMAGES_NETWORK, get_preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLACE = "own-images"
TRAINED, VALIDATED = 400, 1000  # drawings; of the photographs 5,000 and 1,000
PHOTOS_TRAINED = 5000
SHAPE_SIDE = 48
SHAPES = ("disc", "triangle", "star", "ring")
CANDIDATES = {
    "capsules": "CapsNet, convolutional stem",
    "residual": "CapsNet, residual stem",
    "unsquashed": "CapsNet, residual stem, primary capsules not squashed",
    "cnn": "CNN of similar size",
    "resnet": "residual stem, linear layer",
}
CAPSULES = ("capsules", "residual", "unsquashed")


@dataclass(frozen=True)
class Folder:
    """A folder of images: what it contains, and how often it is seen."""

    name: str
    title: str
    side: int
    channels: int
    classes: int
    epochs: int
    augment: Augment


FOLDERS = (
    Folder("scans", "synthetic scans", 64, 1, 2, 40, Augment(shift=4)),
    Folder("shapes", "drawn shapes", SHAPE_SIDE, 3, len(SHAPES), 30, Augment(shift=4)),
    Folder("photos", "a tenth of CIFAR-10", 32, 3, 10, 15, Augment(shift=4, flip=True)),
)


class OwnImages(Experiment):
    name = "own-images"
    title = "Small folders of images"
    question = (
        "Which network should be the default for a small folder of images? Three capsule networks and two networks "
        "without capsules are trained with the settings of the own-images preset on 400 synthetic scans, 400 drawn "
        "shapes and 5,000 photographs, and judged on 1,000 validation images each. The test images are not used."
    )
    columns = {"error_percent": "validation error, %"}  # noqa: RUF012
    budgets = ("smoke", "hour")

    def __init__(self) -> None:
        self.place = Path(PLACE)

    def prepare(self, place: Place, budget: Budget) -> None:
        self.place = place.runs / (PLACE if budget != "smoke" else f"{PLACE}-smoke")
        write_folders(self.place, budget)

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [
            Row(f"{folder.name}-{name}", config_of(folder, name, self.place, budget, seed),
                {"folder": folder.title, "network": title}, validated=True)
            for folder in folders_of(budget)
            for name, title in CANDIDATES.items()
        ]  # fmt: skip

    def findings(self, records: Sequence[Record]) -> list[str]:
        groups = {group[0].method: group for group in by_method(records)}
        said = [sentence(folder, groups) for folder in FOLDERS if f"{folder.name}-residual" in groups]
        return [*said, *filter(None, [chosen(groups)])]

    def pictures(self, records: Sequence[Record]) -> dict[str, Figure]:
        from capsnet.report import figures

        panels: dict[str, list[figures.Bar]] = {}
        for group in by_method(records):
            name = group[0].method.partition("-")[2]
            colour = figures.BLUE if name in CAPSULES else figures.VERMILLION
            bar = figures.Bar.over_seeds(name, values(group, "error_percent"), colour)
            panels.setdefault(group[0].shown["folder"], []).append(bar)
        note = "Validation error in percent, mean and standard deviation over seeds; without capsules vermillion."
        return {"own-images": figures.bars(self.title, note, panels)}


def folders_of(budget: Budget) -> Sequence[Folder]:
    return FOLDERS[:1] if budget == "smoke" else FOLDERS


def config_of(folder: Folder, name: str, place: Path, budget: Budget, seed: int) -> Config:
    """The own-images preset's training of one candidate on one folder."""
    config = replace(
        get_preset("own-images"), data=f"folder:{place / folder.name}", seed=seed, epochs=folder.epochs,
        model=candidate(folder, name), augment=folder.augment,
    )  # fmt: skip
    if budget != "smoke":
        return config
    blocks = {"stem_channels": (4, 8), "stem_kernels": (3, 3), "stem_strides": (4, 2)}
    residual = name in ("residual", "unsquashed", "resnet")
    small = with_model(config, **blocks) if residual else tiny(config)
    return replace(small, train_limit=20, batch_size=10, epochs=1, validation=config.validation)


def candidate(folder: Folder, name: str) -> ModelConfig:
    """One of the networks for the images of a folder."""
    capsules = compact_capsules(folder.side, folder.channels, folder.classes)
    if name == "cnn":
        return compact_cnn(capsules)
    if name == "resnet":
        ours = OWN_IMAGES_NETWORK
        blocks = ours.stem_channels, ours.stem_kernels, ours.stem_strides
        return ResNetConfig(capsules.image_shape, capsules.num_classes, *blocks)
    if name in ("residual", "unsquashed"):
        sizes = {"image_shape": capsules.image_shape, "num_classes": capsules.num_classes}
        return replace(OWN_IMAGES_NETWORK, **sizes, primary_squash=name == "residual")  # type: ignore[arg-type]
    return capsules


# --- Findings ------------------------------------------------------------------------------------------------


def sentence(folder: Folder, groups: dict[str, list[Record]]) -> str:
    """The errors of all candidates on a folder."""
    rows = {title: f"{folder.name}-{name}" for name, title in CANDIDATES.items()}
    found = {title: average(groups[row], "error_percent") for title, row in rows.items() if row in groups}
    errors = [f"{title} diverged" if error is None else f"{title} {error:.2f} %" for title, error in found.items()]
    return f"{folder.title}: {', '.join(errors)}."


def chosen(groups: dict[str, list[Record]]) -> str:
    """The capsule network with the lowest mean error over the folders, and the best one without; empty without both."""
    means = {name: mean_over_folders(name, groups) for name in CANDIDATES}
    best, other = min(CAPSULES, key=lambda n: means[n]), min(means.keys() - set(CAPSULES), key=lambda n: means[n])
    if not math.isfinite(means[best] + means[other]):
        return ""
    return (
        f"Mean over the folders: the best capsule network is the one with the "
        f"{CANDIDATES[best].removeprefix('CapsNet, ')} ({means[best]:.2f} %); the better network without capsules has "
        f"{means[other]:.2f} % ({CANDIDATES[other]})."
    )


def mean_over_folders(name: str, groups: dict[str, list[Record]]) -> float:
    """Infinite for a network that has not been trained, or has diverged on a folder."""
    found = [average(g, "error_percent") for method, g in groups.items() if method.partition("-")[2] == name]
    return statistics.fmean(math.inf if error is None else error for error in found or [None])


# --- Images --------------------------------------------------------------------------------------------------


def write_folders(place: Path, budget: Budget) -> None:
    """Write train/, validation/ and test/ of every folder, from fixed seeds; what is complete is kept.

    The test images are there because a folder that is split needs some; they are never evaluated.
    """
    sizes = {"train": TRAINED, "validation": VALIDATED, "test": 20}
    for seed, (part, n) in enumerate(sizes.items(), 1):
        n = min(n, 40) if budget == "smoke" else n
        write_drawings(place / "scans" / part, ("healthy", "lesion"), n, 10 + seed, draw_scan)
        write_drawings(place / "shapes" / part, SHAPES, n, 20 + seed, draw_shape)
    if budget != "smoke":
        write_photos(place / "photos")


def write_photos(folder: Path) -> None:
    """A tenth of CIFAR-10's training images, 1,000 others for validation, and a few of the test images."""
    parts = {"train": PHOTOS_TRAINED, "validation": VALIDATED, "test": 20}
    if all(len(list((folder / part).glob("*/*.png"))) == n for part, n in parts.items()):
        return
    splits = load("cifar10", validation=VALIDATED, seed=0, train_limit=PHOTOS_TRAINED)
    for part, n in parts.items():
        dataset = getattr(splits, part)
        for k in range(n):
            pixels = dataset.images[k].permute(1, 2, 0).contiguous().numpy()
            write_png(folder / part / dataset.classes[int(dataset.labels[k])] / f"{k:05d}.png", pixels)


def draw_shape(random: np.random.Generator, label: int) -> np.ndarray:
    """A shape of random colour, size, place and angle before a noisy background with clutter. uint8 (side, side, 3)"""
    side = SHAPE_SIDE
    back = random.integers(0, 120, 3)
    canvas = Image.fromarray((back + random.normal(0, 12, (side, side, 3))).clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(canvas)
    for _ in range(random.integers(2, 6)):
        draw.line([int(v) for v in random.integers(0, side, 4)], fill=colour(random), width=int(random.integers(1, 3)))
    radius, turn = random.uniform(7, 13), random.uniform(0, 2 * np.pi)
    x, y = random.uniform(radius, side - radius, 2)
    box, fill = [x - radius, y - radius, x + radius, y + radius], colour(random)
    if SHAPES[label] == "disc":
        draw.ellipse(box, fill=fill)
    elif SHAPES[label] == "ring":
        draw.ellipse(box, outline=fill, width=max(2, int(radius / 3)))
    else:
        draw.polygon(corners(SHAPES[label], x, y, radius, turn), fill=fill)
    return np.asarray(canvas)


def colour(random: np.random.Generator) -> tuple[int, int, int]:
    red, green, blue = random.integers(110, 256, 3).tolist()
    return red, green, blue


def corners(shape: str, x: float, y: float, radius: float, turn: float) -> list[tuple[float, float]]:
    """The corners of a triangle or of a star with five points."""
    n = 3 if shape == "triangle" else 10
    radii = [radius if n == 3 or k % 2 == 0 else 0.45 * radius for k in range(n)]
    angles = [turn + 2 * np.pi * k / n for k in range(n)]
    return [(x + r * float(np.cos(a)), y + r * float(np.sin(a))) for r, a in zip(radii, angles, strict=True)]
