"""Your own images: any size, mode and format in; what cannot be read is named and left out."""

from __future__ import annotations

import os
import struct
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capsnet.cli import main
from capsnet.data import Request, decode, load, parse
from capsnet.errors import UserError
from capsnet.terminal import Counter


def picture(path: Path, colour: int | tuple[int, int, int] = 128, size: tuple[int, int] = (8, 8), **save) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path, **save)
    return path


def two_classes(root: Path, each: int = 20) -> Path:
    for k in range(each):
        picture(root / "cat" / f"{k:03}.png", k)
        picture(root / "dog" / f"{k:03}.png", 255 - k)
    return root


def huge_header(path: Path, width: int, height: int) -> None:
    """A PNG that claims a size and holds next to nothing."""
    chunks = b"\x89PNG\r\n\x1a\n"
    for kind, data in (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)),
        (b"IDAT", b"x"),
        (b"IEND", b""),
    ):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    path.write_bytes(chunks)


def test_a_folder_is_split_80_10_10_each_class_alike_and_by_the_seed(tmp_path: Path) -> None:
    splits = load(f"folder:{two_classes(tmp_path)}")
    assert splits.train.classes == ("cat", "dog")
    assert [part.labels.bincount().tolist() for part in (splits.train, splits.validation, splits.test)] == [
        [16, 16],
        [2, 2],
        [2, 2],
    ]
    values = torch.cat([part.images[:, 0, 0, 0] for part in (splits.train, splits.validation, splits.test)])
    assert len(values.unique()) == 40
    assert torch.equal(load(f"folder:{tmp_path}").test.images, splits.test.images)
    assert not torch.equal(load(f"folder:{tmp_path}", seed=1).test.images, splits.test.images)


def test_a_large_test_part_of_ones_own_takes_no_training_images_away(tmp_path: Path) -> None:
    two_classes(tmp_path / "train", each=10)
    two_classes(tmp_path / "test", each=60)
    splits = load(f"folder:{tmp_path}")
    assert (splits.train.n, splits.validation.n, splits.test.n) == (18, 2, 120)


def test_validation_is_as_large_as_asked_when_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_classes(tmp_path)
    assert load(f"folder:{tmp_path}", validation=8).validation.n == 8
    assert load(f"folder:{tmp_path}", validation=0).validation.n == 0
    assert load(f"folder:{tmp_path}", validation=0).train.n == 36
    assert capsys.readouterr().err == ""
    assert load(f"folder:{tmp_path}", validation=30).validation.n == 4
    assert "validation=30" in capsys.readouterr().err


def test_parts_that_the_user_made_are_respected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part, n in (("train", 6), ("val", 3), ("test", 4)):
        for name, colour in (("cat", 10), ("dog", 200)):
            for k in range(n):
                picture(tmp_path / part / name / f"{k}.png", colour)
    splits = load(f"folder:{tmp_path}")
    assert (splits.train.n, splits.validation.n, splits.test.n) == (12, 6, 8)
    assert splits.test.images[:, 0, 0, 0].tolist() == [10] * 4 + [200] * 4
    assert capsys.readouterr().err == ""
    none_held_back = load(f"folder:{tmp_path}", validation=0)
    assert (none_held_back.train.n, none_held_back.validation.n) == (12, 6)
    assert "a validation split of 6: it is kept" in capsys.readouterr().err


def test_a_class_that_is_only_in_the_test_part_is_an_error(tmp_path: Path) -> None:
    for path in ("train/cat", "train/dog", "test/cat", "test/owl"):
        picture(tmp_path / path / "1.png")
    with pytest.raises(UserError, match="owl"):
        load(f"folder:{tmp_path}")


def test_a_class_may_be_called_train(tmp_path: Path) -> None:
    for name in ("train", "bus"):
        for k in range(5):
            picture(tmp_path / name / f"{k}.png")
    assert load(f"folder:{tmp_path}").train.classes == ("bus", "train")


