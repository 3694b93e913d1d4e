"""A trained model as the beginning of another: what fits is taken over, the rest is fresh, and it is said which."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_zoo import script

import capsnet
from capsnet import create_model, data
from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Certificate
from capsnet.io.transfer import LoadReport, start_from, starting_from
from capsnet.models.capsnet import CapsNet
from capsnet.models.config import CapsNetConfig, CNNConfig
from capsnet.models.registry import build
from capsnet.routing.options import DynamicOptions
from capsnet.train import loop, steps
from capsnet.train.presets import get_preset

TINY = CapsNetConfig(
    (1, 12, 12), 3, stem_channels=(4,), stem_kernels=(3,), primary_types=2, primary_dim=4, primary_kernel=3,
    class_dim=4, decoder=(8, 6), routing=DynamicOptions(bias=True),
)  # fmt: skip


def report_of(model: object) -> LoadReport:
    report = model.loaded  # type: ignore[attr-defined]
    assert isinstance(report, LoadReport)
    return report


@pytest.fixture
def trained(tmp_path: Path) -> str:
    """A tiny network of grey images with the classes ant, bee and cat, on disk."""
    model = build(TINY)
    model.classes = ("ant", "bee", "cat")
    checkpoint.save_model(tmp_path / "tiny.safetensors", model, Certificate())
    return str(tmp_path / "tiny.safetensors")


# -------------------------------------------------------------------------------------------------- create_model


def test_a_pretrained_model_is_the_shipped_one(digits: data.Dataset) -> None:
    model, shipped = create_model("quick-mnist", pretrained=True), capsnet.load("quick-mnist")
    assert not report_of(model).fresh
    assert report_of(model).sha256 == zoo.card("quick-mnist").weights.sha256
    assert torch.equal(model.predict(digits.images[:50]).activations, shipped.predict(digits.images[:50]).activations)


def test_a_shipped_name_without_its_weights_gives_the_architecture() -> None:
    model = create_model("quick-mnist", num_classes=4, image_size=32, channels=3)
    assert model.loaded is None
    assert model.config == replace(get_preset("quick").model, num_classes=4, image_shape=(3, 32, 32))
    assert model.classes == ("0", "1", "2", "3")


def test_another_number_of_classes_means_fresh_class_capsules(trained: str) -> None:
    report = report_of(create_model(trained, pretrained=True, num_classes=5))
    assert set(report.fresh) == {"caps.0.weight", "caps.0.routing.bias", "decoder.linears.0.weight"}
    assert {"stem.0.weight", "primary.conv.weight", "decoder.linears.1.weight"} <= set(report.loaded)
    assert str(report).endswith("stem, primary, decoder (but fresh decoder.linears.0.weight); fresh: caps")


def test_numbers_that_happen_to_be_names_are_not_taken_for_classes_of_that_name() -> None:
    report = report_of(create_model("quick-mnist", pretrained=True, num_classes=4))
    assert "caps.0.weight" in report.fresh


def test_classes_are_taken_over_by_their_names_in_any_order(trained: str) -> None:
    source = capsnet.load(trained)
    model = create_model(trained, pretrained=True, classes=["cat", "dog", "ant", "elk"])
    assert isinstance(source, CapsNet)
    assert isinstance(model, CapsNet)
    ours, theirs = model.caps[0].weight, source.caps[0].weight
    assert torch.equal(ours[:, [0, 2]], theirs[:, [2, 0]])  # type: ignore[index]
    assert not torch.equal(ours[:, 1], theirs[:, 1])  # type: ignore[index]
    painted, known = (m.decoder.linears[0].weight.unflatten(1, (-1, 4)) for m in (model, source))  # type: ignore
    assert torch.equal(painted[:, [0, 2]], known[:, [2, 0]])
    assert report_of(model).adapted["caps.0.weight"] == "of the classes ant, cat"
    assert model.classes == ("cat", "dog", "ant", "elk")


def test_classes_may_be_given_as_numbers() -> None:
    model = create_model("quick-mnist", pretrained=True, classes=[7, 1])  # type: ignore[list-item]
    assert model.classes == ("7", "1")
    assert report_of(model).adapted["caps.0.weight"] == "of the classes 1, 7"


def test_the_same_classes_in_another_order_predict_the_same(trained: str) -> None:
    source = capsnet.load(trained)
    model = create_model(trained, pretrained=True, classes=["cat", "ant", "bee"])
    images = torch.rand(4, 1, 12, 12)
    torch.testing.assert_close(model.predict(images).activations, source.predict(images).activations[:, [2, 0, 1]])


def test_another_image_size_keeps_the_class_capsules_only_where_they_are_shared(trained: str, tmp_path: Path) -> None:
    report = report_of(create_model(trained, pretrained=True, image_size=16))
    assert "caps.0.weight" in report.fresh
    assert "caps.0.routing.bias" in report.loaded
    shared = build(replace(TINY, shared=True))
    checkpoint.save_model(tmp_path / "shared.safetensors", shared, Certificate())
    report = report_of(create_model(str(tmp_path / "shared.safetensors"), pretrained=True, image_size=(16, 14)))
    assert report.fresh == ("decoder.linears.2.weight", "decoder.linears.2.bias")


def test_a_grey_picture_in_colour_is_seen_as_before(trained: str) -> None:
    grey = capsnet.load(trained)
    colour = create_model(trained, pretrained=True, channels=3)
    image = torch.rand(2, 1, 12, 12)
    torch.testing.assert_close(colour.predict(image.repeat(1, 3, 1, 1)).activations, grey.predict(image).activations)
    assert report_of(colour).adapted == {"stem.0.weight": "1 → 3 channels"}


def test_colour_kernels_serve_grey_pictures(tmp_path: Path) -> None:
    colour = build(replace(TINY, image_shape=(3, 12, 12)))
    checkpoint.save_model(tmp_path / "colour.safetensors", colour, Certificate())
    grey = create_model(str(tmp_path / "colour.safetensors"), pretrained=True, channels=1)
    image = torch.rand(2, 1, 12, 12)
    torch.testing.assert_close(grey.predict(image).activations, colour.predict(image.repeat(1, 3, 1, 1)).activations)


def test_a_cnn_keeps_all_but_its_outputs(tmp_path: Path) -> None:
    config = CNNConfig((1, 8, 8), 3, (4,), (3,), (2,), (6,))
    checkpoint.save_model(tmp_path / "cnn.safetensors", build(config), Certificate())
    model = create_model(str(tmp_path / "cnn.safetensors"), pretrained=True, num_classes=2)
    assert report_of(model).fresh == ("head.3.weight", "head.3.bias")


def test_a_beginning_that_cannot_be_one_is_refused(trained: str) -> None:
    with pytest.raises(UserError, match="'quick' is a preset and has no weights"):
        create_model("quick", pretrained=True)
    with pytest.raises(UserError, match="should be a list of 3 different names"):
        create_model(trained, pretrained=True, num_classes=3, classes=["ant", "bee"])
    with pytest.raises(UserError, match="different names"):
        create_model(trained, classes=["ant", "ant"], pretrained=True)
    with pytest.raises(UserError, match="not one convolution"):
        start_from(build(replace(TINY, stem_channels=(5,))), trained)
    with pytest.raises(UserError, match="did you mean 'quick-mnist'"):
        create_model("quick-mnits")


# ---------------------------------------------------------------------------------------------- train --init


@pytest.mark.slow
def test_few_images_are_learnt_better_from_a_trained_model_than_from_nothing(tmp_path: Path) -> None:
    tried = script("finetune", "research")
    folder = tried.write_images(tmp_path / "images", tried.CASES["digits rotated by 90°"])
    begun = tried.error_percent(folder, 0, "quick-mnist")
    assert begun < 20  # chance is 83; measured: 9, and 32 without the trained model
    assert begun < tried.error_percent(folder, 0, None) - 5


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A folder of images in colour, larger than the model's, and a run on it that began with quick-mnist."""
    from pictures import write_folder

    desk = tmp_path_factory.mktemp("desk")
    write_folder(desk / "photos", ("red", "green"), n=24)
    words = ["train", "--data", f"folder:{desk / 'photos'}", "--init", "quick-mnist", "--epochs", "4"]
    assert main([*words, "--out", str(desk / "run"), "--no-report", "--no-tensorboard"]) == 0
    return desk / "photos", desk / "run"


