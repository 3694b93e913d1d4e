"""Routing options as controls: every field of an options dataclass, with its help and its bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import pytest

from capsnet.errors import UserError
from capsnet.lab.options import Control, chosen, controls
from capsnet.routing.options import DynamicOptions


@dataclass(frozen=True)
class Base:
    iterations: int = 3
    """Routing iterations."""


@dataclass(frozen=True)
class Options(Base):
    temperature: float = field(default=1.0, metadata={"min": 0.1})
    """Inverse temperature
    of the softmax."""
    sharpen: bool = False
    norm: Literal["none", "layer"] = "none"
    """Normalisation."""
    rounds: int = 12
    heads: int = field(default=4, metadata={"training": True})
    sizes: tuple[int, ...] = ()


def test_every_field_that_can_change_becomes_a_control() -> None:
    assert controls(Options(temperature=2.0)) == [
        Control("iterations", "int", 3, "Routing iterations.", 1, 10),
        Control("temperature", "float", 2.0, "Inverse temperature of the softmax.", 0.1),
        Control("sharpen", "bool", False),
        Control("norm", "choice", "none", "Normalisation.", choices=("none", "layer")),
        Control("rounds", "int", 12, max=12),
    ]


def test_a_routing_without_options_has_no_controls() -> None:
    assert controls(None) == []
    assert chosen(None, "{}") == {}


def test_a_request_chooses_some_of_the_options() -> None:
    wanted = '{"iterations": 5, "temperature": 2, "norm": "layer"}'
    assert chosen(Options(), wanted) == {"iterations": 5, "temperature": 2, "norm": "layer"}


def test_dynamic_routing_offers_what_can_change_after_training() -> None:
    found = controls(DynamicOptions(iterations=2))
    assert [(one.name, one.type, one.value) for one in found] == [("iterations", "int", 2), ("leaky", "bool", False)]
    assert all(one.help for one in found)


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ('{"iterations": 2.5}', "iterations must be an integer from 1 to 10, got 2.5."),
        ('{"temperature": 0}', "temperature must be a number of at least 0.1, got 0."),
        ('{"temperature": NaN}', "temperature must be a number of at least 0.1, got NaN."),
        pytest.param('{"temperature": 1%s}' % ("0" * 400), "temperature must be a number of at least 0.1", id="huge"),
        ('{"temperature": Infinity}', "temperature must be a number of at least 0.1, got Infinity."),
        ('{"temperature": null}', "temperature must be a number of at least 0.1, got null."),
        ('{"rounds": 100000}', "rounds must be an integer up to 12, got 100000."),
        ('{"sharpen": 1}', "sharpen must be true or false, got 1."),
        ('{"norm": "batch"}', "there is no norm 'batch'"),
        ('{"heads": 8}', "there is no routing option 'heads'"),
        ("3", "routing must be a JSON object"),
    ],
)
def test_a_wrong_value_gets_a_sentence(wanted: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        chosen(Options(), wanted)
    assert str(error.value).startswith(sentence)