def test_mixed_sizes_are_fitted_keeping_their_aspect(tmp_path: Path) -> None:
    for k in range(5):
        picture(tmp_path / "wide" / f"{k}.png", 200, (100, 50))
        picture(tmp_path / "tall" / f"{k}.jpg", 200, (30, 90))
    data = load(f"folder:{tmp_path}", validation=0).train
    assert data.image_shape == (1, 64, 64)
    wide = data.images[data.labels == data.classes.index("wide")][0, 0]
    assert (wide[16:48] == 200).all()
    assert (wide[:16] == 0).all()
    assert (wide[48:] == 0).all()
    assert load(f"folder:{tmp_path}", image_size=20).train.image_shape == (1, 20, 20)
    assert load(f"folder:{tmp_path}", image_size=(16, 24)).train.image_shape == (1, 16, 24)


def test_one_common_small_size_is_kept(tmp_path: Path) -> None:
    for k in range(5):
        picture(tmp_path / "a" / f"{k}.png", 1, (40, 24))
        picture(tmp_path / "b" / f"{k}.png", 2, (40, 24))
    assert load(f"folder:{tmp_path}").train.image_shape == (1, 24, 40)


def test_grey_is_found_out_and_colour_wins(tmp_path: Path) -> None:
    two_classes(tmp_path)
    picture(tmp_path / "cat" / "grey-saved-as-colour.png", (90, 90, 90))
    assert load(f"folder:{tmp_path}").train.image_shape[0] == 1
    picture(tmp_path / "cat" / "orange.png", (200, 120, 10))
    assert load(f"folder:{tmp_path}").train.image_shape[0] == 3
    assert load(f"folder:{tmp_path}", channels=1).train.image_shape[0] == 1


def test_every_mode_of_picture_reads_as_its_brightness(tmp_path: Path) -> None:
    folder = tmp_path / "modes"
    picture(folder / "grey.png", 255)
    Image.new("1", (8, 8), 1).save(folder / "bits.png")
    Image.fromarray(np.full((8, 8), 65535, np.uint16)).save(folder / "deep.png")
    Image.fromarray(np.full((8, 8), 1.0, np.float32)).save(folder / "float.tif")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(folder / "clear.png")
    Image.new("LA", (8, 8), (0, 0)).save(folder / "clear-grey.png")
    Image.new("RGB", (8, 8), "white").quantize(4).save(folder / "palette.gif")
    Image.new("CMYK", (8, 8), (0, 0, 0, 0)).save(folder / "print.jpg")
    for k in range(8):
        picture(tmp_path / "black" / f"{k}.png", 0)
    splits = load(f"folder:{tmp_path}")
    for part in (splits.train, splits.validation, splits.test):
        assert (part.images[part.labels == 1] >= 254).all()
    assert sum(int((part.labels == 1).sum()) for part in (splits.train, splits.validation, splits.test)) == 8


