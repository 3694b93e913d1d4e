"""The command line. Each verb has its own module, which parses flags, calls the library and prints.

Results go to stdout, everything else to stderr. A user's mistake ends with one sentence and exit code 2, never with a
traceback. A verb's module is imported only when the verb is used, so `capsnet --version` does not wait for PyTorch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module

from capsnet import __version__
from capsnet.errors import UserError, explained, unknown
from capsnet.group.launch import Launch, launch
from capsnet.plugins import load_plugin

VERBS = {  # the verb NAME is the function NAME in capsnet.cli.NAME
    "demo": "train on MNIST, evaluate, and write a report: the whole workflow in a few minutes",
    "train": "train a network (by default the quick preset on MNIST)",
    "evaluate": "measure a model's error on a dataset",
    "predict": "classify your images",
    "reconstruct": "draw reconstructions, or the effect of each pose dimension",
    "export": "export a model to ONNX or to a PyTorch program",
    "lab": "open the interactive Lab: draw a digit and watch a network classify it",
    "models": "list trained models, your runs and the presets, or show a model's card",
    "data": "list, fetch and verify datasets",
    "reproduce": "run the paper's experiments and compare with the paper's numbers",
    "search": "search for better hyperparameters on validation images",
    "ablate": "compare single changes of the settings over several seeds",
    "bench": "measure speed and memory of the fast kernels and of the plain ones",
}

OVERVIEW = """\
capsnet {version}: dynamic routing between capsules

usage: capsnet VERB …, or capsnet VERB --help for its flags

{verbs}

examples:
  capsnet demo                          train on MNIST, evaluate, write a report
  capsnet train --data folder:photos    train on your own images
  capsnet predict runs/demo photo.png   classify an image
  capsnet lab                           open the interactive Lab"""


def overview() -> str:
    """What `capsnet` prints without a verb."""
    verbs = "\n".join(f"  {name:<12} {summary}" for name, summary in VERBS.items())
    return OVERVIEW.format(version=__version__, verbs=verbs)


def find_verb(name: str) -> Callable[[list[str]], int]:
    """The function of a verb; importing it brings in PyTorch, so the allocator is set up first."""
    if name not in VERBS:
        raise unknown("verb", name, VERBS)
    from capsnet.kernels.allocator import keep_memory

    keep_memory()
    return getattr(import_module(f"capsnet.cli.{name}"), name)


def complain(message: str) -> int:
    """Print one line on stderr, in red on a terminal; the exit code 2."""
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}capsnet: {message}{plain}", file=sys.stderr)
    return 2


def run(words: list[str]) -> int:
    """Load the plugins and run the verb."""
    from capsnet.cli.flags import take

    files, rest = take(words, "--plugin")
    if not rest:
        raise UserError("a verb is missing: capsnet VERB --plugin FILE.")
    verb = find_verb(rest[0])
    for file in files:
        load_plugin(file)
    return verb(rest[1:])


COMPILE_NOTHING = ("train", "demo")


def start_quickly(words: list[str]) -> None:
    """Leave out what PyTorch imports for `torch.compile`, unless a plugin might use it."""
    if words[0] in COMPILE_NOTHING and "--plugin" not in words:
        from capsnet.kernels.private import skip_compiler

        skip_compiler()


TOGETHER = ("train", "evaluate", "reproduce")  # the verbs that several processes share


def run_together(place: Launch, words: list[str]) -> int:
    """Run the verb as one of the processes that torchrun has started."""
    from capsnet.group.member import take_part

    verb = next((word for word in words if word in VERBS), "")
    if verb and verb not in TOGETHER and place.size > 1:
        return 2 if place.rank else complain(f"{verb} runs in one process: start it without torchrun.")
    return take_part(place, lambda: run(words))


def main(argv: list[str] | None = None) -> int:
    """Run a verb and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if words[0] in ("--version", "version"):
        print(f"capsnet {__version__}")
        return 0
    try:
        place = launch()
        if argv is None:  # this process is ours
            start_quickly(words)
        return run(words) if place is None else run_together(place, words)
    except UserError as error:
        return complain(str(error))
    except BrokenPipeError:  # the reader of a pipe has gone, which is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return complain(explained(error))
