"""MultiMNIST: pairs that depend on nothing but their number, a loss with two decodings, half right is wrong."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from capsnet import data
from capsnet.cli import main
from capsnet.cli.inputs import splits_for
from capsnet.data import Augment, Batch, Batches, Dataset, Splits, in_order, seeds
from capsnet.data.registry import bin_edges
from capsnet.data.synthetic.multimnist import Layout, Pairs, lay, overlap
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation, evaluate, name_classes
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig
from capsnet.models.registry import build
from capsnet.report.html import write_report
from capsnet.train import loop, steps
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = CapsNetConfig(
    (1, 36, 36), stem_channels=(4,), stem_kernels=(5,), stem_strides=(4,), stem_norm=True, primary_types=2,
    primary_dim=4, primary_kernel=3, class_dim=4, decoder=(8,),
)  # fmt: skip


@pytest.fixture(scope="module")
def splits() -> Splits[Pairs]:
    return data.load("multimnist")


@pytest.fixture(scope="module")
def few(splits: Splits[Pairs]) -> Splits[Pairs]:
    """The same out of a few hundred digits, for trainings that take a second."""
    train, test = splits.train, splits.test
    return Splits(
        replace(train, source=train.source.subset(torch.arange(64)), pairs=64),
        replace(splits.validation, pairs=40),
        replace(test, pairs=50),
    )


def tensors(batch: Batch) -> list[Tensor]:
    assert batch.parts is not None
    assert batch.digits is not None
    assert batch.present is not None
    return [batch.images, batch.targets, batch.labels, batch.index, batch.parts, batch.digits, batch.present]


CHECKSUM = "9e0f009a67142a221ed1f3c6c073a7cd9da871a6ad8ba080cfefbd974aedffd0"  # of every 499th test pair


# --------------------------------------------------------------------------------------------- where pairs come from


def test_a_pair_is_the_same_in_any_batch_and_any_order(splits: Splits[Pairs]) -> None:
    numbers = torch.tensor([7, 123_456_789_012, 0, 7, 50_007])
    together = splits.train.gather(numbers)
    for place, number in enumerate(numbers):
        alone = splits.train.gather(number.view(1))
        for one, many in zip(tensors(alone), tensors(together), strict=True):
            assert torch.equal(one[0], many[place])
        assert torch.equal(alone.measures["overlap"][0], together.measures["overlap"][place])


def test_every_epoch_has_pairs_of_its_own_and_every_digit_once_as_the_first(few: Splits[Pairs]) -> None:
    batches = Batches(few.train, 16, seed=3)
    epochs = [torch.cat([batches.batch(k + 4 * epoch).index for k in range(4)]) for epoch in (0, 1)]
    assert sorted(epochs[0].tolist()) == list(range(64))
    assert sorted(epochs[1].tolist()) == list(range(64, 128))
    first, _ = few.train.choose(epochs[1])
    assert sorted(first[:, 0].tolist()) == list(range(64))
    again = few.train.gather(epochs[0].sort().values)
    later = few.train.gather(epochs[1].sort().values)
    assert torch.equal(again.digits[:, 0], later.digits[:, 0])
    assert (again.images != later.images).flatten(1).any(1).float().mean() > 0.95


def test_a_resumed_stream_goes_on_as_it_would_have(few: Splits[Pairs]) -> None:
    whole = Batches(few.train, 16, seed=1)
    before = [whole.batch(step) for step in range(11)]
    resumed = Batches(few.train, 16, seed=1)
    assert torch.equal(resumed.batch(10).images, before[10].images)
    assert not torch.equal(Batches(few.train, 16, seed=2).batch(10).images, before[10].images)


def test_two_digits_of_a_pair_never_have_the_same_class(splits: Splits[Pairs]) -> None:
    for part in (splits.train, splits.validation, splits.test):
        chosen, present = part.choose(torch.arange(100_000))
        digits = part.source.labels[chosen]
        assert present.all()
        assert (digits[:, 0] != digits[:, 1]).all()
        assert (part.labels_of(chosen, present).sum(1) == 2).all()


def test_the_second_digit_is_any_digit_of_another_class(splits: Splits[Pairs]) -> None:
    chosen, _ = splits.test.choose(torch.arange(300_000))
    seconds = torch.bincount(chosen[:, 1], minlength=10_000).float()
    assert seconds.min() > 5  # 30 expected: none is left out
    assert seconds.max() < 70
    digits = splits.test.source.labels[chosen]
    after_a_one = torch.bincount(digits[digits[:, 0] == 1, 1], minlength=10).float()
    others = splits.test.class_counts.float()
    others[1] = 0
    assert (after_a_one / after_a_one.sum() - others / others.sum()).abs().max() < 0.01


def test_no_digit_comes_from_another_part(splits: Splits[Pairs]) -> None:
    digits = data.load("mnist")
    for part, source in zip(
        (splits.train, splits.validation, splits.test), (digits.train, digits.validation, digits.test), strict=True
    ):
        assert torch.equal(part.source.images, source.images)
        batch = part.gather(torch.arange(3))
        chosen, _ = part.choose(torch.arange(3))
        ink = source.images[chosen].float().sum((2, 3, 4)) / 255
        torch.testing.assert_close(batch.parts.sum((2, 3, 4)), ink)  # shifted by 4 px at most, nothing is cut off


def test_the_parts_add_up_to_the_image_and_the_sum_is_clipped(splits: Splits[Pairs]) -> None:
    batch = splits.test.gather(torch.arange(200))
    assert batch.images.shape == (200, 1, 36, 36)
    assert batch.parts.shape == (200, 2, 1, 36, 36)
    total = batch.parts.sum(1)
    assert total.max() > 1
    assert torch.equal(batch.images, total.clamp(max=1))
    assert torch.equal(batch.targets, torch.nn.functional.one_hot(batch.digits, 10).sum(1).float())


def test_the_test_set_is_the_same_hundred_thousand_pairs_for_everyone(splits: Splits[Pairs]) -> None:
    assert len(splits.test) == 100_000
    pixels = splits.test.gather(torch.arange(0, 100_000, 499)).images.mul(255).round().to(torch.uint8)
    assert hashlib.sha256(pixels.numpy().tobytes()).hexdigest() == CHECKSUM
    other_seed = data.load("multimnist:test=100", seed=5)
    assert torch.equal(other_seed.test.gather(torch.arange(100)).images, splits.test.gather(torch.arange(100)).images)


def test_the_hash_behind_a_pair_is_splitmix64() -> None:
    """Its first three numbers from the seed 1234567, as the algorithm's test vectors have them."""
    words = [seeds.bits(1234567, torch.zeros(1, dtype=torch.long), draw) for draw in range(3)]
    known = (6457827717110365317, 3203168211198807973, 9817491932198370423)
    assert [int(word) for word in words] == [number & (2**63 - 1) for number in known]


