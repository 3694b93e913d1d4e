"""Our operators have a first derivative; whoever asks for a second is told how to get it."""

from __future__ import annotations

from typing import Any, NoReturn

from capsnet.errors import UserError


def differentiable_once(backward: Any, what: str) -> None:
    """Let the operator `backward`, which computes the gradients of `what`, refuse to be differentiated itself."""

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise UserError(
            f"the fast {what} can be differentiated once, and a second derivative was asked for: "
            f"compute the forward pass inside `with capsnet.kernels.plain():`."
        )

    backward.register_autograd(refuse)
