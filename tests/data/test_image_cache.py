"""Images on disk: decoded once, the same batches as from memory, and nothing stale or half written is ever used."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from capsnet.cli import main
from capsnet.data import Batches, Splits, decoders, image_cache, in_order, load, mapped
from capsnet.data.config import Augment
from capsnet.data.mapped import Mapped, Stored, joined
from capsnet.data.splits import fingerprint
from capsnet.errors import UserError
from capsnet.files import Lock

PARTS = ("train", "validation", "test")


class Here:
    """A helper without a process of its own, which would take seconds to start; it counts what it decodes."""

    decoded: int = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def ask(self, **request: Any) -> Any:
        Here.decoded += len(request.get("rows", ()))
        return json.loads(json.dumps(decoders.answer(json.loads(json.dumps(request)))))

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and small requests, so that there are several."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("CAPSNET_DATA", str(folder))
    monkeypatch.setattr(decoders, "Helper", Here)
    monkeypatch.setattr(decoders, "CHUNK", 8)
    Here.decoded = 0
    return folder / "decoded"


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_cache, "IN_MEMORY", 0)


def draw(root: Path, n: int = 30, colour: bool = True, side: int = 12) -> Path:
    """Noise in two classes."""
    random = np.random.default_rng(0)
    for k in range(n):
        pixels = random.integers(0, 256, (side, side, 3) if colour else (side, side), dtype=np.uint8)
        path = root / ("cat", "dog")[k % 2] / f"{k:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return root


def both(name: str, monkeypatch: pytest.MonkeyPatch, **wanted: Any) -> tuple[Splits, Splits]:
    """The splits in memory and on disk."""
    in_memory = load(name, **wanted)
    monkeypatch.setattr(image_cache, "IN_MEMORY", 0)
    on_disk = load(name, **wanted)
    assert all(isinstance(getattr(on_disk, part), Stored) for part in PARTS)
    return in_memory, on_disk


def same(one: Splits, other: Splits) -> None:
    """Both have the same examples in every split."""
    for part in PARTS:
        a, b = (getattr(splits, part).in_memory() for splits in (one, other))
        assert torch.equal(a.images, b.images)
        assert torch.equal(a.labels, b.labels)
        assert a.classes == b.classes


def complete(cache: Path) -> list[Path]:
    return [path.parent for path in cache.glob("*/done.json")]


def test_batches_and_augmentation_are_the_same_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"folder:{draw(tmp_path / 'photos', 60)}"
    for seed, limit in ((0, 0), (7, 25)):
        splits = both(name, monkeypatch, seed=seed, train_limit=limit)
        augment = Augment(shift=2, rotate=10, scale=0.1, flip=True, erase=3)
        memory, disk = (Batches(part.train, 8, seed, augment, epochs=2) for part in splits)
        for step in range(2 * len(memory)):
            a, b = memory.batch(step), disk.batch(step)
            for field in ("images", "targets", "labels", "index"):
                assert torch.equal(getattr(a, field), getattr(b, field))
        for a, b in zip(in_order(splits[0].test, 4), in_order(splits[1].test, 4), strict=True):
            assert torch.equal(a.images, b.images)
        assert fingerprint(splits[0], name) == fingerprint(splits[1], name)
        monkeypatch.setattr(image_cache, "IN_MEMORY", 2**28)
    assert Here.decoded == 60  # once


def test_sizes_modes_and_broken_files_are_treated_alike_and_told_at_every_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = draw(tmp_path / "photos", 20, side=30)
    Image.new("L", (100, 40), 90).save(root / "cat" / "wide.jpg")
    Image.new("RGBA", (9, 9), (10, 200, 30, 99)).save(root / "dog" / "clear.png")
    (root / "cat" / "text.png").write_text("not an image")
    (root / "dog" / "cut.png").write_bytes((root / "dog" / "001.png").read_bytes()[:900])
    same(*both(f"folder:{root}", monkeypatch))
    first = capsys.readouterr().err
    assert first.count("text.png") == first.count("cut.png") == 2
    load(f"folder:{root}")
    again = capsys.readouterr().err
    assert again.count("text.png") == again.count("cut.png") == 1


@pytest.mark.parametrize("wanted", [{}, {"image_size": (10, 16)}, {"channels": 1}, {"channels": 3}])
def test_images_in_colour_that_are_grey_have_one_channel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: dict[str, Any], cache: Path
) -> None:
    root = draw(tmp_path / "photos", 20, colour=False)
    Image.new("RGB", (12, 12), (7, 7, 7)).save(root / "cat" / "grey.png")
    memory, disk = both(f"folder:{root}", monkeypatch, **wanted)
    same(memory, disk)
    c, h, w = memory.test.image_shape
    (pixels,) = cache.glob("*/pixels-*")
    assert pixels.stat().st_size == 21 * c * h * w


def test_a_table_shares_its_images_with_other_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw(tmp_path / "photos", 20)
    table = tmp_path / "labels.csv"
    files = sorted(path.relative_to(tmp_path) for path in (tmp_path / "photos").rglob("*.png"))
    table.write_text("\n".join(f"{file},{('sea', 'sky', 'sea;sky')[k % 3]}" for k, file in enumerate(files)))
    memory, disk = both(f"csv:{table}", monkeypatch)
    same(memory, disk)
    assert disk.train.multi_label
    assert Here.decoded == 20
    table.write_text("\n".join(f"{file},{('sea', 'sky')[k % 2]}" for k, file in enumerate(reversed(files))))
    assert not load(f"csv:{table}").train.multi_label
    assert Here.decoded == 20


def test_small_sets_stay_in_memory_and_large_ones_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"folder:{draw(tmp_path / 'photos', 20)}"
    most = 20 * 3 * 64 * 64
    for limit, wanted, stored in (
        (most, {}, False),
        (most - 1, {}, True),
        (most - 1, {"image_size": 12}, False),
        (most - 1, {"channels": 1}, False),
    ):
        monkeypatch.setattr(image_cache, "IN_MEMORY", limit)
        assert isinstance(load(name, **wanted).train, Stored) == stored


@pytest.mark.usefixtures("on_disk")
def test_only_what_has_changed_is_decoded_again_and_the_old_cache_goes(tmp_path: Path, cache: Path) -> None:
    root = draw(tmp_path / "photos", 20)
    before = load(f"folder:{root}", validation=0)
    shutil.copy(root / "cat" / "000.png", root / "dog" / "new.png")
    Image.new("RGB", (12, 12), (1, 2, 3)).save(root / "cat" / "002.png")
    (root / "dog" / "001.png").unlink()
    (old,) = complete(cache)
    after = load(f"folder:{root}", validation=0)
    assert Here.decoded == 22
    (new,) = complete(cache)
    assert new != old
    assert not old.exists()
    pixels = torch.cat([part.in_memory().images for part in (after.train, after.test)])[:, :, 0, 0].tolist()
    assert [1, 2, 3] in pixels
    assert len(pixels) == 20
    assert before.train.gather(torch.arange(16)).images.isfinite().all()  # who has opened the old one still reads it


@pytest.mark.usefixtures("on_disk")
def test_a_file_that_is_replaced_with_its_old_size_and_time_is_noticed(tmp_path: Path) -> None:
    root = draw(tmp_path / "photos", 10)
    for name, value in (("000", 10), ("002", 200)):
        Image.new("RGB", (12, 12), (value, 0, 1)).save(root / "cat" / f"{name}.bmp")
    load(f"folder:{root}")
    one, other = root / "cat" / "000.bmp", root / "cat" / "002.bmp"
    found = one.stat()
    time.sleep(0.02)  # the clock of a file system ticks slowly
    one.write_bytes(other.read_bytes())
    os.utime(one, ns=(found.st_atime_ns, found.st_mtime_ns))
    splits = load(f"folder:{root}", validation=0)
    assert Here.decoded == 13
    pixels = torch.cat([part.in_memory().images for part in (splits.train, splits.test)])
    assert (pixels[:, 0, 0, 0] == 200).sum() >= 2


@pytest.mark.usefixtures("on_disk")
def test_an_interrupted_cache_is_completed_and_torn_images_are_decoded_again(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = draw(tmp_path / "photos", 20)
    whole = load(f"folder:{root}")
    wanted = whole.train.in_memory().images
    (folder,) = complete(cache)
    (folder / "done.json").unlink()
    marks = np.memmap(folder / "marks-3", np.int64, "r+")
    marks[12:] = 0
    images = np.memmap(folder / "pixels-3", np.uint8, "r+").reshape(20, -1)
    images[[3, 15]] ^= 1  # one that was said to be there, and one that was not
    images.flush()
    capsys.readouterr()
    assert torch.equal(load(f"folder:{root}").train.in_memory().images, wanted)
    assert Here.decoded == 20 + 9
    assert "11 of 20 images are in the cache already" in capsys.readouterr().err


KILLED = """
import sys
from capsnet.data import decoders, image_cache, load
image_cache.IN_MEMORY, decoders.CHUNK = 0, 4
print(load(sys.argv[1]).train.checksum())
"""


@pytest.mark.slow
def test_real_processes_share_a_cache_and_survive_kill_9(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = draw(tmp_path / "photos", 400, side=60)
    command = [sys.executable, "-c", KILLED, f"folder:{root}"]
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not begun(cache):
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    assert not complete(cache)
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    told = [rank.communicate(timeout=240) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], told
    assert {int(out) for out, _ in told} == {load(f"folder:{root}").train.checksum()}
    said = "".join(err for _, err in told)
    assert "of 400 images are in the cache already" in said
    assert "Another process is decoding" in said


def begun(cache: Path) -> bool:
    """Whether some images are decoded."""
    return any(np.fromfile(path, np.int64).any() for path in cache.glob("*/marks-3"))


@pytest.mark.usefixtures("on_disk")
def test_a_disk_that_is_too_small_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = draw(tmp_path / "photos", 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1000))  # type: ignore[attr-defined]
    with pytest.raises(UserError, match=r"need 0\.0 GB and .* has 0\.0 GB: free some space \(capsnet data prune\)"):
        load(f"folder:{root}")
    monkeypatch.setenv("CAPSNET_DATA", str(root / "cat" / "000.png"))
    with pytest.raises(UserError, match="cannot be written to"):
        load(f"folder:{root}")


@pytest.mark.usefixtures("on_disk")
def test_a_cache_of_which_a_part_was_deleted_is_made_again(tmp_path: Path, cache: Path) -> None:
    root = draw(tmp_path / "photos", 10)
    wanted = load(f"folder:{root}").train.checksum()
    for name, decoded in (("pixels-3", 10), ("marks-3", 10)):
        (complete(cache)[0] / name).unlink()
        Here.decoded = 0
        assert load(f"folder:{root}").train.checksum() == wanted
        assert Here.decoded == decoded


@pytest.mark.usefixtures("on_disk")
def test_a_cache_that_was_never_completed_goes_when_the_files_have_changed(tmp_path: Path, cache: Path) -> None:
    root = draw(tmp_path / "photos", 10)
    load(f"folder:{root}")
    (old,) = complete(cache)
    (old / "done.json").unlink()
    (root / "cat" / "000.png").unlink()
    load(f"folder:{root}")
    assert [path.name for path in cache.iterdir()] == [complete(cache)[0].name]


@pytest.mark.usefixtures("on_disk")
def test_the_caches_together_are_bounded_and_the_least_used_goes_first(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"folder:{draw(tmp_path / name, 10)}" for name in ("a", "b", "c")]
    for age, name in zip((300, 200), names, strict=False):
        load(name)
        stamp = max(complete(cache), key=lambda path: (path / "done.json").stat().st_mtime) / "done.json"
        os.utime(stamp, (time.time() - age,) * 2)
    load(names[0])  # used now
    size = image_cache.bytes_of(complete(cache)[0])
    monkeypatch.setattr(image_cache, "MOST_BYTES", int(2.5 * size))
    load(names[2])
    assert {json.loads((path / "about.json").read_text()) for path in complete(cache)} == {names[0], names[2]}


@pytest.mark.usefixtures("on_disk")
def test_prune_deletes_what_is_named_and_nothing_that_is_being_written(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        load(f"folder:{draw(tmp_path / name, 10)}")
    monkeypatch.chdir(tmp_path)
    assert main(["data", "prune", "folder:a", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["data"]
    assert (row["name"], row["deleted"]) == (f"folder:{tmp_path / 'a'}", True)
    assert row["bytes"] > 10 * 3 * 12 * 12
    (busy,) = (path for path in complete(cache) if str(tmp_path / "b") in (path / "about.json").read_text())
    with Lock(busy):
        assert main(["data", "prune"]) == 0
    assert "in use" in capsys.readouterr().out
    assert complete(cache) == [busy]
    assert main(["data", "prune"]) == 0
    assert main(["data", "prune"]) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert main(["data", "prune", "mnist"]) == 2
    assert "folder:PATH" in capsys.readouterr().err


@pytest.mark.usefixtures("on_disk")
def test_nothing_readable_is_an_error_here_as_well(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_text("broken")
    for _ in range(2):
        with pytest.raises(UserError, match="none of the 2 images"):
            load(f"folder:{tmp_path}")


def test_the_checksum_of_many_blocks_follows_from_theirs() -> None:
    draw = random.Random(0)
    for length in (1, 7, 300):
        blocks = [draw.randbytes(length) for _ in range(20)]
        crcs = np.array([zlib.crc32(block) for block in blocks])
        assert joined(crcs, length) == zlib.crc32(b"".join(blocks))
    assert joined(np.array([], np.int64), 5) == zlib.crc32(b"")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads the resident set of a map from /proc")
def test_the_pages_of_a_map_are_released_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped, "TOUCHED", 2**20)
    path = tmp_path / "pixels"
    with path.open("wb") as file:
        file.truncate(2**27)  # one hole
    images = Mapped(path, (1, 64, 64), np.zeros(2**15))
    most = 0
    for rows in torch.randperm(2**15)[:4096].split(64):
        images.expect(rows.tolist())
        assert not images.take(rows).any()
        most = max(most, resident_of(path))
    assert 0 < most < 2**26


def resident_of(path: Path) -> int:
    """Bytes of a mapped file in the resident set of this process."""
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    return sum(
        int(next(line for line in lines if line.startswith("Rss:")).split()[1]) * 1024
        for line in lines
        if line.endswith(str(path))
    )


@pytest.mark.usefixtures("on_disk")
def test_a_run_on_stored_images_trains_evaluates_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, out = draw(tmp_path / "photos", 40), tmp_path / "run"
    words = ["--data", f"folder:{root}", "--epochs", "2", "--image-size", "12", "--batch-size", "8", "--out", str(out)]
    tiny = ["--model.stem-channels", "4", "--model.stem-kernels", "3", "--model.stem-strides", "2"]
    tiny += ["--model.primary-types", "2", "--model.primary-kernel", "3", "--model.decoder", "8"]
    assert main(["train", *words, *tiny, "--no-tensorboard", "--no-report"]) == 0
    images = json.loads((out / "results.json").read_text())["certificate"]["images"]
    monkeypatch.setattr(image_cache, "IN_MEMORY", 2**28)
    capsys.readouterr()
    assert main(["evaluate", str(out), "--json"]) == 0
    told = capsys.readouterr()
    assert "has changed" not in told.err
    assert images == fingerprint(load(f"folder:{root}", image_size=12, channels=3), f"folder:{root}")