# ------------------------------------------------------------------------------------------------ how pairs overlap


@pytest.mark.parametrize(
    ("one", "other", "shared"),
    [((0, 0), (0, 0), 1), ((4, 4), (-4, -4), 0.36), ((0, 3), (0, -2), 0.75), ((1, 0), (-1, 5), 0.675),
     ((14, 0), (-14, 0), 0)],
)  # fmt: skip
def test_overlap_is_what_the_boxes_share(one: tuple[int, int], other: tuple[int, int], shared: float) -> None:
    assert overlap(torch.tensor([[one, other]])).item() == pytest.approx(shared)


def test_overlap_is_73_percent_on_average_and_never_below_36(splits: Splits[Pairs]) -> None:
    found = overlap(splits.test.shifts(torch.arange(100_000)))
    assert found.mean().item() == pytest.approx((1 - 80 / 27 / 20) ** 2, abs=0.002)  # E|a − b| of two of nine shifts
    assert found.min().item() == pytest.approx(0.36)
    assert found.max() == 1


def test_shifts_are_uniform_and_reach_both_ends(splits: Splits[Pairs]) -> None:
    shifts = splits.train.shifts(torch.arange(90_000)).flatten(1)
    for axis in range(4):
        counts = torch.bincount(shifts[:, axis] + 4, minlength=9)
        assert len(counts) == 9
        assert (counts - 10_000).abs().max() < 500


