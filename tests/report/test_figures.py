"""What the pictures promise: that they show what they were given, whatever its size, colour and names."""

from __future__ import annotations

import os

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from capsnet.errors import UserError
from capsnet.evaluate import Evaluation
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig
from capsnet.nn.layers import DenseCaps
from capsnet.report import figures
from capsnet.routing import Trace, dynamic_routing

DIGITS = tuple("0123456789")


def words(figure: Figure) -> list[str]:
    """All that is written on a figure, tick labels too."""
    found = [t.get_text() for t in figure.texts]
    for axes in figure.axes:
        ticks = [*axes.get_xticklabels(), *axes.get_yticklabels()]
        found += [t.get_text() for t in [*axes.texts, *ticks, axes.title, axes.xaxis.label, axes.yaxis.label]]
        found.append(axes.get_title(loc="left"))
    return [text for text in found if text]


def judged(true: list[int], named: list[int], classes: tuple[str, ...] = DIGITS) -> Evaluation:
    """An evaluation in which `named` are 0.8 long, what is there 0.3 where it was missed, all else 0.1."""
    targets = torch.nn.functional.one_hot(torch.tensor(true), len(classes)).float()
    predicted = torch.nn.functional.one_hot(torch.tensor(named), len(classes)).bool()
    sizes = torch.where(predicted, 0.8, torch.where(targets.bool(), 0.3, 0.1))
    return Evaluation("a test", sizes, targets, predicted, classes, False)


def small_model(shape: tuple[int, int, int] = (1, 12, 12), classes: int = 3, **more: object) -> CapsNet:
    torch.manual_seed(0)
    sizes = {"stem_channels": (4,), "stem_kernels": (5,), "primary_types": 2, "primary_kernel": 5, "class_dim": 6}
    config = CapsNetConfig(shape, classes, decoder=(8,), **{**sizes, **more})  # type: ignore[arg-type]
    return CapsNet(config).eval()


def records(validation: float | None = 2.5, reconstruction: bool = True) -> list[dict]:
    train = [
        {
            **{"kind": "train", "step": k, "epoch": k / 10, "loss": 1 / k, "classification": 0.8 / k, "lr": 0.001},
            **{"reconstruction": 50.0 / k if reconstruction else None, "images_per_second": 900.0, "seconds": k},
        }
        for k in range(1, 31)
    ]
    epochs = [
        {"kind": "epoch", "epoch": k, "step": 10 * k, "validation_error_percent": validation and validation / k}
        for k in (1, 2, 3)
    ]
    return [*train, *epochs]


