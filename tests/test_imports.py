"""Imports go one way, `import capsnet` is quick and drags in nothing, and what is public is documented."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capsnet

ROOT = Path(capsnet.__file__).parent

# The room on the left may use the rooms on the right (and itself); a room that is not listed may use anything
# that is not reserved below.
MAY_IMPORT = {
    "errors": set(),
    "functional": set(),
    "losses": {"errors", "functional"},
    "kernels": {"errors", "functional"},
    "routing": {"errors", "functional", "kernels"},
    "layers": {"errors", "functional", "kernels", "routing"},
    "data": {"errors", "functional"},
    "config": {"errors", "layers", "losses", "data"},
    "models": {"errors", "functional", "routing", "layers", "config"},
    "evaluation": {"errors", "functional", "data", "config", "models"},
    "zoo": {"errors"},
    "checkpoint": {"errors", "config", "models", "zoo"},
    "pretrained": {"errors", "data", "config", "models", "zoo", "checkpoint", "evaluation"},
}
# The room on the left is used by the rooms on the right only.
ONLY_IMPORTED_BY = {
    "cli": {"__main__"},
    "lab": {"cli"},
    "experiments": {"cli", "search"},
    "search": {"cli"},
    "report": {"cli", "experiments", "search"},
    "figures": {"cli", "experiments", "report", "search"},
    "export": {"cli"},
}
HEAVY = [
    *("matplotlib", "tensorboard", "fastapi", "PIL", "tyro", "rich", "numba", "optuna"),
    *("onnx", "onnxscript", "onnxruntime"),
]
WITH_EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ">>> " in path.read_text())


def room(path: Path) -> str:
    """The file or folder right under src/capsnet that a source file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(node: ast.AST) -> list[str]:
    """The dotted names of ours that an import statement may mean."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are written in full"
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def imports_between_rooms() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    rooms = {room(path) for path in ROOT.rglob("*.py")}
    for path in ROOT.rglob("*.py"):
        used = graph.setdefault(room(path), set())
        for node in ast.walk(ast.parse(path.read_text())):
            parts = [name.split(".") for name in imported(node)]
            used |= {p[1] for p in parts if p[0] == "capsnet" and len(p) > 1 and p[1] in rooms}
    return {name: used - {name} for name, used in graph.items()}


GRAPH = imports_between_rooms()


def test_the_house_is_where_the_test_looks() -> None:
    assert set(MAY_IMPORT) <= set(GRAPH)
    assert {"layers", "config"} <= GRAPH["models"]


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_a_room_stands_only_on_the_rooms_below_it(name: str) -> None:
    assert GRAPH[name] <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", sorted(ONLY_IMPORTED_BY))
def test_what_is_for_the_command_line_is_imported_by_nobody_else(name: str) -> None:
    importers = {user for user, used in GRAPH.items() if name in used}
    assert importers <= ONLY_IMPORTED_BY[name]


def test_there_is_no_circle() -> None:
    below = {name: used for name, used in GRAPH.items() if name != "__init__"}
    assert list(graphlib.TopologicalSorter(below).static_order())


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_layers_drags_in_nothing_heavy() -> None:
    code = "import sys, torch; before = set(sys.modules); import capsnet; print(*set(sys.modules) - before)"
    dragged_in = {name.split(".")[0] for name in run(code).split()}
    assert "capsnet" in dragged_in
    assert dragged_in.isdisjoint(HEAVY)


def test_the_import_takes_less_than_a_second_beyond_torch() -> None:
    code = "import time, torch; t = time.perf_counter(); import capsnet; print(time.perf_counter() - t)"
    assert min(float(run(code)) for _ in range(3)) < 1


def test_importing_leaves_the_process_as_it_was() -> None:
    code = (
        "import torch, random\n"
        "def state(): return torch.get_num_threads(), torch.get_rng_state().sum(), torch.get_default_dtype()\n"
        "before = state(); import capsnet; assert state() == before"
    )
    run(code)


def test_every_public_name_exists_and_is_documented() -> None:
    assert capsnet.__all__ == sorted(capsnet.__all__)
    for name in capsnet.__all__:
        thing = getattr(capsnet, name)
        doc = (thing.__doc__ or "").strip()
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name} has only the docstring that Python made up"


def test_every_module_says_what_it_is() -> None:
    for path in ROOT.rglob("*.py"):
        if text := path.read_text():
            assert ast.get_docstring(ast.parse(text)), path


@pytest.mark.parametrize("file", WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_run(file: str) -> None:
    dotted = ".".join(["capsnet", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    outcome = doctest.testmod(importlib.import_module(dotted), extraglobs={"torch": torch})
    text = (ROOT / file).read_text()
    assert outcome.failed == 0
    assert outcome.attempted == text.count(">>> ") - text.count("# doctest: +SKIP")
