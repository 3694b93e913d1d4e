"""Imports go one way, `import capsnet` is quick and drags in nothing, and what is public is documented."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import capsnet

ROOT = Path(capsnet.__file__).parent

# What stands on the left may import what stands on the right (and itself); what is not listed may import anything that
# is not reserved below. `nn` has two floors: functional and losses know nothing of ours, layers know routing.
MAY_IMPORT = {
    "errors": set(),
    "lazy": set(),
    "files": {"errors"},
    "notice": set(),
    "terminal": {"timing"},
    "registry": {"errors"},
    "ranges": {"errors"},
    "records": {"errors"},
    "helper_process": {"errors"},
    "plugins": {"errors", "notice", "registry"},
    "nn.functional": set(),
    "nn.options": set(),
    "nn.shares": set(),
    "group": {"errors", "nn.shares"},
    "nn.initial": {"errors", "nn.options"},
    "nn.losses": {"errors", "nn.functional", "nn.options"},
    "kernels": {"errors", "nn.functional", "routing"},  # of routing the options alone
    "routing": {"errors", "lazy", "ranges", "registry", "nn.functional", "nn.shares", "kernels"},
    "sync": {"errors"},
    "nn.decoder": {"errors", "kernels", "nn.initial", "nn.options"},
    "nn.layers": {"errors", "kernels", "routing", "nn.functional", "nn.initial", "nn.options"},
    "nn.residual": {"errors", "nn.layers"},
    "data": {"errors", "files", "lazy", "notice", "helper_process", "registry", "terminal", "nn.functional"},
    "models": {"errors", "lazy", "ranges", "records", "registry", "kernels", "routing", "sync", "data"}
    | {f"nn.{name}" for name in ("functional", "options", "losses", "layers", "conv", "residual", "decoder")},
    "train.config": {"ranges", "data", "models"},
    "evaluate": {"errors", "nn.functional", "data", "models", "group"},
    "io.records": {"errors", "records"},
    "io.zoo": {"errors", "files", "io.records"},
}
# What stands on the left is imported by what stands on the right only.
ONLY_IMPORTED_BY = {
    "cli": {"__main__"},
    "lab": {"cli"},
    "experiments": {"cli", "search"},
    "search": {"cli"},
    "report": {"cli", "experiments", "search"},
    "io.export": {"cli", "lab"},
}
HEAVY = [
    *("matplotlib", "tensorboard", "fastapi", "PIL", "tyro", "rich", "numba", "optuna", "sklearn", "huggingface_hub"),
    *("onnx", "onnxscript", "onnxruntime"),
]
WITH_EXAMPLES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if ">>> " in path.read_text())


def room(path: Path) -> str:
    """The file or folder right under src/capsnet that a source file belongs to; in nn, train and io each file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:2]) if parts[0] in ("nn", "train", "io") and parts[1:] != ("__init__",) else parts[0]


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
            ours = [p[1:] for p in parts if p[0] == "capsnet" and len(p) > 1]
            used |= {name for p in ours for name in (p[0], ".".join(p[:2])) if name in rooms - {"nn", "train", "io"}}
    return {name: used - {name} for name, used in graph.items()}


GRAPH = imports_between_rooms()


def test_the_house_is_where_the_test_looks() -> None:
    assert set(MAY_IMPORT) <= set(GRAPH)
    assert {"nn.layers", "routing"} <= GRAPH["models"]


@pytest.mark.parametrize("name", sorted(MAY_IMPORT))
def test_a_room_stands_only_on_the_rooms_below_it(name: str) -> None:
    assert GRAPH[name] <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", sorted(ONLY_IMPORTED_BY))
def test_what_is_for_the_command_line_is_imported_by_nobody_else(name: str) -> None:
    importers = {user for user, used in GRAPH.items() if name in used}
    assert importers <= ONLY_IMPORTED_BY[name]


def test_there_is_no_circle() -> None:
    below = {name: used - ({"routing"} if name == "kernels" else set()) for name, used in GRAPH.items()}
    del below["__init__"]
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
    assert min(float(run(code)) for _ in range(2)) < 1


@pytest.mark.parametrize("module", ["data.config", "models.config", "train.config", "train.presets", "routing.options"])
def test_a_config_module_imports_no_torch(module: str) -> None:
    assert run(f"import sys, capsnet.{module}; print('torch' in sys.modules)") == "False"


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


PRIVATE = re.compile(
    r"\btorch(\.\w+)*\._[a-z]|\btorch\._C\b|\bfrom torch\S* import _|\btorch\.ops\.aten\b|\bnumba\.core\b|_internal\b"
    r"|\b_dynamo|\._(forward|backward)(_pre)?_hooks\b|\bGOMP_|\blibtorch"
)


def test_private_apis_are_used_in_one_file() -> None:
    users = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if PRIVATE.search(path.read_text())}
    assert users == {"kernels/private.py"}


def test_every_module_says_what_it_is() -> None:
    for path in ROOT.rglob("*.py"):
        if text := path.read_text():
            assert ast.get_docstring(ast.parse(text)), path


@pytest.mark.usefixtures("forget_plugins")
@pytest.mark.parametrize("file", WITH_EXAMPLES)
def test_the_examples_in_the_docstrings_run(file: str) -> None:
    dotted = ".".join(["capsnet", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    outcome = doctest.testmod(importlib.import_module(dotted), extraglobs={"torch": torch})
    text = (ROOT / file).read_text()
    assert outcome.failed == 0
    assert outcome.attempted == text.count(">>> ") - text.count("# doctest: +SKIP")
