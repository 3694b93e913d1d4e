"""Images as tiles on a sheet: pixels, size and position."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from torch import Tensor

from capsnet.report.figures.style import BLUE, GREEN, PAPER, PER_POINT, VERMILLION


def as_pixels(images: Tensor) -> np.ndarray:
    """Images (…, c, h, w), uint8 or 0 to 1, grey, RGB or with more channels → (…, h, w, 3) uint8."""
    x = torch.as_tensor(images).detach().cpu()
    if x.dtype != torch.uint8:
        x = (x.float().nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8)
    if x.shape[-3] != 3:  # RGBA and multispectral: the first three; grey, with or without alpha: the first
        x = x[..., :3, :, :] if x.shape[-3] > 3 else x[..., :1, :, :].expand(*x.shape[:-3], 3, *x.shape[-2:])
    return x.movedim(-3, -1).numpy()


def in_colours(images: Tensor) -> Tensor:
    """Several images added in different colours (Fig. 5): (…, k, c, h, w) → (…, 3, h, w)."""
    light = images.float().mean(-3, keepdim=True)  # k 1 h w
    # full brightness, or a dark blue would hide a strong stroke
    chosen = [to_rgb((VERMILLION, BLUE, GREEN)[k % 3]) for k in range(images.shape[-4])]
    rgb = torch.tensor(chosen, device=light.device).view(-1, 3)
    rgb = rgb / rgb.amax(1, keepdim=True)
    return (light * rgb[:, :, None, None]).sum(-4).clamp(0, 1)


def mosaic(tiles: Tensor, gap: int) -> np.ndarray:
    """Tiles (rows, columns, c, h, w) as one picture with `gap` pixels between them, (H, W, 3) uint8."""
    pixels = as_pixels(tiles)
    paper = (np.array(to_rgb(PAPER)) * 255).round().astype(np.uint8)
    framed = np.empty((*pixels.shape[:2], pixels.shape[2] + gap, pixels.shape[3] + gap, 3), np.uint8)
    framed[...] = paper
    framed[:, :, : pixels.shape[2], : pixels.shape[3]] = pixels
    rows, columns, h, w, _ = framed.shape
    return framed.swapaxes(1, 2).reshape(rows * h, columns * w, 3)


def put(axes: Axes, image: np.ndarray, left: float, top: float, width: float, height: float) -> None:
    """Place a tile on a sheet, with nearest-neighbour interpolation if enlarged."""
    extent = (left, left + width, top + height, top)
    axes.imshow(image, extent=extent, aspect="auto", interpolation="auto")
    side = [axes.figure.get_figwidth() * 72, axes.figure.get_figheight() * 72]  # type: ignore[union-attr]
    axes.set(xlim=(0, side[0]), ylim=(side[1], 0))


def snap(points: float) -> float:
    """Round to a whole pixel of the PNG, so that all image pixels have the same size."""
    return round(points * PER_POINT) / PER_POINT


def tile_size(shape: Sequence[int], most: float) -> tuple[float, float]:
    """Width and height in points of an image (…, h, w), at most `most`; an enlarged pixel covers whole PNG pixels."""
    h, w = shape[-2:]
    scale = most / max(h, w)
    if scale * PER_POINT >= 1:
        scale = math.floor(scale * PER_POINT + 1e-6) / PER_POINT
    return snap(w * scale), snap(h * scale)
