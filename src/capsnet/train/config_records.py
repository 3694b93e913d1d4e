"""A training's config as JSON and back."""

from __future__ import annotations

import dataclasses
from typing import Any

from capsnet import plugins
from capsnet.data.config import Augment
from capsnet.data.registry import DATASETS, find, name_of
from capsnet.errors import UserError
from capsnet.models.config import LossConfig
from capsnet.models.registry import MODELS, model_from_dict, model_to_dict, plugins_of
from capsnet.records import from_json
from capsnet.routing.base import ROUTINGS
from capsnet.train.config import Config


def to_dict(config: Config) -> dict[str, Any]:
    """A config as JSON types, with the kind of the model and its routing by name, and the plugins that it needs."""
    record = dataclasses.asdict(config) | {"model": model_to_dict(config.model)}
    used = [*plugins_of(config.model), *([(DATASETS, name_of(config.data))] if find(config.data) else [])]
    needed = plugins.needs(used)
    return record | ({"plugins": needed} if needed else {})


def from_dict(record: dict[str, Any], what: str = "this training") -> Config:
    """The config back from JSON; a missing plugin and fields that this version does not know are named in the error."""
    parts = dict(record) if isinstance(record, dict) else {}
    plugins.require(parts.pop("plugins", []), (ROUTINGS, MODELS, DATASETS), what)
    if missing := [name for name in ("model", "loss", "augment") if not isinstance(parts.get(name), dict)]:
        raise UserError(f"the file's Config has no {missing[0]}: the file is damaged, or not a config.")
    parts["model"] = model_from_dict(record["model"])
    loss = dict(record["loss"])
    if (kind := loss.pop("cnn", "entropy")) == "margin" and parts["model"].kind == "cnn":  # old records
        loss["kind"] = kind
    parts["loss"] = from_json(LossConfig, loss)
    parts["augment"] = from_json(Augment, record["augment"])
    return from_json(Config, parts)
