"""Thirteen mistakes found in public implementations of the paper, and a guard against each.

A guard asserts a promise about an implementation that it is given. Each is used twice: it passes on ours, and it
fails on an implementation with the mistake put in, so that we know that it would notice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from capsnet import kernels
from capsnet.data import Augment, Batch, Batches, Dataset, Splits, in_order, multi_hot
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation, evaluate, name_classes
from capsnet.kernels import routing as kernel
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.functional import squash, votes
from capsnet.nn.layers import DenseCaps, PrimaryCaps
from capsnet.nn.losses import margin_loss, reconstruction_loss
from capsnet.routing import dynamic_routing
from capsnet.train import loop, steps
from capsnet.train.config import Config

Route = Callable[[Tensor, Tensor], Tensor]

TINY = CapsNetConfig(
    (1, 8, 8), 3, stem_channels=(8,), stem_kernels=(3,), primary_types=4, primary_dim=4, primary_kernel=3,
    class_dim=6, decoder=(16,),
)  # fmt: skip


def tiny() -> CapsNet:
    torch.manual_seed(0)
    return CapsNet(TINY)


def digits(n: int = 23, seed: int = 0) -> Dataset:
    """Small images whose class can be seen: a bright row, at one of three heights."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (n, 1, 8, 8), generator=generator)
    labels = torch.arange(n) % 3
    for image, label in zip(images, labels, strict=True):
        image[0, 1 + 2 * int(label)] += 180
    return Dataset(images.to(torch.uint8), labels, ("top", "middle", "bottom"), "rows")


def ours_plain(u: Tensor, W: Tensor, iterations: int = 3) -> Tensor:
    with kernels.plain():
        return dynamic_routing(u, W, iterations=iterations).poses


def ours_fast(u: Tensor, W: Tensor, iterations: int = 3) -> Tensor:
    """The kernel that large problems get."""
    return kernel.dynamic_routing(u, W, None, iterations)


def ours_fused(u: Tensor, W: Tensor, iterations: int = 3) -> Tensor:
    """The same in compiled loops, which are not taken for a few examples: the rest are silent."""
    padded = torch.cat([u, torch.zeros(16, *u.shape[1:])])
    return ours_fast(padded, W, iterations)[: len(u)]


def routing_with(
    softmax_over: str = "upper", squash_over: str = "pose", mix_batch: bool = False, iterations: int = 3
) -> Route:
    """Procedure 1 with a mistake put in; without one it is right."""

    def route(u: Tensor, W: Tensor) -> Tensor:
        u_hat = votes(u, W)
        b_ij = torch.zeros(u_hat.shape[:-1])
        for _ in range(iterations):
            c_ij = b_ij.softmax({"upper": -1, "lower": -2}[softmax_over])
            s_j = torch.einsum("bij,bijq->bjq", c_ij, u_hat)
            v_j = squash(s_j, {"pose": -1, "capsules": -2, "batch": 0}[squash_over])
            agreement = torch.einsum("bijq,bjq->bij", u_hat, v_j)
            b_ij = b_ij + (agreement.mean(0, keepdim=True) if mix_batch else agreement)
        return v_j

    return route


OURS = [ours_plain, ours_fast, ours_fused]
RIGHT = [*OURS, routing_with()]


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(4, 6, 5, generator=generator), torch.randn(6, 3, 7, 5, generator=generator)


# --- 1. Softmax over the lower capsules instead of the upper ones -------------------------------------------------


def guard_a_lower_capsule_shares_itself_out_among_the_upper_ones(route: Route) -> None:
    """A lone lower capsule that agrees with all upper capsules alike sends each of them an equal share of itself."""
    u, W = torch.ones(1, 1, 5), torch.full((1, 4, 7, 5), 0.3)
    torch.testing.assert_close(route(u, W), squash(votes(u, W)[:, 0] / 4))


@pytest.mark.parametrize("route", RIGHT)
def test_1_couplings_sum_to_one_over_the_upper_capsules(route: Route) -> None:
    guard_a_lower_capsule_shares_itself_out_among_the_upper_ones(route)


def test_1_a_softmax_over_the_lower_capsules_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_a_lower_capsule_shares_itself_out_among_the_upper_ones(routing_with(softmax_over="lower"))


