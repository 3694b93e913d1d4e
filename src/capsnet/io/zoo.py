"""The trained models that come with the package: weights/NAME.safetensors and weights/NAME.json, the model card.

A model name can be used anywhere a run folder is accepted. It takes precedence over a folder or file of the same name
in the current folder, which can be written as ./NAME. The weights are verified against the SHA-256 in the card whenever
they are used.
"""

from __future__ import annotations

import json
from pathlib import Path

from capsnet.errors import UserError, unknown
from capsnet.files import sha256
from capsnet.io.records import Card

FOLDER = Path(__file__).resolve().parent.parent / "weights"
MOST_BYTES = 25_000_000  # of one weight file


def names() -> list[str]:
    """Names of the shipped models."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def is_shipped(model: str | Path) -> bool:
    """Whether this is the name of a shipped model; never for a Path or anything with a slash."""
    return isinstance(model, str) and model in names()


def card(name: str) -> Card:
    """The card of a shipped model: data, training, errors, weaknesses, birth certificate."""
    if not is_shipped(name):
        raise unknown("model", name, names())
    try:
        found = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the card of {name} cannot be read ({error}): install capsnet again.") from None
    try:
        return Card.from_json(found)
    except (KeyError, TypeError, AttributeError, UserError):
        raise UserError(f"the card of {name} is damaged: install capsnet again.") from None


def weight_file(name: str) -> Path:
    """The verified weight file of a shipped model."""
    expected, path = card(name).weights.sha256, FOLDER / f"{name}.safetensors"
    if not path.is_file():
        raise UserError(f"the weights of {name} are missing ({path}): install capsnet again.")
    if sha256(path) != expected:
        raise UserError(
            f"the weights of {name} are damaged, because the SHA-256 of {path} differs from its card: install capsnet "
            f"again."
        )
    return path
