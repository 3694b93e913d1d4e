"""The examples run as they are printed in the docs; here with fewer images."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES = {"plain_loop.py": 30, "lightning_loop.py": 40}


def run(script: Path, folder: Path) -> str:
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def accuracy(out: str) -> float:
    return float(re.findall(r"accuracy\D*(\d\.\d+)", out)[-1])


@pytest.mark.parametrize("name", MOST_LINES)
def test_an_example_of_a_loop_is_short_and_runs(name: str, tmp_path: Path) -> None:
    text = (ROOT / "examples" / name).read_text()
    assert len(text.splitlines()) <= MOST_LINES[name]
    short = tmp_path / name
    short.write_text(text.replace("2000", "400"))
    assert accuracy(run(short, tmp_path)) > 0.3


@pytest.mark.slow
@pytest.mark.parametrize("name", MOST_LINES)
def test_an_example_of_a_loop_learns(name: str, tmp_path: Path) -> None:
    assert accuracy(run(ROOT / "examples" / name, tmp_path)) > 0.85


@pytest.mark.parametrize("name", MOST_LINES)
def test_the_guide_prints_the_examples_as_they_are(name: str) -> None:
    guide = (ROOT / "docs" / "own-loop.md").read_text()
    assert (ROOT / "examples" / name).read_text().strip() in guide
