"""Images that tests write to disk: photographed digits, and folders of coloured squares."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def photo_of(digit: np.ndarray, path: Path) -> Path:
    """A digit as dark ink on light paper, large and off centre, as a camera might give it."""
    ink = np.kron(digit.astype(float), np.ones((9, 9)))
    paper = np.full((420, 380), 225.0) + np.linspace(-20, 20, 380)
    paper[100 : 100 + ink.shape[0], 20 : 20 + ink.shape[1]] -= ink * 0.7
    Image.fromarray(paper.clip(0, 255).astype(np.uint8)).save(path)
    return path


def write_folder(root: Path, classes: tuple[str, ...], n: int = 24) -> Path:
    """Red and green squares, in colour and of mixed sizes: a set that two epochs can learn."""
    draw = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for index in range(n):
            side = 20 + index % 5
            pixels = draw.integers(0, 60, (side, side, 3), dtype=np.uint8)
            pixels[5:15, 5:15, number % 3] = 230
            Image.fromarray(pixels).save(root / name / f"{index:03d}.png")
    return root
