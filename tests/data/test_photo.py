"""A photo or drawing comes out as MNIST would have made it; a picture nobody can mean is refused."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from capsnet.data import fit, load, prepare_like_mnist, read_image
from capsnet.data.photo import prepare_for
from capsnet.errors import UserError


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, torch.Tensor]:
    test = load("mnist", validation=0).test
    return test.images[:200, 0].numpy(), test.labels[:200]


def enlarged(digit: np.ndarray, side: int = 280) -> np.ndarray:
    return np.asarray(Image.fromarray(digit).resize((side, side), Image.Resampling.BICUBIC))


def off_centre(digit: np.ndarray) -> np.ndarray:
    canvas = np.zeros((400, 600), np.uint8)
    canvas[20:300, 300:580] = enlarged(digit)
    return canvas


def photographed(digit: np.ndarray) -> np.ndarray:
    """Dark pen on paper, lit from the upper left, by a noisy camera."""
    h, w = 240, 320
    ink = np.zeros((h, w))
    ink[50:190, 30:170] = enlarged(digit, 140) / 255
    y, x = np.mgrid[0 : 1 : h * 1j, 0 : 1 : w * 1j]
    paper = 0.9 - 0.35 * x - 0.15 * y
    noise = np.random.default_rng(int(digit.sum())).normal(0, 0.02, (h, w))
    return ((paper * (1 - 0.75 * ink) + noise).clip(0, 1) * 255).astype(np.uint8)


def prepared(pixels: np.ndarray) -> np.ndarray:
    return prepare_like_mnist(Image.fromarray(pixels)).image[0].numpy()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a.ravel().astype(float), b.ravel().astype(float))[0, 1])


@pytest.mark.parametrize("invert", [False, True])
def test_a_real_mnist_digit_comes_through_as_it_is(digits: tuple, invert: bool) -> None:
    for digit in digits[0]:
        assert correlation(prepared(255 - digit if invert else digit), digit) > 0.95


@pytest.mark.parametrize("change", [enlarged, lambda d: 255 - enlarged(d), off_centre, photographed])
def test_a_digit_is_found_however_it_was_taken(digits: tuple, change: Callable[[np.ndarray], np.ndarray]) -> None:
    images, labels = digits
    came = np.stack([prepared(change(digit)) for digit in images[:60]])
    assert np.mean([correlation(a, b) for a, b in zip(came, images, strict=False)]) > 0.93
    train = load("mnist", validation=0).train.subset(torch.arange(6000))
    known = torch.nn.functional.normalize(train.images.flatten(1).float())
    right = [
        int((train.labels[(torch.from_numpy(some).flatten(1).float() @ known.T).argmax(1)] == labels[:60]).sum())
        for some in (came, images[:60])
    ]
    assert right[0] >= right[1] - 4  # the nearest neighbour knows it about as well as the original


def test_specks_and_the_edge_of_the_paper_are_no_ink(digits: tuple) -> None:
    photo = photographed(digits[0][0])
    clean = prepared(photo)
    photo[20:23, 250:253] = 20
    photo[:, 310:] = 30
    assert correlation(prepared(photo), clean) > 0.8  # the crop may differ by a pixel


def test_a_thin_line_on_a_large_canvas_does_not_vanish() -> None:
    image = Image.new("L", (1000, 1000), 255)
    ImageDraw.Draw(image).line([(200, 200), (800, 200), (400, 800)], fill=0, width=6)
    result = prepare_like_mnist(image)
    assert "thickened" in result.note
    assert (result.image > 128).sum() > 40


def test_the_note_says_what_was_done(digits: tuple) -> None:
    note = prepare_like_mnist(Image.fromarray(photographed(digits[0][3]))).note
    assert "inverted" in note
    assert "uneven light" in note
    assert "20×20" in note
    assert "\n" not in note


@pytest.mark.parametrize("size", [14, 28, 36, 56])
def test_other_sizes_are_in_proportion(digits: tuple, size: int) -> None:
    image = prepare_like_mnist(Image.fromarray(enlarged(digits[0][0])), size).image
    assert image.shape == (1, size, size)
    assert image.dtype == torch.uint8
    rows = image[0].amax(1).nonzero()
    assert int(rows.max() - rows.min()) + 1 <= round(size * 20 / 28)


def pair_of(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Two digits on one canvas, four pixels apart in each direction."""
    canvas = np.zeros((36, 36), np.uint8)
    canvas[2:30, 2:30] = first
    canvas[6:34, 6:34] = np.maximum(canvas[6:34, 6:34], second)
    return canvas


