"""Drawn scenes: what is recorded is what is drawn, and nothing scrambled is learnt from; the experiment on them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor

from capsnet import data
from capsnet.data.synthetic import parts
from capsnet.data.synthetic.parts import CLASSES, MOST, SCENES, SCRAMBLED, Objects, Scenes, scenes
from capsnet.errors import UserError
from capsnet.experiments import get
from capsnet.experiments import parts as experiment
from capsnet.experiments.core.conduct import conduct
from capsnet.experiments.core.readout import r_squared
from capsnet.experiments.core.results import Place
from capsnet.models.config import CNNConfig, LossConfig
from capsnet.models.registry import build
from capsnet.nn.losses import margin_loss
from capsnet.train import steps
from capsnet.train.config import Config


def centre_of_mass(image: Tensor) -> Tensor:
    """x to the right and y down in pixels, of an image (h, w)."""
    h, w = image.shape
    x = (image.sum(0) * (torch.arange(w) + 0.5)).sum()
    y = (image.sum(1) * (torch.arange(h) + 0.5)).sum()
    return torch.stack([x, y]) / image.sum()


def posed(arrangement: int, x: float, y: float, degrees: float, size: float) -> Tensor:
    """One object at a chosen pose, drawn: (h, w). The first three arrangements are those of the classes."""
    return posed_at(arrangement, [(x, y, math.radians(degrees), size)])[0]


def posed_at(arrangement: int, poses: list[tuple[float, float, float, float]]) -> Tensor:
    """The same object at several poses: (n, h, w)."""
    n = len(poses)
    objects = Objects(
        torch.arange(MOST).repeat(n, 1),
        torch.tensor([[True, False, False]]).repeat(n, 1),
        torch.zeros(n, dtype=torch.bool),
        torch.full((n, MOST), arrangement),
        torch.tensor(poses)[:, None].repeat(1, MOST, 1),
    )
    return parts.draw(objects, 40)[:, 0, 0]


# --- The same scene whenever it is asked for -------------------------------------------------------------------


@pytest.mark.parametrize("kind", SCENES)
def test_a_scene_does_not_depend_on_the_batch_it_comes_in(kind: str) -> None:
    some = scenes(kind, 100)
    together = some.gather(some.numbers())
    for index in ([97, 3, 40], [3], list(range(31, 62))):
        again = some.gather(torch.tensor(index))
        assert torch.equal(again.images, together.images[index])
        assert torch.equal(again.labels, together.labels[index])


def test_another_seed_purpose_or_index_gives_another_scene() -> None:
    images = [
        scenes("one", 9).gather(torch.tensor([0, 1])).images,
        scenes("one", 9, seed=1).gather(torch.tensor([0, 1])).images,
        scenes("one", 9, purpose="validation").gather(torch.tensor([0, 1])).images,
    ]
    for one, other in combinations(torch.cat(images), 2):
        assert not torch.equal(one, other)


def test_training_goes_on_to_new_scenes_while_validation_and_test_stay() -> None:
    first, other = (data.load("parts:train=64,test=32", validation=16, seed=seed) for seed in (0, 1))
    batches = data.Batches(first.train, 32)
    epochs = [torch.cat([batches.batch(step).images for step in epoch]) for epoch in ((0, 1), (2, 3))]
    assert not (epochs[0][:, None] == epochs[1]).flatten(2).all(2).any()
    assert len(first.validation) == 16
    for one, same in ((first.validation, other.validation), (first.test, other.test)):
        assert torch.equal(one.gather(one.numbers()).images, same.gather(same.numbers()).images)
    assert not torch.equal(first.train.gather(torch.arange(8)).images, other.train.gather(torch.arange(8)).images)


# --- The recorded pose is the drawn pose -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["one", "scrambled"])
def test_the_recorded_place_is_the_centre_of_mass(kind: str) -> None:
    some = scenes(kind, 200)
    images, poses = some.gather(some.numbers()).images, some.objects(some.numbers()).poses
    for image, pose in zip(images, poses[:, 0], strict=True):
        assert torch.dist(centre_of_mass(image[0]), pose[:2]) < 0.2


def test_every_object_of_a_crowd_lies_where_it_is_recorded() -> None:
    some = scenes("crowded", 60)
    batch, objects = some.gather(some.numbers()), some.objects(some.numbers())
    assert batch.parts is not None
    for alone, pose in zip(batch.parts[objects.present], objects.poses[objects.present], strict=True):
        assert torch.dist(centre_of_mass(alone[0]), pose[:2]) < 0.2


@pytest.mark.parametrize("kind", range(len(CLASSES)))
def test_a_quarter_turn_of_the_angle_turns_the_picture_counter_clockwise(kind: int) -> None:
    upright, turned = posed(kind, 20, 20, 10, 9), posed(kind, 20, 20, 100, 9)
    assert (turned - torch.rot90(upright)).abs().max() < 0.01


@pytest.mark.parametrize("kind", range(len(CLASSES)))
def test_moving_the_place_by_whole_pixels_moves_the_picture(kind: int) -> None:
    here, there = posed(kind, 18.3, 17.6, 25, 8), posed(kind, 21.3, 22.6, 25, 8)
    assert (there[5:, 3:] - here[:-5, :-3]).abs().max() < 0.01


@pytest.mark.parametrize("kind", range(len(CLASSES)))
def test_the_ink_grows_with_the_square_of_the_size(kind: int) -> None:
    ratio = posed(kind, 20, 20, 30, 11).sum() / posed(kind, 20, 20, 30, 7).sum()
    assert ratio == pytest.approx((11 / 7) ** 2, rel=0.03)


def test_a_house_has_its_roof_up_and_a_smile_is_at_the_bottom() -> None:
    def width(image: Tensor, row: int) -> float:
        return float(image[row].sum())

    house = posed(0, 20, 20, 0, 11)
    rows = house.sum(1).nonzero().flatten()
    assert width(house, int(rows[2])) < 0.5 * width(house, int(rows[-3]))
    face = posed(2, 20, 20, 0, 11)
    assert (face - face.flip(1)).abs().max() < 0.01  # a face is as its mirror image, a boat is not
    assert width(face, 26) > width(face, 20)
    boat = posed(1, 20, 20, 0, 11)
    assert (boat - boat.flip(1)).abs().max() > 0.5


@pytest.mark.parametrize("kind", SCENES)
def test_no_object_is_cut_off_by_the_border(kind: str) -> None:
    some = scenes(kind, 400)
    image = some.gather(some.numbers()).images[:, 0]
    border = torch.cat([image[:, 0], image[:, -1], image[:, :, 0], image[:, :, -1]], 1)
    assert border.max() == 0


# --- Whole, scrambled, crowded ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", range(len(CLASSES)))
def test_a_scrambled_object_has_the_same_parts_and_the_same_ink_in_another_arrangement(kind: int) -> None:
    whole = posed(kind, 20, 20, 0, 10)
    first = parts._FIRST_WRONG[kind]
    for arrangement in range(first, first + len(SCRAMBLED[kind])):
        wrong = posed(arrangement, 20, 20, 0, 10)
        assert sorted(p.shape for p in parts._ALL[arrangement]) == sorted(p.shape for p in parts.WHOLE[kind])
        assert wrong.sum() == pytest.approx(float(whole.sum()), rel=0.02)


def test_no_scrambled_object_is_a_whole_one_at_any_angle_or_in_the_mirror() -> None:
    for kind in range(len(CLASSES)):
        whole = posed(kind, 20, 20, 0, 10)
        for other in range(MOST, len(parts._ALL)):
            wrongs = posed_at(other, [(20.0, 20.0, math.radians(degrees), 10.0) for degrees in range(0, 360, 6)])
            wrongs = torch.cat([wrongs, wrongs.flip(2)])
            least = (wrongs - whole).abs().sum((1, 2)).min() / whole.sum()
            assert least > 0.15, (CLASSES[kind], other)


def test_a_house_and_a_boat_are_the_same_parts() -> None:
    shapes = [sorted(part.shape for part in arrangement) for arrangement in parts.WHOLE]
    assert shapes[0] == shapes[1] == [parts.RECTANGLE, parts.TRIANGLE]
    assert shapes[2] == [parts.EYE, parts.EYE, parts.NOSE, parts.MOUTH]


def test_no_scene_that_is_trained_on_has_anything_scrambled_or_upside_down() -> None:
    splits = data.load("parts:train=2000,test=500", validation=500)
    for part in (splits.train, splits.validation, splits.test):
        assert isinstance(part, Scenes)
        objects = part.objects(torch.arange(3 * len(part)))  # training goes on beyond its first epoch
        assert not objects.scrambled.any()
        assert (objects.arrangement < len(CLASSES)).all()
        assert torch.equal(objects.arrangement, objects.kinds)
        assert objects.poses[..., 2].abs().max() <= math.pi / 2
        assert objects.labels.any(1).all()


def test_scrambled_scenes_have_no_class_and_all_wrong_arrangements() -> None:
    some = scenes("scrambled", 2000)
    objects = some.objects(some.numbers())
    assert not objects.labels.any()
    assert set(objects.arrangement[:, 0].tolist()) == set(range(len(CLASSES), len(parts._ALL)))
    assert some.targets.sum() == 0


def test_a_crowd_has_two_or_three_objects_of_different_classes_that_hardly_overlap() -> None:
    some = scenes("crowded", 1000)
    objects, batch = some.objects(some.numbers()), some.gather(some.numbers())
    number = objects.present.sum(1)
    assert set(number.tolist()) == {2, 3}
    assert torch.equal(objects.labels.sum(1), number)
    assert batch.parts is not None
    lost = 1 - batch.images.flatten(1).sum(1) / batch.parts.flatten(1).sum(1)
    assert lost.mean() < 0.01
    assert (lost > 0.1).float().mean() < 0.02


def test_upside_down_means_exactly_one_object_on_its_head() -> None:
    some = scenes("upside-down", 500)
    objects = some.objects(some.numbers())
    overturned = (objects.poses[..., 2].abs() > math.radians(149)) & objects.present
    assert (overturned.sum(1) == 1).all()
    assert (objects.poses[..., 2].abs() <= math.pi).all()
    others = objects.poses[..., 2][objects.present & ~overturned]
    assert others.abs().max() <= math.pi / 2


def test_places_angles_sizes_and_classes_are_spread_evenly() -> None:
    some = scenes("one", 4000)
    objects = some.objects(some.numbers())
    x, y, angle, size = objects.poses[:, 0].unbind(1)
    assert float(x.mean()) == pytest.approx(20, abs=0.4)
    assert float(y.mean()) == pytest.approx(20, abs=0.4)
    assert float(angle.mean()) == pytest.approx(0, abs=0.06)
    assert (float(size.min()), float(size.max())) == pytest.approx((parts.SMALLEST, parts.LARGEST), abs=0.02)
    assert (objects.labels.float().mean(0) - 1 / 3).abs().max() < 0.04


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("parts:train=0", "at least 1"),
        ("parts:side=20", "at least 36"),
        ("parts:side=999", "at most 256"),
        ("parts:tests=5", "test"),
        ("parts:train=many", "integer"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        data.load(name)


def test_an_unknown_kind_of_scene_and_another_size_are_refused() -> None:
    with pytest.raises(UserError, match="scrambled"):
        scenes("scrambeld", 5)
    with pytest.raises(UserError, match="leave the image size out"):
        data.load("parts", image_size=64)


# --- Learning and measuring ------------------------------------------------------------------------------------


def cnn(loss: LossConfig) -> tuple[Config, data.Batch]:
    model = CNNConfig((1, 40, 40), 3, (4,), (5,), (4,), (8,), 0.0)
    return Config(model=model, loss=loss), scenes("training", 16).gather(torch.arange(16))


def test_a_cnn_takes_the_margin_loss_of_its_sigmoids_when_asked_to_and_only_then() -> None:
    config, batch = cnn(LossConfig(kind="margin"))
    model = build(config.model).eval()
    model.multi_label = True
    with torch.no_grad():
        output = model(batch.images)
        margin = steps.compute_loss(model, batch, config)
        entropy = steps.compute_loss(model, batch, replace(config, loss=LossConfig()))
    assert margin.total == pytest.approx(float(margin_loss(output.activations, batch.targets)))
    assert margin.reconstruction == 0
    assert entropy.total != pytest.approx(float(margin.total), rel=0.1)


def test_a_cnn_with_norm_has_one_after_each_convolution() -> None:
    model = build(CNNConfig((1, 40, 40), 3, (4, 6), (5, 3), (2, 2), (8,), norm=True))
    kinds = [type(layer).__name__ for layer in model.features]  # type: ignore[union-attr]
    assert kinds == ["Conv2d", "BatchNorm2d", "ReLU", "MaxPool2d"] * 2
    assert model(torch.rand(2, 1, 40, 40)).activations.shape == (2, 3)


def test_the_numbers_that_a_pose_is_read_from_are_those_the_answer_comes_from() -> None:
    config, batch = cnn(LossConfig())
    model = build(config.model).eval()
    model.multi_label = True
    lengths, hidden = experiment.answer(model, batch.images)
    assert torch.allclose(lengths, model(batch.images).activations)
    assert hidden.shape == (16, 8)


def test_the_networks_are_of_similar_size_and_as_many_numbers_are_read() -> None:
    for plan in experiment.PLANS.values():
        ours, theirs = (experiment.size_without_decoder(build(model)) for model in (plan.capsnet, plan.cnn))
        assert theirs == pytest.approx(ours, rel=0.05)
        assert plan.cnn.hidden[-1] == plan.capsnet.class_dim * len(CLASSES)
        assert all(pool > 1 for pool in plan.cnn.pool)


def seen(numbers: Tensor, lengths: Tensor, some: Scenes) -> experiment.Seen:
    return experiment.Seen(lengths.double(), numbers.double(), some.objects(some.numbers()))


def test_a_read_out_finds_a_pose_that_is_there_and_none_in_noise() -> None:
    noise = torch.Generator().manual_seed(0)
    known, unknown = [], []
    for purpose in ("fit", "test"):
        some = scenes("one", 600, purpose=purpose)
        pose = experiment.pose_targets(some.objects(some.numbers()).poses[:, 0])
        mixed = pose @ torch.randn(5, 16, generator=torch.Generator().manual_seed(1))
        known.append(seen(mixed[:, None].expand(-1, 3, -1), torch.zeros(600, 3), some))
        unknown.append(seen(torch.randn(600, 3, 16, generator=noise), torch.zeros(600, 3), some))
    found, none = ([experiment.reading(part) for part in parts] for parts in (known, unknown))
    assert min(r_squared(*found, experiment.TARGETS).values()) > 0.98
    assert max(r_squared(*none, experiment.TARGETS).values()) < 0.05


def test_a_network_that_calls_everything_a_face_has_an_auc_of_a_half_and_a_perfect_one_of_one() -> None:
    assert experiment.auc(torch.ones(5), torch.ones(7)) == 0.5
    assert experiment.auc(torch.tensor([0.9, 0.8]), torch.tensor([0.1, 0.3, 0.5])) == 1.0
    whole, wrong = scenes("one", 90), scenes("scrambled", 90)
    real = seen(torch.zeros(90, 3, 16), whole.targets, whole)
    blind = seen(torch.zeros(90, 3, 16), torch.ones(90, 3), wrong)
    sharp = seen(torch.zeros(90, 3, 16), torch.zeros(90, 3), wrong)
    half = torch.full((3,), 0.5)
    assert experiment.alarms(real, blind, half)["false_alarm_face_percent"] == 100
    assert experiment.alarms(real, sharp, half)["false_alarm_house_percent"] == 0
    assert experiment.alarms(real, sharp, half)["detection_boat_percent"] == 100
    assert experiment.alarms(real, sharp, half)["auc"] == 1


def test_the_threshold_is_where_the_fewest_decisions_are_wrong() -> None:
    lengths = torch.tensor([0.1, 0.2, 0.7, 0.3, 0.8, 0.9])
    present = torch.tensor([False, False, False, True, True, True])
    chosen = float(experiment.best_threshold(lengths, present))
    wrong = ((lengths >= chosen) != present).sum()
    assert wrong == 1
    assert float(experiment.best_threshold(torch.tensor([0.2, 0.6]), torch.tensor([False, True]))) == pytest.approx(0.4)


def test_half_of_a_crowd_named_is_wrong() -> None:
    some, down, alone = scenes("crowded", 50), scenes("upside-down", 50), scenes("one", 50)
    right, half = some.targets, some.targets.clone()
    half[torch.arange(50), half.argmax(1)] = 0
    others = [seen(torch.zeros(50, 3, 16), each.targets, each) for each in (alone, down)]
    threshold = torch.full((3,), 0.5)
    for lengths, error in ((right, 0), (half, 100)):
        crowd = seen(torch.zeros(50, 3, 16), lengths, some)
        outcome = experiment.sets(others[0], crowd, others[1], threshold)
        assert outcome["crowded_error_percent"] == error
        assert outcome["one_error_percent"] == outcome["upside_down_error_percent"] == 0
        assert outcome["found_on_their_head_percent"] == outcome["found_beside_them_percent"] == 100


def test_the_experiment_runs_at_smoke_and_is_not_run_twice(tmp_path: Path) -> None:
    place = Place(tmp_path / "results", tmp_path / "runs")
    results = conduct(get("parts"), "smoke", place=place)
    assert [row.method for row in results.rows] == ["capsnet", "capsnet-no-decoder", "cnn"]
    for row in results.rows:
        assert all(math.isfinite(row.outcome[name]) for name in get("parts").columns)
        assert 0 <= row.outcome["false_alarm_face_percent"] <= 100
    written = json.loads((tmp_path / "results" / "parts-smoke.json").read_text())
    pictures = {path.name for path in (tmp_path / "results" / "parts-smoke").iterdir()}
    for name in ("false-alarms", "roc", "sets", "read-out", "capsnet-seed0-scenes", "cnn-seed0-scenes"):
        assert f"{name}.png" in pictures
    assert get("parts").findings(results.rows)
    conduct(get("parts"), "smoke", place=place)
    assert json.loads((tmp_path / "results" / "parts-smoke.json").read_text()) == written
