"""The models that the page may ask for, by name: the shipped ones, and the one given on the command line.

A name from the network is only ever looked up in this table. A model is described by its file's header, without its
weights; it is loaded when it is first used, once, and the few used last stay in memory.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch

from capsnet import checkpoint, zoo
from capsnet.config import CapsNetConfig, ModelConfig, model_from_dict
from capsnet.errors import UserError, unknown
from capsnet.lab.thinking import receptive_field
from capsnet.models import Model
from capsnet.models.capsnet import grid_size
from capsnet.models.registry import build
from capsnet.terminal import say

IN_MEMORY = 4
FAVOURITES = ("quick-mnist", "best-mnist")  # the first has one routing to watch, and fits on one screen
DIGITS = ("mnist", "multimnist", "expanded-mnist", "affine-mnist")  # what is made of MNIST's digits


@dataclass(frozen=True)
class Entry:
    """One model of the table: its name, its file, and what is known about it besides."""

    name: str
    file: Path
    card: dict[str, Any]

    @cached_property
    def record(self) -> dict[str, Any]:
        """What its file says about the model."""
        try:
            with safetensors.safe_open(self.file, framework="pt") as file:
                record = json.loads((file.metadata() or {}).get("record", "null"))
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise UserError(
                f"{self.file} is no model that can be read ({error}): restore it, or train again."
            ) from None
        if not isinstance(record, dict) or "model" not in record:
            raise UserError(f"{self.file} holds no model: give a run's folder, a .safetensors file or a shipped name.")
        checkpoint.check_record(record, model_from_dict(record["model"]).num_classes, self.file)
        return record

    @cached_property
    def config(self) -> ModelConfig:
        return model_from_dict(self.record["model"])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        return self.config.image_shape

    @property
    def data(self) -> str:
        """What it was trained on; of your own images no path is told."""
        config = self.record["certificate"].get("config")
        name = str(config.get("data", "")) if isinstance(config, dict) else ""
        return name.partition(":")[0]

    @property
    def sees_digits(self) -> bool:
        return self.data in DIGITS

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the page needs to know before it shows the model."""
        network = build(self.config, device=torch.device("meta"))
        about = {
            "name": self.name,
            "title": self.card.get("title") or f"{self.name}, trained on {self.data or 'unknown data'}",
            "data": self.data,
            "parameters": sum(p.numel() for p in network.parameters()),
            "image_shape": list(self.image_shape),
            "classes": [str(name) for name in self.record["classes"]],
            "multi_label": self.record["multi_label"],
            "error_percent": error_percent(self.card),
        }
        if isinstance(self.config, CapsNetConfig):
            return about | {"kind": "capsnet"} | describe_capsules(self.config)
        return about | {"kind": "cnn", "has_decoder": False}


def describe_capsules(config: CapsNetConfig) -> dict[str, Any]:
    """The sizes of a capsule network; `routed` is how many capsules the last routing takes."""
    height, width = grid_size(config)
    return {
        "grid": [height, width],
        "primary_types": config.primary_types,
        "primary_dim": config.primary_dim,
        "class_dim": config.class_dim,
        "branches": config.branches,
        "routed": config.hidden_caps[-1][0] if config.hidden_caps else height * width * config.primary_types,
        "iterations": config.iterations,
        "leaky": config.leaky,
        "routing_bias": config.routing_bias,
        "shared": config.shared,
        "has_decoder": bool(config.decoder),
        "decoder": list(config.decoder),
        "receptive": receptive_field(config),
    }


def error_percent(card: dict[str, Any]) -> float | None:
    """The test error of a card or of a run's results.json, if it says one."""
    test = card.get("test")
    error = test.get("error_percent") if isinstance(test, dict) else None
    return float(error) if isinstance(error, int | float) else None


class Shelf:
    """The table of models; `lock` is to be held while one of them computes."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.lock = threading.RLock()
        self.entries: dict[str, Entry] = {}
        self._loaded: OrderedDict[str, Model] = OrderedDict()
        for name in zoo.names():
            self._add_shipped(name)
        given = [self._add_given(model) for model in models]
        self.default = given[0] if given else self._favourite()

    def _add_shipped(self, name: str) -> None:
        try:
            entry = Entry(name, zoo.weight_file(name), zoo.card(name))
            assert entry.description
            self.entries[name] = entry
        except UserError as error:  # the others are still good
            say(f"capsnet: {error}")

    def _add_given(self, model: str) -> str:
        """Put the model of the command line into the table, and give the name that it has there."""
        if zoo.is_shipped(model):
            if model not in self.entries:
                raise UserError(f"the shipped model {model} cannot be read: install capsnet again.")
            return model
        file = checkpoint.model_file(model)
        if not file.is_file():
            raise UserError(f"there is no model {model}; `capsnet models` lists what there is.")
        results = file.parent / "results.json"
        card = checkpoint.read_json(results) if results.is_file() else {}
        name = free_name(file.parent.name if file.name == checkpoint.MODEL_FILE else file.stem, self.entries)
        self.entries[name] = Entry(name, file.resolve(), card if isinstance(card, dict) else {})
        assert self.entries[name].description
        return name

    def _favourite(self) -> str:
        names = [*FAVOURITES, *self.entries]
        found = next((name for name in names if name in self.entries), None)
        if found is None:
            raise UserError("there is no trained model yet: `capsnet demo` trains one, then `capsnet lab runs/demo`.")
        return found

    def find(self, name: str) -> Entry:
        if name not in self.entries:
            raise unknown("model", name[:60], self.entries)
        return self.entries[name]

    def load(self, name: str) -> Model:
        """The model, from memory if it was used lately."""
        entry = self.find(name)
        with self.lock:
            if name not in self._loaded:
                self._loaded[name] = checkpoint.load(entry.file).requires_grad_(False)
                while len(self._loaded) > IN_MEMORY:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def describe(self) -> dict[str, Any]:
        return {"default": self.default, "models": [entry.description for entry in self.entries.values()]}


def free_name(wanted: str, taken: dict[str, Entry]) -> str:
    """A name for the address bar that no other model has.

    >>> free_name("my run", {})
    'my-run'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-.")[:60] or "model"
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)
