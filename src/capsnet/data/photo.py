"""Single images: safe reading, and preparation of a photo or drawing of a digit in the way MNIST was made.

The digits of MNIST were scaled into a 20×20 box, keeping their aspect ratio, with antialiasing, and placed in a 28×28
field so that their centre of mass is at its centre; ink is bright on black. `prepare_like_mnist` does the same to any
image after finding the ink, because paper is light and unevenly lit and cameras are noisy.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from capsnet.data.registry import find, parse
from capsnet.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = (
    "PNG", "JPEG", "MPO", "BMP", "DIB", "GIF", "WEBP", "TIFF", "PPM", "JPEG2000", "TGA", "ICO", "AVIF",
)  # fmt: skip
MOST_PIXELS = 100_000_000
LONGEST_SIDE = 20_000  # images with a longer side are refused
WORKING_SIDE = 256  # pixels of the longer side during the search for ink
RESIZED = "resized to fit."  # the note on an image without other preprocessing
FAINTEST_INK = 0.12  # of the range from paper to black; anything fainter is a shadow


@dataclass(frozen=True, eq=False)
class Prepared:
    """A prepared image, uint8 (c, h, w), and one line about the steps."""

    image: Tensor
    note: str


def read_image(source: str | os.PathLike[str] | IO[bytes], name: str = "") -> Image:
    """An image in mode "L" or "RGB": rotated by its EXIF tag, transparent parts on white.

    `name` is used in error messages (default: the path).
    """
    name = name or (str(source) if isinstance(source, str | os.PathLike) else "the picture")
    if isinstance(source, str | os.PathLike) and not os.path.isfile(source):
        raise UserError(f"there is no file {name}: check the path.")
    with open_bounded(source, name) as image:
        try:
            return upright_on_white(image)
        except Exception as error:  # decoders raise many kinds of errors for broken data
            raise UserError(f"{name} is damaged ({error}): save or copy it again.") from error


def formats() -> list[str]:
    """The formats that may be opened, whatever the suffix; others, such as EPS, would start programs."""
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]  # builds of Pillow differ


@contextmanager
def open_bounded(source: str | os.PathLike[str] | IO[bytes], name: str) -> Iterator[Image]:
    """Read the header of an image and refuse implausible sizes; the pixels are not decoded yet."""
    from PIL import Image

    with ExitStack() as stack:
        try:
            # Opened here, because Pillow does not close the file if it refuses an image for its size
            stream = stack.enter_context(open(source, "rb")) if isinstance(source, str | os.PathLike) else source
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # we raise an error instead
                image = stack.enter_context(Image.open(stream, formats=formats()))
        except Image.DecompressionBombError as error:
            raise UserError(f"{name} is too large ({error}): shrink it first.") from error
        except Image.UnidentifiedImageError as error:
            raise UserError(f"{name} is not an image in a supported format: choose a PNG or JPEG.") from error
        except OSError as error:
            raise UserError(f"{name} cannot be read ({error.strerror or error}): check its permissions.") from error
        except Exception as error:
            raise UserError(f"{name} is damaged ({error}): save or copy it again.") from error
        _check_size(image, name, Image.MAX_IMAGE_PIXELS)
        yield image


def _check_size(image: Image, name: str, pillows_limit: int | None) -> None:
    width, height = image.size
    most = min(MOST_PIXELS, pillows_limit or MOST_PIXELS)
    if not width or not height:
        raise UserError(f"{name} is empty: {width}×{height} pixels.")
    if max(width, height) >= LONGEST_SIDE or width * height > most:
        limit = f"fewer than {LONGEST_SIDE:,} on a side and at most {most // 1_000_000} million in all"
        raise UserError(f"{name} is too large: {width}×{height} pixels, but the limit is {limit}; shrink it first.")


def upright_on_white(image: Image) -> Image:
    """Decode any mode to "L" or "RGB", with EXIF orientation applied and transparent parts on white."""
    from PIL import Image, ImageOps

    image.load()
    try:
        image = ImageOps.exif_transpose(image)
    except Exception:  # a broken EXIF block does not affect the pixels
        image = image.copy()
    if image.mode == "F" or image.mode.startswith("I"):
        return _deep_to_8_bits(image)
    grey = image.mode in ("1", "L", "LA", "La")
    if "A" in image.mode or "a" in image.mode or "transparency" in image.info:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer)
    return image.convert("L" if grey else "RGB")


def _deep_to_8_bits(image: Image) -> Image:
    """Scale 16-bit, 32-bit and float pixels by their nominal range, which the conversion of Pillow would clip."""
    from PIL import Image

    values = np.asarray(image, np.float64)
    top = values.max(initial=0)
    full = 65535 if image.mode.startswith("I;16") else next((x for x in (1, 255, 65535) if top <= x), top)
    if image.mode == "I" and top <= 255:
        full = 255
    return Image.fromarray((values / full * 255).clip(0, 255).round().astype(np.uint8))


def fit(image: Image, channels: int, height: int, width: int) -> Tensor:
    """uint8 (c, h, w): scaled to fit, keeping the aspect ratio, centred and padded with zeros."""
    from PIL import Image

    if channels not in (1, 3):
        raise UserError(f"channels should be 1 (grey) or 3 (colour), not {channels}.")
    image = image.convert("L" if channels == 1 else "RGB")
    factor = min(width / image.width, height / image.height)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    if size != image.size:
        image = image.resize(size, Image.Resampling.BILINEAR, reducing_gap=2.0)
    if size != (width, height):
        canvas = Image.new(image.mode, (width, height))
        canvas.paste(image, ((width - size[0]) // 2, (height - size[1]) // 2))
        image = canvas
    return torch.from_numpy(np.array(image).reshape(height, width, channels)).permute(2, 0, 1).contiguous()


def digit_box(shape: tuple[int, int, int], data: str) -> tuple[int, int] | None:
    """Side of the field and of the box for digits in images (c, h, w) of a dataset; None if it has no digits."""
    spec = parse(data) if find(data) else None
    if spec is None or not spec.info.digit_side or spec.info.image_shape is None or spec.labels_per_image is None:
        return None
    side = min(shape[1:])
    if spec.labels_per_image == 2:
        return side, pair_box(side, spec.options.shift)
    size = spec.info.digit_side * side // spec.info.image_shape[1]
    return size, single_box(size)


def prepare_for(image: Image, shape: tuple[int, int, int], data: str = "") -> Prepared:
    """An image (c, h, w) for a model that was trained on the dataset `data`.

    Digits are preprocessed as those of MNIST, or as pairs of them, if the model was trained on such images; any other
    image is resized.
    """
    channels, height, width = shape
    digit = digit_box(shape, data)
    if digit is None:
        return Prepared(fit(image, channels, height, width), RESIZED)
    prepared = _prepare(image, *digit)
    side = prepared.image.shape[1]
    if (channels, height, width) == prepared.image.shape:
        return prepared
    top, left = (height - side) // 2, (width - side) // 2
    padded = F.pad(prepared.image, (left, width - side - left, top, height - side - top)).expand(channels, -1, -1)
    return Prepared(padded, f"{prepared.note.rstrip('.')}, padded to {height}×{width}.")


def single_box(size: int) -> int:
    """The longer side of one digit: 20 of 28 pixels."""
    return round(size * 20 / 28)


def pair_box(size: int, shift: int) -> int:
    """The longer side of a box around two digits, that of an average pair: 20 + 0.8 × the largest shift."""
    return min(size, round(20 + 0.8 * shift))


def prepare_like_mnist(image: Image, size: int = 28) -> Prepared:
    """Preprocess a digit as MNIST was: find the ink, scale it into 20/28 of the side and centre it by mass."""
    return _prepare(image, size, single_box(size))


def _prepare(image: Image, size: int, box: int) -> Prepared:
    if size < 7:
        raise UserError(f"size should be at least 7 pixels, not {size}.")
    ink, steps = find_ink(_grey(image))
    ink = _crop(ink, box)
    steps.append(f"cropped to {ink.shape[1]}×{ink.shape[0]}")
    ink, thickened = _scale_into(ink, box)
    steps += [f"thin strokes thickened, scaled into {box}×{box}" if thickened else f"scaled into {box}×{box}"]
    field = _centre_by_mass(ink, size)
    pixels = torch.from_numpy((field * 255).round().astype(np.uint8))[None]
    return Prepared(pixels, ", ".join([*steps, f"centred by mass in {size}×{size}"]) + ".")


def find_ink(grey: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Amount of ink at each pixel (h, w), 0 to 1, and the steps that found it.

    The border distinguishes paper from ink. A border of mostly one value means a drawing or a scan, which is used
    unchanged; a varied border means a photo, from which uneven light, noise and specks are removed.
    """
    border = _border(grey)
    paper = float(np.median(border))
    dark_on_light = paper - grey.min() > grey.max() - paper
    steps = ["dark on light, inverted" if dark_on_light else "light on dark, kept"]
    bright = 1 - grey if dark_on_light else grey
    if np.mean(np.abs(border - paper) < 1.5 / 255) > 0.7:
        ink, noise = (bright - np.median(_border(bright))).clip(0, 1), 0.0
    else:
        background, noise = _smooth_background(bright)
        # Shade dims paper and ink alike, so ink is measured relative to the light at each pixel
        light = np.maximum(1 - background, 0.1) if dark_on_light else np.ones_like(background)
        ink, noise = ((bright - background) / light).clip(0, 1), noise / float(light.min())
        steps.append("uneven light and noise removed")
    peak = ink.max()
    if peak < max(FAINTEST_INK, 6 * noise):
        raise UserError("the picture looks blank: draw or photograph a dark digit on a light background.")
    if not noise:
        return ink / peak, steps
    floor, full = max(4 * noise, 0.2 * peak), float(np.median(ink[ink > 0.5 * peak]))
    stretched = ((ink - floor) / max(full - floor, 1e-3)).clip(0, 1)
    return _without_specks(stretched), steps


