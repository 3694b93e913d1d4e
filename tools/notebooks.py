"""Generate the notebooks of examples/ from examples/source/*.py and execute them.

    python tools/notebooks.py                        all of them, with outputs
    python tools/notebooks.py routing-by-hand        only this one

A source is a Python file with cells that start with `# %%`, or `# %% [markdown]` for text.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
COLAB = (
    "*To run this on Colab: open colab.research.google.com and upload the file. The first cell installs what it needs.*"
)
INSTALL = """# On Colab: install the package, which is there already if you run this notebook from its repository.
import importlib.util

if importlib.util.find_spec("capsnet") is None:
    get_ipython().run_line_magic("pip", "install --quiet 'capsnet[train,fast,sklearn]'")"""
SECONDS = 600


def names() -> list[str]:
    return sorted(path.stem for path in (EXAMPLES / "source").glob("*.py"))


def cells(source: str) -> list[tuple[str, str]]:
    """Kind and text of each cell of a source.

    >>> cells("# %% [markdown]\\n# # Title\\n\\n# %%\\nx = 1\\n")
    [('markdown', '# Title'), ('code', 'x = 1')]
    """
    found = []
    for part in ("\n" + source).split("\n# %%")[1:]:
        first, _, rest = part.partition("\n")
        if "[markdown]" in first:
            lines = [line.removeprefix("#").removeprefix(" ") for line in rest.strip().splitlines()]
            found.append(("markdown", "\n".join(lines)))
        else:
            found.append(("code", rest.strip()))
    return found


def notebook(name: str) -> nbformat.NotebookNode:
    """The notebook of a source, without outputs."""
    (_, title), *rest = cells((EXAMPLES / "source" / f"{name}.py").read_text())
    made = [new_markdown_cell(f"{title}\n\n{COLAB}"), new_code_cell(INSTALL)]
    made += [new_markdown_cell(text) if kind == "markdown" else new_code_cell(text) for kind, text in rest]
    for number, cell in enumerate(made):
        cell["id"] = f"cell-{number}"  # the same in every generation
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return new_notebook(cells=made, metadata=kernel)


def execute(name: str, folder: Path) -> nbformat.NotebookNode:
    """The notebook with its outputs, run in a folder."""
    made = notebook(name)
    NotebookClient(made, timeout=SECONDS, resources={"metadata": {"path": str(folder)}}).execute()
    for cell in made.cells:
        cell.metadata = nbformat.NotebookNode()  # without times of execution
    return made


def main(chosen: list[str]) -> int:
    for name in chosen or names():
        began = time.monotonic()
        made = execute(name, EXAMPLES)
        nbformat.write(made, EXAMPLES / f"{name}.ipynb")
        print(f"{name}: {time.monotonic() - began:.0f} s, {(EXAMPLES / f'{name}.ipynb').stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