def test_laying_moves_a_digit_down_and_right_and_loses_nothing() -> None:
    digit = torch.zeros(1, 1, 28, 28, dtype=torch.uint8)
    digit[0, 0, 0, 0], digit[0, 0, 27, 27] = 1, 2
    for down, right in ((0, 0), (4, -4), (-4, 3)):
        canvas = lay(digit, torch.tensor([[down, right]]), 36)[0, 0]
        assert canvas[4 + down, 4 + right] == 1
        assert canvas[31 + down, 31 + right] == 2
        assert canvas.sum() == 3


def test_a_larger_canvas_reaches_every_overlap_from_none_to_all() -> None:
    wide = data.load("multimnist:canvas=56,shift=14,test=20000").test
    assert wide.image_shape == (1, 56, 56)
    found = overlap(wide.shifts(torch.arange(20_000)))
    assert found.min() == 0
    assert found.max() == 1
    assert torch.bincount((found * 9.99).long(), minlength=10).min() > 50


def test_one_digit_alone_is_an_option() -> None:
    mixed = data.load("multimnist:single=0.3,test=5000").test
    batch = mixed.gather(torch.arange(5000))
    single = ~batch.present[:, 1]
    assert batch.present[:, 0].all()
    assert single.float().mean().item() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(batch.labels.sum(1), 2 - single.long())
    assert batch.parts[single, 1].abs().max() == 0
    assert torch.equal(batch.measures["overlap"].isnan(), single)
    assert mixed.labels_per_image is None
    assert torch.equal(mixed.targets, batch.targets)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("multimnist:canvas=20", "between 28 and 512"),
        ("multimnist:shift=5", "between 0 and 4"),
        ("multimnist:single=1.5", "between 0 and 1"),
        ("multimnist:single=nan", "between 0 and 1"),
        ("multimnist:shift=4.5", "should be an integer"),
        ("multimnist:test=0", "between 1 and 100,000"),
        ("multimnist:shfit=3", "did you mean 'shift'"),
        ("multimnist:shift=1,shift=2", "twice"),
        ("multimnsit", "did you mean 'multimnist'"),
    ],
)
def test_wrong_options_are_answered_in_a_sentence(name: str, said: str) -> None:
    with pytest.raises(UserError, match=said) as error:
        data.load(name)
    assert len(str(error.value)) < 400


def test_digits_of_one_class_cannot_be_paired() -> None:
    ones = Dataset(torch.zeros(3, 1, 28, 28, dtype=torch.uint8), torch.ones(3, dtype=torch.long), ("0", "1"), "ones")
    with pytest.raises(UserError, match="at least two classes"):
        Pairs(ones, Layout(), 0, 3)


def test_another_image_size_is_refused_with_a_way_out() -> None:
    with pytest.raises(UserError, match=r"\(1, 36, 36\), and \(1, 28, 28\) was requested"):
        data.load("multimnist", image_size=28)


# -------------------------------------------------------------------------------------------------- what is learnt


def test_both_digits_are_painted_each_from_its_own_pose_alone(few: Splits[Pairs]) -> None:
    torch.manual_seed(0)
    model, batch = build(TINY).eval(), few.test.gather(torch.arange(6))
    found = steps.compute_loss(model, batch, Config(model=TINY)).reconstruction
    poses = model(batch.images).poses
    by_hand = torch.zeros(())
    for k in range(2):
        painted = model.reconstruct(poses, batch.digits[:, k])
        by_hand = by_hand + (painted - batch.parts[:, k]).square().flatten(1).sum(1).mean()
    torch.testing.assert_close(found, by_hand)


def test_each_decoding_weighs_as_much_as_the_one_of_a_single_digit(few: Splits[Pairs]) -> None:
    model, batch = build(TINY).eval(), few.test.gather(torch.arange(6))
    losses = steps.compute_loss(model, batch, Config(model=TINY, loss=LossConfig(reconstruction=0.0005)))
    torch.testing.assert_close(losses.total, losses.classification + 0.0005 * losses.reconstruction)


