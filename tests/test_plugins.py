"""Plugin files: run once, clash in words, and are asked for by name where a file needs them."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from capsnet import load_plugin, plugins
from capsnet.data.registry import DATASETS
from capsnet.errors import UserError
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import MODELS, model_from_dict, model_to_dict
from capsnet.models.registry import register as register_model
from capsnet.nn.layers import DenseCaps
from capsnet.registry import Registry, registering_from
from capsnet.routing import ROUTINGS, Routing, RoutingOptions, create, options_for, register
from packages import install_package

ROUTING = """
from capsnet.routing import Routing, register

@register("{name}")
class Mine(Routing):
    pass
"""


pytestmark = pytest.mark.usefixtures("forget_plugins")


def plugin(folder: Path, file: str, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / file
    path.write_text(ROUTING.format(name=name))
    return path


def test_what_a_plugin_registers_is_known_by_name_and_by_its_file(tmp_path: Path) -> None:
    file = plugin(tmp_path, "mine.py", "mine")
    load_plugin(file)
    assert "mine" in ROUTINGS
    assert ROUTINGS.origin("mine") == "mine.py"
    assert ROUTINGS.get("mine").Options.algorithm == "mine"
    assert plugins.flags() == ["--plugin", str(file.resolve())]


def test_a_plugin_runs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "count.py").write_text("with open('runs', 'a') as file: file.write('x')")
    load_plugin("count.py")
    load_plugin(tmp_path / "count.py")
    assert (tmp_path / "runs").read_text() == "x"


def test_plugins_that_register_the_same_name_clash(tmp_path: Path) -> None:
    load_plugin(plugin(tmp_path, "one.py", "mine"))
    with pytest.raises(UserError, match=r"two\.py registers the routing 'mine', which one\.py already has: rename it"):
        load_plugin(plugin(tmp_path, "two.py", "mine"))
    with pytest.raises(UserError, match=r"three\.py registers the routing 'dynamic', which capsnet already has"):
        load_plugin(plugin(tmp_path, "three.py", "dynamic"))
    assert ROUTINGS.get("dynamic").__name__ == "DynamicRouting"


def test_plugins_of_one_file_name_cannot_be_told_apart_in_a_checkpoint(tmp_path: Path) -> None:
    first = plugin(tmp_path / "a", "mine.py", "mine")
    load_plugin(first)
    with pytest.raises(UserError, match=r"mine\.py has the name of another plugin, .*a/mine\.py: rename one"):
        load_plugin(plugin(tmp_path / "b", "mine.py", "other"))
    assert "other" not in ROUTINGS


@pytest.mark.parametrize(("file", "message"), [("none.py", "there is no plugin"), ("text.txt", "not a Python file")])
def test_what_is_not_a_plugin_is_refused(tmp_path: Path, file: str, message: str) -> None:
    (tmp_path / "text.txt").write_text("x = 1")
    with pytest.raises(UserError, match=message):
        load_plugin(tmp_path / file)


def test_a_plugin_that_fails_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("x = 1\nimport capsnet.nowhere\n")
    with pytest.raises(UserError, match=r"fails\.py cannot be loaded \(line 2\): ModuleNotFoundError"):
        load_plugin(tmp_path / "fails.py")


def test_a_routing_without_a_route_is_refused(tmp_path: Path) -> None:
    load_plugin(plugin(tmp_path, "idle.py", "idle"))
    with pytest.raises(UserError, match="the routing 'idle' has no method route"):
        DenseCaps(6, 3, 5, 4, routing="idle")(torch.zeros(2, 6, 3))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("u_hat.mean(1)", "route of the routing 'odd' should return a Routed, not a Tensor"),
        ("Routed(u_hat.mean(2), u_hat[..., 0].mean(2))", r"here \(b, 5, 4\) and \(b, 5\), and returned \(2, 6, 4\)"),
    ],
)
def test_what_a_route_returns_is_checked(tmp_path: Path, returned: str, message: str) -> None:
    (tmp_path / "odd.py").write_text(
        "from capsnet.routing import Routed, Routing, register\n@register('odd')\nclass Odd(Routing):\n"
        f"    def route(self, u_hat, a, parents, trace):\n        return {returned}\n"
    )
    load_plugin(tmp_path / "odd.py")
    with pytest.raises(UserError, match=message):
        DenseCaps(6, 3, 5, 4, routing="odd")(torch.zeros(2, 6, 3))


def test_only_what_is_not_built_in_is_needed(tmp_path: Path) -> None:
    load_plugin(plugin(tmp_path, "mine.py", "mine"))
    needed = plugins.needs([(ROUTINGS, "dynamic"), (ROUTINGS, "mine")])
    sha256 = hashlib.sha256((tmp_path / "mine.py").read_bytes()).hexdigest()
    assert needed == [{"kind": "routing", "name": "mine", "plugin": "mine.py", "sha256": sha256}]


@pytest.mark.parametrize(
    ("origin", "message"),
    [
        ("mine.py", r"runs/x needs the routing 'mine' of the plugin mine\.py: add --plugin mine\.py\."),
        ("caps-mine 1.2", r"runs/x needs the routing 'mine' of the plugin caps-mine 1\.2: install caps-mine 1\.2\."),
    ],
)
def test_a_missing_plugin_is_one_sentence_that_says_how_to_supply_it(origin: str, message: str) -> None:
    record = [{"kind": "routing", "name": "mine", "plugin": origin}]
    with pytest.raises(UserError, match=message):
        plugins.require(record, [ROUTINGS], "runs/x")
    plugins.require(record, [Registry("model", "capsnet.models")], "runs/x")  # not a registry that it concerns


def test_a_plugin_that_is_there_is_not_missed(tmp_path: Path) -> None:
    load_plugin(plugin(tmp_path, "renamed.py", "mine"))
    plugins.require([{"kind": "routing", "name": "mine", "plugin": "mine.py"}], [ROUTINGS], "runs/x")


@pytest.mark.parametrize(
    ("origin", "sha256", "warning"),
    [
        ("mine.py", "0" * 64, "runs/x was made with another version of the plugin mine.py: results may differ.\n"),
        ("old.py", "0" * 64, "runs/x was made with the plugin old.py, and mine.py is used now: results may differ.\n"),
        ("mine.py", "", ""),  # a record of an earlier version
    ],
)
def test_a_plugin_that_has_changed_is_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], origin: str, sha256: str, warning: str
) -> None:
    load_plugin(plugin(tmp_path, "mine.py", "mine"))
    for _ in range(2):  # said once
        record = {"kind": "routing", "name": "mine", "plugin": origin, "sha256": sha256}
        plugins.require([record], [ROUTINGS], "runs/x")
    assert capsys.readouterr().err == (f"capsnet: {warning}" if warning else "")


def test_a_plugin_that_is_unchanged_or_only_renamed_is_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_plugin(plugin(tmp_path, "mine.py", "mine"))
    needed = plugins.needs([(ROUTINGS, "mine")])
    plugins.require(needed, [ROUTINGS], "runs/x")
    plugins.require([needed[0] | {"plugin": "before.py"}], [ROUTINGS], "runs/x")
    assert capsys.readouterr().err == ""


def test_another_version_of_a_package_is_one_warning(capsys: pytest.CaptureFixture[str]) -> None:
    with registering_from("caps-mine 1.3"):
        register("mine")(type("Mine", (Routing,), {"__module__": "caps_mine"}))
    record = [{"kind": "routing", "name": "mine", "plugin": "caps-mine 1.2", "sha256": ""}]
    plugins.require(record, [ROUTINGS], "runs/x")
    assert "made with the plugin caps-mine 1.2, and caps-mine 1.3 is used now" in capsys.readouterr().err


ENTRY_POINTS = {
    "capsnet.routings": (
        "thing = caps_things:Thing",
        "from capsnet.routing import DynamicRouting\nclass Thing(DynamicRouting): ...",
    ),
    "capsnet.models": ("thing = caps_things:Thing", "from capsnet import CapsNet\nclass Thing(CapsNet): ..."),
    "capsnet.datasets": (
        "thing = caps_things:thing",
        "from capsnet.data import DatasetInfo\ndef load(request): ...\nthing = DatasetInfo('thing', 'things', load)",
    ),
}
REGISTRIES = {registry.group: registry for registry in (ROUTINGS, MODELS, DATASETS)}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str, str], Registry[Any]]:
    """Install a package caps_things with one entry point; returns the registry of its group."""

    def install(group: str, entry: str, code: str) -> Registry[Any]:
        install_package(tmp_path, "caps_things", group, code, entry)
        return REGISTRIES[group]

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "caps_things", None)
    monkeypatch.delitem(sys.modules, "caps_things")
    return install


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_an_entry_point_that_names_the_thing_itself_registers_it(
    installed: Callable[[str, str, str], Registry[Any]], group: str
) -> None:
    registry = installed(group, *ENTRY_POINTS[group])
    thing = registry.get("thing")
    assert registry.origin("thing") == "caps_things 2.5"
    if group == "capsnet.routings":
        assert thing.name == options_for("thing").algorithm == "thing"
        assert create(options_for("thing", iterations=2)).__class__ is thing
        assert options_for("dynamic").algorithm == "dynamic"
    if group == "capsnet.models":
        assert model_from_dict(model_to_dict(thing.Config())).kind == "thing"
        assert CapsNetConfig.kind == "capsnet"


@pytest.mark.parametrize("group", ENTRY_POINTS)
def test_an_entry_point_that_names_something_else_is_refused(
    installed: Callable[[str, str, str], Registry[Any]], group: str
) -> None:
    with pytest.raises(UserError, match=r"the \w+ 'thing' should be a .*, and is 5\."):
        installed(group, "thing = caps_things:five", "five = 5").get("thing")


@pytest.mark.parametrize("group", ["capsnet.routings", "capsnet.datasets"])
def test_an_entry_point_uses_the_name_that_the_package_registers(
    installed: Callable[[str, str, str], Registry[Any]], group: str
) -> None:
    entry, code = ENTRY_POINTS[group]
    code = code.replace("class Thing", "from capsnet.routing import register\n@register('thing')\nclass Thing")
    with pytest.raises(UserError, match="use one name for both"):
        installed(group, entry.replace("thing =", "other ="), code).get("other")


def test_a_command_for_the_user_names_the_plugins_of_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plugin(tmp_path, "mine.py", "mine").resolve()
    load_plugin(file)
    assert plugins.command("train", "--resume", "a b") == f"capsnet train --resume 'a b' --plugin {file}"
    monkeypatch.chdir(tmp_path)
    assert plugins.command("lab") == "capsnet lab --plugin mine.py"


def test_options_that_two_algorithms_inherit_belong_to_each_of_them() -> None:
    @dataclass(frozen=True)
    class Options(RoutingOptions):
        """Options of two algorithms."""

        share: float = 0.5

    one = register("one")(type("One", (Routing,), {"Options": Options, "__module__": __name__}))
    two = register("two")(type("Two", (Routing,), {"Options": Options, "__module__": __name__}))
    assert one.Options is Options
    assert two.Options(share=0.1).share == 0.1
    assert (options_for("one").algorithm, options_for("two").algorithm) == ("one", "two")
    assert RoutingOptions.algorithm == ""


def test_a_model_that_inherits_its_config_gets_one_of_its_own() -> None:
    class Deeper(CapsNet):
        """A capsule network under another name."""

    register_model("deeper")(Deeper)
    assert CapsNetConfig.kind == "capsnet"
    config = model_from_dict(model_to_dict(Deeper.Config(class_dim=8)))
    assert isinstance(config, CapsNetConfig)
    assert (config.kind, config.class_dim) == ("deeper", 8)


def test_a_damaged_list_of_plugins_is_refused() -> None:
    with pytest.raises(UserError, match="the plugins that runs/x needs cannot be read"):
        plugins.require([{"kind": "routing"}], [ROUTINGS], "runs/x")
