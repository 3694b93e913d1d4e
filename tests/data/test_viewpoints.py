"""The dataset `viewpoints`: toys, views, splits, options, windows and the cache."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

from capsnet import data
from capsnet.data.batches import Batches
from capsnet.data.splits import Splits
from capsnet.data.synthetic import studio, viewpoints
from capsnet.data.synthetic.toys import ground, toy
from capsnet.data.synthetic.viewpoints import Options, pairs_of, path_of
from capsnet.data.views import CATEGORIES, FIELDS, INSTANCES, TESTING, TRAINING, Views
from capsnet.errors import UserError

# counts up with VERSION, so that no cached image is used after a change of the toys
CHECKSUM = {1: "716a732834827a08b7c58003be9ff3d3b7e96ff31b2fcfc9f4b961269448571e"}
SMALL = "viewpoints:every=6"


def small(options: str = "", **more: int) -> Splits[Views]:
    return data.load(SMALL + options, **{"validation": 0, **more})  # type: ignore[arg-type,return-value]


def field(part: Views, name: str) -> set[int]:
    return set(part.poses[:, FIELDS.index(name)].tolist())


def test_every_toy_fits_into_the_unit_sphere_and_differs_from_the_others() -> None:
    seen = set()
    for category in range(len(CATEGORIES)):
        for instance in range(INSTANCES):
            corners = np.concatenate([solid.corners for solid in toy(category, instance)])
            assert np.linalg.norm(corners, axis=1).max() == pytest.approx(1)
            assert corners[:, 2].min() == pytest.approx(ground(toy(category, instance)))
            seen.add(corners.round(4).tobytes())
    assert len(seen) == 50


def test_the_images_change_only_with_their_version() -> None:
    images = np.stack([studio.render(toy(category, 0), [30], 40) for category in range(len(CATEGORIES))])
    assert hashlib.sha256(images.tobytes()).hexdigest() == CHECKSUM[viewpoints.VERSION]


def test_the_two_eyes_see_a_toy_from_different_places() -> None:
    left, right = studio.render(toy(4, 0), [30], 40)[0, 0].astype(int)
    assert 0.5 < np.abs(left - right).mean() < 30


def test_all_pairs_have_the_layout_of_smallnorb() -> None:
    assert Options().sizes == (24_300, 24_300)
    assert Options(views="novel-azimuth").sizes == (8_100, 16_200)
    assert Options(views="novel-elevation").sizes == (8_100, 16_200)
    assert Options(views="familiar-elevation").sizes == (8_100, 8_100)


def test_training_and_test_show_different_instances_of_every_category() -> None:
    splits = small()
    assert splits.test.image_shape == (2, 48, 48)
    assert (splits.train.n, splits.test.n) == data.parse(SMALL).sizes
    assert field(splits.train, "instance") == set(TRAINING)
    assert field(splits.test, "instance") == set(TESTING)
    assert torch.bincount(splits.test.labels).tolist() == [30] * 5
    assert splits.test.classes == CATEGORIES


def test_a_batch_knows_the_pose_of_each_image() -> None:
    test = small().test
    batch = test.gather(torch.tensor([0, 7, 100]))
    for k, name in enumerate(FIELDS):
        assert batch.measures[name].tolist() == test.poses[[0, 7, 100], k].tolist()


def test_a_pose_belongs_to_the_image_that_was_rendered_with_it() -> None:
    test = small(",size=96").test
    for index in (3, 77, 149):
        instance, elevation, azimuth, lighting = test.poses[index].tolist()
        light = [studio.LIGHTINGS[lighting]]
        rendered = studio.render(toy(int(test.labels[index]), instance), [elevation], azimuth, light)[0, 0]
        assert np.array_equal(test.images[index], rendered)


@pytest.mark.parametrize("what", ["azimuth", "elevation"])
def test_novel_views_are_never_trained_on(what: str) -> None:
    novel, familiar = small(f",views=novel-{what}"), small(f",views=familiar-{what}")
    assert field(novel.train, what) == field(familiar.train, what) == field(familiar.test, what)
    assert not field(novel.train, what) & field(novel.test, what)
    assert field(novel.train, what) | field(novel.test, what) == field(small().train, what)
    assert (novel.train.n, novel.test.n) == data.parse(novel.train.name).sizes
    assert field(novel.train, what) <= {"azimuth": {300, 320, 340, 0, 20, 40}, "elevation": {30, 35, 40}}[what]


def test_held_out_instances_are_only_in_the_validation_split() -> None:
    splits = small(",held_out=1", validation=1000)
    assert field(splits.validation, "instance") == {9}
    assert field(splits.train, "instance") == {4, 6, 7, 8}
    assert splits.train.n + splits.validation.n == small().train.n
    assert small(",held_out=1", validation=10).validation.n == 10
    assert small(",held_out=2", validation=1000, train_limit=15).train.n == 15


def test_training_windows_move_and_test_windows_are_central() -> None:
    splits, whole = small(",crop=32"), small()
    assert splits.train.image_shape == splits.test.image_shape == (2, 32, 32)
    index = torch.arange(20)
    assert torch.equal(splits.test.gather(index).images, whole.test.gather(index).images[:, :, 8:40, 8:40])
    first, second = (splits.train.gather(index + epoch * splits.train.n).images for epoch in (0, 1))
    assert not torch.equal(first, second)
    assert torch.equal(first[3:5], splits.train.gather(index[3:5]).images)  # a function of the index alone
    big = whole.train.gather(index).images
    for k in range(20):
        windows = big[k].unfold(1, 32, 1).unfold(2, 32, 1)
        assert (windows == first[k][:, None, None]).all(-1).all(-1).all(0).any()
    batch = Batches(splits.train, 16, epochs=2).batch(len(splits.train) // 16 + 1)
    assert batch.images.shape == (16, 2, 32, 32)
    assert splits.test.in_memory().image_shape == (2, 32, 32)
    asked = data.load(f"{SMALL},crop=32", validation=0, image_size=(32, 32)).test  # windows, not smaller images
    assert torch.equal(asked.gather(index).images, splits.test.gather(index).images)


def test_standardised_pairs_have_one_mean_and_contrast_and_show_the_same() -> None:
    rendered, standard = small().test, small(",standardise=1").test
    values = standard.images.double()
    assert (values.mean((1, 2, 3)) - 127.5).abs().max() < 8  # what is clipped moves the mean a little
    assert (values.std((1, 2, 3)) - 42.5).abs().max() < 10
    assert rendered.images.double().std((1, 2, 3)).std() > 4  # the contrasts differ
    for before, after in zip(rendered.images[:20], standard.images[:20], strict=True):
        assert torch.corrcoef(torch.stack([before.flatten().double(), after.flatten().double()]))[0, 1] > 0.95


def test_a_thinned_set_is_part_of_the_complete_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path))
    images = np.random.default_rng(0).integers(0, 256, (9 * 18 * 6, 2, 96, 96), np.uint8)
    folder = path_of(1, 2, 1).parent
    folder.mkdir(parents=True)
    path_of(1, 2, 1).write_bytes(viewpoints.sealed(viewpoints.to_idx(images)))
    thinned = pairs_of(1, 2, Options(every=3))
    assert np.array_equal(thinned, images.reshape(9, 18, 6, 2, 96, 96)[::3, ::3, ::3].reshape(-1, 2, 96, 96))


def test_a_damaged_file_is_rendered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path))
    options = Options(every=6)
    images, path = pairs_of(2, 0, options), path_of(2, 0, 6)
    whole = path.read_bytes()
    for damaged in (b"", whole[:1000], whole[:-1], whole[:5000] + b"\x07" + whole[5001:]):
        path.write_bytes(damaged)
        assert torch.equal(pairs_of(2, 0, options), images)
        assert "is damaged; rendering it again" in capsys.readouterr().err
        assert path.read_bytes() == whole
    assert [file.name for file in path.parent.iterdir() if not file.name.startswith(".")] == [path.name]


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path / "taken"))
    with pytest.raises(UserError, match=r"viewpoints cannot be written to \(Not a directory\): free some space"):
        pairs_of(0, 0, Options(every=6))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("viewpoints:views=novel-azimut", "no choice of viewpoints:views 'novel-azimut'; did you mean 'novel-azimuth'"),
        ("viewpoints:size=50", "size=50 should be one of 96, 48, 32, 24, 16"),
        ("viewpoints:crop=60", "crop=60 should be between 0 and 48"),
        ("viewpoints:standardise=2", "standardise=2 should be between 0 and 1"),
        ("viewpoints:held_out=5", "held_out=5 should be between 0 and 4"),
        ("viewpoints:every=0", "every=0 should be between 1 and 6"),
        ("viewpoints:every=two", "should be an integer, not 'two'"),
    ],
)
def test_a_wrong_option_is_one_sentence(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        data.parse(text)
