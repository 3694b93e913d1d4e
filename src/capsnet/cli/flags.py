"""Flags from dataclasses: a field is a flag, its docstring the help text, the class's docstring the verb's help."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, TypeVar

import tyro
from tyro.conf import Positional, arg

Flags = TypeVar("Flags")
# --json, and no --no-json beside it
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, arg(help_behavior_hint="")]
# flags that may be left out: their help text says what then happens, so no "None" is shown
MaybePath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
MaybeStr = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
MaybeInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
ModelName = Annotated[Positional[str], arg(metavar="MODEL")]
ImageNames = Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE…", help_behavior_hint="")]


def parse(flags: type[Flags], verb: str, argv: list[str], default: Flags | None = None) -> Flags:
    """A verb's flags from the command line; an unknown one shows its nearest neighbours and exits with 2."""
    shaped = tyro.conf.configure(tyro.conf.AvoidSubcommands)(flags)
    kwargs = {} if default is None else {"default": default}
    about = inspect.getdoc(flags)
    return tyro.cli(shaped, args=argv, prog=f"capsnet {verb}", description=about, **kwargs)  # type: ignore[call-overload]
