"""Plugins: routings, datasets and models that live outside the package.

A plugin is a Python file that registers what it defines (`--plugin my_routing.py` on every verb, or
`capsnet.load_plugin("my_routing.py")`), or an installed package with entry points in the groups `capsnet.routings`,
`capsnet.datasets` and `capsnet.models`. A checkpoint records which plugins it needs; `require` turns a missing one into
a sentence that says how to supply it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from capsnet.errors import UserError
from capsnet.registry import BUILT_IN, Registry, registering_from

_loaded: dict[Path, str] = {}  # plugin file → sha256 of what was loaded


@dataclass(frozen=True)
class Need:
    """An entry of a registry that a model or a run cannot do without."""

    kind: str
    name: str
    plugin: str
    """The plugin's file name, or package and version."""


def load_plugin(path: str | Path) -> None:
    """Run a plugin's file once, so that what it registers is known by name.

    A plugin is a program: load only files that you trust.
    """
    file = Path(path).expanduser().resolve()
    if file in _loaded:
        return
    if not file.is_file():
        raise UserError(f"there is no plugin {path}: give the path of a Python file.")
    if twin := next((other for other in _loaded if other.name == file.name), None):
        raise UserError(f"{path} has the name of another plugin, {twin}: rename one, because checkpoints use the name.")
    name = f"capsnet_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file: a plugin ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with registering_from(file.name):
            spec.loader.exec_module(module)
    except UserError:
        raise
    except SyntaxError as error:
        raise UserError(f"the plugin {path} has a syntax error in line {error.lineno}: {error.msg}.") from error
    except Exception as error:  # somebody else's code may fail in any way
        raise UserError(f"the plugin {path} cannot be loaded: {error!r}.") from error
    _loaded[file] = hashlib.sha256(file.read_bytes()).hexdigest()


def flags() -> list[str]:
    """The `--plugin` flags of this process, for the processes that it starts."""
    return [word for file in _loaded for word in ("--plugin", str(file))]


def needs(used: Iterable[tuple[Registry[Any], str]]) -> list[dict[str, str]]:
    """What a record has to name so that another process can supply it: everything that is not built in."""
    found = [Need(registry.kind, name, registry.origin(name)) for registry, name in used]
    return [asdict(need) for need in found if need.plugin != BUILT_IN]


def require(record: Iterable[Mapping[str, str]], registries: Iterable[Registry[Any]], what: str) -> None:
    """Refuse a file whose plugins are missing, and say which and how to supply them."""
    by_kind = {registry.kind: registry for registry in registries}
    try:
        needed = [Need(**entry) for entry in record]
    except TypeError:
        raise UserError(f"the plugins that {what} needs cannot be read: the file is damaged.") from None
    for need in needed:
        if need.kind in by_kind and need.name not in by_kind[need.kind]:
            supply = f"add --plugin {need.plugin}" if need.plugin.endswith(".py") else f"install {need.plugin}"
            raise UserError(f"{what} needs the {need.kind} '{need.name}' of the plugin {need.plugin}: {supply}.")
