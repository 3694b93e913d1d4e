"""Draw docs/images/synchrony.gif: the phases of trained synchronisation networks, step by step, one row per run.

    python tools/synchrony.py runs/labels runs/guided

The first row shows the test images of two overlapping digits.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from capsnet import data
from capsnet.experiments.synchrony.pictures import colours_over_time
from capsnet.io import checkpoint

TARGET = Path(__file__).resolve().parent.parent / "docs" / "images" / "synchrony.gif"
SHOWN, SCALE, GAP = (0, 2, 3, 5, 6, 8), 3, 4  # test images; enlargement and space between them, in pixels
STEP, PAUSE = 300, 1500  # milliseconds of a step and of the last one


@torch.inference_mode()
def frames(runs: list[Path]) -> list[Image.Image]:
    """One image per step: the input in the first row, then the phases of each run."""
    batch = data.load("multimnist:test=100", validation=0).test.gather(torch.tensor(SHOWN))
    models = [checkpoint.load(run).eval() for run in runs]
    rows = [colours_over_time(model, model(batch.images, trace=True), batch) for model in models]
    grey = batch.images.expand(-1, 3, -1, -1)
    return [sheet([grey, *(row[step] for row in rows)]) for step in range(len(rows[0]))]


def sheet(rows: list[Tensor]) -> Image.Image:
    """Rows of images (n, 3, h, w) on black, with space between them."""
    padded = torch.stack([torch.nn.functional.pad(row, (0, GAP, 0, GAP)) for row in rows])  # k n 3 h w
    joined = padded.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)  # h w 3
    pixels = (255 * joined[:-GAP, :-GAP].clamp(0, 1)).byte().numpy().repeat(SCALE, 0).repeat(SCALE, 1)
    return Image.fromarray(np.ascontiguousarray(pixels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    first, *others = frames(parser.parse_args().runs)
    times = [STEP] * len(others) + [PAUSE]
    first.save(TARGET, save_all=True, append_images=others, duration=times, loop=0, optimize=True)
