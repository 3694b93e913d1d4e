"""Depth: what counts as alive, what the recipe scales, and that the experiment runs."""

from __future__ import annotations

import torch

from capsnet.experiments.core.plan import Record
from capsnet.experiments.depth import ALIVE, Depth, alive_share, by_layer, sentence, stacked_activations
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.layers import DenseCaps

DEEP = CapsNetConfig(
    (1, 12, 12), 3, stem_channels=(8,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    hidden_caps=((6, 4),) * 3, class_dim=6, decoder=(),
)  # fmt: skip


def test_a_capsule_is_alive_if_one_image_excites_it() -> None:
    activations = torch.full((20, 4), 0.01)
    activations[3, 1] = ALIVE + 0.01
    activations[:, 2] = ALIVE - 0.01
    assert alive_share(activations) == 0.25


def test_our_initialisation_fades_less_than_that_of_the_authors() -> None:
    torch.manual_seed(0)
    stacks = [torch.nn.Sequential(*(DenseCaps(32, 8, 32, 8) for _ in range(3))) for _ in range(2)]
    for layer in stacks[1]:
        torch.nn.init.normal_(layer.weight, std=0.1)
    u = torch.nn.functional.normalize(torch.randn(4, 32, 8), dim=-1)
    ours, authors = (stack(u).norm(dim=-1).mean() for stack in stacks)
    assert ours > 1000 * authors


def test_the_activations_by_layer_end_with_those_of_the_model() -> None:
    model, images = CapsNet(DEEP), torch.rand(4, 1, 12, 12)
    torch.testing.assert_close(stacked_activations(model, images)[-1], model(images).activations)
    torch.testing.assert_close(model(images, trace=True).poses, model(images).poses)


def test_each_depth_has_as_many_layers() -> None:
    rows = Depth().rows("day", 0)
    assert [row.method for row in rows] == ["layers-1", "layers-2", "layers-3", "layers-4"]
    for row in rows:
        assert row.config is not None
        assert len(row.config.model.hidden_caps) == int(row.shown["layers"]) - 1


def test_findings_are_made_from_the_numbers() -> None:
    outcome = {"error_percent": 8.0, "alive_percent": [100.0, 50.0]}
    group = [
        Record(method="layers-2", seed=k, shown={"layers": "2"}, outcome=outcome | {"error_percent": 8.0 + k})
        for k in (0, 1)
    ]  # fmt: skip
    assert by_layer(group, "alive_percent", 0) == "100, 50"
    assert sentence(group) == "2 capsule layers: 8.50 % error, alive by layer 100, 50 %."
