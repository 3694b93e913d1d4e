"""What the operators of the kernels share: their compiled loops are optional, and they can be differentiated once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NoReturn

from capsnet.errors import UserError

LANES = 16  # examples that the compiled loops of routing take at a time


def optional(consequence: str) -> Callable[[Callable[[], Any]], Any]:
    """Decorator of a function that imports loops compiled by Numba, tries them out and returns them.

    Where Numba is missing the function returns None instead. Where it is installed and fails, a warning says so once,
    with the consequence.
    """

    def decorate(load: Callable[[], Any]) -> Any:
        @cache
        @wraps(load)
        def load_or_none() -> Any:
            try:
                return load()
            except Exception as error:  # an optional library must not stop anything, whatever goes wrong in it
                if not (isinstance(error, ModuleNotFoundError) and error.name == "numba"):
                    said = f"Numba is installed but does not work here, so {consequence}: {error!r}"
                    warnings.warn(said, RuntimeWarning, stacklevel=2)
                return None

        return load_or_none

    return decorate


def differentiable_once(backward: Any, what: str) -> None:
    """Let the operator `backward`, which computes the gradients of `what`, refuse to be differentiated itself."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise UserError(
            f"the fast {what} can be differentiated once, and a second derivative was asked for: "
            f"compute the forward pass inside `with capsnet.kernels.plain():`."
        )

    backward.register_autograd(refuse)
