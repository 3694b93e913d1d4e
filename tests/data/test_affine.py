"""Digits on a 40×40 field: placed at random, transformed as a re-creation of affNIST, or read from affNIST's files."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from capsnet import data
from capsnet.cli import main
from capsnet.cli.inputs import prepare_image
from capsnet.cli.train import take_preset
from capsnet.data import Batches, Dataset, Splits
from capsnet.data.photo import RESIZED
from capsnet.data.synthetic.affine import Placed, Transformed, linear, transform
from capsnet.errors import UserError
from capsnet.evaluate import evaluate
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import build
from capsnet.train import loop
from capsnet.train.config import Config
from capsnet.train.presets import get_preset
from pictures import photo_of

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def expanded() -> Splits[Placed]:
    return data.load("expanded-mnist")


@pytest.fixture(scope="module")
def affine() -> Transformed:
    return data.load("affine-mnist").test


# -------------------------------------------------------------------------------------------------- placed at random


def test_a_placed_digit_keeps_every_pixel_and_lies_wholly_on_the_field(expanded: Splits[Placed]) -> None:
    batch = expanded.train.gather(torch.arange(500))
    source = expanded.train.source.images[:500].float() / 255
    assert batch.images.shape == (500, 1, 40, 40)
    torch.testing.assert_close(batch.images.sum((1, 2, 3)), source.sum((1, 2, 3)))
    assert torch.equal(batch.labels, expanded.train.source.labels[:500])


def test_places_are_uniform_over_all_169() -> None:
    corner = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    corner[0, 0, 0, 0] = 255
    dots = Placed(Dataset(corner, torch.zeros(1, dtype=torch.long), ("dot",), "dots"), 5, "dots")
    found = dots.gather(torch.arange(169 * 200)).images.sum(0)[0]
    assert found[13:].sum() == 0
    assert found[:, 13:].sum() == 0
    assert found.sum() == 169 * 200
    assert found[:13, :13].min() > 130
    assert found[:13, :13].max() < 270


def test_training_digits_have_a_new_place_in_every_epoch_and_others_one_for_good(expanded: Splits[Placed]) -> None:
    batches = Batches(expanded.train, 50_000)
    assert len(batches) == 1
    n = len(expanded.train)
    first, second = (expanded.train.gather(torch.arange(64) + epoch * n) for epoch in (0, 1))
    assert torch.equal(first.labels, second.labels)
    assert (first.images != second.images).flatten(1).any(1).float().mean() > 0.9
    again = data.load("expanded-mnist", seed=0)
    other = data.load("expanded-mnist", seed=1)
    some = torch.arange(64)
    assert torch.equal(again.train.gather(some).images, first.images)
    assert torch.equal(other.test.gather(some).images, expanded.test.gather(some).images)
    assert not torch.equal(other.train.gather(some).images, first.images)


# ------------------------------------------------------------------------------------------------------ transformed


def test_the_identity_returns_the_digit(affine: Transformed) -> None:
    digits = affine.source.images[:20].float()
    one, zero = torch.ones(20), torch.zeros(20)
    same = transform(digits, linear(zero, zero, one, one), torch.zeros(20, 2))
    torch.testing.assert_close(same[:, :, 6:34, 6:34], digits, atol=0.02, rtol=0)  # of 255
    assert same.sum().item() == pytest.approx(digits.sum().item(), rel=1e-4)


def test_a_move_is_right_then_down() -> None:
    dot = torch.zeros(1, 1, 28, 28)
    dot[0, 0, 13, 13] = 1
    moved = transform(dot, torch.eye(2)[None], torch.tensor([[3.0, -5.0]]))
    assert moved[0, 0, 19 - 5, 19 + 3].item() == pytest.approx(1, abs=1e-4)


def corner_after(rotation: float = 0, shear: float = 0, across: float = 1, down: float = 1) -> Tensor:
    """Where (right 0, up 10) goes."""
    values = (torch.tensor([float(x)]) for x in (rotation, shear, across, down))
    return linear(*values)[0] @ torch.tensor([0.0, -10.0])


def test_rotation_is_counter_clockwise_shear_leans_to_the_right_and_scale_is_by_axis() -> None:
    torch.testing.assert_close(corner_after(rotation=90), torch.tensor([-10.0, 0]), atol=1e-5, rtol=0)
    torch.testing.assert_close(corner_after(shear=0.2), torch.tensor([2.0, -10.0]))
    torch.testing.assert_close(corner_after(across=3, down=1.2), torch.tensor([0.0, -12.0]))


def test_what_is_drawn_is_what_the_image_shows(affine: Transformed) -> None:
    """The moments of a blob's ink, before and after, give its transformation back."""
    blob = torch.zeros(1, 1, 28, 28)
    blob[0, 0, 6:22, 10:18] = 255
    rotation, shear, across, down = (torch.tensor([x]) for x in (17.0, -0.15, 1.1, 0.9))
    matrix = linear(rotation, shear, across, down)
    after = transform(blob, matrix, torch.tensor([[2.5, -1.0]]))
    middle, spread = moments(after)
    torch.testing.assert_close(middle, torch.tensor([2.5, -1.0]), atol=0.02, rtol=0)
    expected = matrix[0] @ moments(blob)[1] @ matrix[0].T
    torch.testing.assert_close(spread, expected, atol=0.35, rtol=0)  # bilinear sampling blurs a little


