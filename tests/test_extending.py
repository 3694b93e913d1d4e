"""The guide to extending capsnet: its files are those tested here, and every command of it works, step by step."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import capsnet
from capsnet import plugins
from capsnet.cli import main
from capsnet.cli.flags import PLUGIN_HELP
from capsnet.lab.models import Shelf
from capsnet.nn.conv import ConvCaps
from capsnet.nn.layers import DenseCaps
from capsnet.routing import ROUTINGS
from capsnet.train import loop

PLUGINS = Path(__file__).parent / "plugins"
GUIDE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
COMMANDS = [shlex.split(line) for language, text in BLOCKS if not language for line in text.splitlines()]
TINY = shlex.split(
    "--epochs 1 --batch-size 25 --no-tensorboard --no-report --model.stem-channels 8 --model.stem-kernels 9 "
    "--model.stem-strides 2 --model.primary-types 2 --model.decoder 16"
)
LIMITS = ["--train-limit", "100", "--validation", "100"]
Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("forget_plugins", "one_thread")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the plugins and a photo, in which the commands run one after the other."""
    folder = tmp_path_factory.mktemp("desk")
    for name in ("my_routing.py", "my_model.py", "my_dataset.py"):
        shutil.copy(PLUGINS / name, folder)
    Image.fromarray(200 * np.eye(28, dtype=np.uint8)).save(folder / "photo.png")
    return folder


@pytest.fixture(autouse=True)
def _at_the_desk(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)


def shortened(words: list[str]) -> list[str]:
    """A command of the guide with little to do."""
    if words[0] == "train" and "--resume" not in words:
        limits = ["--validation", "20"] if "my_dataset.py" in words else LIMITS
        network = ["--model.types", "2"] if "shallow" in words else TINY[6:]
        return [*words, *TINY[:6], *limits, *network]
    if words[0] in ("ablate", "search"):
        few = {"ablate": ["--seeds", "2", "--name", "few"], "search": ["--trials", "2", "--workers", "1"]}[words[0]]
        kept = [word for word in words if word not in ("--seeds", "3", "--trials", "20")]
        return [*kept, *few, *LIMITS, *TINY[:4], *TINY[6:]]
    return words + ["--skip-speed"] * (words[0] == "export")


def test_the_guide_shows_the_files_that_are_tested() -> None:
    shown = [text for language, text in BLOCKS if language in ("python", "toml")]
    for file in ("my_routing.py", "my_model.py", "my_dataset.py", "capsnet-sharp/pyproject.toml"):
        text = (PLUGINS / file).read_text()
        assert text in shown, f"docs/extending.md does not show tests/plugins/{file} as it is"
        assert len(text.splitlines()) <= 40


@pytest.mark.parametrize(
    "words", [words[1:] for words in COMMANDS if words[0] == "capsnet" and words[1] != "lab"], ids=" ".join
)
def test_a_command_of_the_guide_works(words: list[str], capsys: Capture) -> None:
    if "sharp-installed" in words[-1]:
        words = [*words, "--plugin", "my_routing.py"]  # the test below installs the package
    assert main(shortened(words)) == 0, capsys.readouterr().err


def test_the_lab_lists_the_model_and_shows_its_routing() -> None:
    capsnet.load_plugin("my_routing.py")
    shelf = Shelf(["runs/sharp"])
    shown = {model["name"]: model for model in shelf.listing()["models"]}
    assert shelf.default == "sharp"
    assert shown["sharp"]["routing"]["name"] == "sharp"
    trace = shelf.load("sharp")(torch.rand(2, 1, 28, 28), trace=True).trace
    torch.testing.assert_close(trace.couplings.sum(-1), torch.ones(trace.couplings.shape[:-1]))


