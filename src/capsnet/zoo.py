"""The trained models that come with the package: weights/NAME.safetensors, and weights/NAME.json, the model's card.

A name stands wherever a checkpoint is accepted, and comes before a folder or file of the same name in the current
folder, which is then called ./NAME. The weights are checked against the sha256 of their card whenever they are used.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from capsnet.errors import UserError, unknown

FOLDER = Path(__file__).resolve().parent / "weights"
MOST_BYTES = 25_000_000  # of one weight file
MOST_BYTES_IN_ALL = 60_000_000


def names() -> list[str]:
    """The shipped models."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def is_shipped(model: str | Path) -> bool:
    """Whether this is a shipped model's name; a Path never is, nor anything with a slash."""
    return isinstance(model, str) and model in names()


def card(name: str) -> dict[str, Any]:
    """What is known about a shipped model: data, training, errors, weaknesses, birth certificate."""
    if not is_shipped(name):
        raise unknown("model", name, names())
    try:
        found = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"the card of {name} cannot be read ({error}): install capsnet again.") from None
    if not isinstance(found, dict):
        raise UserError(f"the card of {name} is no card: install capsnet again.")
    return found


def weight_file(name: str) -> Path:
    """The weights of a shipped model, once it is certain that they are the ones that its card speaks of."""
    expected, path = card(name).get("weights", {}).get("sha256"), FOLDER / f"{name}.safetensors"
    if not path.is_file():
        raise UserError(f"the weights of {name} are missing ({path}): install capsnet again.")
    if sha256(path) != expected:
        raise UserError(f"the weights of {name} are damaged: {path} is not what its card says. Install capsnet again.")
    return path


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
