"""The command line as its user meets it: results, pictures, and one clear line for every mistake."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from capsnet import data
from capsnet.cli import VERBS, main
from capsnet.cli.inputs import training_config
from capsnet.data.views import CATEGORIES
from capsnet.evaluate import evaluate
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.config import CapsNetConfig, CNNConfig
from capsnet.models.registry import build
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from pictures import photo_of, write_folder

Capture = pytest.CaptureFixture[str]


def fails(capsys: Capture, words: list[str], *expected: str) -> None:
    """The verb ends with 2 and one line that says all of this, and shows no traceback."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as exit_:  # the parser of flags exits by itself
        code = int(exit_.code or 0)
    error = capsys.readouterr().err
    assert code == 2, error
    assert "Traceback" not in error
    for text in expected:
        assert text in " ".join(error.split()), error


# ------------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself_with_an_example(verb: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0
    assert "Example" in text
    assert f"  capsnet {verb}" in text


def test_capsnet_alone_lists_its_verbs(capsys: Capture) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb}" in text for verb in VERBS)


def test_an_unknown_verb_preset_data_set_or_option_shows_the_nearest(capsys: Capture) -> None:
    fails(capsys, ["trian"], "no verb 'trian'", "did you mean 'train'")
    fails(capsys, ["train", "--preset", "papr"], "no preset 'papr'", "did you mean 'paper'")
    fails(capsys, ["train", "--data", "minst"], "no dataset 'minst'", "did you mean 'mnist'")
    fails(capsys, ["train", "--model.routing.iteration", "2"], "--model.routing.iterations")
    fails(capsys, ["data", "fetch", "mnst"], "did you mean 'mnist'")


# -------------------------------------------------------------------------------------------- train and evaluate