def test_the_python_of_the_guide_runs(capsys: Capture) -> None:
    code = next(text for language, text in BLOCKS if language == "python" and "DenseCaps(" in text and "@" not in text)
    exec(compile(code, "extending.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([2, 10, 16]) torch.Size([1, 2, 1152, 10])\n"


def test_the_parameter_and_the_option_of_the_routing_are_used() -> None:
    capsnet.load_plugin("my_routing.py")
    layer = DenseCaps(6, 4, 3, 5, routing="sharp", start=2.0)
    assert layer.routing.get_parameter("sharpness") == 2
    layer(torch.randn(2, 6, 4)).square().sum().backward()
    assert layer.routing.get_parameter("sharpness").grad != 0
    model = capsnet.load("runs/sharp")
    assert model.state_dict()["caps.0.routing.sharpness"] != 1  # it was trained
    assert model.config.routing.start == 1


def test_the_routing_of_a_plugin_works_in_every_layer() -> None:
    capsnet.load_plugin("my_routing.py")
    stack = nn.Sequential(
        DenseCaps(24, 4, 6, 9, routing="sharp", shared=4), DenseCaps(6, 9, 3, 9, routing="sharp", matrix=True)
    )
    assert stack(torch.randn(2, 24, 4)).shape == (2, 3, 9)
    poses = ConvCaps(4, 6, 5, 8, routing="sharp")(torch.randn(2, 5, 5, 4, 6))
    assert poses.shape == (2, 3, 3, 5, 8)
    poses.sum().backward()


def forget() -> None:
    """As in a new process."""
    plugins._loaded.clear()
    del ROUTINGS._entries["sharp"], ROUTINGS._origins["sharp"]


def said(capsys: Capture) -> str:
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error.splitlines()[-1]


def test_a_run_is_resumed_with_its_plugin_and_without_it_asks_for_it(capsys: Capture) -> None:
    class Interrupt(loop.Watcher):
        def stepped(self, run: loop.Run, record: dict) -> None:
            raise KeyboardInterrupt

    words = shortened(["train", "--plugin", "my_routing.py", "--model.routing", "sharp", "--out", "runs/cut"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("capsnet.cli.train.TrainingBar", Interrupt)
        assert main(words) == 130
    sha256 = hashlib.sha256(Path("my_routing.py").read_bytes()).hexdigest()
    assert json.loads(Path("runs/cut/config.json").read_text())["plugins"] == [
        {"kind": "routing", "name": "sharp", "plugin": "my_routing.py", "sha256": sha256}
    ]
    assert "resume with: capsnet train --resume runs/cut --plugin my_routing.py\n" in capsys.readouterr().err
    forget()
    assert main(["train", "--resume", "runs/cut"]) == 2
    assert said(capsys).endswith("needs the routing 'sharp' of the plugin my_routing.py: add --plugin my_routing.py.")
    assert main(["train", "--resume", "runs/cut", "--plugin", "my_routing.py", "--no-report", "--no-tensorboard"]) == 0


@pytest.mark.parametrize(
    "words",
    [
        ["evaluate", "runs/sharp"],
        ["predict", "runs/sharp", "photo.png"],
        ["export", "runs/sharp", "--out", "other.onnx"],
        ["reconstruct", "runs/sharp"],
        ["reproduce", "figures", "--model", "runs/sharp"],
        ["lab", "runs/sharp", "--no-browser", "--port", "0"],
    ],
    ids=" ".join,
)
def test_without_the_plugin_every_verb_says_what_is_missing(words: list[str], capsys: Capture) -> None:
    assert main(words) == 2
    assert said(capsys).endswith(
        "model.safetensors needs the routing 'sharp' of the plugin my_routing.py: add --plugin my_routing.py."
    )


def test_the_help_of_a_plugins_option_is_its_docstring(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--plugin", "my_routing.py", "--model.routing", "sharp", "--help"])
    page = " ".join(capsys.readouterr().out.split())
    assert "--model.routing.start" in page
    assert "Initial sharpness." in page
    assert " ".join(PLUGIN_HELP.split()) in page


# --- The same algorithm as an installed package --------------------------------------------------------------------

USE = """
from capsnet.cli import main
from capsnet.lab.models import Shelf
for words in (["evaluate", "runs/packed"], ["predict", "runs/packed", "photo.png"],
              ["export", "runs/packed", "--skip-speed", "--out", "packed.onnx"]):
    assert main(words) == 0
shelf = Shelf(["runs/packed"])
print(next(model["routing"]["name"] for model in shelf.listing()["models"] if model["name"] == shelf.default))
"""


def python(*words: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A new process, with a folder of installed packages or without it."""
    source = str(Path(capsnet.__file__).parent.parent)
    folders = os.pathsep.join([source, *([str(path)] if path else [])])
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False, env=environment)


def test_an_installed_package_is_used_by_name_in_new_processes(tmp_path: Path) -> None:
    shutil.copytree(PLUGINS / "capsnet-sharp", tmp_path / "package")
    shutil.copy(PLUGINS / "my_routing.py", tmp_path / "package" / "capsnet_sharp.py")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "installed")]
    done = python("-m", "pip", "install", *options, str(tmp_path / "package"))
    assert done.returncode == 0, done.stderr
    words = shortened(["train", "--model.routing", "sharp", "--out", "runs/packed"])
    trained = python("-m", "capsnet", *words, path=tmp_path / "installed")
    assert trained.returncode == 0, trained.stderr
    used = python("-c", USE, path=tmp_path / "installed")
    assert used.returncode == 0, used.stderr
    assert used.stdout.splitlines()[-1] == "sharp"
    without = python("-m", "capsnet", "evaluate", "runs/packed")
    assert without.returncode == 2
    assert without.stderr.splitlines() == [
        "capsnet: runs/packed/model.safetensors needs the routing 'sharp' of the plugin capsnet-sharp 0.1: "
        "install capsnet-sharp 0.1."
    ]
