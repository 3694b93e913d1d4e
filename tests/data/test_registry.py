"""Datasets by name: one record each, strings parsed once, and a plugin's dataset wherever a built-in one works."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from capsnet import data
from capsnet.cli import main
from capsnet.data.registry import DATASETS, DatasetInfo, Request, bin_edges
from capsnet.errors import UserError
from capsnet.train.presets import PRESETS

PLUGIN = Path(__file__).parent.parent / "plugins" / "my_dataset.py"
FAST = ["--epochs", "1", "--batch-size", "20", "--validation", "40", "--no-report", "--no-tensorboard"]
SMALL = ["--model.stem-channels", "8", "--model.stem-kernels", "5", "--model.stem-strides", "2", "--model.decoder"]


@pytest.mark.parametrize("name", DATASETS.names())
def test_every_record_is_complete(name: str) -> None:
    info = DATASETS.get(name)
    assert info.name == name
    assert "\n" not in info.description
    assert info.preset in PRESETS
    assert not info.made_of or info.made_of in DATASETS
    assert not (info.takes_path and info.options)
    for edges in info.measures.values():
        assert list(edges) == sorted(set(edges))
    for option in fields(info.options) if info.options else ():
        assert option.type in ("int", "float", "str")


def test_what_a_record_says_is_what_is_loaded() -> None:
    for name in ("mnist", "multimnist:test=50", "expanded-mnist", "affine-mnist:per_digit=2", "parts:train=64,test=32"):
        spec, splits = data.parse(name), data.load(name, validation=0)
        assert splits.test.classes == spec.info.classes
        assert splits.test.image_shape == spec.info.image_shape
        assert (len(splits.train), len(splits.test)) == spec.sizes
        assert splits.test.labels_per_image == spec.labels_per_image
        assert set(splits.test.gather(splits.test.sample(2)).measures) == set(bin_edges(name))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("mnits", "did you mean 'mnist'"),
        ("folder", "write folder:PATH"),
        ("mnist:side=3", "mnist has no options"),
        ("multimnist:canvas", "should be an integer"),
        ("tests", "did you mean folder:tests"),
        ("", "there is no dataset ''. The choices are"),
    ],
)
def test_a_wrong_name_is_answered_in_a_sentence(text: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    with pytest.raises(UserError, match=said):
        data.parse(text)


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(UserError, match="rename it"):
        data.register(DatasetInfo("mnist", "another one", lambda request: request.load_base()))


def test_a_dataset_in_another_size_than_requested_is_refused() -> None:
    asked = Request(data.parse("parts:train=8,test=8"), validation=0)
    assert data.load("parts:train=8,test=8", validation=0, image_size=40).test.image_shape == (1, 40, 40)
    with pytest.raises(UserError, match=r"\(3, 40, 40\) was requested"):
        data.registry.load_request(replace(asked, channels=3))


def test_generated_examples_can_be_kept_in_memory() -> None:
    scenes = data.load("multimnist:test=20").test
    kept = scenes.in_memory()
    expected = scenes.gather(scenes.numbers())
    torch.testing.assert_close(kept.gather(expected.index).images, expected.images)
    assert torch.equal(kept.targets, scenes.targets)


def test_parsing_a_name_needs_no_pytorch() -> None:
    code = "import sys, capsnet.data.registry, capsnet.data.config; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_plugin_is_short_enough_for_a_page() -> None:
    assert len(PLUGIN.read_text().splitlines()) <= 40


@pytest.mark.usefixtures("forget_plugins")
def test_a_plugins_dataset_trains_evaluates_and_predicts_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plugin = str(tmp_path / "run"), ["--plugin", str(PLUGIN)]
    assert main(["train", "--data", "shapes:train=200", *FAST, *SMALL, "--out", run, *plugin]) == 0
    capsys.readouterr()
    assert main(["evaluate", run, "--json", *plugin]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == 100
    assert found["errors"] == json.loads((tmp_path / "run" / "results.json").read_text())["test"]["errors"]
    Image.new("RGB", (30, 30), "red").save(tmp_path / "photo.png")
    assert main(["predict", run, str(tmp_path / "photo.png"), "--json", *plugin]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] in ("disc", "square")
    assert main(["data", "list", "--json", *plugin]) == 0
    assert "shapes" in [row["name"] for row in json.loads(capsys.readouterr().out)["data"]]
    command = [sys.executable, "-m", "capsnet", "evaluate", run]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs the dataset 'shapes' of the plugin my_dataset.py: add --plugin my_dataset.py" in done.stderr
