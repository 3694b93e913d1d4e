"""What searches and ablations share: the config they start from, and what makes two trainings comparable."""

from __future__ import annotations

import re
from typing import Any

from capsnet import data
from capsnet.errors import UserError
from capsnet.files import sha256
from capsnet.io import checkpoint
from capsnet.io.leakage import check_unseen
from capsnet.train import runs
from capsnet.train.config import Config

FAILURES = (UserError, RuntimeError, MemoryError, ArithmeticError)  # fail one training, not the whole search


def check_name(name: str, flag: str) -> None:
    """Refuse a name that cannot be a file name."""
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"{flag} '{name}' is not a name: use letters, digits, dots, dashes and underscores.")


def check_base(base: Config) -> None:
    """Refuse settings under which validation images cannot judge a training."""
    if not base.validation:
        raise UserError("trainings are compared on validation images: set --validation above 0.")
    if base.stop_at:
        raise UserError("--stop-at would end every good training at the same error: leave it out.")
    check_unseen(base)


def ingredients(base: Config) -> dict[str, Any]:
    """Checksums of what a training depends on besides its config: other models, and the user's own images."""
    models = {name: sha256(checkpoint.model_file(name)) for name in (base.init, base.teacher) if name}
    images = data.parse(base.data).checksum()
    return {"models": models} | ({} if images is None else {"images": images})


def reason(failure: BaseException) -> str:
    """Why a training failed, without advice that does not apply here."""
    text = failure.what if isinstance(failure, runs.GoneBad) else str(failure)
    return text or type(failure).__name__