def test_a_digit_that_is_not_there_is_not_painted(few: Splits[Pairs]) -> None:
    mixed = replace(few.test, layout=Layout(single=1.0))
    model, batch = build(TINY).eval(), mixed.gather(torch.arange(6))
    found = steps.compute_loss(model, batch, Config(model=TINY)).reconstruction
    painted = model.reconstruct(model(batch.images).poses, batch.digits[:, 0])
    torch.testing.assert_close(found, (painted - batch.images).square().flatten(1).sum(1).mean())


def test_augmentation_moves_the_digits_with_their_image(few: Splits[Pairs]) -> None:
    batch = Batches(few.train, 32, augment=Augment(shift=2)).batch(0)
    plain = Batches(few.train, 32).batch(0)
    assert torch.equal(batch.images, batch.parts.sum(1).clamp(max=1))
    assert not torch.equal(batch.images, plain.images)


@pytest.mark.parametrize("model", [TINY, CNNConfig(channels=(4,), kernels=(3,), pool=(4,), hidden=(8,))])
def test_both_kinds_of_network_train_stop_and_resume_to_the_same_weights(
    few: Splits[Pairs], model: CapsNetConfig | CNNConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "load_data", lambda *_, **__: few)
    config = Config(data="multimnist", epochs=2, batch_size=16, lr=0.01, model=model)
    whole = loop.train(loop.start(config, tmp_path / "whole"))
    run = loop.start(config, tmp_path / "halves")
    with pytest.raises(KeyboardInterrupt):
        loop.loop(run, [], lambda: run.step >= 5)
    assert run.lock is not None
    run.lock.release()
    halves = loop.train(loop.resume(tmp_path / "halves"))
    for one, other in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert (whole.evaluation.predicted.sum(1) == 2).all()
    assert whole.evaluation.summary()["errors_by_overlap"]["n"] == halves.evaluation.summary()["errors_by_overlap"]["n"]


# ------------------------------------------------------------------------------------------------- what is counted


def judged(lengths: Tensor, targets: Tensor, **more: Tensor) -> Evaluation:
    classes = tuple(map(str, range(lengths.shape[1])))
    return Evaluation(
        "pairs", lengths, targets, name_classes(lengths, 2, 0.5), classes, True, more, bin_edges("multimnist")
    )


def test_half_right_is_wrong() -> None:
    targets = torch.tensor([[1.0, 1, 0, 0]] * 3)
    lengths = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.9, 0.1, 0.8, 0.2], [0.1, 0.2, 0.3, 0.4]])
    found = judged(lengths, targets)
    assert found.wrong.tolist() == [False, True, True]
    assert found.summary()["missed_label_percent"] == 50.0


def test_pairs_are_judged_by_their_two_longest_and_mixed_images_by_a_threshold(few: Splits[Pairs]) -> None:
    model = build(TINY)
    lengths = evaluate(model, few.test).activations
    assert (evaluate(model, few.test).predicted.sum(1) == 2).all()
    middle = float(lengths.median())
    assert torch.equal(evaluate(model, few.test, threshold=middle).predicted, lengths >= middle)
    mixed = replace(few.test, layout=Layout(single=0.5))
    found = evaluate(model, mixed)
    assert torch.equal(found.predicted, found.activations >= 0.5)


def test_errors_are_counted_by_overlap_and_none_is_lost() -> None:
    targets, right, wrong = torch.tensor([1.0, 1, 0]), torch.tensor([0.9, 0.9, 0.1]), torch.tensor([0.9, 0.1, 0.9])
    lengths = torch.stack([right, wrong, wrong, right, right])
    overlaps = torch.tensor([0.36, 0.36, 1.0, 0.85, torch.nan])
    curve = judged(lengths, targets.expand(5, 3), overlap=overlaps).summary()["errors_by_overlap"]
    bins = {
        round(edge, 2): (n, e) for edge, n, e in zip(curve["edges"], curve["n"], curve["errors"], strict=False) if n
    }
    assert bins == {0.35: (2, 1), 0.85: (1, 0), 0.95: (1, 1)}  # the last bin holds its upper edge too