def test_a_photo_of_two_digits_looks_like_the_pair_that_it_shows(digits: tuple) -> None:
    images, _ = digits
    for first, second in zip(images[:20:2], images[1:20:2], strict=True):
        pair = pair_of(first, second)
        came = prepare_for(Image.fromarray(photographed(pair)), (1, 36, 36), "multimnist").image[0].numpy()
        assert came.shape == (36, 36)
        rows, columns = (np.flatnonzero(came.max(axis) > 64) for axis in (1, 0))
        assert 21 <= max(np.ptp(rows), np.ptp(columns)) + 1 <= 24  # as large as an average pair
        assert abs(float((came.sum(1) * np.arange(36)).sum() / came.sum()) - 17.5) < 1.5  # in the middle


def test_two_drawn_strokes_far_apart_are_both_kept() -> None:
    image = Image.new("L", (600, 400), 255)
    for x in (200, 400):
        ImageDraw.Draw(image).line([(x, 100), (x, 300)], fill=0, width=20)
    came = prepare_for(image, (1, 36, 36), "multimnist").image[0].numpy()
    filled = came.max(0) > 128
    assert np.diff(np.concatenate([[0], filled, [0]]).astype(int)).clip(0).sum() == 2


def test_a_blank_picture_is_refused() -> None:
    rng = np.random.default_rng(0)
    gradient = np.linspace(120, 230, 200)[None].repeat(150, 0) + rng.normal(0, 5, (150, 200))
    for blank in (np.full((50, 60), 255), np.zeros((28, 28)), np.full((1, 1), 7), gradient):
        with pytest.raises(UserError, match="blank"):
            prepared(blank.clip(0, 255).astype(np.uint8))


def test_a_picture_is_read_from_a_path_or_a_stream(tmp_path: Path) -> None:
    Image.new("RGBA", (3, 2), (0, 0, 0, 0)).save(tmp_path / "a.png")
    for source in (tmp_path / "a.png", str(tmp_path / "a.png"), io.BytesIO((tmp_path / "a.png").read_bytes())):
        image = read_image(source)
        assert (image.mode, image.size, image.getpixel((0, 0))) == ("RGB", (3, 2), (255, 255, 255))


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.png"
    with pytest.raises(UserError, match=r"a\.png"):
        read_image(path)
    noise = np.random.default_rng(0).integers(0, 255, (80, 80), np.uint8)
    Image.fromarray(noise).save(path)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(UserError, match=r"a\.png"):
        read_image(path)
    path.write_text("hello")
    with pytest.raises(UserError, match=r"a\.png is not an image"):
        read_image(path)
    with pytest.raises(UserError, match="the picture"):
        read_image(io.BytesIO(b""))
    with pytest.raises(UserError, match="stdin is not an image"):
        read_image(io.BytesIO(b""), "stdin")
    Image.new("L", (20_000, 1)).save(path)
    with pytest.raises(UserError, match=r"20000×1 pixels, but the limit is fewer than 20,000"):
        read_image(path)
    Image.new("L", (19_999, 1)).save(path)
    assert read_image(path).width == 19_999
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for side in (12, 40):  # above Pillow's limit it warns, above twice the limit it raises
        Image.new("L", (side, side)).save(path)
        with pytest.raises(UserError, match="too large"):
            read_image(path)


def test_fitting_keeps_the_aspect_and_the_channels() -> None:
    image = Image.new("RGB", (40, 20), (255, 0, 0))
    colour, grey = fit(image, 3, 10, 10), fit(image, 1, 10, 10)
    assert (colour.shape, grey.shape) == ((3, 10, 10), (1, 10, 10))
    assert colour[:, 5, 5].tolist() == [255, 0, 0]
    assert colour[:, 0].sum() == 0
    assert grey[0, 5, 5] == 76
    with pytest.raises(UserError, match="channel"):
        fit(image, 2, 10, 10)
