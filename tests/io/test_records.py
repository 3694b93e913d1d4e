"""Certificates and cards: what is read from JSON is written back unchanged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from capsnet.errors import UserError
from capsnet.io import zoo
from capsnet.io.records import Certificate
from capsnet.records import from_json

RESULTS = Path(__file__).resolve().parent.parent.parent / "results"


def certificates(value: object) -> list[dict[str, object]]:
    """All certificates in a JSON value."""
    if isinstance(value, list):
        return [found for each in value for found in certificates(each)]
    if not isinstance(value, dict):
        return []
    inside = certificates(list(value.values()))
    return [*inside, value["certificate"]] if isinstance(value.get("certificate"), dict) else inside


def test_every_certificate_in_the_repository_is_written_as_it_was_read() -> None:
    files = [*RESULTS.rglob("*.json"), *zoo.FOLDER.glob("*.json")]
    found = [each for file in files for each in certificates(json.loads(file.read_text()))]
    assert len(found) > 100
    for each in found:
        again = json.loads(json.dumps(Certificate.from_json(each).to_json()))
        assert again == {"validation_error_percent": None, **each} or again == each


def test_keys_of_other_versions_are_kept() -> None:
    assert Certificate.from_json({"seconds": 1, "tomorrow": [1]}).to_json()["tomorrow"] == [1]


@dataclass(frozen=True)
class OfAPlugin:
    sizes: list[int] = field(default_factory=list)
    words: list = field(default_factory=list)
    anything: Any = None


def test_fields_of_types_that_the_package_does_not_use_are_read_unchecked() -> None:
    assert from_json(OfAPlugin, {"sizes": [1], "words": ["a"], "anything": 2}) == OfAPlugin((1,), ("a",), 2)  # type: ignore[arg-type]


def test_a_damaged_certificate_is_refused_or_replaced_by_an_empty_one() -> None:
    with pytest.raises(UserError, match=r"Certificate\.config is 3"):
        Certificate.from_json({"config": 3})
    for damaged in (None, "x", {"config": 3}):
        assert Certificate.of_header(damaged) == Certificate()
