"""Records that are stored with models and results, as frozen dataclasses. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from capsnet.errors import UserError
from capsnet.records import from_json

ALWAYS = ("config", "capsnet", "git", "python", "torch", "numpy", "machine", "seconds")  # of the keys in JSON


@dataclass(frozen=True)
class Certificate:
    """A result's birth certificate: what was run, by which versions, on what machine, for how long.

    >>> Certificate.from_json({"seconds": 2.5, "cpu": "fast"}).more
    {'cpu': 'fast'}
    """

    config: dict[str, Any] = field(default_factory=dict)
    capsnet: str = ""
    git: str | None = None
    python: str = ""
    torch: str = ""
    numpy: str = ""
    machine: str = ""
    seconds: float = 0.0
    parameters: int | None = None
    steps: int | None = None
    epochs: float | None = None
    training_images: int | None = None
    device: str | None = None
    processes: int | None = None
    validation_error_percent: float | None = None
    images: dict[str, int] | None = None
    """Checksums of each split of the user's images."""
    started_from: dict[str, Any] | None = None
    taught_by: dict[str, Any] | None = None
    more: dict[str, Any] = field(default_factory=dict)
    """Other keys of the JSON object: of a measurement, or of another version."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Certificate:
        names = {each.name for each in fields(cls)} - {"more"}
        known = {name: value for name, value in record.items() if name in names}
        return from_json(cls, known | {"more": {n: value for n, value in record.items() if n not in names}})

    @classmethod
    def of_header(cls, record: Any) -> Certificate:
        """The certificate in the header of a model file; an empty one if it is missing or damaged."""
        try:
            return cls.from_json(record) if isinstance(record, dict) else cls()
        except UserError:
            return cls()

    def to_json(self) -> dict[str, Any]:
        null = ("validation_error_percent",) if self.steps is not None else ()  # a run without validation images
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "more"}
        stored = {name: v for name, v in values.items() if name in (*ALWAYS, *null) or v is not None}
        return stored | self.more


@dataclass(frozen=True)
class Weights:
    """The weight file of a shipped model."""

    sha256: str
    bytes: int
    precision: str


@dataclass(frozen=True)
class Card:
    """The card of a shipped model: data, training, errors, weaknesses, birth certificate, weight file."""

    name: str
    title: str
    data: str
    image_shape: tuple[int, int, int]
    classes: tuple[str, ...]
    multi_label: bool
    parameters: int
    training_images: int
    seed: int
    epochs: float
    training_seconds: float
    legs: tuple[dict[str, Any], ...]
    """The stages of a training that continued from other weights."""
    validation: dict[str, Any] | None
    """The summary of an evaluation; None if the model was trained on all training images."""
    test: dict[str, Any]
    mistakes: tuple[int, ...]
    weaknesses: tuple[str, ...]
    chosen_by: str
    seeds: tuple[dict[str, Any], ...]
    certificate: Certificate
    weights: Weights

    @property
    def config(self) -> dict[str, Any]:
        return self.certificate.config

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Card:
        certificate, weights = Certificate.from_json(record["certificate"]), from_json(Weights, record["weights"])
        return from_json(cls, record | {"certificate": certificate, "weights": weights})

    def to_json(self) -> dict[str, Any]:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"certificate": self.certificate.to_json(), "weights": asdict(self.weights)}
