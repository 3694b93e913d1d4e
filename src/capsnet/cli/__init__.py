"""The command line: verbs, and nothing but verbs. Each parses its flags, calls the library and prints.

A user's mistake is one sentence and exit code 2, never a traceback; results go to stdout, everything else to stderr.
A verb's module is imported only when the verb is used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from capsnet import __version__
from capsnet.errors import UserError, unknown

VERBS = {
    "demo": ("train.demo", "train on MNIST, test, and write a report: the whole story in a few minutes"),
    "train": ("train.train", "train a network (the quick preset on MNIST, if you say nothing else)"),
    "evaluate": ("use.evaluate_verb", "count a model's errors on a data set"),
    "predict": ("use.predict", "say what is in your images"),
    "reconstruct": ("use.reconstruct", "paint reconstructions, or what each number of a pose means"),
    "export": ("export.export", "write a model as ONNX or as a program of PyTorch's own"),
    "lab": ("lab.lab", "open a page on which one draws a digit and watches a network think"),
    "models": ("browse.models", "list trained models, your runs and the presets; or show a model's card"),
    "data": ("browse.data_verb", "list, fetch and verify data sets"),
    "reproduce": ("reproduce.reproduce", "run the paper's experiments, beside the paper's own numbers"),
    "search": ("search.search", "search for better settings, or ablate them one at a time, on validation images"),
    "bench": ("bench.bench", "measure speed and memory, plain beside fast"),
}

OVERVIEW = """\
capsnet {version}: dynamic routing between capsules

usage: capsnet VERB …, and capsnet VERB --help for its flags

{verbs}

examples:
  capsnet demo                          train on MNIST, test, write a report
  capsnet train --data folder:photos    train on your own images
  capsnet predict runs/demo photo.png   say what is in an image
  capsnet lab                           draw a digit and watch a network think"""


def overview() -> str:
    """What `capsnet` alone prints."""
    verbs = "\n".join(f"  {name:<12} {summary}" for name, (_, summary) in VERBS.items())
    return OVERVIEW.format(version=__version__, verbs=verbs)


def find_verb(name: str) -> Callable[[list[str]], int]:
    if name not in VERBS:
        raise unknown("verb", name, VERBS)
    module, _, function = VERBS[name][0].partition(".")
    return getattr(import_module(f"capsnet.cli.{module}"), function)


def complain(message: str) -> int:
    """One line on stderr, in red where there is a terminal; exit code 2."""
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}capsnet: {message}{plain}", file=sys.stderr)
    return 2


def main(argv: list[str] | None = None) -> int:
    """Run a verb."""
    from capsnet.kernels.allocator import keep_memory

    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "version"):
        print(f"capsnet {__version__}")
        return 0
    keep_memory()
    try:
        return find_verb(words[0])(words[1:])
    except UserError as error:
        return complain(str(error))
    except BrokenPipeError:  # the reader of a pipe has gone: no reason to complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return complain(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}")