# --- Files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_same_picture_gives_the_same_bytes(tmp_path, kind):
    paths = [figures.save(figures.training_curves(records()), tmp_path / f"{n}.{kind}") for n in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"date" not in paths[0].read_bytes().lower()


def test_a_write_that_fails_leaves_the_old_picture_and_no_debris(tmp_path, monkeypatch):
    path = figures.save(figures.confusion_matrix(judged([0, 1], [0, 1])), tmp_path / "matrix.png")
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match="No space left"):
        figures.save(figures.confusion_matrix(judged([0, 1], [1, 1])), path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["matrix.png"]


def test_a_suffix_that_is_no_picture_is_refused_with_the_choices(tmp_path):
    with pytest.raises(UserError, match=r"\.png or \.svg"):
        figures.save(Figure(), tmp_path / "picture.gif")


def test_drawing_leaves_the_users_own_style_alone():
    with matplotlib.rc_context({"lines.linewidth": 7.5, "axes.facecolor": "red"}):
        before = dict(matplotlib.rcParams)
        figure = figures.training_curves(records())
        assert dict(matplotlib.rcParams) == before
    assert figure.axes[0].get_facecolor() == matplotlib.colors.to_rgba(figures.PAPER)


# --- Names and pixels ----------------------------------------------------------------------------------------


def test_names_fit_on_one_line_and_stay_apart():
    assert figures.short_name("cat") == "cat"
    assert figures.short_name("two\nlines\tand\0more") == "two li… more"
    long = figures.short_names(["European shorthair, grey", "European shorthair, red"])
    assert len(set(long)) == 2
    assert all(len(name) <= 12 for name in long)


def test_a_name_that_the_font_cannot_write_becomes_the_class_number():
    assert figures.short_names(["cat", "猫", ""]) == ["cat", "#1", "#2"]
    assert figures.short_name("猫 5") == "□ 5"


def test_names_are_never_read_as_mathematics(tmp_path):
    figure = figures.confusion_matrix(judged([0, 1], [1, 1], ("$\\frac$", "a_$b")))
    figures.save(figure, tmp_path / "names.png")
    assert "$\\frac$" in words(figure)


@pytest.mark.parametrize(("channels", "expected"), [(1, [9, 9, 9]), (2, [9, 9, 9]), (3, [9, 8, 7]), (4, [9, 8, 7])])
def test_any_number_of_channels_becomes_rgb(channels, expected):
    image = torch.tensor([9, 8, 7, 6], dtype=torch.uint8)[:channels, None, None].expand(channels, 2, 5)
    pixels = figures.as_pixels(image)
    assert pixels.shape == (2, 5, 3)
    assert pixels[1, 4].tolist() == expected
    assert np.array_equal(figures.as_pixels(image.float() / 255), pixels)


def test_several_decoded_images_keep_their_colours_apart():
    decoded = torch.zeros(2, 1, 1, 2)
    decoded[0, 0, 0, 0] = decoded[1, 0, 0, 1] = 1.0
    first, second = figures.in_colours(decoded)[:, 0].T
    assert first[0] > first[2]  # vermillion is red
    assert second[2] > second[0]  # blue is not
    assert figures.in_colours(decoded[:0]).sum() == 0


# --- Training ------------------------------------------------------------------------------------------------


def test_training_curves_have_a_panel_for_each_thing_that_was_recorded():
    assert len(figures.training_curves(records()).axes) == 4
    assert len(figures.training_curves(records(validation=None)).axes) == 3
    assert len(figures.training_curves(records(validation=None, reconstruction=False)).axes) == 2
    assert any("0.83 %" in text for text in words(figures.training_curves(records())))


def test_training_curves_survive_short_and_broken_histories(tmp_path):
    broken = [{**records()[0], "loss": float("nan")}, *records()[:1]]
    for k, history in enumerate(([], records()[:1], broken, records()[-1:])):
        figures.save(figures.training_curves(history), tmp_path / f"{k}.png")


def test_steps_that_a_resumed_training_repeats_are_drawn_once():
    line = figures.training_curves(records() + records()[5:30]).axes[0].lines[0]
    assert len(line.get_xdata()) == 30


# --- Speed ---------------------------------------------------------------------------------------------------


def swept() -> list[dict]:
    quantities = {"batch": ("8", "32", "128"), "image size": ("20", "48"), "iterations": ("3",)}
    return [
        {"quantity": name, "value": value, "seconds": {"plain": 0.04 * float(value), "fast": 0.01 * float(value)}}
        for name, values in quantities.items()
        for value in values
    ]


def benched(**changes: object) -> dict:
    plain = {"convolutions": 900.0, "routing": 500.0, "decoder": 20.0, "Adam": 30.0}
    fast = {"convolutions": 250.0, "routing": 50.0, "decoder": 20.0, "Adam": 30.0}
    seconds = {side: {"median": value} for side, value in (("public", 3.0), ("plain", 1.5), ("fast", 0.4))}
    return {"case": "batch 128", "train_seconds": seconds, "breakdown_ms": {"plain": plain, "fast": fast}, **changes}


def test_the_sweep_has_a_panel_for_each_quantity_with_both_sides_at_their_values():
    figure = figures.sweep(swept())
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["batch", "image size", "iterations"]
    for line, factor in zip(figure.axes[0].lines, (0.04, 0.01), strict=True):
        assert line.get_xdata() == pytest.approx([8, 32, 128])
        assert line.get_ydata() == pytest.approx([8 * factor, 32 * factor, 128 * factor])
    assert {"plain", "fast", "4.0×", "8", "128", "20"} <= set(words(figure))


def test_all_panels_of_the_sweep_have_one_scale_that_holds_every_point():
    figure = figures.sweep(swept()[::-1])  # in any order
    limits = {axes.get_ylim() for axes in figure.axes}
    assert len(limits) == 1
    low, high = limits.pop()
    assert low < 0.03
    assert high > 0.04 * 128
    assert figure.axes[-1].lines[0].get_xdata() == pytest.approx([8, 32, 128])


def test_the_step_bill_draws_every_part_as_long_as_it_takes_and_the_rest():
    axes = figures.step_bill(benched()).axes[0]
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_height() > 8]
    public, plain, fast = bars[0], bars[1:6], bars[6:]
    a_second = public.get_width() / 3.0
    assert [bar.get_width() / a_second for bar in plain] == pytest.approx([0.9, 0.5, 0.02, 0.03, 0.05])
    assert [bar.get_width() / a_second for bar in fast] == pytest.approx([0.25, 0.05, 0.02, 0.03, 0.05])
    assert plain[1].get_x() == pytest.approx(plain[0].get_x() + plain[0].get_width())
    assert public.get_x() == plain[0].get_x() == fast[0].get_x()


