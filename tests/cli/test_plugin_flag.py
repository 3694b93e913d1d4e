"""`--plugin FILE` on every verb, and a start-up that does not wait for PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import capsnet
from capsnet.cli import VERBS, main

Capture = pytest.CaptureFixture[str]


def test_plugins_are_loaded_wherever_the_flag_stands(tmp_path: Path, capsys: Capture) -> None:
    for number in range(3):
        (tmp_path / f"{number}.py").write_text(f"open({str(tmp_path / str(number))!r}, 'w').close()")
    words = ["--plugin", str(tmp_path / "0.py"), "data", f"--plugin={tmp_path / '1.py'}", "list", "mnist"]
    assert main([*words, "--plugin", str(tmp_path / "2.py")]) == 0
    assert all((tmp_path / str(number)).exists() for number in range(3))
    assert "mnist" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("raise RuntimeError('broken')", "broken"), ("def (", "syntax error in line 1"), (None, "there is no plugin")],
)
def test_a_missing_or_broken_plugin_is_one_sentence(
    tmp_path: Path, capsys: Capture, text: str | None, sentence: str
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    assert main(["data", "--plugin", str(file)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert "Traceback" not in error


def test_a_plugin_flag_needs_a_file_and_a_verb(tmp_path: Path, capsys: Capture) -> None:
    assert main(["data", "--plugin"]) == 2
    assert "--plugin needs a value" in capsys.readouterr().err
    assert main(["--plugin", str(tmp_path / "mine.py")]) == 2
    assert "a verb is missing" in capsys.readouterr().err


ROUTING = """
from dataclasses import dataclass

import torch
from capsnet.routing import Routed, Routing, RoutingOptions, register


@dataclass(frozen=True)
class MeanOptions(RoutingOptions):
    scale: float = 1.0
    "Factor of the mean vote."


@register("mean")
class MeanRouting(Routing):
    Options = MeanOptions

    def route(self, u_hat, a, parents, trace):
        v = self.options.scale * u_hat.mean(1)
        return Routed(v, v.norm(dim=-1).clamp(max=1.0))
"""


@pytest.fixture
def routing(tmp_path: Path) -> str:
    (tmp_path / "mean.py").write_text(ROUTING)
    return str(tmp_path / "mean.py")


@pytest.mark.usefixtures("elsewhere", "forget_plugins")
def test_a_routing_of_a_plugin_is_trained_and_used_in_another_process(routing: str, tiny_flags: list[str]) -> None:
    words = ["--model.routing", "mean", "--model.routing.scale", "0.5", "--no-report", "--no-tensorboard"]
    assert main(["train", "--plugin", routing, *words, *tiny_flags, "--out", "run"]) == 0
    command = [sys.executable, "-m", "capsnet", "evaluate", "run"]
    used = subprocess.run([*command, "--plugin", routing, "--json"], capture_output=True, check=True)
    assert json.loads(used.stdout)["n"] == 8
    without = subprocess.run(command, capture_output=True, text=True, check=False)
    assert without.returncode == 2
    assert "add --plugin mean.py" in without.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_mentions_the_flag(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    assert "--plugin FILE" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--version"], [], ["--help"]])
def test_version_and_overview_take_little_time_because_they_import_no_torch(words: list[str]) -> None:
    code = (
        f"import json, sys, time; from capsnet.cli import main; main({words!r}); "
        f"json.dump([time.process_time(), sorted({{'torch', 'numba', 'numpy'}} & set(sys.modules))], sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    seconds, costly = json.loads(done.stderr)
    assert capsnet.__version__ in done.stdout
    assert costly == []
    assert seconds < 0.5, "of processor time; 0.1 are usual, and importing torch alone takes more than 1"


def test_importing_capsnet_does_not_import_torch_and_its_names_do() -> None:
    code = "import sys, capsnet; print('torch' in sys.modules); capsnet.DenseCaps; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_every_public_name_is_listed_and_an_unknown_one_refused() -> None:
    assert set(capsnet.__all__) <= set(dir(capsnet))
    with pytest.raises(AttributeError, match="no attribute 'DenseCap'"):
        capsnet.DenseCap  # noqa: B018
