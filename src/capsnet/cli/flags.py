"""Flags from dataclasses: a field is a flag, its docstring the help text, the class's docstring the verb's help."""

from __future__ import annotations

import difflib
import inspect
import re
from contextlib import redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro
from tyro.conf import Positional, arg

from capsnet.errors import UserError

Flags = TypeVar("Flags")
# --json, without a --no-json
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff, arg(help_behavior_hint="")]
# optional flags: the help text describes the default, so "None" is not shown
MaybePath = Annotated[Path | None, arg(metavar="PATH", help_behavior_hint="")]
MaybeStr = Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")]
MaybeInt = Annotated[int | None, arg(metavar="INT", help_behavior_hint="")]
MaybeFloat = Annotated[float | None, arg(metavar="FLOAT", help_behavior_hint="")]
ModelName = Annotated[Positional[str], arg(metavar="MODEL")]
ImageNames = Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE…", help_behavior_hint="")]

SELECTORS = ("--preset", "--model", "--model.routing")  # they select the defaults of other flags, so they come first
PLUGIN_HELP = """\
Every verb also accepts --plugin FILE (repeatable), a Python file that registers a
routing algorithm, a dataset or a model."""


def parse(flags: type[Flags], verb: str, argv: list[str], default: Flags | None = None) -> Flags:
    """Parse a verb's flags; a mistake raises a `UserError` of one sentence.

    The words that selected a verb's `default` (see `SELECTORS`) are skipped.
    """
    shaped = tyro.conf.configure(tyro.conf.AvoidSubcommands)(flags)
    about = f"{inspect.getdoc(flags)}\n\n{PLUGIN_HELP}"
    options: dict[str, Any] = {"prog": f"capsnet {verb}", "description": about}
    if default is not None:
        options["default"] = default
        for name in SELECTORS:
            _, argv = take(argv, name)
    box = StringIO()
    try:
        with redirect_stderr(box):
            found, unknown = tyro.cli(shaped, args=argv, return_unknown_args=True, **options)
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        raise UserError(mistake(stop, box.getvalue(), argv)) from None
    if unknown:
        raise UserError(unrecognised(verb, unknown[0], flags_of(shaped, options)))
    return found


def take(argv: list[str], name: str) -> tuple[list[str], list[str]]:
    """Split off a flag that may be anywhere: its values and the other words.

    >>> take(["train", "--plugin", "em.py", "--epochs", "2", "--plugin=toys.py"], "--plugin")
    (['em.py', 'toys.py'], ['train', '--epochs', '2'])
    """
    values, rest, words = [], [], iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        if flag != name:
            rest.append(word)
            continue
        values.append(value if equals else next(words, ""))
        if not values[-1] or values[-1].startswith("--"):
            raise UserError(f"{name} needs a value.")
    return values, rest


def take_one(argv: list[str], name: str) -> tuple[str, list[str]]:
    """Split off a flag that may be given once: its value ("" without the flag) and the other words."""
    values, rest = take(argv, name)
    if len(values) > 1:
        raise UserError(f"{name} is given {len(values)} times ({', '.join(values)}): choose one.")
    return (values or [""])[0], rest


def flags_of(shaped: Any, options: dict[str, Any]) -> list[str]:
    """All flags of a verb: those that start a row of its help. Examples may name flags that are not offered now."""
    page = StringIO()
    with redirect_stdout(page), suppress(SystemExit):
        tyro.cli(shaped, args=["--help"], **options)
    rows = re.findall(r"^[│ ]{1,2} *(-.*)$", page.getvalue(), re.MULTILINE)
    found = {flag for row in rows for flag in re.findall(r"--[a-z][\w.-]*", row.split("  ")[0])}
    return sorted(found | {"--plugin", *(SELECTORS if "default" in options else ())})


def mistake(stop: BaseException, box: str, argv: list[str]) -> str:
    """The sentence for input that the parser rejects: our own where a dataclass raised it, else from the box."""
    error: BaseException | None = stop
    while error is not None:
        if isinstance(error, UserError):
            return str(error)
        error = error.__context__
    rows = [line.strip("│╰╯ ") for line in box.splitlines()[1:]]  # without the title
    text = next(filter(None, re.split(" *[─-]{5,} *", " ".join(rows))), "the flags cannot be parsed.")
    if found := re.match("Error parsing (--[^:]+):", text):
        usage = next((row for row in rows if re.match("--[a-z]", row)), "another value")
        return f"{given(found[1], argv)} is not valid: expected {usage}."
    if found := re.match(r"invalid choice (.+) for argument '(.+)'. Expected one of \((.+)\)", text):
        return f"{found[1]} is not valid for {found[2]}: choose one of {found[3]}."
    if found := re.match("Missing value for argument '(.+)'", text):
        return f"{found[1]} needs a value."
    if found := re.match(r"Missing from (.+?): (\S+) (.*) \(required\)", text):
        return f"{found[1]} needs {found[2]}: {found[3][:1].lower()}{found[3][1:]}"
    return text


def given(flag: str, argv: list[str]) -> str:
    """A flag with the values that were given to it."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    names = {name.replace("_", "-") for name in flag.split("/")}
    start = next((k for k, word in enumerate(words) if word.replace("_", "-") in names), len(words))
    stop = next((k for k in range(start + 1, len(words)) if words[k].startswith("--")), len(words))
    return " ".join(words[start:stop]) or flag


def unrecognised(verb: str, word: str, known: list[str]) -> str:
    """The sentence for a word that a verb does not accept, with the nearest flags."""
    if not word.startswith("-"):
        return f"{word} is one argument too many: see capsnet {verb} --help."
    near = difflib.get_close_matches(word.partition("=")[0].replace("_", "-"), known, n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"see capsnet {verb} --help."
    of = {"--model.routing.": "an option of this routing", "--model.": "an option of this model"}
    what = next((what for prefix, what in of.items() if word.startswith(prefix)), f"a flag of capsnet {verb}")
    return f"{word} is not {what}: {hint}"