def test_a_photo_taken_sideways_stands_upright(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: rows run down on the right
    for k in range(6):
        image = np.zeros((10, 20), np.uint8)
        image[:, :10] = 250
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.fromarray(image).save(tmp_path / "a" / f"{k}.png", exif=exif)
        picture(tmp_path / "b" / f"{k}.png", 9, (10, 20))
    data = load(f"folder:{tmp_path}", validation=0).train
    assert data.image_shape == (1, 20, 10)
    upright = data.images[data.labels == 0][0, 0]
    assert (upright[:10] == 250).all()
    assert (upright[10:] == 0).all()


def test_what_cannot_be_read_is_named_and_the_rest_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_classes(tmp_path)
    (tmp_path / "cat" / "text.png").write_text("not a picture")
    (tmp_path / "cat" / "empty.jpg").write_bytes(b"")
    whole = picture(tmp_path / "dog" / "cut.bmp", 7, (40, 40)).read_bytes()
    (tmp_path / "dog" / "cut.bmp").write_bytes(whole[:200])
    whole = picture(tmp_path / "dog" / "cut.png", 7, (40, 40)).read_bytes()
    (tmp_path / "dog" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "dog" / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n")
    huge_header(tmp_path / "dog" / "wide.png", 20001, 1)
    huge_header(tmp_path / "dog" / "bomb.png", 15000, 15000)
    (tmp_path / "dog" / "notes.txt").write_text("ignored")
    (tmp_path / "dog" / ".hidden.png").write_text("ignored")
    (tmp_path / ".git").mkdir()
    splits = load(f"folder:{tmp_path}")
    assert splits.train.n + splits.validation.n + splits.test.n == 40
    said = capsys.readouterr().err
    for name in ("text.png", "empty.jpg", "cut.bmp", "cut.png", "eps.png", "wide.png", "bomb.png"):
        assert said.count(name) == 1
    assert "notes" not in said
    assert "hidden" not in said


def test_a_broken_exif_block_costs_no_picture(tmp_path: Path) -> None:
    two_classes(tmp_path)
    Image.fromarray(np.full((20, 20), 99, np.uint8)).save(tmp_path / "cat" / "odd.jpg", exif=b"Exif\0\0no tags at all")
    splits = load(f"folder:{tmp_path}")
    assert splits.train.n + splits.validation.n + splits.test.n == 41


def test_a_file_in_several_rows_is_one_image_with_all_its_labels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for k in range(12):
        picture(tmp_path / f"{k}.png", k, (8, 8))
    rows = [f"{k}.png,{'cat' if k % 2 else 'dog'}" for k in range(12)] + ["./3.png,dog", "4.png,dog"]
    (tmp_path / "labels.csv").write_text("\n".join(["file,labels", *rows]))
    splits = load(f"csv:{tmp_path / 'labels.csv'}")
    parts = (splits.train, splits.validation, splits.test)
    assert sum(part.n for part in parts) == 12
    assert sum(int(part.labels.sum()) for part in parts) == 13  # one is both
    assert "2 files in several rows (3.png)" in capsys.readouterr().err
    (tmp_path / "labels.csv").write_text("file,labels,split\n1.png,cat,train\n1.png,cat,test\n2.png,dog,train\n")
    with pytest.raises(UserError, match=r"assigns 1\.png to two splits"):
        load(f"csv:{tmp_path / 'labels.csv'}")


def test_links_that_lead_in_circles_are_not_followed(tmp_path: Path) -> None:
    two_classes(tmp_path)
    os.symlink(tmp_path, tmp_path / "loop")
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "again")
    splits = load(f"folder:{tmp_path}")
    assert splits.train.classes == ("cat", "dog")
    assert splits.train.n + splits.validation.n + splits.test.n == 40


def test_wrong_folders_are_the_users_to_mend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="no folder"):
        load(f"folder:{tmp_path / 'nowhere'}")
    with pytest.raises(UserError, match="no images"):
        load(f"folder:{tmp_path}")
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.png").write_text("broken")
    with pytest.raises(UserError, match="none of the 1 images"):
        load(f"folder:{tmp_path}")
    picture(tmp_path / "cat" / "2.png")
    with pytest.raises(UserError, match="only 'cat'"):
        load(f"folder:{tmp_path}")