def test_the_step_bill_says_totals_and_what_each_part_gained():
    said = set(words(figures.step_bill(benched())))
    assert {"batch 128. Below: plain → fast, each part timed separately.", "3.00 s", "1.50 s", "0.40 s"} <= said
    assert {"2.0× as fast", "7.5× as fast", "900 → 250 ms", "10.0× as fast", "50 → 50 ms", "rest"} <= said


def test_parts_that_add_up_to_more_than_the_step_leave_no_rest_and_stay_on_the_page():
    hasty = {side: {"median": 0.1} for side in ("public", "plain", "fast")}
    figure = figures.step_bill(benched(train_seconds=hasty))
    assert "0.0 → 0.0 ms" in words(figure)
    ends = [p.get_x() + p.get_width() for p in figure.axes[0].patches if isinstance(p, Rectangle)]
    assert max(ends) < figure.get_figwidth() * 72 - 60  # room for the total beside the longest bar


def test_numbers_that_cannot_be_drawn_say_which_command_gives_them():
    with pytest.raises(UserError, match="without --quick"):
        figures.step_bill({"train_seconds": benched()["train_seconds"]})
    with pytest.raises(UserError, match="bench --sweep"):
        figures.sweep([])


# --- Confusion -----------------------------------------------------------------------------------------------


def test_confusions_of_single_labels_are_the_confusion_matrix():
    evaluation = judged([0, 1, 2, 2, 2], [0, 1, 7, 7, 2])
    counts = figures.confusions(evaluation)
    assert torch.equal(counts[:-1, :-1], evaluation.confusion)
    assert counts[-1].sum() == counts[:, -1].sum() == 0


def test_confusions_of_label_sets_pair_what_was_missed_with_what_was_invented():
    there = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 1]]).float()
    named = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 1]]).bool()
    counts = figures.confusions(Evaluation("sets", there, there, named, ("a", "b", "c"), True))
    assert counts.tolist() == [[1, 0, 0, 1], [0, 0, 1, 0], [0, 0, 1, 0], [0, 1, 0, 0]]


def test_errors_have_colour_and_numbers_and_the_diagonal_is_grey():
    figure = figures.confusion_matrix(judged([3] * 995 + [4] * 7, [3] * 993 + [5, 5] + [4] * 7))
    colours = figure.axes[1].images[0].get_array()
    grey, heat = colours[3, 3, :3], colours[3, 5, :3]
    assert np.ptp(grey) < 0.05 < np.ptp(heat)
    assert {"993", "2", "7", "0.2 %", *DIGITS} <= set(words(figure))


@pytest.mark.parametrize(("classes", "numbers"), [(30, True), (31, False)])
def test_beyond_thirty_classes_there_are_colours_and_no_numbers(classes, numbers):
    names = tuple(f"n{k}" for k in range(classes))
    figure = figures.confusion_matrix(judged([1] * 23, [1] * 22 + [2], names))
    assert ("22" in words(figure)) == numbers
    assert figure.axes[1].images[0].get_array().shape[:2] == (classes, classes)


def test_two_hundred_classes_with_long_names_still_make_a_picture(tmp_path):
    names = tuple(f"a rather long name, {k}" for k in range(200))
    figures.save(figures.confusion_matrix(judged([0, 199], [0, 5], names)), tmp_path / "many.png")


# --- Mistakes ------------------------------------------------------------------------------------------------


