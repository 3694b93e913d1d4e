"""The notebooks: generated from their sources, readable without running, and they run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMES = ["capsules-in-ten-minutes", "compare-two-routings", "routing-by-hand", "your-own-images"]


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)


@pytest.fixture(autouse=True)
def tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))


def test_these_are_all_notebooks() -> None:
    assert sorted(path.stem for path in (ROOT / "examples").glob("*.ipynb")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_what_its_source_says(name: str) -> None:
    import notebooks

    assert [cell.source for cell in stored(name).cells] == [cell.source for cell in notebooks.notebook(name).cells]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_can_be_read_without_running_it(name: str) -> None:
    found = stored(name)
    nbformat.validate(found)
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1
    assert not [output for output in outputs if output.output_type == "error"]
    assert "colab.research.google.com" in found.cells[0].source
    assert (ROOT / "examples" / f"{name}.ipynb").stat().st_size < 1_000_000
    assert str(Path.home()) not in (ROOT / "examples" / f"{name}.ipynb").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_the_imports_of_a_notebook_exist(name: str) -> None:
    source = "\n".join(cell.source for cell in stored(name).cells if cell.cell_type == "code")
    imports = [n for n in ast.parse(source).body if isinstance(n, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), name, "exec"), {})


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_within_three_minutes(name: str, tmp_path: Path) -> None:
    code = f"import notebooks, pathlib; notebooks.execute({name!r}, pathlib.Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "tools", capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
