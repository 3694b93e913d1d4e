"""Models by name, and old records of configs, which upgrade to what they meant."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import capsnet
from capsnet.errors import UserError
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Certificate
from capsnet.models.base import Model, Output
from capsnet.models.branched import BranchedConfig
from capsnet.models.config import CapsNetConfig, ModelConfig
from capsnet.models.registry import MODELS, build, model_from_dict, model_to_dict, plugins_of, register
from capsnet.routing import DynamicOptions
from capsnet.train.config_records import from_dict
from tiny_models import TINY, TINY_CNN

OLD = {
    "kind": "capsnet", "image_shape": [3, 20, 24], "num_classes": 7, "stem_channels": [8, 12], "stem_kernels": [5, 3],
    "stem_strides": [2, 1], "stem_norm": True, "primary_types": 4, "primary_dim": 6, "primary_kernel": 3,
    "primary_stride": 1, "primary_factor": True, "hidden_caps": [[5, 4]], "class_dim": 12, "routing": "dynamic",
    "iterations": 2, "leaky": True, "routing_bias": True, "detach": True, "shared": True, "decoder": [32],
    "init": "official",
}  # fmt: skip
UPGRADED = CapsNetConfig(
    (3, 20, 24), 7, stem_channels=(8, 12), stem_kernels=(5, 3), stem_strides=(2, 1), stem_norm=True, primary_types=4,
    primary_dim=6, primary_kernel=3, primary_stride=1, primary_factor=True, hidden_caps=((5, 4),), class_dim=12,
    routing=DynamicOptions(iterations=2, leaky=True, bias=True, detach=True), shared=True, decoder=(32,),
    init="official",
)  # fmt: skip


@pytest.mark.parametrize("config", [TINY, TINY_CNN, UPGRADED, BranchedConfig(branches=2, trunk=0)])
def test_a_config_survives_the_way_through_json(config: ModelConfig) -> None:
    record = json.loads(json.dumps(model_to_dict(config)))
    assert record["kind"] == config.kind
    assert model_from_dict(record) == config


@pytest.mark.parametrize("kind", ["capsnet", "efficient", "branched", "matrix", "cnn", "resnet"])
@pytest.mark.parametrize("side", [28, 40])
def test_every_kind_of_network_has_a_tiny_one_of_its_kind(kind: str, side: int) -> None:
    config = replace(MODELS.get(kind).Config(), image_shape=(1, side, side))
    small = config.tiny()
    assert (type(small), small.image_shape) == (type(config), config.image_shape)
    assert sum(p.numel() for p in build(small).parameters()) < 100_000
    assert build(small)(torch.rand(2, 1, side, side)).activations.shape == (2, 10)


def test_a_capsule_network_of_an_old_record_becomes_what_it_was() -> None:
    assert model_from_dict(OLD) == UPGRADED


def test_hidden_norm_of_an_old_record_is_forgotten_if_it_was_off() -> None:
    record = model_to_dict(CapsNetConfig())
    assert model_from_dict(record | {"hidden_norm": False}) == CapsNetConfig()
    with pytest.raises(UserError, match="hidden_norm"):
        model_from_dict(record | {"hidden_norm": True})


def test_branches_of_an_old_record_become_a_model_of_their_own() -> None:
    found = model_from_dict(OLD | {"branches": 2, "trunk": 1, "hidden_caps": []})
    assert found == BranchedConfig(**vars(replace(UPGRADED, hidden_caps=())), branches=2, trunk=1)
    assert model_from_dict(OLD | {"branches": 1, "trunk": 0}) == UPGRADED


def test_what_an_old_record_left_out_has_its_default() -> None:
    old = {name: value for name, value in OLD.items() if name not in ("kind", "detach", "iterations")}
    assert model_from_dict(old) == replace(UPGRADED, routing=DynamicOptions(leaky=True, bias=True))


@pytest.mark.parametrize(("cnn", "kind"), [("entropy", "auto"), ("margin", "margin")])
def test_the_loss_of_a_cnn_of_an_old_record_is_kept(cnn: str, kind: str) -> None:
    record = zoo.card("expanded-cnn").config
    record["loss"]["cnn"] = cnn
    assert from_dict(record).loss.kind == kind
    record["model"] = OLD  # of a capsule network the field meant nothing
    assert from_dict(record).loss.kind == "auto"


@dataclass(frozen=True)
class LinearConfig(ModelConfig):
    """One linear layer."""

    scale: float = 1.0
    """Factor of the logits."""


class Linear(Model):
    """Pixels to classes by one matrix."""

    Config = LinearConfig
    default_loss = "entropy"

    def __init__(
        self, config: LinearConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(config)
        self.layer = nn.Linear(config.image_shape[1] * config.image_shape[2], config.num_classes, device=device)

    def forward(self, images: Tensor, trace: bool = False, routing: Any = None) -> Output:
        logits = self.config.scale * self.layer(images.flatten(1))
        return Output(logits.softmax(1), logits=logits)


@pytest.mark.usefixtures("forget_plugins")
def test_a_registered_model_is_built_saved_and_loaded_by_its_name(tmp_path: Path) -> None:
    register("one-layer")(Linear)
    model = build(LinearConfig((1, 8, 8), 3, scale=2.0))
    assert isinstance(model, Linear)
    assert plugins_of(model.config) == [(MODELS, "one-layer")]
    path = tmp_path / checkpoint.MODEL_FILE
    checkpoint.save_model(path, model, Certificate())
    loaded = capsnet.load(path)
    images = torch.rand(2, 8, 8)
    assert asdict(loaded.config) == asdict(model.config)
    assert torch.equal(loaded.predict(images).activations, model.predict(images).activations)
    assert model.describe() == "8×8 grey → Linear → 3 classes"