def test_mistakes_come_most_confident_first_and_none_that_is_right():
    evaluation = judged([0, 1, 2, 3], [0, 5, 6, 7])
    evaluation.activations[2, 6] = 0.95
    assert figures.worst_mistakes(evaluation, 24) == [2, 1, 3]
    assert figures.worst_mistakes(evaluation, 1) == [2]


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 20), (1, 200, 300)])
def test_mistakes_show_image_true_and_predicted_label_with_lengths(shape):
    images = torch.randint(0, 256, (4, *shape), dtype=torch.uint8)
    figure = figures.mistakes(images, judged([0, 1, 2, 3], [0, 5, 6, 7]), most=2, title="By all")
    assert "By all" in words(figure)
    tiles = figure.axes[0].images
    assert len(tiles) == 2
    assert np.array_equal(tiles[0].get_array(), figures.as_pixels(images[1]))
    assert {"1", "5", "2", "6", "0.80", "0.30"} <= set(words(figure))
    assert "7" not in words(figure)


def test_no_mistakes_is_said():
    figure = figures.mistakes(torch.zeros(2, 1, 8, 8), judged([0, 1], [0, 1]))
    assert not figure.axes[0].images
    assert "None: all 2 are correct." in words(figure)


# --- Reconstructions and tweaks ------------------------------------------------------------------------------


def test_wrong_reconstructions_have_a_third_tile_and_say_label_prediction_and_target():
    tiles = torch.rand(3, 1, 8, 8)
    figure = figures.reconstruction_rows(tiles, tiles / 2, ["1", "5", "2"], ["1", "3", "2"], tiles / 3)
    assert len(figure.axes[0].images) == 2 + 2 + 3
    assert {"(1, 1, 1)", "(5, 3, 3)", "(5, 3, 5)", "(2, 2, 2)", "right", "wrong"} <= set(words(figure))
    assert np.array_equal(figure.axes[0].images[-1].get_array(), figures.as_pixels(tiles[1] / 3))


def test_reconstructions_of_a_model_are_what_it_predicts():
    model, images = small_model(), torch.rand(13, 1, 12, 12)
    prediction = model.predict(images)
    figure = figures.reconstructions(model, images, prediction.labels)
    assert len(figure.axes[0].images) == 26
    assert np.array_equal(figure.axes[0].images[1].get_array(), figures.as_pixels(prediction.reconstructions[0]))
    assert "right" not in words(figures.reconstructions(model, images))


def test_a_model_without_decoder_is_told_to_get_one():
    model = CapsNet(CapsNetConfig((1, 12, 12), 3, (4,), (5,), (1,), primary_types=2, primary_kernel=5, decoder=()))
    with pytest.raises(UserError, match="decoder"):
        figures.reconstructions(model, torch.rand(1, 1, 12, 12))
    with pytest.raises(UserError, match="decoder"):
        figures.tweak_grid(model, torch.rand(1, 12, 12))


@pytest.mark.parametrize("shape", [(1, 12, 12), (3, 13, 17)])
def test_the_tweak_grid_shows_the_pixels_of_the_models_tweaks(shape):
    model = small_model(shape)
    pose = torch.linspace(-0.3, 0.3, 6)
    figure = figures.tweak_grid(model, pose, 2)
    with torch.inference_mode():
        expected = figures.as_pixels(model.tweaks(pose, 2))  # q steps h w 3
    grid, (_, h, w) = figure.axes[0].images[0].get_array(), shape
    down, across = grid.shape[0] // 6, grid.shape[1] // 11
    for q in range(6):
        for step in range(11):
            tile = grid[q * down : q * down + h, step * across : step * across + w]
            assert np.array_equal(tile, expected[q, step])
    assert {"−0.25", "−0.05", "0", "+0.25", "1", "6"} <= set(words(figure))


def test_the_middle_column_of_the_tweak_grid_is_framed():
    figure = figures.tweak_grid(small_model(), torch.zeros(6), 0)
    (frame,) = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    left, right, *_ = figure.axes[0].images[0].get_extent()
    middle = frame.get_x() + frame.get_width() / 2
    assert frame.get_width() == pytest.approx((right - left) / 11)
    assert abs(middle - (left + right) / 2) < frame.get_width() / 8  # the last column's gap is part of the picture


