"""A training's config as JSON: every preset and field survives, and what does not fit is named by its field."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields, replace
from typing import Any

import pytest

from capsnet.errors import UserError
from capsnet.models.branched import BranchedConfig
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig
from capsnet.routing import DynamicOptions
from capsnet.train.config import Config
from capsnet.train.config_records import from_dict, to_dict
from capsnet.train.presets import PRESETS, get_preset
from tiny_models import TINY


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_preset_survives_the_way_through_json(name: str) -> None:
    config = get_preset(name)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert config.preset == name


def test_every_field_survives_the_way_through_json() -> None:
    model = replace(TINY, hidden_caps=((5, 4), (3, 2)), shared=True, init="official", stem_channels=(), stem_kernels=())
    model = replace(model, routing=DynamicOptions(iterations=2, leaky=True, bias=True, detach=True))
    config = Config(data="folder:x", image_size=64, epochs=2, lr=1, precision="bf16", model=model)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("epohcs",), 3, "Config has fields .* epohcs"),
        (("model", "depth"), 3, "CapsNetConfig has fields .* depth"),
        (("loss", "weird"), 3, "LossConfig has fields .* weird"),
        (("augment", "weird"), 3, "Augment has fields .* weird"),
        (("model", "kind"), "capsnt", "no model 'capsnt'; did you mean 'capsnet'"),
        (("epochs",), "ten", "Config.epochs is 'ten'"),
        (("epochs",), True, "Config.epochs is True"),
        (("batch_size",), 1.5, "Config.batch_size is 1.5"),
        (("schedule",), "sometimes", "Config.schedule is 'sometimes'"),
        (("model", "image_shape"), [1, 28], "image_shape is"),
        (("model", "hidden_caps"), [[5, 4, 3]], "hidden_caps is"),
        (("model", "routing", "leaky"), 1, "DynamicOptions.leaky is 1"),
        (("model", "routing", "heads"), 2, "DynamicOptions has fields .* heads"),
        (("model", "routing", "algorithm"), "dinamic", "no routing 'dinamic'; did you mean 'dynamic'"),
        (("loss", "present"), None, "present is None"),
        (("model",), None, "Config has no model"),
    ],
)
def test_a_config_that_does_not_fit_is_named_by_its_field(path: tuple[str, ...], value: object, said: str) -> None:
    record = to_dict(get_preset("paper"))
    inside = record
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    with pytest.raises(UserError, match=said):
        from_dict(record)


@pytest.mark.parametrize("record", [None, [], 3])
def test_a_config_that_is_not_an_object_is_refused(record: Any) -> None:
    with pytest.raises(UserError, match="not a config"):
        from_dict(record)


@pytest.mark.parametrize("name", ["model", "loss", "augment"])
def test_a_config_with_a_part_missing_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=f"Config has no {name}"):
        from_dict(without(to_dict(get_preset("paper")), name))


def test_a_field_without_help_does_not_exist() -> None:
    for kind in (CapsNetConfig, CNNConfig, BranchedConfig, LossConfig, DynamicOptions, Config):
        source = "".join(map(inspect.getsource, kind.__mro__[:-1]))
        for field in fields(kind):
            after = source.split(f"\n    {field.name}:")[1].split("\n")[1].strip()
            assert after.startswith('"""'), f"{kind.__name__}.{field.name}"