def test_a_run_holds_model_config_metrics_results_report_and_tensorboard(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    assert names >= {"model.safetensors", "config.json", "metrics.jsonl", "results.json", "report.html", "tensorboard"}
    assert "state.safetensors" not in names
    certificate = json.loads((run / "results.json").read_text())["certificate"]
    assert certificate["config"]["preset"] == "quick"
    assert certificate["seconds"] > 0


def test_tensorboard_has_scalars_reconstructions_and_the_graph(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(run / "tensorboard"))
    log.Reload()
    assert "train/loss" in log.Tags()["scalars"]
    assert any("reconstructions" in tag for tag in log.Tags()["images"])
    assert log.Tags()["graph"]


def test_evaluate_prints_an_object_with_n_errors_and_error_percent(run: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--data", "mnist", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["n"] == 10_000
    assert found["error_percent"] == pytest.approx(found["errors"] / 100)
    trained = json.loads((run / "results.json").read_text())["test"]
    assert found["errors"] == trained["errors"]
    assert found["error_percent"] < 8


def test_evaluate_takes_a_limit_and_says_so(run: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--limit", "500", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["n"], found["split_size"]) == (500, 10_000)
    assert main(["evaluate", str(run), "--limit", "500"]) == 0
    assert "500 of 10,000 test images" in capsys.readouterr().out
    fails(capsys, ["evaluate", run, "--limit", "0"], "at least 1")


def test_the_batch_size_of_an_evaluation_is_of_no_consequence(run: Path, capsys: Capture) -> None:
    errors = []
    for size in ("70", "1000"):
        assert main(["evaluate", str(run), "--limit", "1000", "--batch-size", size, "--json"]) == 0
        errors.append(json.loads(capsys.readouterr().out)["errors"])
    assert errors[0] == errors[1]


def test_models_lists_runs_and_presets(run: Path, capsys: Capture) -> None:
    assert main(["models", "--runs", str(run.parent), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["runs"][0]["data"] == "mnist"
    assert {"quick", "paper", "official"} <= set(listed["presets"])
    assert main(["models", "--runs", str(run.parent)]) == 0
    assert "quick" in capsys.readouterr().out


def test_a_run_folder_that_exists_is_never_overwritten(run: Path, capsys: Capture) -> None:
    before = (run / "model.safetensors").read_bytes()
    fails(capsys, ["train", "--out", run], "already exists and is not overwritten", "--resume")
    assert (run / "model.safetensors").read_bytes() == before


def test_a_finished_or_missing_run_cannot_be_resumed(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["train", "--resume", run], "has finished")
    fails(capsys, ["train", "--resume", tmp_path / "none"], "there is no run")


def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    few = ["--train-limit", "2000", "--batch-size", "8", "--epochs", "99", "--no-tensorboard"]
    command = [sys.executable, "-m", "capsnet", "train", "--out", str(folder), *few]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not (folder / "metrics.jsonl").exists() and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert f"capsnet train --resume {folder}" in error
    assert "Traceback" not in error
    _, record = checkpoint.read_tensors(folder / checkpoint.STATE_FILE)
    assert record["state"]["step"] > 0


# ------------------------------------------------------------------------------------------------------- predict


def test_predict_reads_photos_folders_and_stdin(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = digits.labels[:20].tolist()
    for number in range(20):
        photo_of(digits.images[number, 0].numpy(), tmp_path / f"{number:02d}.png")
    assert main(["predict", str(run), str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    right = sum(p["label"] == str(label) for p, label in zip(found, labels, strict=True))
    assert right >= 18
    assert "invert" in found[0]["prepared"]
    picture = (tmp_path / "00.png").read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(picture)))
    assert main(["predict", str(run), "-", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] == found[0]["label"]


def test_a_photo_of_two_digits_is_preprocessed_for_a_model_of_pairs(
    digits: data.Dataset, tmp_path: Path, capsys: Capture
) -> None:
    pairs = data.load("multimnist").test.gather(torch.arange(20))
    for number, pair in enumerate((255 * pairs.images[:, 0, 2:34, 2:34]).byte().numpy()):
        photo_of(pair, tmp_path / f"{number:02d}.png")
    assert main(["predict", "multimnist", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"]
    true = [{str(k) for k in row.nonzero()[:, 0].tolist()} for row in pairs.targets]
    assert sum(set(p["labels"]) == labels for p, labels in zip(found, true, strict=True)) >= 15
    assert "scaled into 23×23, centred by mass in 36×36" in found[0]["prepared"]


def test_predict_shows_people_a_table_and_says_what_was_done(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture
) -> None:
    path = photo_of(digits.images[0, 0].numpy(), tmp_path / "seven.png")
    assert main(["predict", str(run), str(path)]) == 0
    shown = capsys.readouterr()
    assert "seven.png" in shown.out
    assert "--raw" in shown.err


def test_raw_only_scales(run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture) -> None:
    Image.fromarray(digits.images[0, 0].numpy()).save(tmp_path / "digit.png")
    assert main(["predict", str(run), str(tmp_path / "digit.png"), "--raw", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"][0]
    expected = checkpoint.load(run).predict(digits.images[:1]).activations[0]
    assert list(found["activations"].values()) == pytest.approx(expected.tolist(), abs=1e-3)


def test_bad_images_are_named_and_the_good_ones_predicted(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture
) -> None:
    good = photo_of(digits.images[0, 0].numpy(), tmp_path / "good.png")
    (tmp_path / "half.png").write_bytes(good.read_bytes()[: len(good.read_bytes()) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("L", (20_000, 2)).save(tmp_path / "wide.png")
    Image.new("L", (90, 90), 255).save(tmp_path / "blank.png")
    names = ("half.png", "text.png", "empty.png", "wide.png", "missing.png", "blank.png")
    bad = [tmp_path / name for name in names]
    assert main(["predict", str(run), *map(str, bad), str(good), "--json"]) == 2
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert [Path(p["file"]).name for p in record["predictions"]] == ["good.png"]
    assert len(record["errors"]) == len(bad)
    for path, line in zip(bad, record["errors"], strict=True):
        assert path.name in line
    assert "Traceback" not in shown.err


def test_a_file_may_be_called_anything(run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "m[").mkdir()
    names = [photo_of(digits.images[0, 0].numpy(), tmp_path / name) for name in ("m[/b].png", "img[a].png")]
    assert main(["predict", str(run), *map(str, names)]) == 0
    shown = capsys.readouterr().out.replace("\n", "")
    assert "m[/b].png" in shown
    assert "img[a].png" in shown


def test_no_class_can_be_named_nor_several_of_data_that_have_one(run: Path, capsys: Capture) -> None:
    for top in ("0", "-1"):
        fails(capsys, ["predict", run, "x.png", "--top", top], "at least 1", top)
        fails(capsys, ["evaluate", run, "--top", top], "at least 1", top)
    fails(capsys, ["predict", run, "x.png", "--top", "2", "--threshold", "0.5"], "choose one")
    fails(capsys, ["evaluate", run, "--top", "2"], "mnist has one", "leave top out")


def test_an_empty_folder_and_no_image_at_all_are_said(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["predict", run, tmp_path], "contains no images")
    fails(capsys, ["predict", run], "no image given")


# --------------------------------------------------------------------------------------------------- reconstruct


@pytest.mark.parametrize("what", ["reconstructions", "tweaks"])
def test_reconstruct_draws_test_images_and_photos(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture, what: str
) -> None:
    out = tmp_path / "picture.png"
    assert main(["reconstruct", str(run), "--what", what, "--class", "5", "--out", str(out)]) == 0
    with Image.open(out) as picture:
        assert min(picture.size) > 100
    fails(capsys, ["reconstruct", run, "--what", what, "--out", out], "already exists", "--force")
    photo = photo_of(digits.images[0, 0].numpy(), tmp_path / "photo.png")
    assert main(["reconstruct", str(run), str(photo), "--what", what, "--out", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().lstrip().startswith("<?xml")


def test_reconstruct_refuses_an_unknown_class_or_kind_of_picture(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["reconstruct", run, "--class", "x"], "there is no class 'x'")
    fails(capsys, ["reconstruct", run, "--out", tmp_path / "a.bmp"], "should end in .png or .svg")
    fails(capsys, ["reconstruct", run, "--out", "/proc/a.png"], "could not write", "Choose a place")


def test_the_class_to_decode_is_the_one_that_was_asked_for(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture
) -> None:
    photo = photo_of(digits.images[0, 0].numpy(), tmp_path / "photo.png")
    for name, more in (("longest", []), ("seven", ["--class", "7"]), ("three", ["--class", "3"])):
        assert main(["reconstruct", str(run), str(photo), "--out", str(tmp_path / f"{name}.png"), *more]) == 0
    longest, seven, three = (painted_tile(tmp_path / f"{name}.png") for name in ("longest", "seven", "three"))
    assert (longest == seven).all()
    assert not (seven == three).all()


def painted_tile(path: Path) -> np.ndarray:
    """The pixels of a sheet below its heading, which says whose pose was painted."""
    with Image.open(path) as picture:
        return np.asarray(picture)[110:-60]


def test_tweaks_take_one_image_and_a_class_needs_a_test_image(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = [photo_of(digits.images[k, 0].numpy(), tmp_path / f"{k}.png") for k in range(2)]
    fails(
        capsys,
        ["reconstruct", run, *photos, "--what", "tweaks", "--out", tmp_path / "two.png"],
        "takes one image, not 2",
    )
    without_fives = digits.subset((digits.labels != 5).nonzero()[:, 0])
    monkeypatch.setattr("capsnet.cli.reconstruct.splits_for", lambda *_: data.Splits(digits, digits, without_fives))
    fails(capsys, ["reconstruct", run, "--class", "5", "--out", tmp_path / "a.png"], "no test image of class 5")


def test_without_matplotlib_reconstruct_says_what_to_install(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    fails(capsys, ["reconstruct", run], "pip install 'capsnet[train]'")


# --------------------------------------------------------------------------------------------------- checkpoints


def test_a_missing_damaged_half_or_strange_checkpoint_is_named(run: Path, tmp_path: Path, capsys: Capture) -> None:
    whole = (run / "model.safetensors").read_bytes()
    half, text = tmp_path / "half.safetensors", tmp_path / "text.safetensors"
    half.write_bytes(whole[: len(whole) // 2])
    text.write_text("hello")
    fails(capsys, ["evaluate", tmp_path / "none"], "there is no checkpoint")
    fails(capsys, ["evaluate", half], "half.safetensors", "damaged or incomplete")
    fails(capsys, ["predict", text, "x.png"], "text.safetensors", "damaged")


def test_a_checkpoint_with_nan_or_of_another_shape_is_refused(run: Path, tmp_path: Path, capsys: Capture) -> None:
    tensors, record = checkpoint.read_tensors(run / "model.safetensors")
    name = "caps.0.weight"
    bad = {**tensors, name: tensors[name].clone()}
    bad[name][0] = torch.nan
    checkpoint.write_tensors(tmp_path / "nan.safetensors", bad, record)
    fails(capsys, ["evaluate", tmp_path / "nan.safetensors"], name, "not finite")
    checkpoint.write_tensors(tmp_path / "cut.safetensors", {**tensors, name: tensors[name][:5]}, record)
    fails(capsys, ["evaluate", tmp_path / "cut.safetensors"], name, "(5, 10, 16, 8)")


@pytest.mark.parametrize("birth", [None, "x", {"config": 3}, {}])
def test_a_damaged_birth_certificate_shows_no_traceback(
    run: Path, tmp_path: Path, capsys: Capture, birth: object
) -> None:
    tensors, record = checkpoint.read_tensors(run / "model.safetensors")
    path = tmp_path / "strange.safetensors"
    checkpoint.write_tensors(path, tensors, {**record, "certificate": birth})
    assert training_config(str(path)) is None
    if isinstance(birth, dict):
        fails(capsys, ["evaluate", path], "does not record its training data", "--data")


# -------------------------------------------------------------------------------------------------- own images


def test_a_folder_of_images_is_trained_on_and_one_unreadable_file_is_named(tmp_path: Path, capsys: Capture) -> None:
    root = write_folder(tmp_path / "photos", ("red", "green"))
    (root / "red" / "broken.png").write_text("no image")
    out = tmp_path / "run"
    words = ["train", "--data", f"folder:{root}", "--image-size", "24", "--epochs", "8", "--batch-size", "8"]
    assert main([*words, "--out", str(out), "--json"]) == 0
    shown = capsys.readouterr()
    assert "broken.png" in shown.err
    assert json.loads(shown.out)["test"]["errors"] == 0
    assert main(["evaluate", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["errors"] == 0
    assert main(["predict", str(out), str(root / "green" / "000.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] == "green"
    fails(capsys, ["evaluate", out, "--data", "mnist"], "only the model has green, red", "mnist has 0, 1, 2, …")
    other = write_folder(tmp_path / "other", ("ant", "zebra"))
    fails(capsys, ["evaluate", out, "--data", f"folder:{other}"], "only the model has green, red", "ant, zebra")
    more = write_folder(tmp_path / "more", ("red", "green", "blue"))
    fails(capsys, ["evaluate", out, "--data", f"folder:{more}"], "/more has blue: evaluate it")


def test_a_grey_model_of_oblong_images_is_evaluated_on_any_folder_in_any_order(tmp_path: Path, capsys: Capture) -> None:
    """The names of classes count and not their order; images are made as the model takes them."""
    sizes = {"stem_channels": (4,), "primary_types": 2, "primary_dim": 4, "class_dim": 4, "decoder": ()}
    model = build(CapsNetConfig((1, 20, 26), 2, **sizes))  # type: ignore[arg-type]
    model.classes = ("red", "green")
    checkpoint.save_model(tmp_path / "m.safetensors", model, Certificate())
    root = write_folder(tmp_path / "photos", ("red", "green"))
    assert main(["evaluate", str(tmp_path / "m.safetensors"), "--data", f"folder:{root}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    test = data.load(f"folder:{root}", image_size=(20, 26), channels=1).test
    assert test.classes == ("green", "red")
    assert found["errors"] == int((model.predict(test.images).labels != 1 - test.labels).sum())
    swapped = {name: found["error_percent_by_class"][name] for name in test.classes}
    model.classes = ("green", "red")
    checkpoint.save_model(tmp_path / "n.safetensors", model, Certificate())
    assert main(["evaluate", str(tmp_path / "n.safetensors"), "--data", f"folder:{root}", "--json"]) == 0
    straight = json.loads(capsys.readouterr().out)["error_percent_by_class"]
    assert {name: 100 - error for name, error in straight.items()} == pytest.approx(swapped)


def test_a_model_of_stereo_pairs_is_evaluated_on_windows_of_them(tmp_path: Path, capsys: Capture) -> None:
    model = build(CNNConfig((2, 32, 32), 5, (4,), (3,), (4,), ()))
    model.classes = CATEGORIES
    name = "viewpoints:every=6,crop=32"
    trained = Certificate(to_dict(Config(data=name, validation=0, model=model.config)))
    checkpoint.save_model(tmp_path / "m.safetensors", model, trained)
    assert main(["evaluate", str(tmp_path / "m.safetensors"), "--json"]) == 0
    test = data.load(name, validation=0).test
    assert json.loads(capsys.readouterr().out)["errors"] == evaluate(model.eval(), test).errors


def test_a_table_of_several_labels_is_trained_on_and_all_that_are_there_are_named(
    tmp_path: Path, capsys: Capture
) -> None:
    root = write_folder(tmp_path / "p", ("red", "green"), n=12)
    rows = [
        f"p/{name}/{k:03d}.png,{name};{'even' if k % 2 == 0 else ''}" for name in ("red", "green") for k in range(12)
    ]
    (tmp_path / "t.csv").write_text("\n".join(["file,labels", *rows]))
    words = ["train", "--data", f"csv:{tmp_path / 't.csv'}", "--image-size", "20", "--epochs", "1"]
    assert main([*words, "--batch-size", "4", "--no-tensorboard", "--out", str(tmp_path / "run")]) == 0
    capsys.readouterr()
    image = str(root / "red" / "000.png")
    assert main(["predict", str(tmp_path / "run"), image, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["predictions"][0]
    assert set(found["labels"]) == {name for name, length in found["activations"].items() if length >= 0.5}
    assert main(["predict", str(tmp_path / "run"), image, "--threshold", "0", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)["predictions"][0]["labels"]) == {"red", "green", "even"}
    assert main(["predict", str(tmp_path / "run"), image, "--top", "2", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["predictions"][0]["labels"]) == 2
    assert main(["evaluate", str(tmp_path / "run"), "--top", "2", "--json"]) == 0
    assert "per_label_error_percent" in json.loads(capsys.readouterr().out)


def test_a_folder_with_one_class_or_no_images_or_none_at_all_is_refused(tmp_path: Path, capsys: Capture) -> None:
    one = write_folder(tmp_path / "one", ("red",))
    (tmp_path / "bare" / "a").mkdir(parents=True)
    (tmp_path / "bare" / "b").mkdir()
    fails(capsys, ["train", "--data", f"folder:{one}", "--out", tmp_path / "r"], "class")
    fails(capsys, ["train", "--data", f"folder:{tmp_path / 'bare'}", "--out", tmp_path / "r"], "image")
    fails(capsys, ["train", "--data", f"folder:{tmp_path / 'nowhere'}", "--out", tmp_path / "r"], "nowhere")
    assert not (tmp_path / "r").exists()


# ---------------------------------------------------------------------------------------------------------- data


def test_data_lists_and_verifies(digits: data.Dataset, capsys: Capture) -> None:
    assert main(["data", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["data"]
    cached = {row["name"]: row["cached"] for row in listed}
    assert cached["mnist"]
    assert cached["folder:PATH"] is None
    assert main(["data", "list", "mnist", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["data"]] == ["mnist"]
    assert main(["data", "verify", "mnist", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == [{"name": "mnist", "good": True, "state": "good"}]
    fails(capsys, ["data", "fetch"], "which dataset should be fetched")


def test_data_made_out_of_digits_are_listed_and_verified_by_them(digits: data.Dataset, capsys: Capture) -> None:
    assert main(["data", "list", "multimnist", "affine-mnist:per_digit=2", "folder:photos", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["data"]
    assert [row["cached"] for row in listed] == [True, True, None]
    assert "overlapping" in listed[0]["about"]
    assert main(["data", "verify", "multimnist", "expanded-mnist", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)["data"]] == ["mnist"]
    fails(capsys, ["data", "list", "multimnst"], "did you mean 'multimnist'")


def test_a_damaged_cache_is_seen_by_verify(
    digits: data.Dataset, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = data.cache_folder() / "mnist"
    monkeypatch.setenv("CAPSNET_DATA", str(tmp_path))
    (tmp_path / "mnist").mkdir()
    for path in good.iterdir():
        if path.is_file() and "ubyte" in path.name:
            (tmp_path / "mnist" / path.name).write_bytes(path.read_bytes())
    broken = next((tmp_path / "mnist").glob("t10k-labels*"))
    broken.write_bytes(broken.read_bytes()[:-1] + b"\xff")
    assert main(["data", "verify", "mnist", "--json"]) == 2
    assert broken.name in json.loads(capsys.readouterr().out)["data"][0]["state"]


def test_a_switch_of_the_network_is_shown_with_its_opposite_and_one_of_a_verb_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = capsys.readouterr().out
    assert "--model.stem-norm, --model.no-stem-norm" in shown
    assert "--json" in shown
    assert "--no-json" not in shown
