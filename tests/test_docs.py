"""README and docs: numbers come from results/, commands run, the site builds and its links work."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest

import capsnet
from capsnet import data
from capsnet.cli import main
from pictures import photo_of, write_folder

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / name for name in ("README.md", "RESULTS.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [path for folder in ("docs", "research") for path in sorted((ROOT / folder).rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """The capsnet commands in the code blocks of a page."""
    blocks = [block.replace("\\\n", " ") for language, block in BLOCK.findall(text) if not language]
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("capsnet ")]
    return [shlex.split(line, comments=True) for line in lines]


COMMANDS = commands(README)
LAB = ["capsnet", "lab"]
TRAININGS = (
    ["capsnet", "demo"],
    ["capsnet", "reproduce", "table1", "--budget", "hour"],
    ["capsnet", "search", "--space", "training", "--minutes", "1"],
)
FLAGS = sorted({(words[1], word) for page in PAGES for words in commands(page.read_text()) for word in words})


def start(words: list[str], folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "capsnet", *words[1:]]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def desk(run: Path, digits: data.Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the commands of the README refer to."""
    folder = tmp_path_factory.mktemp("desk")
    (folder / "runs").mkdir()
    (folder / "runs" / "demo").symlink_to(run)
    photo_of(digits.images[0, 0].numpy(), folder / "photo.png")
    write_folder(folder / "photos", ("cat", "dog"), n=20)
    photo_of(digits.images[0, 0].numpy(), folder / "new.jpg")
    return folder


# --- Numbers and links -------------------------------------------------------------------------------------------


def test_every_table_is_what_the_results_say() -> None:
    command = [sys.executable, ROOT / "tools" / "generate.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_result_pages_are_what_the_results_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from capsnet.experiments.core import page
    from capsnet.experiments.core.results import Place

    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(ROOT)
    for path in page.write(Place(), tmp_path):
        ours = ROOT / path.relative_to(tmp_path)
        pictures = re.compile(r"\]\([^)]*?/results/reproduce/")  # relative to where the page lies
        assert pictures.sub("](", path.read_text()) == pictures.sub("](", ours.read_text()), ours


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings: lower case, hyphens for spaces, no other signs."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_and_picture_of_a_page_exists(page: Path) -> None:
    text = BLOCK.sub("", page.read_text())
    for target, anchor in re.findall(r"(?:\]\(|src=\")([^)#\"]*)(?:#([^)\"]+))?", text):
        if target.startswith("https://"):
            continue
        place = page.parent / target if target else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


# --- The site ----------------------------------------------------------------------------------------------------


class Links(HTMLParser):
    """What a page of the site refers to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.fetched: list[str] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        if tag == "a" and "href" in found:
            self.targets.append(found["href"])
        elif tag in ("img", "script", "link", "iframe"):
            self.fetched += [found[name] for name in ("src", "href") if name in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Links]:
    """The pages of the site, built strictly: a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {}
    for path in folder.rglob("*.html"):
        if path.name != "404.html":
            pages[path] = Links()
            pages[path].feed(path.read_text())
    return pages


def test_every_link_of_the_site_leads_somewhere(site: dict[Path, Links]) -> None:
    for page, links in site.items():
        for target in links.targets + links.fetched:
            file, anchor = urldefrag(target)
            if file.startswith(("https://", "http://", "mailto:", "data:")):
                continue
            place = (page.parent / unquote(file)).resolve() if file else page
            assert place.exists(), f"{page.name}: {target}"
            if anchor and place in site:
                assert unquote(anchor) in site[place].ids, f"{page.name}: {target}"


def test_the_site_loads_nothing_from_other_servers(site: dict[Path, Links]) -> None:
    assert [(page.name, url) for page, links in site.items() for url in links.fetched if "://" in url] == []


def test_the_reference_documents_every_public_name(site: dict[Path, Links]) -> None:
    documented = {anchor.rpartition(".")[2] for links in site.values() for anchor in links.ids if "capsnet." in anchor}
    assert set(capsnet.__all__) - documented == set()


# --- Commands ----------------------------------------------------------------------------------------------------


def test_the_readme_names_the_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("lab", "demo", "test"):
        assert re.search(rf"^make {target}\b", README, re.MULTILINE)
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("verb", sorted({verb for verb, _ in FLAGS}))
def test_every_flag_in_the_docs_exists(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help"])
    told = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    known = set(re.findall(r"--[\w.-]+", told))
    assert {flag for other, flag in FLAGS if other == verb and flag.startswith("--")} - known == set()


@pytest.mark.parametrize("words", [c for c in COMMANDS if c not in (*TRAININGS, LAB)], ids=" ".join)
def test_a_command_of_the_readme_runs(
    words: list[str], desk: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(desk)
    assert main(words[1:]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out


@pytest.mark.parametrize("words", [TRAININGS[0], *(pytest.param(c, marks=pytest.mark.slow) for c in TRAININGS[1:])])
def test_a_long_training_of_the_readme_starts_and_says_how_to_resume(words: list[str], tmp_path: Path) -> None:
    assert words in COMMANDS
    with start(words, tmp_path) as process:
        while not list(tmp_path.rglob("metrics.jsonl")) and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "resume with: capsnet " in error


def test_the_lab_of_the_readme_opens_a_page_and_ends_quietly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LAB in COMMANDS
    monkeypatch.setenv("BROWSER", "true")  # a command that does nothing, instead of a window
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


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md"])
def test_the_python_of_a_page_runs(page: str, digits: data.Dataset) -> None:
    import torch

    names = {"torch": torch, "images": digits.images[:4].numpy()}
    for language, block in BLOCK.findall((ROOT / page).read_text()):
        if language == "python":
            exec(block, names)
    assert names["seen"].trace.couplings.shape[1] == 4  # type: ignore[attr-defined]
    assert names["capsules"](torch.zeros(2, 256, 20, 20)).shape == (2, 10, 16)  # type: ignore[operator]
