"""`smallnorb:PATH`: files in the original layout, packed and not; damaged ones; downloads."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from capsnet import data
from capsnet.data.sources import smallnorb, user_folder
from capsnet.data.sources.cache import File
from capsnet.data.sources.smallnorb import BYTES, INTEGERS, TEST, TRAIN
from capsnet.errors import UserError

N = 12


def layout(array: np.ndarray, magic: int) -> bytes:
    """An array as the authors wrote it: three sizes at least, the missing ones as 1."""
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<Ii{len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()


def write(folder: Path, half: str, instances: tuple[int, ...], packed: bool, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    steps = [random.integers(0, most, N) for most in (9, 18, 6)]
    arrays = {
        "dat": random.integers(0, 256, (N, 2, 96, 96), np.uint8),
        "cat": random.integers(0, 5, N).astype("<i4"),
        "info": np.stack([random.choice(instances, N), steps[0], 2 * steps[1], steps[2]], 1).astype("<i4"),
    }
    for part, array in arrays.items():
        content = layout(array, BYTES if part == "dat" else INTEGERS)
        name = f"{half}-{part}.mat"
        (folder / f"{name}.gz").write_bytes(gzip.compress(content)) if packed else (folder / name).write_bytes(content)
    return arrays


def both_halves(folder: Path, packed: bool = False) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return write(folder, TRAIN, (4, 6, 7, 8, 9), packed, 0), write(folder, TEST, (0, 1, 2, 3, 5), packed, 1)


@pytest.mark.parametrize("packed", [True, False])
def test_files_in_smallnorbs_layout_give_images_categories_and_poses(tmp_path: Path, packed: bool) -> None:
    train, test = both_halves(tmp_path, packed)
    splits = data.load(f"smallnorb:{tmp_path}", validation=4)
    assert (splits.train.n, splits.validation.n, splits.test.n) == (8, 4, 12)
    assert splits.test.image_shape == (2, 96, 96)
    assert np.array_equal(splits.test.images, test["dat"])
    assert np.array_equal(splits.test.labels, test["cat"])
    batch = splits.test.gather(splits.test.numbers())
    instance, elevation, azimuth, lighting = test["info"].T
    assert np.array_equal(batch.measures["instance"], instance)
    assert np.array_equal(batch.measures["elevation"], 30 + 5 * elevation)
    assert np.array_equal(batch.measures["azimuth"], 10 * azimuth)
    assert np.array_equal(batch.measures["lighting"], lighting)
    assert np.array_equal(data.load(f"smallnorb:{tmp_path}", validation=0).train.images, train["dat"])
    assert data.load(f"smallnorb:{tmp_path}", validation=0, image_size=48).test.image_shape == (2, 48, 48)


@pytest.mark.parametrize("packed", [True, False])
def test_a_damaged_file_is_one_sentence(tmp_path: Path, packed: bool) -> None:
    both_halves(tmp_path, packed)
    for part in ("dat", "cat", "info"):
        path = tmp_path / (f"{TRAIN}-{part}.mat" + ".gz" * packed)
        whole = path.read_bytes()
        for damaged in (b"", whole[:6], whole[:15], whole[: len(whole) // 2], whole[:-1], b"no matrix at all" * 20):
            path.write_bytes(damaged)
            with pytest.raises(UserError, match=rf"{part}\.mat.* is not an intact file of smallNORB"):
                data.load(f"smallnorb:{tmp_path}")
        path.write_bytes(whole)


def test_values_out_of_range_and_halves_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    train, _ = both_halves(tmp_path)
    cat, info = (tmp_path / f"{TRAIN}-{part}.mat" for part in ("cat", "info"))
    cat.write_bytes(layout(train["cat"] + 1, INTEGERS))
    with pytest.raises(UserError, match="out of range"):
        data.load(f"smallnorb:{tmp_path}")
    cat.write_bytes(layout(train["cat"][:5], INTEGERS))
    with pytest.raises(UserError, match="12 images, 5 categories and 12 poses"):
        data.load(f"smallnorb:{tmp_path}")
    cat.write_bytes(layout(train["cat"], INTEGERS))
    info.write_bytes(layout(train["info"] - 9, INTEGERS))
    with pytest.raises(UserError, match="out of range"):
        data.load(f"smallnorb:{tmp_path}")


def test_a_file_that_claims_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    both_halves(tmp_path)
    (tmp_path / f"{TEST}-dat.mat").write_bytes(struct.pack("<Ii4i", BYTES, 4, 2**31 - 1, 2, 96, 96))
    with pytest.raises(UserError, match="not an intact file of smallNORB"):
        data.load(f"smallnorb:{tmp_path}")
    bomb = struct.pack("<Ii4i", BYTES, 4, 12, 2, 96, 96) + b"\0" * 50_000_000
    (tmp_path / f"{TEST}-dat.mat").unlink()
    (tmp_path / f"{TEST}-dat.mat.gz").write_bytes(gzip.compress(bomb, 1))
    with pytest.raises(UserError, match="221,184 bytes should follow its header and 221,185 do"):
        data.load(f"smallnorb:{tmp_path}")


def test_a_folder_that_does_not_exist_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder: check the path, or create the folder"):
        data.load(f"smallnorb:{tmp_path / 'none'}")
    assert not (tmp_path / "none").exists()


# --- Downloads -----------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder on a web server of this machine, and its address."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def as_published(folder: Path) -> tuple[File, ...]:
    contents = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
    return tuple(File(name, len(c), hashlib.sha256(c).hexdigest()) for name, c in contents.items())


def test_missing_files_are_downloaded_and_verified(
    server: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web, address = server
    _, test = both_halves(web, packed=True)
    monkeypatch.setattr(smallnorb, "FILES", as_published(web))
    monkeypatch.setattr(smallnorb, "ADDRESS", address)
    mine = tmp_path / "mine"
    mine.mkdir()
    assert np.array_equal(data.load(f"smallnorb:{mine}", validation=0).test.images, test["dat"])
    assert sorted(path.name for path in mine.iterdir()) == sorted(path.name for path in web.iterdir())
    for path in web.iterdir():
        path.unlink()
    data.load(f"smallnorb:{mine}", validation=0)  # nothing is downloaded again


def test_a_download_with_another_checksum_is_not_kept(server: tuple[Path, str], tmp_path: Path) -> None:
    web, address = server
    (web / "a.mat").write_bytes(b"something else")
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("a.mat", "b.mat"):
        wanted = (File(name, 14, "0" * 64),)
        with pytest.raises(UserError, match=f"could not be downloaded.*put {name} from {address} into it"):
            user_folder.fetch_missing("toys", mine, wanted, address)
    assert list(mine.iterdir()) == []
