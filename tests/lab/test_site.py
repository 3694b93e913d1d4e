"""The Lab as a folder: what is written, what is refused, and what is left out. tests/browser opens it."""

from __future__ import annotations

import json
import re
import stat
import zlib
from pathlib import Path

import pytest

from capsnet.cli import main
from capsnet.lab import graphs, runtime
from capsnet.lab.site import export_site
from capsnet.models.config import CapsNetConfig, CNNConfig
from capsnet.plugins import load_plugin
from capsnet.routing.base import options_for
from lab_server import PLUGIN, SMALL, write_model

JS = Path(graphs.__file__).parent / "static" / "js"
CNN = CNNConfig(channels=(4,), kernels=(5,), pool=(4,), hidden=(8,))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of a small CNN, written over an older one."""
    folder = tmp_path_factory.mktemp("sites")
    site = folder / "site"
    model = write_model(folder / "small-cnn", CNN)
    assert export_site(site, [model], samples=50).models == ("small-cnn",)
    (site / "old").write_text("from the last export")
    export_site(site, [model], samples=50)
    return site


def test_an_export_replaces_the_last_one_and_leaves_nothing_beside_it(site: Path) -> None:
    assert not (site / "old").exists()
    assert {path.name for path in site.parent.iterdir()} == {"site", "small-cnn"}


def test_every_address_in_the_page_is_relative(site: Path) -> None:
    page = (site / "index.html").read_text()
    assert re.findall(r'(?:src|href)="(?!static/|#)[^"]*"', page) == []
    scripts = "".join(file.read_text() for file in (site / "static" / "js").glob("*.js"))
    assert re.findall(r"""["'`]/(?:api|static|models)/""", scripts) == []
    assert "engine-server" not in scripts


def test_the_policy_of_the_page_allows_webassembly_and_nothing_from_elsewhere(site: Path) -> None:
    (found,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', (site / "index.html").read_text())
    directives = dict(part.split(" ", 1) for part in found.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == "'self' 'wasm-unsafe-eval'"
    assert not any("http" in value or "unsafe-inline" in value or "*" in value for value in directives.values())


def test_the_service_worker_knows_every_file(site: Path) -> None:
    source = (site / "service-worker.js").read_text()
    files = json.loads(re.search(r"^const FILES = (.*?);", source, re.MULTILINE)[1])  # type: ignore[index]
    first = json.loads(re.search(r"^const FIRST = (.*?);", source, re.MULTILINE)[1])  # type: ignore[index]
    there = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert set(files) == there - {"service-worker.js"}
    assert {"index.html", "lab.json", "static/js/main.js", "models/small-cnn/graph.bin"} <= set(first) <= set(files)


def test_test_images_and_mistakes_are_those_of_the_dataset(site: Path) -> None:
    from capsnet import data
    from capsnet.io import checkpoint
    from capsnet.lab.samples import mistaken

    lab = json.loads((site / "lab.json").read_text())
    test = data.load("mnist").test
    assert lab["samples"] == {"mnist": {"count": 50, "part": 500, "shape": [1, 28, 28]}}
    assert zlib.decompress((site / "samples/mnist/0.bin").read_bytes()) == test.images[:50].numpy().tobytes()
    (model,) = lab["models"]
    expected = mistaken(checkpoint.load(site.parent / "small-cnn"), test.images[:50], test.labels[:50])
    assert model["mistakes"] == expected


def test_no_file_contains_a_path_of_this_machine(site: Path) -> None:
    secret = str(Path(graphs.__file__).parents[3]).encode()
    for path in site.rglob("*.bin"):
        assert secret not in zlib.decompress(path.read_bytes()), path
    assert secret not in (site / "lab.json").read_bytes()


def test_routings_of_the_browser_are_those_that_python_names() -> None:
    source = (JS / "routings.js").read_text()
    listed = re.search(r"export const ROUTINGS = \{(.*?)\};", source, re.DOTALL)
    assert listed
    names = {entry.split(":")[0].strip().strip('"') for entry in listed[1].split(",") if entry.strip()}
    assert names == set(graphs.ROUTINGS)


def test_a_model_whose_routing_the_browser_lacks_is_left_out_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], forget_plugins: None
) -> None:
    load_plugin(PLUGIN)
    gated = write_model(tmp_path / "gated", CapsNetConfig(**SMALL, routing=options_for("gates"), decoder=(8,)))
    assert main(["lab", gated, "--export", str(tmp_path / "site")]) == 2
    said = capfd.readouterr().err.strip().splitlines()
    assert said[0] == "capsnet: gated is left out of the site: the browser has no gates routing."
    assert "none of the models can run in a browser" in said[-1]
    assert {path.name for path in tmp_path.iterdir()} == {"gated"}


def test_a_folder_that_is_no_exported_lab_is_not_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["lab", "--export", str(tmp_path)]) == 2
    assert "not an exported Lab" in capfd.readouterr().err
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_current_folder_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["lab", "--export", "."]) == 2
    assert "contains the current folder" in capfd.readouterr().err


def npm_that(folder: Path, script: str) -> Path:
    """An npm that runs these lines of sh; the last argument is the folder to download into."""
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\nfor last; do :; done\n{script}\n")
    npm.chmod(npm.stat().st_mode | stat.S_IXUSR)
    return npm


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (None, "which is not installed: install Node.js"),
        ('echo "npm error network" >&2; exit 1', "(npm error network): check the connection"),
        ('echo other > "$last/onnxruntime-web.tgz"', "delivered another onnxruntime-web"),
    ],
)
def test_without_the_right_runtime_nothing_is_written(
    script: str | None,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = None if script is None else str(npm_that(tmp_path, script))
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(runtime.shutil, "which", lambda name: found)
    assert main(["lab", "quick-mnist", "--export", str(tmp_path / "site")]) == 2
    assert expected in capfd.readouterr().err
    assert not (tmp_path / "site").exists()