# --- 2. A view without a permute: capsules of pixels -------------------------------------------------------------


def guard_one_pixel_reaches_one_capsule_of_each_type(forward: Callable[[PrimaryCaps, Tensor], Tensor]) -> None:
    """With a kernel of 1×1, a changed pixel changes the capsules at its own place: one of each type, all in a row."""
    torch.manual_seed(0)
    layer = PrimaryCaps(2, types=3, dim=8, kernel_size=1, stride=1)
    image = torch.randn(1, 2, 4, 4)
    touched = image.clone()
    touched[:, :, 2, 1] += 1
    changed = (forward(layer, image) - forward(layer, touched)).abs().amax((0, 2)) > 1e-6
    place = 2 * 4 + 1
    assert changed.nonzero().flatten().tolist() == list(range(3 * place, 3 * place + 3))


def capsules_of_pixels(layer: PrimaryCaps, x: Tensor) -> Tensor:
    return squash(layer.conv(x).view(len(x), -1, layer.dim))


def test_2_a_primary_capsule_is_made_of_channels() -> None:
    guard_one_pixel_reaches_one_capsule_of_each_type(lambda layer, x: layer(x))


def test_2_capsules_of_pixels_are_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_one_pixel_reaches_one_capsule_of_each_type(capsules_of_pixels)


# --- 3. Squash over the wrong axis -------------------------------------------------------------------------------


def guard_every_capsule_is_squashed_by_itself(squashing: Callable[[Tensor], Tensor]) -> None:
    s = problem()[0]
    alone = torch.stack([torch.stack([squashing(s[b : b + 1, i : i + 1])[0, 0] for i in range(6)]) for b in range(4)])
    torch.testing.assert_close(squashing(s), alone)
    n = s.norm(dim=-1)
    torch.testing.assert_close(squashing(s).norm(dim=-1), n**2 / (1 + n**2))


