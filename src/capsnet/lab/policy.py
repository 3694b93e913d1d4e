"""The content security policy of the page: nothing is loaded from elsewhere, and no script or style is inline."""

from __future__ import annotations

DIRECTIVES = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self' data: blob:",
    "connect-src": "'self'",
    "font-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
}


def policy(**changes: str) -> str:
    """The policy with other or additional directives, whose dashes are written as underscores.

    >>> policy(script_src="'self' 'wasm-unsafe-eval'").split("; ")[1]
    "script-src 'self' 'wasm-unsafe-eval'"
    """
    changed = DIRECTIVES | {name.replace("_", "-"): value for name, value in changes.items()}
    return "; ".join(f"{name} {value}" for name, value in changed.items())


SERVED = policy(frame_ancestors="'none'")
STATIC = policy(script_src="'self' 'wasm-unsafe-eval'", worker_src="'self'")  # frame-ancestors needs a header