def test_a_folder_goes_from_images_to_a_trained_evaluated_model(
    tuned: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    photos, run = tuned
    assert main(["evaluate", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == json.loads((run / "results.json").read_text())["test"]["errors"]
    assert main(["predict", str(run), str(photos / "red" / "000.png"), "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["predictions"][0]["activations"]) == {"red", "green"}


def test_images_are_converted_to_what_the_trained_model_takes(tuned: tuple[Path, Path]) -> None:
    model = capsnet.load(str(tuned[1]))
    assert tuple(model.config.image_shape) == (1, 28, 28)
    assert model.classes == ("green", "red")


def test_the_certificate_says_where_a_training_began(tuned: tuple[Path, Path]) -> None:
    birth = json.loads((tuned[1] / "results.json").read_text())["certificate"]
    assert birth["config"]["init"] == "quick-mnist"
    assert birth["started_from"]["sha256"] == zoo.card("quick-mnist").weights.sha256
    assert "caps.0.weight" in birth["started_from"]["fresh"]
    assert "primary.conv.weight" in birth["started_from"]["loaded"]


def test_flags_change_the_network_and_the_size_of_a_beginning(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    words = ["train", "--data", f"folder:{tuned[0]}", "--init", "quick-mnist", "--epochs", "1", "--image-size", "24"]
    words += ["--model.routing.iterations", "1", "--no-report", "--no-tensorboard"]
    assert main([*words, "--out", str(tmp_path / "run")]) == 0
    model = capsnet.load(str(tmp_path / "run"))
    assert tuple(model.config.image_shape) == (3, 24, 24)
    assert isinstance(model.config, CapsNetConfig)
    assert model.config.routing == DynamicOptions(iterations=1, bias=True)
    assert model.config.stem_channels == (32, 64, 64)


def test_a_training_that_began_with_a_model_goes_on_without_it(tuned: tuple[Path, Path], tmp_path: Path) -> None:
    weights = tmp_path / "beginning.safetensors"
    shutil.copy(zoo.weight_file("quick-mnist"), weights)
    config = replace(get_preset("own-images"), data=f"folder:{tuned[0]}", epochs=2)
    run = loop.start(starting_from(config, str(weights)), tmp_path / "run")
    began, origin = run.model.state_dict()["stem.0.weight"].clone(), run.origin
    assert torch.equal(began, capsnet.load("quick-mnist").state_dict()["stem.0.weight"])
    steps.train_step(run)
    run.save()
    assert run.lock is not None
    run.lock.release()
    weights.unlink()
    again = loop.resume(tmp_path / "run")
    assert torch.equal(again.model.state_dict()["stem.0.weight"], run.model.state_dict()["stem.0.weight"])
    assert not torch.equal(again.model.state_dict()["stem.0.weight"], began)
    assert loop.train(again).certificate.started_from == origin


def test_a_mistake_with_init_is_one_sentence(
    tuned: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = ["train", "--data", f"folder:{tuned[0]}", "--out", str(tmp_path / "run"), "--init"]
    (tmp_path / "file").write_text("")
    mistakes = {
        ("quick-mnits",): "did you mean 'quick-mnist'",
        (str(tmp_path / "none.safetensors"),): "there is no checkpoint",
        ("quick-mnist", "--model.stem-channels", "8", "8", "8"): "not one convolution of quick-mnist fits",
        ("quick-mnist", "--out", str(tmp_path / "file" / "run")): "file",
        ("quick-mnist", "--resume", str(tuned[1])): "--resume continues a run with its own settings",
    }
    for words, said in mistakes.items():
        assert main([*begin, *words]) == 2, words
        error = capsys.readouterr().err
        assert said in error
        assert "Traceback" not in error
    assert main(["evaluate", "quick-mnist", "--data", f"folder:{tuned[0]}"]) == 2
    assert "classes" in capsys.readouterr().err


# --- Names as timm users type them -------------------------------------------------------------------------------


def test_models_are_listed_by_patterns() -> None:
    assert {"quick", "quick-mnist"} <= set(capsnet.list_models("quick*"))
    assert capsnet.list_models(["best*", "fash*"], pretrained=True) == ["best-mnist", "fashion"]
    assert "cnn" not in "".join(capsnet.list_models(exclude_filters="*cnn"))
    assert capsnet.list_models("nothing*") == []


def test_in_chans_is_another_word_for_channels() -> None:
    model = create_model("quick-mnist", pretrained=True, num_classes=4, in_chans=3)
    assert model.config.image_shape == (3, 28, 28)
    with pytest.raises(UserError, match="mean the same"):
        create_model("quick", channels=1, in_chans=3)