def _grey(image: Image) -> np.ndarray:
    """float (h, w) in [0, 1], the longer side at most WORKING_SIDE."""
    from PIL import Image

    image = upright_on_white(image)
    factor = WORKING_SIDE / max(image.size)
    if factor < 1:
        size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
        image = image.resize(size, Image.Resampling.BOX, reducing_gap=3.0)
    return np.asarray(image.convert("L"), np.float32) / 255


def _border(values: np.ndarray) -> np.ndarray:
    """The values of the outermost pixels."""
    return np.concatenate([values[0], values[-1], values[:, 0], values[:, -1]])


def _smooth_background(bright: np.ndarray) -> tuple[np.ndarray, float]:
    """A quadratic surface fitted to the paper without the ink, and the noise of the paper around it."""
    h, w = bright.shape
    y, x = np.mgrid[-1 : 1 : h * 1j, -1 : 1 : w * 1j]
    terms = np.stack([np.ones_like(x), x, y, x * x, x * y, y * y], -1).reshape(-1, 6)
    few = slice(None, None, 1 + bright.size // 8000)  # enough for six coefficients
    values = bright.reshape(-1)[few].astype(np.float64)
    paper = values <= np.median(values) + 0.25
    for _ in range(6):
        surface = np.linalg.lstsq(terms[few][paper], values[paper], rcond=None)[0]
        difference = values - terms[few] @ surface
        noise = 1.4826 * float(np.median(np.abs(difference[paper])))
        paper = np.abs(difference) < max(3 * noise, 0.02)
        if paper.sum() < 0.1 * values.size:
            break
    return (terms @ surface).reshape(h, w).clip(0, 1).astype(np.float32), max(noise, 1e-3)


def _without_specks(ink: np.ndarray) -> np.ndarray:
    """Remove regions far smaller than the largest stroke, and regions at the border unless all of them are."""
    mask = ink > 0.4
    step = 2 if max(mask.shape) > WORKING_SIDE // 2 else 1  # half the resolution is eight times as fast
    labels = _components(np.pad(mask, [(0, -side % step) for side in mask.shape])[::step, ::step])
    kinds, areas = np.unique(labels[labels > 0], return_counts=True)
    if not len(kinds):
        return ink
    inside = ~np.isin(kinds, _border(labels))
    keep = areas >= 0.04 * areas.max()
    if areas[inside].max(initial=0) >= 0.1 * areas.max():
        keep = inside & (areas >= 0.04 * areas[inside].max())
    kept = np.isin(labels, kinds[keep]).astype(np.float32).repeat(step, 0).repeat(step, 1)
    near = F.max_pool2d(torch.from_numpy(kept)[None], 5, stride=1, padding=2)[0].numpy()  # includes soft edges
    return ink * near[: ink.shape[0], : ink.shape[1]]


def _components(mask: np.ndarray) -> np.ndarray:
    """Connected regions, labelled by their highest pixel index, which spreads over the region."""
    inside = torch.from_numpy(mask.astype(np.float32))  # exact up to 2^24, far more than WORKING_SIDE²
    labels = torch.arange(1, mask.size + 1, dtype=torch.float32).view(mask.shape) * inside
    for _ in range(mask.size):
        flooded = F.max_pool2d(labels[None], 3, stride=1, padding=1)[0] * inside
        if torch.equal(flooded, labels):
            break
        labels = flooded
    return labels.numpy()


def _crop(ink: np.ndarray, box: int) -> np.ndarray:
    """Crop to the ink. In a large image the soft edges of strokes do not count, or the digit would become too small."""
    faint = 0.02 if max(ink.shape) <= 2 * box else 0.3
    rows, columns = np.flatnonzero(ink.max(1) > faint), np.flatnonzero(ink.max(0) > faint)
    return ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _scale_into(ink: np.ndarray, box: int) -> tuple[np.ndarray, bool]:
    """Scale the longer side to `box`; strokes that would become too thin are thickened first."""
    factor = box / max(ink.shape)
    thin = _stroke_width(ink) * factor < 0.9  # the thinnest digit of MNIST has 1.05
    if thin:
        grow = max(1, round((1.8 / factor - _stroke_width(ink)) / 2))
        padded = torch.from_numpy(np.pad(ink, grow))[None]
        ink = F.max_pool2d(padded, 2 * grow + 1, stride=1, padding=grow)[0].numpy()
        factor = box / max(ink.shape)
    ink = _resize(ink, factor)
    return ink / ink.max(), thin


def _stroke_width(ink: np.ndarray) -> float:
    """Ink divided by half its outline, in pixels: exact for a long straight stroke along an axis."""
    padded = np.pad(ink, 1)
    outline = np.abs(np.diff(padded, axis=0)).sum() + np.abs(np.diff(padded, axis=1)).sum()
    return float(2 * padded.sum() / max(outline, 1e-6))


def _resize(ink: np.ndarray, factor: float) -> np.ndarray:
    from PIL import Image

    h, w = (max(1, round(side * factor)) for side in ink.shape)
    if (h, w) == ink.shape:
        return ink
    scaled = Image.fromarray(np.ascontiguousarray(ink, np.float32)).resize((w, h), Image.Resampling.BICUBIC)
    return np.asarray(scaled).clip(0, 1)


def _centre_by_mass(ink: np.ndarray, size: int) -> np.ndarray:
    """Place the ink in a black field, with its centre of mass at the centre to the nearest pixel."""
    field = np.zeros((size, size), np.float32)
    corner = []
    for axis, side in enumerate(ink.shape):
        mass = ink.sum(1 - axis)
        centre = float((mass * np.arange(side)).sum() / mass.sum())
        corner.append(min(max(round(size / 2 - centre), 0), size - side))
    top, left = corner
    field[top : top + ink.shape[0], left : left + ink.shape[1]] = ink
    return field
