"""What README and docs say: their numbers come out of results/, and their commands run."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from capsnet import data
from pictures import photo_of, write_folder

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
COMMANDS = [
    shlex.split(line, comments=True)
    for language, block in BLOCKS
    for line in block.splitlines()
    if not language and line.startswith("capsnet ")
]
LAB = ["capsnet", "lab"]
TRAININGS = (
    ["capsnet", "demo"],
    ["capsnet", "train", "--preset", "paper"],
    ["capsnet", "reproduce", "table1", "--budget", "hour"],
    ["capsnet", "search", "--space", "training", "--minutes", "1"],
)
LONG = (*TRAININGS, LAB, ["capsnet", "bench", "--quick"])  # the last one has tests of its own


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "capsnet.cli", *words[1:]]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def desk(run: Path, digits: data.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the README's commands find what they name."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "runs").mkdir()
    (folder / "runs" / "demo").symlink_to(run)
    photo_of(digits.images[0, 0].numpy(), folder / "photo.png")
    write_folder(folder / "photos", ("cat", "dog"), n=100)
    photo_of(digits.images[0, 0].numpy(), folder / "new.jpg")
    return folder


def test_every_table_is_what_the_results_say() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "generate.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: lower case, hyphens for spaces, no other signs."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    }


def test_every_link_and_picture_of_the_pages_exists() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"(?:\]\(|src=\")([^)#\"]*)(?:#([^)\"]+))?", page.read_text()):
            if target.startswith("https://"):
                continue
            place = page.parent / target if target else page
            assert place.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in anchors(place), f"{page.name}: {target}#{anchor}"


def test_the_readme_names_the_two_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert re.search(rf"^make {target}\b", README, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("words", [c for c in COMMANDS if c not in LONG], ids=" ".join)
def test_a_command_of_the_readme_runs(words: list[str], desk: Path) -> None:
    out, error = start(words, desk).communicate(timeout=300)
    assert out, error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", TRAININGS, ids=" ".join)
def test_a_long_training_of_the_readme_starts_and_says_how_to_go_on(words: list[str], tmp_path: Path) -> None:
    assert words in COMMANDS
    with start(words, tmp_path) as process:
        while not list(tmp_path.rglob("metrics.jsonl")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "go on with: capsnet " in error


def test_the_lab_of_the_readme_opens_a_page_and_ends_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAB in COMMANDS
    monkeypatch.setenv("BROWSER", "true")  # the command that does nothing, instead of a window
    with start(LAB, tmp_path) as process:
        assert process.stdout
        address = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        assert address
        with urllib.request.urlopen(address[0], timeout=60) as page:
            assert b"Capsule Lab" in page.read()
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "Traceback" not in error


def test_the_python_of_the_readme_runs(run: Path, digits: data.Dataset, tmp_path: Path) -> None:
    import torch

    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "demo").symlink_to(run)
    names = {"torch": torch, "images": digits.images[:4].numpy()}
    for language, block in BLOCKS:
        if language == "python":
            exec(block.replace('"runs/demo"', repr(str(run))), names)
    assert names["seen"].trace.couplings.shape[1] == 4  # type: ignore[attr-defined]
    assert names["capsules"](torch.zeros(2, 256, 20, 20)).shape == (2, 10, 16)  # type: ignore[operator]
