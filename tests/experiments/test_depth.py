"""Depth: what counts as alive, what the recipe scales, and that the experiment runs."""

from __future__ import annotations

from dataclasses import replace

import torch

from capsnet.experiments.core.plan import Record
from capsnet.experiments.depth import ALIVE, Depth, alive_share, by_layer, config_of, sentence, stacked_activations
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.functional import lengths, unit_scale

DEEP = CapsNetConfig(
    (1, 12, 12), 3, stem_channels=(8,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    hidden_caps=((6, 4),) * 3, class_dim=6, decoder=(),
)  # fmt: skip


def test_a_capsule_is_alive_if_one_image_excites_it() -> None:
    activations = torch.full((20, 4), 0.01)
    activations[3, 1] = ALIVE + 0.01
    activations[:, 2] = ALIVE - 0.01
    assert alive_share(activations) == 0.25


def test_scaling_keeps_directions_and_relative_lengths() -> None:
    u = torch.randn(3, 5, 4)
    scaled = unit_scale(0.001 * u)
    torch.testing.assert_close(lengths(scaled).square().mean(1), torch.ones(3), atol=1e-3, rtol=0)
    factor = scaled / u
    torch.testing.assert_close(factor, factor[:, :1, :1].expand_as(factor))


def test_the_recipe_keeps_four_layers_from_fading_and_the_plain_stack_fades() -> None:
    torch.manual_seed(0)
    images = torch.rand(4, 1, 12, 12)
    faded, kept = (stacked_activations(CapsNet(replace(DEEP, hidden_norm=norm)), images) for norm in (False, True))
    assert faded[-1].mean() < 0.05 * faded[0].mean()
    assert all(layer.mean() > 0.1 for layer in kept[1:])


def test_the_activations_by_layer_end_with_those_of_the_model() -> None:
    model, images = CapsNet(replace(DEEP, hidden_norm=True)), torch.rand(4, 1, 12, 12)
    torch.testing.assert_close(stacked_activations(model, images)[-1], model(images).activations)
    torch.testing.assert_close(model(images, trace=True).poses, model(images).poses)


def test_each_depth_has_as_many_layers_and_only_the_recipe_scales() -> None:
    rows = Depth().rows("day", 0)
    assert [row.method for row in rows] == [
        "plain-1", "plain-2", "recipe-2", "plain-3", "recipe-3", "plain-4", "recipe-4",
    ]  # fmt: skip
    for row in rows:
        assert row.config is not None
        assert len(row.config.model.hidden_caps) == int(row.shown["layers"]) - 1
        assert row.config.model.hidden_norm == (row.shown["stack"] == "recipe")
    assert replace(config_of("recipe", 3, "day", 0).model, hidden_norm=False) == config_of("plain", 3, "day", 0).model


def test_findings_are_made_from_the_numbers() -> None:
    outcome = {"error_percent": 8.0, "alive_percent": [100.0, 50.0]}
    group = [Record(method="plain-2", seed=k, outcome=outcome | {"error_percent": 8.0 + k}) for k in (0, 1)]
    assert by_layer(group, "alive_percent", 0) == "100, 50"
    assert sentence(2, {"plain-2": group}) == "2 capsule layers: plain 8.50 % error, alive by layer 100, 50 %."