def moments(image: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (2,) and covariance (2, 2) of (right, down) of the ink from the middle."""
    side = image.shape[-1]
    place = torch.arange(side) - (side - 1) / 2
    where = torch.stack([place.expand(side, side), place[:, None].expand(side, side)], -1).reshape(-1, 2)
    weight = (image / image.sum()).reshape(-1, 1)
    mean = (weight * where).sum(0)
    return mean, (weight * (where - mean)).T @ (where - mean)


def test_parameters_stay_in_their_ranges_and_fill_them(affine: Transformed) -> None:
    found = affine.gather(torch.arange(0, 320_000, 64)).measures
    ranges = {"rotation": (-20, 20), "shear": (-0.2, 0.2), "scale_across": (0.8, 1.2), "scale_down": (0.8, 1.2)}
    for name, (low, high) in ranges.items():
        values = found[name]
        span = high - low
        assert low <= values.min() < low + 0.01 * span
        assert high - 0.01 * span < values.max() <= high
        assert torch.histc(values, 10, low, high).min() > 400  # 500 expected


def test_every_digit_stays_inside_the_frame(affine: Transformed) -> None:
    """Laid on a far larger field, none leaves ink beyond the 40×40 in the middle."""
    index = torch.arange(0, 320_000, 160)
    chosen = index % 10_000
    images = affine.source.images[chosen].float()
    rotation, shear, across, down = affine.draw(index)
    matrix = linear(rotation, shear, across, down)
    move = affine.place(matrix, affine.ink[chosen], index)
    padded = torch.nn.functional.pad(images, (26, 26, 26, 26))
    # the frame moved 30 px aside shows what lies beyond the edge of the original one
    for aside, beyond in (
        ((30.0, 0.0), (..., slice(10, None))),
        ((-30.0, 0.0), (..., slice(None, 30))),
        ((0.0, 30.0), (..., slice(10, None), slice(None))),
        ((0.0, -30.0), (..., slice(None, 30), slice(None))),
    ):
        assert transform(padded, matrix, move - torch.tensor(aside))[beyond].abs().max() < 1e-3
    inside = transform(images, matrix, move)
    assert inside.sum((1, 2, 3)).min() > 0
    edge = torch.cat([inside[..., :2].flatten(1), inside[..., -2:].flatten(1)], 1).amax(1)
    assert (edge > 0).float().mean() > 0.05  # and they do reach it


def test_an_example_is_the_same_in_any_batch_and_the_first_of_each_digit_come_first(affine: Transformed) -> None:
    assert len(affine) == 320_000
    fewer = data.load("affine-mnist:per_digit=2").test
    assert len(fewer) == 20_000
    numbers = torch.tensor([0, 19_999, 7, 10_007])
    many = affine.gather(numbers)
    for place, number in enumerate(numbers):
        assert torch.equal(fewer.gather(number.view(1)).images[0], many.images[place])
    assert many.labels[2] == many.labels[3]  # two transformations of digit 7
    assert torch.equal(fewer.targets[numbers], many.targets)


def test_the_test_set_is_the_same_for_everyone(affine: Transformed) -> None:
    index = torch.arange(0, 320_000, 4999)
    found, again = affine.gather(index), data.load("affine-mnist", seed=9).test.gather(index)
    assert torch.equal(found.images, again.images)
    # not a checksum: another processor's sine may round a grey level otherwise
    assert found.measures["rotation"][:3].tolist() == pytest.approx([6.3586, 19.5958, -12.5978], abs=1e-4)
    assert found.images.mean().item() == pytest.approx(0.061769, abs=1e-5)


def test_errors_are_counted_by_rotation_shear_and_scale(affine: Transformed) -> None:
    tiny = CapsNetConfig(
        (1, 40, 40), stem_channels=(4,), stem_kernels=(5,), stem_strides=(4,), primary_types=2, primary_dim=4,
        primary_kernel=3, class_dim=4, decoder=(),
    )  # fmt: skip
    digits = affine.source.subset(torch.arange(300))
    summary = evaluate(build(tiny), Transformed(digits, 1, "affine-mnist", per_digit=2)).summary()
    for measure in ("rotation", "shear", "scale_across", "scale_down", "shift"):
        curve = summary[f"errors_by_{measure}"]
        assert sum(curve["n"]) == 600
        assert sum(curve["errors"]) == summary["errors"]
        assert len(curve["edges"]) == len(curve["n"]) + 1


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("affine-mnist:per_digit=33", "between 1 and 32"),
        ("affine-mnist:per_digit=x", "should be an integer"),
        ("affine-mnist:digits=2", "no option of affine-mnist 'digits'"),
        ("expanded-mnist:canvas=50", "no option of expanded-mnist 'canvas'"),
        ("expanded-mnist:shift=9", "between 0 and 6"),
        ("affnist:nowhere.mat", "check the path"),
        ("affnist", "write affnist:PATH"),
    ],
)
def test_wrong_options_are_answered_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        data.load(name)


# ---------------------------------------------------------------------------------------- the original affNIST's files


def original(file: Path, images: np.ndarray, labels: np.ndarray, **options: bool) -> Path:
    """A file in affNIST's layout: a structure with one image a column."""
    from scipy.io import savemat

    one_of_n = np.eye(10, dtype=np.uint8)[:, labels.astype(int) % 10]
    fields = {"image": images, "label_one_of_n": one_of_n, "label_int": labels[None], "affine_matrix": np.eye(3)}
    savemat(file, {"affNISTdata": fields}, **options)
    return file


@pytest.fixture(scope="module")
def some(affine: Transformed) -> tuple[np.ndarray, np.ndarray]:
    """Sixty images (n, 40, 40) and their labels."""
    batch = affine.gather(torch.arange(60))
    return batch.images[:, 0].mul(255).round().to(torch.uint8).numpy(), batch.labels.numpy().astype(np.uint8)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lying", [False, True])
def test_a_file_in_affnists_layout_gives_upright_digits(
    some: tuple[np.ndarray, np.ndarray], tmp_path: Path, packed: bool, lying: bool
) -> None:
    images, labels = some
    columns = (images.transpose(0, 2, 1) if lying else images).reshape(60, 1600).T
    splits = data.load(f"affnist:{original(tmp_path / 'test.mat', columns, labels, do_compression=packed)}")
    assert np.array_equal(splits.test.images[:, 0].numpy(), images)
    assert np.array_equal(splits.test.labels.numpy(), labels)
    assert splits.test.classes == tuple("0123456789")
    assert len(splits.train) == len(splits.validation) == 0


def test_a_folder_of_files_is_read_in_the_order_of_their_numbers(
    some: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    images, labels = some
    for number, part in ((1, slice(0, 20)), (2, slice(20, 50)), (10, slice(50, 60))):
        original(tmp_path / f"{number}.mat", images[part].reshape(-1, 1600).T, labels[part])
    assert np.array_equal(data.load(f"affnist:{tmp_path}").test.images[:, 0].numpy(), images)


def test_other_files_are_refused_in_a_sentence(some: tuple[np.ndarray, np.ndarray], tmp_path: Path) -> None:
    from scipy.io import savemat

    images, labels = some
    columns = images.reshape(60, 1600).T
    (tmp_path / "text.mat").write_text("no matrix at all " * 30)
    (tmp_path / "empty.mat").write_bytes(b"")
    savemat(tmp_path / "other.mat", {"x": np.eye(3)})
    original(tmp_path / "small.mat", images[:, :28, :28].reshape(60, 784).T, labels)
    original(tmp_path / "labels.mat", columns, labels + 5)
    original(tmp_path / "floats.mat", columns.astype(float), labels)
    original(tmp_path / "whole.mat", columns, labels, do_compression=True)
    content = (tmp_path / "whole.mat").read_bytes()
    (tmp_path / "cut.mat").write_bytes(content[: len(content) // 2])
    for name in ("text", "empty", "other", "small", "labels", "floats", "cut"):
        with pytest.raises(UserError, match="does not have the format of affNIST"):
            data.load(f"affnist:{tmp_path / name}.mat")


def test_a_file_that_claims_gigabytes_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    bomb = zlib.compress(struct.pack("<II", 14, 2**32 - 1) + b"\0" * 1000)
    header = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<H", 0x0100) + b"IM"
    (tmp_path / "bomb.mat").write_bytes(header + struct.pack("<II", 15, len(bomb)) + bomb)
    with pytest.raises(UserError, match="too large"):
        data.load(f"affnist:{tmp_path / 'bomb.mat'}")


def test_the_original_is_for_testing_only(
    some: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = original(tmp_path / "test.mat", some[0].reshape(60, 1600).T, some[1])
    assert main(["train", "--data", f"affnist:{file}", "--out", str(tmp_path / "run")]) == 2
    assert "no training images" in " ".join(capsys.readouterr().err.split())


def test_a_photo_is_prepared_as_mnist_was_made_and_laid_in_the_middle(
    affine: Transformed, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tiny = CapsNetConfig((1, 40, 40), stem_channels=(4,), stem_strides=(4,), primary_kernel=3, decoder=())
    model, file = build(tiny), str(photo_of(affine.source.images[0, 0].numpy(), tmp_path / "seven.png"))
    notes = {name: prepare_image(model, file, Config(data=name)).note for name in ("mnist", "fashion-mnist")}
    assert "centred by mass in 40×40" in notes["mnist"]
    assert notes["fashion-mnist"] == RESIZED
    for name in ("expanded-mnist", "affine-mnist:per_digit=2"):
        prepared = prepare_image(model, file, Config(data=name))
        image, note = prepared.image, prepared.note
        expected = data.prepare_like_mnist(data.read_image(file)).image
        assert torch.equal(image[:, 6:34, 6:34], expected)
        assert image.sum() == expected.sum()
        assert note.endswith("centred by mass in 28×28, padded to 40×40.")


# ------------------------------------------------------------------------------------------------------- the presets


def test_the_two_networks_that_are_compared_have_as_many_parameters_and_stop_alike() -> None:
    capsules, cnn = get_preset("expanded"), get_preset("expanded-cnn")
    counts = [sum(p.numel() for p in build(config.model).parameters()) for config in (capsules, cnn)]
    assert abs(counts[0] - counts[1]) < 0.05 * counts[0]
    assert capsules.stop_at == cnn.stop_at == 0.8
    assert capsules.data == cnn.data == "expanded-mnist"


def test_data_that_need_a_preset_of_their_own_get_it() -> None:
    assert take_preset(["--data", "affine-mnist:per_digit=2"])[0] == "expanded"
    assert take_preset(["--data=multimnist"])[0] == "multimnist"
    assert take_preset(["--data", "mnist", "--out", "multimnist"])[0] == "quick"
    assert take_preset(["--data", "multimnist", "--preset", "paper"])[0] == "paper"


def bars(n: int) -> Dataset:
    """Two classes that a tiny network tells apart after an epoch or two."""
    labels = torch.arange(n) % 2
    images = torch.zeros(n, 1, 12, 12, dtype=torch.uint8)
    images[labels == 0, :, 2:10, 5:7] = 200
    images[labels == 1, :, 5:7, 2:10] = 200
    return Dataset(images, labels, ("upright", "lying"), "bars")


def test_training_stops_at_the_end_of_the_epoch_that_is_good_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = CapsNetConfig(
        stem_channels=(4,), stem_kernels=(3,), stem_norm=True, primary_types=2, primary_dim=4, primary_kernel=3,
        class_dim=4, decoder=(),
    )  # fmt: skip
    splits = Splits(bars(48), bars(16), bars(16))
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: splits)
    config = Config(epochs=40, batch_size=8, lr=0.01, stop_at=0.001, model=tiny)
    result = loop.train(loop.start(config, tmp_path / "run"))
    assert result.certificate.epochs < 40
    assert result.certificate.steps == 6 * result.certificate.epochs
    assert result.certificate.validation_error_percent == 0
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: Splits(bars(48), bars(0), bars(16)))
    with pytest.raises(UserError, match=r"--stop-at\) needs validation images"):
        loop.start(config, tmp_path / "none")
