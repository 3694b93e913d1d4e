"""Models by name: from a config to a network, and configs as JSON and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from capsnet.errors import UserError
from capsnet.models.base import Model
from capsnet.models.config import ModelConfig
from capsnet.records import from_json
from capsnet.registry import Registry, owned
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.routing.options import RoutingOptions


class ModelRegistry(Registry[type[Model]]):
    """Models by name."""

    def prepare(self, name: str, entry: type[Model]) -> type[Model]:
        """Tell a model's config its name."""
        if not (isinstance(entry, type) and issubclass(entry, Model)):
            raise UserError(f"the model '{name}' should be a subclass of capsnet.Model, and is {entry!r}.")
        entry.Config = owned(entry.Config, entry, "kind", name)
        return entry


MODELS = ModelRegistry(
    "model",
    "capsnet.models",
    {
        "capsnet": "capsnet.models.capsnet",
        "cnn": "capsnet.models.cnn",
        "branched": "capsnet.models.branched",
        "efficient": "capsnet.models.efficient",
        "resnet": "capsnet.models.resnet",
        "matrix": "capsnet.models.matrix",
        "sync": "capsnet.models.sync",
    },
)


def register(name: str) -> Any:
    """Class decorator: register a model under a name that configs and checkpoints refer to."""
    return MODELS.register(name)


def build(
    config: ModelConfig,
    *,
    stem: nn.Module | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """The network that a config describes, with fresh weights; a capsule network also on a given stem."""
    make: Any = MODELS.get(config.kind)
    if stem is not None and config.kind != "capsnet":
        raise UserError(f"the model {config.kind} takes no stem: leave it out, or use the model capsnet.")
    return make(config, device=device, dtype=dtype, **({} if stem is None else {"stem": stem}))


def parameters(config: ModelConfig) -> int:
    """Number of parameters of a network, without memory for them."""
    return sum(p.numel() for p in build(config, device=torch.device("meta")).parameters())


def model_to_dict(config: ModelConfig) -> dict[str, Any]:
    """A model's config as JSON types, with its kind and its routing's algorithm by name."""
    record: dict[str, Any] = {"kind": config.kind}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        is_routing = isinstance(value, RoutingOptions)
        record[field.name] = {"algorithm": value.algorithm, **dataclasses.asdict(value)} if is_routing else value
    return record


def model_from_dict(record: dict[str, Any]) -> ModelConfig:
    """A model's config back from JSON; old records are upgraded."""
    parts = upgrade(record)
    config = MODELS.get(str(parts.pop("kind", ""))).Config
    if isinstance(routing := parts.get("routing"), dict):
        options = dict(routing)
        parts["routing"] = from_json(type(options_for(str(options.pop("algorithm", "")))), options)
    return from_json(config, parts)


def upgrade(record: dict[str, Any]) -> dict[str, Any]:
    """An old record, with the options of dynamic routing and branches among a capsule network's fields, as it is today.

    Results and birth certificates keep the config that they were written with.
    """
    parts = {"kind": "capsnet", **record}
    if parts.get("hidden_norm") is False:  # an option that was removed; it was off
        del parts["hidden_norm"]
    if parts["kind"] != "capsnet" or isinstance(parts.get("routing"), dict):
        return parts
    old = {"iterations": "iterations", "leaky": "leaky", "routing_bias": "bias", "detach": "detach"}
    options = {new: parts.pop(name) for name, new in old.items() if name in parts}
    branches, trunk = parts.pop("branches", 1), parts.pop("trunk", 0)
    if branches != 1:
        parts |= {"kind": "branched", "branches": branches, "trunk": trunk}
    return parts | {"routing": {"algorithm": parts.get("routing", "dynamic"), **options}}


def plugins_of(config: ModelConfig) -> list[tuple[Registry[Any], str]]:
    """What a model takes from registries, so that a checkpoint can record the plugins that it needs."""
    values = (getattr(config, field.name) for field in dataclasses.fields(config))
    routings = [(ROUTINGS, value.algorithm) for value in values if isinstance(value, RoutingOptions)]
    return [(MODELS, config.kind), *routings]