def as_a_layer(route: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """s as the input of upper capsules: each has one lower capsule of its own, which sends everything there."""

    def squashing(s: Tensor) -> Tensor:
        own = torch.eye(s.shape[1]).unsqueeze(-1).unsqueeze(-1) * torch.eye(s.shape[2])
        return route(s * s.shape[1], own, iterations=1)

    return squashing


@pytest.mark.parametrize("squashing", [squash, *map(as_a_layer, OURS)])
def test_3_squash_works_along_the_pose(squashing: Callable[[Tensor], Tensor]) -> None:
    guard_every_capsule_is_squashed_by_itself(squashing)


@pytest.mark.parametrize("dim", [0, 1])
def test_3_a_squash_along_another_axis_is_noticed(dim: int) -> None:
    with pytest.raises(AssertionError):
        guard_every_capsule_is_squashed_by_itself(lambda s: squash(s, dim=dim))


# --- 4. Logits averaged over the batch ---------------------------------------------------------------------------


def guard_a_prediction_does_not_depend_on_its_batch_mates(route: Route) -> None:
    u, W = problem()
    together = route(u, W)
    for b in range(len(u)):
        torch.testing.assert_close(route(u[b : b + 1], W)[0], together[b])


@pytest.mark.parametrize("route", RIGHT)
def test_4_every_example_is_routed_by_itself(route: Route) -> None:
    guard_a_prediction_does_not_depend_on_its_batch_mates(route)


def test_4_logits_averaged_over_the_batch_are_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_a_prediction_does_not_depend_on_its_batch_mates(routing_with(mix_batch=True))


def test_4_nothing_is_remembered_from_one_batch_to_the_next() -> None:
    layer, u = DenseCaps(6, 5, 3, 7), problem()[0]
    first = layer(u)
    layer(torch.randn_like(u))
    assert torch.equal(layer(u), first)
    assert set(layer.state_dict()) == {"weight"}


# --- 5. Softmax on the lengths before the margin loss ------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]


def guard_the_margin_is_taken_on_the_lengths_themselves(loss: Loss) -> None:
    lengths, targets = torch.tensor([[0.95, 0.92, 0.02, 0.08]]), torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert loss(lengths, targets).item() == 0


def test_5_no_softmax_comes_before_the_margin_loss() -> None:
    guard_the_margin_is_taken_on_the_lengths_themselves(margin_loss)


def test_5_a_softmax_before_the_margin_loss_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_the_margin_is_taken_on_the_lengths_themselves(lambda x, t: margin_loss(x.softmax(1), t))


# --- 6. Margin not squared ---------------------------------------------------------------------------------------


def guard_twice_the_violation_costs_four_times_as_much(loss: Loss) -> None:
    for target, once, twice in ((1.0, 0.7, 0.5), (0.0, 0.3, 0.5)):
        targets = torch.tensor([[target]])
        one, two = (loss(torch.tensor([[x]]), targets).item() for x in (once, twice))
        assert two == pytest.approx(4 * one, rel=1e-4)


def margin_without_square(lengths: Tensor, targets: Tensor) -> Tensor:
    return (targets * F.relu(0.9 - lengths) + 0.5 * (1 - targets) * F.relu(lengths - 0.1)).sum(1).mean()


def test_6_the_margin_is_squared() -> None:
    guard_twice_the_violation_costs_four_times_as_much(margin_loss)


def test_6_a_margin_without_its_square_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_twice_the_violation_costs_four_times_as_much(margin_without_square)


# --- 7. Reconstruction as a mean ---------------------------------------------------------------------------------


def guard_every_pixel_counts_in_full(loss: Loss) -> None:
    for n, side in ((1, 4), (3, 28)):
        image = torch.zeros(n, 1, side, side)
        assert loss(image + 0.5, image).item() == pytest.approx(side * side / 4)


def test_7_the_reconstruction_loss_is_a_sum_over_pixels() -> None:
    guard_every_pixel_counts_in_full(reconstruction_loss)


@pytest.mark.parametrize("loss", [F.mse_loss, lambda x, y: F.mse_loss(x, y, reduction="sum")])
def test_7_a_mean_over_pixels_or_a_sum_over_the_batch_is_noticed(loss: Loss) -> None:
    with pytest.raises(AssertionError):
        guard_every_pixel_counts_in_full(loss)


# --- 8. Decoder masked by the prediction during training ----------------------------------------------------------

ComputeLoss = Callable[[CapsNet, Batch, Config], loop.Losses]


def guard_training_decodes_the_true_class(compute: ComputeLoss) -> None:
    """With labels that the model does not predict, the reconstruction still comes from the labels' poses."""
    model, images = tiny(), torch.rand(5, 1, 8, 8)
    output = model(images)
    labels = output.activations.argmin(1)
    assert (labels != output.activations.argmax(1)).all()
    batch = Batch(images, multi_hot(labels, 3), labels, torch.arange(5))
    expected = reconstruction_loss(model.reconstruct(output.poses, labels), images)  # type: ignore[arg-type]
    losses = compute(model, batch, Config())
    torch.testing.assert_close(losses.reconstruction, expected)
    torch.testing.assert_close(losses.total, losses.classification + 0.0005 * expected)


def loss_masked_by_the_prediction(model: CapsNet, batch: Batch, config: Config) -> loop.Losses:
    longest = model(batch.images).activations.argmax(1)
    right = steps.compute_loss(model, batch, config)
    wrong = steps.compute_loss(model, replace(batch, targets=multi_hot(longest, 3)), config).reconstruction
    return loop.Losses(right.classification + 0.0005 * wrong, right.classification, wrong)


def test_8_training_masks_by_the_label() -> None:
    guard_training_decodes_the_true_class(steps.compute_loss)


def test_8_masking_by_the_prediction_in_training_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_training_decodes_the_true_class(loss_masked_by_the_prediction)


def test_8_prediction_masks_by_the_longest_capsule() -> None:
    model, images = tiny(), torch.rand(5, 1, 8, 8)
    prediction = model.predict(images)
    expected = model.reconstruct(prediction.poses, prediction.activations.argmax(1))  # type: ignore[arg-type]
    torch.testing.assert_close(prediction.reconstructions, expected)


# --- 9. Model selection on the test set --------------------------------------------------------------------------


def trained_weights(test: Dataset, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A short training with early stopping, where everything but the test set is always the same."""
    splits = Splits(digits(60), digits(21, seed=1), test)
    monkeypatch.setattr(loop, "load_data", lambda *names, **options: splits)
    config = Config(epochs=5, batch_size=10, lr=0.005, patience=5, device="cpu", model=TINY)
    return loop.train(loop.start(config, folder)).model.state_dict()


def guard_the_test_set_chooses_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test set gets easier while the model learns and the other gets harder: the weights must not care."""
    easy = digits(21, seed=2)
    hard = replace(easy, labels=(easy.labels + 1) % 3)
    first, second = (
        trained_weights(test, folder / name, monkeypatch) for name, test in (("easy", easy), ("hard", hard))
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


our_epoch_record = loop.epoch_record


def choose_on_the_test_set(run: loop.Run) -> dict:
    run.splits = replace(run.splits, validation=run.splits.test)
    return our_epoch_record(run)


def test_9_nothing_is_chosen_on_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard_the_test_set_chooses_nothing(tmp_path, monkeypatch)


def test_9_a_choice_on_the_test_set_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "epoch_record", choose_on_the_test_set)
    with pytest.raises(AssertionError):
        guard_the_test_set_chooses_nothing(tmp_path, monkeypatch)


# --- 10. Augmentation at test time -------------------------------------------------------------------------------

Measure = Callable[[CapsNet, Dataset], Tensor]


def guard_test_images_are_seen_as_they_are(measure: Measure) -> None:
    model, dataset = tiny().eval(), digits()
    with torch.no_grad():
        torch.testing.assert_close(measure(model, dataset), model(dataset.images.float() / 255).activations)


def measured_with_shifts(model: CapsNet, dataset: Dataset) -> Tensor:
    batch = Batches(dataset, len(dataset), augment=Augment(shift=2)).batch(0)
    with torch.no_grad():
        return model(batch.images).activations[batch.index.argsort()]


def test_10_evaluation_augments_nothing() -> None:
    guard_test_images_are_seen_as_they_are(lambda model, dataset: evaluate(model, dataset, batch_size=5).activations)


def test_10_augmentation_at_test_time_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_test_images_are_seen_as_they_are(measured_with_shifts)


def test_10_evaluation_switches_batch_statistics_off_and_restores_the_mode() -> None:
    model, dataset = CapsNet(replace(TINY, stem_norm=True)).train(), digits()
    whole, parts = (evaluate(model, dataset, batch_size=size).activations for size in (23, 4))
    torch.testing.assert_close(whole, parts)
    assert model.training


# --- 11. No epsilon in squash ------------------------------------------------------------------------------------


def guard_a_silent_capsule_has_a_finite_gradient(squashing: Callable[[Tensor], Tensor]) -> None:
    s = torch.zeros(2, 3, 4, requires_grad=True)
    v = squashing(s)
    (v.sum() + v.square().sum()).backward()
    assert v.isfinite().all()
    assert s.grad is not None
    assert s.grad.isfinite().all()


def squash_without_epsilon(s: Tensor) -> Tensor:
    length = s.norm(dim=-1, keepdim=True)
    return length**2 / (1 + length**2) * s / length


def squash_by_square_root(s: Tensor) -> Tensor:
    squared = s.square().sum(-1, keepdim=True)
    return s * squared.sqrt() / (1 + squared)


def test_11_squash_has_its_epsilon() -> None:
    guard_a_silent_capsule_has_a_finite_gradient(squash)


@pytest.mark.parametrize("squashing", [squash_without_epsilon, squash_by_square_root])
def test_11_a_squash_without_epsilon_is_noticed(squashing: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(AssertionError):
        guard_a_silent_capsule_has_a_finite_gradient(squashing)


# --- 12. Half credit for one of two digits -----------------------------------------------------------------------

Score = Callable[[Tensor, Tensor], float]


def guard_half_right_is_wrong(error_percent: Score) -> None:
    """Of four pairs one is right, one has one digit right, one has none right, and one names a digit too many."""
    lengths = torch.tensor([[0.9, 0.8, 0.1, 0], [0.9, 0.1, 0.8, 0], [0, 0.1, 0.8, 0.9], [0.9, 0.8, 0.1, 0.7]])
    targets = torch.tensor([[1.0, 1, 0, 0], [1, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1]])
    assert error_percent(lengths, targets) == 75


def our_score(top: int | None) -> Score:
    def score(lengths: Tensor, targets: Tensor) -> float:
        predicted = name_classes(lengths, top=top, threshold=0.5)
        return Evaluation("pairs", lengths, targets, predicted, tuple("abcd"), True).error_percent

    return score


def half_credit(lengths: Tensor, targets: Tensor) -> float:
    named = name_classes(lengths, top=2, threshold=0.5)
    return 100 * (1 - float((targets.bool() & named).sum() / targets.sum()))


def credit_for_the_longest(lengths: Tensor, targets: Tensor) -> float:
    return 100 * (1 - float(targets.gather(1, lengths.argmax(1, keepdim=True)).mean()))


@pytest.mark.parametrize("top", [2, None])
def test_12_a_pair_is_right_only_as_a_whole(top: int | None) -> None:
    guard_half_right_is_wrong(our_score(top))


def test_12_evaluation_names_sets_where_an_image_may_have_several_labels() -> None:
    one = digits()
    several = replace(one, labels=multi_hot(one.labels, 3).bool())
    model = tiny()
    lengths = evaluate(model, several).activations
    middle = float(lengths.median())
    assert torch.equal(evaluate(model, several, threshold=middle).predicted, lengths >= middle)
    assert (evaluate(model, several, top=2).predicted.sum(1) == 2).all()
    assert (evaluate(model, one, threshold=middle).predicted.sum(1) == 1).all()


@pytest.mark.parametrize("score", [half_credit, credit_for_the_longest])
def test_12_half_credit_is_noticed(score: Score) -> None:
    with pytest.raises(AssertionError):
        guard_half_right_is_wrong(score)


# --- 13. The last test batch dropped -----------------------------------------------------------------------------

InOrder = Callable[[Dataset, int], Iterator[Batch]]


def guard_every_test_image_is_seen_once(batches: InOrder) -> None:
    for n, size in ((23, 5), (20, 5), (3, 5), (1, 1)):
        dataset = digits(n)
        assert torch.cat([batch.index for batch in batches(dataset, size)]).tolist() == list(range(n))


def without_the_last(dataset: Dataset, batch_size: int) -> Iterator[Batch]:
    return (batch for batch in in_order(dataset, batch_size) if len(batch.images) == batch_size)


def test_13_the_last_test_batch_counts() -> None:
    guard_every_test_image_is_seen_once(in_order)
    assert evaluate(tiny(), digits(23), batch_size=5).n == 23


def test_13_a_dropped_test_batch_is_noticed() -> None:
    with pytest.raises(AssertionError):
        guard_every_test_image_is_seen_once(without_the_last)


# --- And what evaluation should not do -----------------------------------------------------------------------------


def test_data_that_do_not_fit_the_model_are_refused_before_they_are_evaluated() -> None:
    model, dataset = tiny(), digits(4)
    misfits = {
        r"images of \(1, 8, 8\) and rows has \(1, 8, 7\)": replace(dataset, images=dataset.images[..., :7]),
        "has 3 classes and rows has 4": replace(dataset, classes=("a", "b", "c", "d")),
        "rows has no images": dataset.subset(torch.arange(0)),
    }
    for said, misfit in misfits.items():
        with pytest.raises(UserError, match=said):
            evaluate(model, misfit)


def test_an_interrupted_evaluation_restores_the_mode() -> None:
    model = tiny().train()

    def interrupt(done: int, n: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(model, digits(4), on_batch=interrupt)
    assert model.training


def test_naming_more_classes_than_there_are_names_them_all() -> None:
    assert name_classes(torch.rand(2, 3), top=9, threshold=0.5).all()


def test_a_class_without_test_images_has_no_error_rate() -> None:
    lengths, targets = torch.tensor([[0.9, 0.1, 0.2], [0.9, 0.3, 0.2]]), torch.tensor([[1.0, 0, 0], [0, 1, 0]])
    evaluation = Evaluation("x", lengths, targets, name_classes(lengths, 1, 0.5), ("a", "b", "c"), False)
    assert evaluation.summary()["error_percent_by_class"] == {"a": 0.0, "b": 100.0}
    assert evaluation.confusion.tolist() == [[1, 0, 0], [1, 0, 0], [0, 0, 0]]
