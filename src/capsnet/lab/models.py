"""The models that the page can open by name: the shipped ones and those given on the command line.

A name in a request is only looked up in this table and never used as a path. A model is described from the header of
its file, without its weights. It is loaded on first use; the most recently used ones stay in memory.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import safetensors
import torch

from capsnet.data.registry import find, is_cached, name_of
from capsnet.errors import UserError, unknown
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Card, Certificate
from capsnet.lab.options import controls
from capsnet.models.base import Model
from capsnet.models.config import ModelConfig
from capsnet.models.registry import build, model_from_dict
from capsnet.nn.decoder import Decoder
from capsnet.notice import say
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.routing.options import RoutingOptions

IN_MEMORY = 4
FAVOURITES = ("quick-mnist", "best-mnist")  # the first one fits on one screen


@dataclass(frozen=True)
class Entry:
    """One model of the table: its name, its file and its card."""

    name: str
    file: Path
    card: Card | None = None
    error_percent: float | None = None

    @cached_property
    def record(self) -> dict[str, Any]:
        """The header of its file."""
        try:
            with safetensors.safe_open(self.file, framework="pt") as file:
                record = json.loads((file.metadata() or {}).get("record", "null"))
        except (safetensors.SafetensorError, OSError, ValueError) as error:
            raise UserError(f"{self.file} cannot be read ({error}): restore it or train it again.") from None
        if not isinstance(record, dict) or "model" not in record:
            raise UserError(f"{self.file} contains no model: give a run folder, a .safetensors file or a model name.")
        checkpoint.require_parts(record, self.file)
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
        """The name of the dataset it was trained on; the path of a folder of images stays private."""
        return name_of(self.trained_on)

    @property
    def trained_on(self) -> str:
        """The dataset with its options or path."""
        return str(Certificate.of_header(self.record["certificate"]).config.get("data", ""))

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the page needs to know before it shows the model."""
        network = build(self.config, device=torch.device("meta"))
        return {
            "name": self.name,
            "title": self.card.title if self.card else f"{self.name}, trained on {self.data or 'unknown data'}",
            "data": self.data,
            "parameters": sum(p.numel() for p in network.parameters()),
            "image_shape": list(self.image_shape),
            "classes": [str(name) for name in self.record["classes"]],
            "multi_label": self.record["multi_label"],
            "error_percent": self.error_percent,
            "examples": has_examples(self),
            "kind": self.config.kind,
            **show(network),
        }


def dataset_of(entry: Entry) -> str:
    """The dataset whose test images suit a model; MNIST for models trained on images made of its digits."""
    info = find(entry.data)
    base = find(info.made_of) if info and info.made_of else info
    if base is None or base.takes_path or base.labels_per_image != 1:
        raise UserError(
            f"{entry.name} was trained on {entry.data or 'unknown data'}, for which the Lab has no test images."
        )
    return entry.trained_on if base is info else base.name


def has_examples(entry: Entry) -> bool:
    """Whether test images that suit a model need no download."""
    try:
        return is_cached(dataset_of(entry))
    except UserError:
        return False


def folder_of(data: str) -> str:
    """A dataset with its options as the name of a folder.

    >>> folder_of("viewpoints:size=32")
    'viewpoints-size-32'
    """
    return re.sub(r"[^A-Za-z0-9._-]+", "-", data)


def show(network: Model) -> dict[str, Any]:
    """What can be shown of a network: what it says itself, with its routing options as controls."""
    shown = network.shown() | {"has_decoder": isinstance(network.decoder, Decoder)}
    options = routing_options(shown)
    if options is None:
        return shown | {"routing": None}
    controlled = [asdict(control) for control in controls(options)]
    couplings = ROUTINGS.get(options.algorithm).couplings
    return shown | {"routing": {"name": options.algorithm, "couplings": couplings, "options": controlled}}


def routing_options(shown: dict[str, Any]) -> RoutingOptions | None:
    """The options of the routing that a network shows; None without one."""
    values = dict(shown.get("routing") or {})
    name = values.pop("name", None)
    return None if name is None else options_for(name, **values)


def error_percent(results: Any) -> float | None:
    """The test error on a model card or in the results.json of a run, if there is one."""
    test = results.get("test") if isinstance(results, dict) else None
    error = test.get("error_percent") if isinstance(test, dict) else None
    return float(error) if isinstance(error, int | float) else None


class Shelf:
    """The table of models. Hold `lock` while a model computes."""

    def __init__(self, models: Sequence[str] = ()) -> None:
        self.lock = threading.RLock()
        self.entries: dict[str, Entry] = {}
        self._loaded: OrderedDict[str, Model] = OrderedDict()
        for name in zoo.names():
            self._add_shipped(name)
        self.given = [self._add_given(model) for model in models]
        self.default = self.given[0] if self.given else self._favourite()

    def _add_shipped(self, name: str) -> None:
        try:
            card = zoo.card(name)
            entry = Entry(name, zoo.weight_file(name), card, error_percent(card.to_json()))
            assert entry.description
            self.entries[name] = entry
        except UserError as error:  # the others still work
            say(f"capsnet: {error}")

    def _add_given(self, model: str) -> str:
        """Add a model of the command line to the table and return its name there."""
        if zoo.is_shipped(model):
            if model not in self.entries:
                raise UserError(f"the shipped model {model} cannot be read: reinstall capsnet.")
            return model
        file = checkpoint.model_file(model)
        if not file.is_file():
            raise UserError(f"there is no model {model}: `capsnet models` lists the available ones.")
        results = file.parent / "results.json"
        error = error_percent(checkpoint.read_json(results)) if results.is_file() else None
        name = free_name(file.parent.name if file.name == checkpoint.MODEL_FILE else file.stem, self.entries)
        self.entries[name] = Entry(name, file.resolve(), error_percent=error)
        assert self.entries[name].description
        return name

    def _favourite(self) -> str:
        names = [*FAVOURITES, *self.entries]
        found = next((name for name in names if name in self.entries), None)
        if found is None:
            raise UserError(
                "there is no trained model yet: train one with `capsnet demo`, then run `capsnet lab runs/demo`."
            )
        return found

    def find(self, name: str) -> Entry:
        if name not in self.entries:
            raise unknown("model", name[:60], self.entries)
        return self.entries[name]

    def load(self, name: str) -> Model:
        """The model, from memory if it was used recently."""
        entry = self.find(name)
        with self.lock:
            if name not in self._loaded:
                self._loaded[name] = checkpoint.load(entry.file).requires_grad_(False)
                while len(self._loaded) > IN_MEMORY:
                    self._loaded.popitem(last=False)
            self._loaded.move_to_end(name)
            return self._loaded[name]

    def listing(self) -> dict[str, Any]:
        return {"default": self.default, "models": [entry.description for entry in self.entries.values()]}


def free_name(wanted: str, taken: dict[str, Entry]) -> str:
    """A unique name that is safe in a URL.

    >>> free_name("my run", {})
    'my-run'
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("-.")[:60] or "model"
    numbered = (f"{name}-{n}" for n in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)