def test_an_interruption_does_not_wait_for_images_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []

    def slowly(path: Path, *_: object) -> torch.Tensor:
        begun.append(path)
        time.sleep(0.01)
        return torch.zeros(1, 8, 8, dtype=torch.uint8)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode, "_open_and_decode", slowly)
    monkeypatch.setattr(Counter, "__call__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        decode._decode([Path(f"{k}.png") for k in range(500)], (8, 8), Request(parse("folder:photos")))
    assert len(begun) < 100


def test_two_images_are_too_few(tmp_path: Path) -> None:
    two_classes(tmp_path, each=1)
    with pytest.raises(UserError, match="too few"):
        load(f"folder:{tmp_path}")


@pytest.mark.parametrize("header", ["", "file,labels\n", "Filename,Label\n"])
@pytest.mark.parametrize("separator", [";", "|"])
def test_a_table_gives_several_labels_to_an_image(tmp_path: Path, header: str, separator: str) -> None:
    for k in range(20):
        picture(tmp_path / "pictures" / f"{k}.png", k)
    rows = [f"pictures/{k}.png,{['cat', f'cat{separator}dog', '', 'owl'][k % 4]}" for k in range(20)]
    (tmp_path / "labels.csv").write_text(header + "\n".join(rows))
    splits = load(f"csv:{tmp_path / 'labels.csv'}")
    assert splits.train.classes == ("cat", "dog", "owl")
    assert splits.train.multi_label
    assert (splits.train.n, splits.validation.n, splits.test.n) == (16, 2, 2)
    for part in (splits.train, splits.test):
        for image, target in zip(part.images, part.targets.tolist(), strict=True):
            assert target == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]][int(image[0, 0, 0]) % 4]


def test_a_table_may_name_the_split_and_hold_single_labels(tmp_path: Path) -> None:
    rows = ["file,labels,split"]
    for k, part in enumerate(["train"] * 6 + ["val"] * 2 + ["test"] * 4):
        picture(tmp_path / f"{k}.png", k)
        rows.append(f"{k}.png,{'golden retriever' if k % 2 else 'cat; '},{part}")
    (tmp_path / "labels.csv").write_text("\n".join(rows))
    splits = load(f"csv:{tmp_path / 'labels.csv'}")
    assert splits.train.classes == ("cat", "golden retriever")
    assert not splits.train.multi_label
    assert splits.test.images[:, 0, 0, 0].tolist() == [8, 9, 10, 11]
    assert splits.validation.labels.tolist() == [0, 1]


def test_with_a_header_only_its_names_count(tmp_path: Path) -> None:
    for k in range(12):
        picture(tmp_path / f"{k}.png", k)
    for header, row in (
        ("file,labels,width", "{0}.png,{1},8"),
        ("id,width,Label,Image", "{0},8,{1},{0}.png"),
        ("file,size,split,labels", "{0}.png,8,train,{1}"),
        ("file,labels\n  \n ,", "{0}.png,{1}"),  # blank lines
    ):
        rows = [row.format(k, ("red apple", "pear")[k % 2]) for k in range(12)]
        (tmp_path / "labels.csv").write_text("\n".join([header, *rows]))
        splits = load(f"csv:{tmp_path / 'labels.csv'}")
        assert splits.train.classes == ("pear", "red apple")
        assert not splits.train.multi_label
        assert splits.train.n + splits.validation.n + splits.test.n == 12


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no rows"),
        ("a.png\n", "line 1 of .*, without labels: write file,labels"),
        ("a.png,x,somewhere\n", "line 1 of .* has the split 'somewhere': write train"),
        ("file,width,height,labels\n\na.png,20\n", "line 3 of .*, without labels"),
        ("file,width\na.png,20\n", "no column labels, only file, width"),
        ("a.png,x\nb.png,y\n", "none of the 2"),
    ],
)
def test_wrong_tables_are_the_users_to_mend(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(UserError, match=says):
        load(f"csv:{tmp_path / 't.csv'}")
    with pytest.raises(UserError, match="no file"):
        load(f"csv:{tmp_path / 'other.csv'}")


def test_a_folder_with_fewer_images_than_a_batch_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for label, colour in (("cat", 20), ("dog", 220)):
        for k in range(4):
            picture(tmp_path / "photos" / label / f"{k}.png", colour + k, size=(28, 28))
    words = ["train", "--data", f"folder:{tmp_path / 'photos'}", "--epochs", "2", "--no-report", "--no-tensorboard"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    assert "Batches have 6 images instead of 16" in capsys.readouterr().err
