"""Splits, batches and augmentation: nothing lost, nothing twice, everything the same when asked again."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch

from capsnet.data import Augment, Batches, Dataset, Request, Splits, in_order, load, parse
from capsnet.data.augment import augment, shift_by
from capsnet.data.config import Interpolation
from capsnet.data.seeds import generator
from capsnet.data.splits import convert
from capsnet.errors import UserError

COUNTS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]


def numbered(n: int, shape: tuple[int, int, int] = (1, 4, 4)) -> Dataset:
    """Image k is filled with k, so that a batch tells where it came from."""
    images = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, *shape).contiguous()
    return Dataset(images, torch.arange(n) % 3, ("a", "b", "c"), "numbered")


@pytest.fixture(scope="module")
def mnist() -> Splits:
    return load("mnist")


def test_mnist_has_the_published_counts() -> None:
    splits = load("mnist", validation=0)
    assert torch.bincount(splits.train.labels).tolist() == COUNTS
    assert (len(splits.train), len(splits.validation), len(splits.test)) == (60000, 0, 10000)
    assert splits.train.labels[:10].tolist() == [5, 0, 4, 1, 9, 2, 1, 3, 1, 4]
    assert splits.train.image_shape == (1, 28, 28)


def test_the_seeded_validation_part_is_disjoint_complete_and_repeatable(mnist: Splits) -> None:
    assert (mnist.train.n, mnist.validation.n, mnist.test.n) == (50000, 10000, 10000)
    together = torch.bincount(mnist.train.labels) + torch.bincount(mnist.validation.labels)
    assert together.tolist() == COUNTS
    again, other = load("mnist"), load("mnist", seed=1)
    assert torch.equal(again.validation.images, mnist.validation.images)
    assert not torch.equal(other.validation.labels, mnist.validation.labels)


def test_the_authors_validation_part_is_the_first_ten_thousand() -> None:
    whole, first = load("mnist", validation=0), load("mnist", validation_choice="first")
    assert torch.equal(first.validation.images, whole.train.images[:10000])
    assert torch.equal(first.train.images, whole.train.images[10000:])


def test_size_and_channels_are_converted(mnist: Splits) -> None:
    few = mnist.test.subset(torch.arange(500))
    asked = Request(parse("mnist"), image_size=32, channels=3)
    converted = convert(few, asked)
    assert converted.image_shape == (3, 32, 32)
    assert torch.equal(converted.images[:, 0], converted.images[:, 2])
    assert float(converted.images.float().mean()) == pytest.approx(float(few.images.float().mean()), rel=0.01)
    assert convert(converted, replace(asked, image_size=None, channels=1)).image_shape == (1, 32, 32)
    assert convert(few, replace(asked, image_size=28, channels=1)) is few


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"name": "mnits"}, "mnist"),
        ({"name": "mnist", "validation": 60000}, "60000"),
        ({"name": "mnist", "validation": -1}, "-1"),
        ({"name": "mnist", "validation_choice": "frist"}, "first"),
        ({"name": "mnist", "image_size": 0}, "image_size"),
        ({"name": "mnist", "channels": 2}, "channels"),
    ],
)
def test_wrong_options_are_the_users_to_mend(options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(**options)


def test_labels_and_shapes_are_checked() -> None:
    images = torch.zeros(3, 1, 2, 2, dtype=torch.uint8)
    for labels in (torch.tensor([0, 1, 2]), torch.tensor([0, -1, 0]), torch.tensor([0, 1]), torch.zeros(3)):
        with pytest.raises(UserError, match="labels"):
            Dataset(images, labels, ("a", "b"), "x")
    with pytest.raises(UserError, match="images"):
        Dataset(images.float(), torch.tensor([0, 1, 0]), ("a", "b"), "x")
    with pytest.raises(UserError, match="labels"):
        Dataset(images, torch.zeros(3, 3, dtype=torch.bool), ("a", "b"), "x")


def test_targets_are_one_for_each_label_that_is_there() -> None:
    images = torch.zeros(2, 1, 2, 2, dtype=torch.uint8)
    single = Dataset(images, torch.tensor([1, 0]), ("a", "b"), "x")
    several = Dataset(images, torch.tensor([[True, True], [False, False]]), ("a", "b"), "x")
    assert single.targets.tolist() == [[0, 1], [1, 0]]
    assert several.targets.tolist() == [[1, 1], [0, 0]]
    assert (single.multi_label, several.multi_label) == (False, True)


def test_an_epoch_holds_each_image_once_but_for_the_tail() -> None:
    batches = Batches(numbered(23), 5, seed=3)
    assert len(batches) == 4
    epoch = torch.cat([batches.batch(step).index for step in range(4)])
    assert len(epoch.unique()) == 20
    following = torch.cat([batches.batch(step).index for step in range(4, 8)])
    assert not torch.equal(epoch, following)
    assert not torch.equal(epoch, torch.cat([Batches(numbered(23), 5, seed=4).batch(s).index for s in range(4)]))


def test_any_batch_can_be_asked_for_again_and_in_any_order() -> None:
    spec = Augment(shift=1, rotate=10, erase=2, flip=True, elastic=0.5, brightness=0.2, contrast=0.2)
    forward = Batches(numbered(20, (3, 8, 8)), 4, seed=7, augment=spec)
    taken = [forward.batch(step) for step in range(12)]
    for step in (11, 0, 5):
        resumed = Batches(numbered(20, (3, 8, 8)), 4, seed=7, augment=spec).batch(step)
        assert torch.equal(resumed.images, taken[step].images)
        assert torch.equal(resumed.index, taken[step].index)


def test_each_step_draws_its_own_augmentation() -> None:
    white = Dataset(torch.full((4, 1, 9, 9), 255, dtype=torch.uint8), torch.tensor([0, 1, 0, 1]), ("a", "b"), "white")
    batches = Batches(white, 4, seed=0, augment=Augment(shift=4))
    seen = {tuple(batches.batch(step).images.flatten().tolist()) for step in range(10)}
    assert len(seen) == 10


def test_a_batch_holds_what_its_index_says() -> None:
    data = numbered(20)
    batch = Batches(data, 6, seed=1).batch(2)
    assert torch.equal(batch.images, data.images[batch.index].float() / 255)
    assert torch.equal(batch.labels, data.labels[batch.index])
    assert torch.equal(batch.targets.argmax(1), batch.labels)


def test_a_dataset_smaller_than_a_batch_is_used_whole() -> None:
    batches = Batches(numbered(20), 128)
    assert len(batches) == 1
    assert sorted(batches.batch(3).index.tolist()) == list(range(20))


def test_an_empty_batch_or_dataset_is_refused() -> None:
    with pytest.raises(UserError, match="batch_size"):
        Batches(numbered(20), 0)
    with pytest.raises(UserError, match="no training images"):
        Batches(numbered(20).subset(torch.arange(0)), 4)


def test_evaluation_sees_everything_once_in_order_and_as_it_is() -> None:
    data = numbered(23)
    seen = list(in_order(data, 5))
    assert [len(batch.images) for batch in seen] == [5, 5, 5, 5, 3]
    assert torch.equal(torch.cat([batch.images for batch in seen]), data.images.float() / 255)
    assert torch.cat([batch.index for batch in seen]).tolist() == list(range(23))
    assert list(in_order(data.subset(torch.arange(0)), 5)) == []


def test_a_limit_takes_examples_from_the_whole_dataset() -> None:
    assert torch.cat([batch.index for batch in in_order(numbered(23), 2, limit=5)]).tolist() == [0, 4, 9, 13, 18]
    assert numbered(3).sample(10).tolist() == [0, 1, 2]


def test_streams_of_different_purposes_and_counters_differ() -> None:
    keys = [(0, "a", 0), (0, "a", 1), (1, "a", 0), (0, "b", 0), (-1, "a", 0)]
    draws = {tuple(torch.randperm(50, generator=generator(*key)).tolist()) for key in keys}
    assert len(draws) == len(keys)


def test_shifting_is_exact_pixel_for_pixel() -> None:
    images = torch.rand(40, 2, 7, 9)
    draw = generator(0, "test")
    down, right = torch.randint(-3, 4, (2, 40), generator=draw)
    moved = shift_by(images, down, right)
    for k in range(40):
        expected = torch.zeros(2, 7, 9)
        for y in range(7):
            for x in range(9):
                if 0 <= y - down[k] < 7 and 0 <= x - right[k] < 9:
                    expected[:, y, x] = images[k, :, y - down[k], x - right[k]]
        assert torch.equal(moved[k], expected)


def test_every_shift_of_the_paper_comes_up_and_none_beyond() -> None:
    point = torch.zeros(2000, 1, 9, 9)
    point[:, :, 4, 4] = 1
    moved = augment(point, Augment(shift=2), generator(0, "test"))
    places = moved.flatten(1).argmax(1)
    assert sorted(places.unique().tolist()) == [9 * y + x for y in range(2, 7) for x in range(2, 7)]


def test_a_shift_out_of_the_narrow_side_is_refused() -> None:
    with pytest.raises(UserError, match="out of view"):
        augment(torch.ones(1, 1, 20, 64), Augment(shift=30), generator(0, "test"))


def test_a_warp_of_nothing_but_a_shift_agrees_with_the_shift() -> None:
    images = torch.rand(16, 1, 12, 10)
    exact = augment(images, Augment(shift=2), generator(5, "test"))
    warped = augment(images, Augment(shift=2, rotate=1e-6), generator(5, "test"))
    assert torch.allclose(exact, warped, atol=1e-4)


def test_bicubic_interpolation_keeps_a_turned_picture_sharper_and_within_its_range() -> None:
    images = (torch.rand(64, 1, 20, 20) > 0.5).float()
    turned = {
        how: augment(images, Augment(rotate=20, interpolation=how), generator(2, "test"))
        for how in get_args(Interpolation)
    }
    grey = {how: ((x > 0.2) & (x < 0.8)).float().mean().item() for how, x in turned.items()}
    assert grey["bicubic"] < 0.8 * grey["bilinear"]
    assert 0 <= turned["bicubic"].min() <= turned["bicubic"].max() <= 1


def test_a_quarter_turn_turns_the_picture() -> None:
    images = torch.zeros(64, 1, 9, 9)
    images[:, :, 4, 8] = 1
    turned = augment(images, Augment(rotate=90), generator(1, "test"))
    y, x = torch.meshgrid(torch.arange(9.0) - 4, torch.arange(9.0) - 4, indexing="ij")
    mass = turned.sum((1, 2, 3)).clamp(min=1e-6)
    radius = ((turned[:, 0] * y).sum((1, 2)) / mass).hypot((turned[:, 0] * x).sum((1, 2)) / mass)
    assert radius.min() > 3.4
    assert (turned[:, 0] * y).sum((1, 2)).std() > 1


def test_flip_mirrors_about_half_and_erase_blanks_one_square() -> None:
    images = torch.rand(400, 1, 8, 8) + 0.5
    flipped = augment(images, Augment(flip=True), generator(0, "test"))
    mirrored = (flipped == images.flip(3)).flatten(1).all(1)
    kept = (flipped == images).flatten(1).all(1)
    assert bool((mirrored | kept).all())
    assert 150 < int(mirrored.sum()) < 250
    erased = augment(images, Augment(erase=3), generator(0, "test"))
    assert ((erased == 0).flatten(1).sum(1) == 9).all()


def test_brightness_moves_the_mean_and_contrast_scales_the_differences_from_it() -> None:
    images = 0.4 + 0.2 * torch.rand(400, 2, 6, 6)
    means, deviations = images.mean((1, 2, 3)), images.std((1, 2, 3))
    brighter = augment(images, Augment(brightness=0.3), generator(0, "test"))
    moved = brighter.mean((1, 2, 3)) - means
    assert moved.abs().max() <= 0.3
    assert 0.14 < moved.std() < 0.2  # uniform between -0.3 and 0.3: 0.173
    assert torch.allclose(brighter.std((1, 2, 3)), deviations, atol=1e-5)
    contrasted = augment(images, Augment(contrast=0.5), generator(0, "test"))
    factors = contrasted.std((1, 2, 3)) / deviations
    assert torch.allclose(contrasted.mean((1, 2, 3)), means, atol=1e-5)
    assert 0.5 <= factors.min() < 0.6
    assert 1.4 < factors.max() <= 1.5
    strong = augment(images, Augment(brightness=5, contrast=0.9), generator(0, "test"))
    assert (strong.min(), strong.max()) == (0, 1)


def test_a_part_of_a_batch_is_augmented_as_in_the_whole_batch() -> None:
    images = torch.rand(20, 1, 12, 12)
    spec = Augment(shift=2, rotate=10, flip=True, elastic=0.5, erase=3, brightness=0.2, contrast=0.3)
    whole = augment(images, spec, generator(3, "test"))
    part = augment(images[8:15], spec, generator(3, "test"), slice(8, 15), 20)
    torch.testing.assert_close(part, whole[8:15])


def test_light_leaves_the_other_draws_as_they_are() -> None:
    images = torch.rand(50, 1, 12, 12)
    spec = Augment(shift=2, rotate=10, flip=True, elastic=0.5, erase=3)
    lit = augment(images, replace(spec, brightness=1e-7), generator(3, "test"))
    assert torch.allclose(lit, augment(images, spec, generator(3, "test")), atol=1e-6)


def test_a_share_of_the_images_is_warped_and_the_others_only_shifted() -> None:
    images = torch.rand(400, 1, 12, 12)
    shifted = augment(images, Augment(shift=2), generator(3, "test"))
    all_of_them = augment(images, Augment(shift=2, rotate=20), generator(3, "test"))
    some = augment(images, Augment(shift=2, rotate=20, share=0.25), generator(3, "test"))
    as_shifted = (some == shifted).flatten(1).all(1)
    as_warped = (some == all_of_them).flatten(1).all(1)
    assert bool((as_shifted ^ as_warped).all())
    assert 60 <= int(as_warped.sum()) <= 140


def test_after_its_time_the_augmentation_only_moves() -> None:
    data = numbered(20, (1, 12, 12))
    spec = Augment(shift=2, rotate=20, elastic=1, erase=3, until=0.75)
    ending = Batches(data, 5, seed=3, augment=spec, epochs=4)  # 16 steps
    whole = Batches(data, 5, seed=3, augment=replace(spec, until=1), epochs=4)
    moved = Batches(data, 5, seed=3, augment=Augment(shift=2), epochs=4)
    for step in range(16):
        expected = whole if step < 12 else moved
        assert torch.equal(ending.batch(step).images, expected.batch(step).images)
        assert not torch.equal(whole.batch(step).images, moved.batch(step).images)
    assert torch.equal(
        whole.batch(99).images, Batches(data, 5, seed=3, augment=replace(spec, until=1)).batch(99).images
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"shift": -1},
        {"scale": 1.0},
        {"contrast": 1.0},
        {"brightness": -0.1},
        {"rotate": float("nan")},
        {"share": 1.5},
        {"until": 1.01},
        {"interpolation": "cubic"},
    ],
)
def test_an_augmentation_that_makes_no_sense_is_refused(wrong: dict) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Augment(**wrong)


def test_an_augmentation_larger_than_the_image_is_refused() -> None:
    with pytest.raises(UserError, match="erase"):
        augment(torch.rand(2, 1, 4, 4), Augment(erase=5), generator(0, "test"))
    with pytest.raises(UserError, match="shift"):
        augment(torch.rand(2, 1, 4, 4), Augment(shift=4), generator(0, "test"))
