"""The wheel: the same bytes twice, complete, small enough, and usable in an empty environment."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zlib
from pathlib import Path

import pytest

import capsnet

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.slow
def test_the_wheel_is_reproducible_and_works_in_an_empty_environment(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "wheel.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("*.whl"))
    assert list(tmp_path.glob("*.tar.gz"))


def test_the_weights_leave_the_wheel_below_its_limit() -> None:
    weights = [path.read_bytes() for path in (ROOT / "src" / "capsnet" / "weights").iterdir()]
    assert sum(len(zlib.compress(each)) for each in weights) < 59_000_000  # the rest has under 1 MB


def test_the_metadata_are_complete_and_say_the_version_once() -> None:
    assert PROJECT["version"] == capsnet.__version__
    assert {"description", "readme", "license", "requires-python", "authors", "urls", "classifiers"} <= set(PROJECT)


def test_the_release_publishes_what_the_wheel_script_checks_without_a_password() -> None:
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "python tools/wheel.py" in workflow
    assert "id-token: write" in workflow
    assert not re.search(r"password:|secrets\.", workflow)
