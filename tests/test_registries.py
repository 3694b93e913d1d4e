"""Registries: names, built-in entries on demand, entries of plugins and of installed packages, and clashes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from capsnet.errors import UserError
from capsnet.registry import Registry, registering_from
from packages import install_package


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry[type]:
    """A registry with one built-in entry, whose module is imported when the entry is asked for."""
    (tmp_path / "built_in_shapes.py").write_text(
        "from capsnet.registry import BUILT_IN, registering_from\n"
        "class Square: ...\n"
        "def add(registry):\n"
        "    with registering_from(BUILT_IN): registry.register('square')(Square)\n"
        "import shapes_registry; add(shapes_registry.shapes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = Registry[type]("shape", "capsnet.shapes", {"square": "built_in_shapes"})
    module = type(sys)("shapes_registry")
    module.shapes = registry  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shapes_registry", module)
    monkeypatch.delitem(sys.modules, "built_in_shapes", raising=False)
    return registry


def test_a_built_in_entry_is_listed_before_it_is_imported(shapes: Registry[type]) -> None:
    assert shapes.names() == ["square"]
    assert "square" in shapes
    assert "built_in_shapes" not in sys.modules
    assert shapes.get("square").__name__ == "Square"
    assert shapes.origin("square") == "capsnet"


def test_an_unknown_name_lists_the_choices_and_the_nearest(shapes: Registry[type]) -> None:
    shapes.register("circle")(int)
    with pytest.raises(UserError, match=r"no shape 'squar'; did you mean 'square'\? The choices are: circle, square\."):
        shapes.get("squar")


def test_an_entry_remembers_the_plugin_that_registered_it(shapes: Registry[type]) -> None:
    with registering_from("mine.py"):
        assert shapes.register("circle")(float) is float
    assert shapes.names() == ["circle", "square"]
    assert shapes.origin("circle") == "mine.py"

    class Local: ...

    shapes.register("local")(Local)
    assert shapes.origin("local") == Local.__module__


def test_a_name_belongs_to_one_origin(shapes: Registry[type]) -> None:
    with registering_from("mine.py"):
        shapes.register("circle")(float)
        shapes.register("circle")(int)  # the same plugin may define it again, as a notebook does
    with registering_from("other.py"):
        with pytest.raises(UserError, match=r"other\.py registers the shape 'circle', which mine\.py already has"):
            shapes.register("circle")(str)
        with pytest.raises(UserError, match=r"other\.py registers the shape 'square', which capsnet already has"):
            shapes.register("square")(str)
    assert shapes.get("circle") is int


def test_an_installed_package_adds_an_entry(
    shapes: Registry[type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_package(tmp_path, "round_shapes", "capsnet.shapes", "class Circle: ...", "circle = round_shapes:Circle")
    assert shapes.names() == ["circle", "square"]
    assert "round_shapes" not in sys.modules
    assert shapes.get("circle").__name__ == "Circle"
    assert shapes.origin("circle") == "round_shapes 2.5"
    monkeypatch.delitem(sys.modules, "round_shapes")


def test_a_package_that_cannot_be_imported_is_named(shapes: Registry[type], tmp_path: Path) -> None:
    install_package(
        tmp_path, "broken_shapes", "capsnet.shapes", "raise OSError('no license')", "oval = broken_shapes:Oval"
    )
    with pytest.raises(UserError, match=r"the shape 'oval' of broken_shapes 2\.5 cannot be imported: OSError\('no lic"):
        shapes.get("oval")