def test_everything_is_evaluated_once_and_batches_do_not_matter(few: Splits[Pairs]) -> None:
    assert torch.cat([batch.index for batch in in_order(few.test, 7)]).tolist() == list(range(50))
    model = build(TINY)
    one, other = evaluate(model, few.test, batch_size=7), evaluate(model, few.test, batch_size=50)
    torch.testing.assert_close(one.activations, other.activations)
    assert torch.equal(one.measures["overlap"], other.measures["overlap"])


def test_the_command_line_evaluates_and_paints_a_model_of_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model = build(TINY)
    model.multi_label = True
    config = to_dict(Config(data="multimnist:test=300", model=TINY))
    checkpoint.save_model(tmp_path / "model.safetensors", model, Certificate(config=config))
    name = str(tmp_path / "model.safetensors")
    assert main(["evaluate", name, "--json"]) == 0
    assert '"errors_by_overlap"' in capsys.readouterr().out
    assert main(["reconstruct", name, "--class", "5", "--out", str(tmp_path / "painted.png")]) == 0
    assert (tmp_path / "painted.png").stat().st_size > 1000


def saved(folder: Path, name: str) -> str:
    """A network with random weights that says it was trained on this."""
    torch.manual_seed(0)
    model = build(TINY)
    model.multi_label = True
    path = folder / "pairs.safetensors"
    checkpoint.save_model(path, model, Certificate(config=to_dict(Config(data=name, model=TINY))))
    return str(path)


def test_predict_names_two_classes_where_every_image_had_two_and_all_long_ones_where_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pair = Image.new("L", (60, 40), 255)
    for left in (10, 32):
        pair.paste(0, (left, 8, left + 6, 32))  # two dark strokes on paper
    pair.save(tmp_path / "pair.png")

    def named(model: str, *more: str) -> dict:
        assert main(["predict", model, str(tmp_path / "pair.png"), "--json", *more]) == 0
        return json.loads(capsys.readouterr().out)["predictions"][0]

    pairs = saved(tmp_path, "multimnist:test=300")
    found = named(pairs)
    assert max(found["activations"].values()) < 0.5  # a network that has learnt nothing is sure of nothing
    assert len(found["labels"]) == 2
    assert found["labels"][0] == found["label"]
    assert named(pairs, "--threshold", "0.5")["labels"] == []
    assert len(named(pairs, "--top", "3")["labels"]) == 3
    assert named(saved(tmp_path, "multimnist:single=0.3"))["labels"] == []


def test_both_ways_to_name_classes_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert main(["evaluate", saved(tmp_path, "multimnist"), "--top", "2", "--threshold", "0.4"]) == 2
    assert "choose one of them" in capsys.readouterr().err


def test_digits_that_were_held_back_stay_so_in_whatever_is_made_of_them(tmp_path: Path) -> None:
    model = build(replace(TINY, image_shape=(1, 40, 40)))
    config = to_dict(Config(data="mnist", validation=300, train_limit=50, seed=4, model=model.config))
    checkpoint.save_model(tmp_path / "model.safetensors", model, Certificate(config=config))
    placed = splits_for(model, str(tmp_path / "model.safetensors"), "expanded-mnist")
    then = data.load("mnist", validation=300, train_limit=50, seed=4)
    assert torch.equal(placed.validation.source.images, then.validation.images)
    assert torch.equal(placed.train.source.images, then.train.images)


def test_the_report_of_pairs_shows_them(few: Splits[Pairs], tmp_path: Path) -> None:
    model = build(TINY).eval()
    model.multi_label = True
    found = evaluate(model, few.test)
    page = write_report(
        tmp_path, model=model, evaluation=found, dataset=few.test, history=[], certificate=Certificate()
    )
    assert "data:image/png" in page.read_text()