def test_the_tweak_grid_of_an_image_starts_from_its_own_pose():
    model, image = small_model(), torch.rand(1, 12, 12)
    prediction = model.predict(image[None])
    label = int(prediction.labels[0])
    from_image, from_pose = (
        figures.tweak_grid(model, what, which).axes[0].images[0].get_array()
        for what, which in ((image, None), (prediction.poses[0, label], label))
    )
    assert np.array_equal(from_image, from_pose)
    with pytest.raises(UserError, match="label"):
        figures.tweak_grid(model, torch.zeros(6))


# --- Routing -------------------------------------------------------------------------------------------------


def traced(leaky: bool = False, iterations: int = 3, classes: int = 4) -> Trace:
    torch.manual_seed(1)
    u, W = torch.randn(2, 8, 4), torch.randn(8, classes, 6, 4)
    trace = dynamic_routing(u, W, iterations=iterations, leaky=leaky, trace=True).trace
    assert trace is not None
    return trace


def test_the_routing_panel_draws_couplings_and_activations_of_every_class_over_the_iterations():
    trace = traced()
    figure = figures.routing(trace, ("a", "b", "c", "d"), example=1)
    couplings, sizes, _ = figure.axes
    assert len(couplings.lines) == len(sizes.lines) == 4
    drawn = sorted(line.get_ydata()[-1] for line in sizes.lines)
    assert drawn == pytest.approx(trace.outputs[-1, 1].norm(dim=-1).sort().values.tolist(), abs=1e-4)
    assert sum(line.get_ydata()[1] for line in couplings.lines) == pytest.approx(100, abs=1e-3)


def test_the_routing_panel_draws_the_activations_of_an_algorithm_that_has_its_own():
    trace = DenseCaps(8, 4, 3, 4, routing="em").route(torch.rand(2, 8, 4), trace=True).trace
    drawn = sorted(line.get_ydata()[-1] for line in figures.routing(trace, tuple("abc")).axes[1].lines)
    assert drawn == pytest.approx(trace.activations[-1, 0].sort().values.tolist(), abs=1e-5)
    assert drawn != pytest.approx(trace.outputs[-1, 0].norm(dim=-1).sort().values.tolist(), abs=1e-3)


def test_blue_is_the_class_that_is_there_even_when_another_is_longer():
    trace = traced()
    shortest = int(trace.outputs[-1, 0].norm(dim=-1).argmin())
    sizes = figures.routing(trace, tuple("abcd"), true=shortest).axes[1]
    (blue,) = [line for line in sizes.lines if line.get_color() == figures.BLUE]
    assert blue.get_ydata()[-1] == pytest.approx(float(trace.outputs[-1, 0, shortest].norm()), abs=1e-4)


@pytest.mark.parametrize("options", [{"leaky": True}, {"iterations": 1}, {"iterations": 12}, {"classes": 1}])
def test_any_routing_has_a_panel(options, tmp_path):
    trace = traced(**options)
    names = tuple(f"class {k}" for k in range(trace.votes.shape[2]))
    image = torch.rand(3, 10, 14)
    figure = figures.routing(trace, names, image=image, grid=(2, 2))
    assert len(figure.axes) == 4
    figures.save(figure, tmp_path / "routing.png")


def test_entropy_is_full_before_the_first_agreement_and_falls_afterwards():
    lines = {line.get_label(): line.get_ydata() for line in figures.routing(traced(), tuple("abcd")).axes[2].lines}
    assert lines["median"][0] == pytest.approx(100, abs=1e-3)
    assert lines["most decided"][-1] < lines["most decided"][0] - 1


def test_contributions_add_up_to_the_input_of_the_capsule_along_its_direction():
    trace = traced()
    s_j = torch.einsum("ij,ijq->jq", trace.couplings[-1, 0], trace.votes[0])
    for label in range(4):
        assert float(figures.contributions(trace, 0, label).sum()) == pytest.approx(float(s_j[label].norm()), rel=1e-4)


def test_many_panels_wrap_so_that_each_has_room():
    """In one row, five panels with long labels left nothing for their bars."""
    bars = [figures.Bar(f"a long label {k}", 3.0 + k, figures.BLUE) for k in range(8)]
    figure = figures.bars("Five panels", "", {f"panel {k}": bars for k in range(5)})
    figures.render(figure)
    assert len(figure.axes) == 5
    assert min(axes.get_position().width for axes in figure.axes) > 0.15
