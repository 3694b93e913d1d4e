"""The command line as its user meets it: results, pictures, and one clear line for every mistake."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from PIL import Image

from capsnet import checkpoint, data
from capsnet.cli import VERBS, main
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
    fails(capsys, ["train", "--data", "minst"], "no data set 'minst'", "did you mean 'mnist'")
    fails(capsys, ["train", "--model.iteration", "2"], "--model.iterations")
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
    assert found["error_percent"] < 3


def test_the_batch_size_of_an_evaluation_is_of_no_consequence(run: Path, capsys: Capture) -> None:
    assert main(["evaluate", str(run), "--batch-size", "7000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["errors"] == json.loads((run / "results.json").read_text())["test"]["errors"]


def test_models_lists_runs_and_presets(run: Path, capsys: Capture) -> None:
    assert main(["models", "--runs", str(run.parent), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["runs"][0]["data"] == "mnist"
    assert {"quick", "paper", "official"} <= set(listed["presets"])
    assert main(["models", "--runs", str(run.parent)]) == 0
    assert "quick" in capsys.readouterr().out


def test_a_run_folder_that_exists_is_never_overwritten(run: Path, capsys: Capture) -> None:
    before = (run / "model.safetensors").read_bytes()
    fails(capsys, ["train", "--out", run], "exists already and is not overwritten", "--resume")
    assert (run / "model.safetensors").read_bytes() == before


def test_a_finished_or_missing_run_cannot_be_resumed(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["train", "--resume", run], "has finished")
    fails(capsys, ["train", "--resume", tmp_path / "none"], "there is no run")


def test_a_batch_larger_than_the_data_names_both(tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["train", "--batch-size", "70000", "--out", tmp_path / "r"], "70000", "60000")
    assert not (tmp_path / "r").exists()


def test_ctrl_c_keeps_a_checkpoint_and_says_how_to_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "capsnet.cli", "train", "--out", str(folder), "--no-tensorboard"]
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
    expected = checkpoint.load(run).predict(digits.images[:1]).lengths[0]
    assert list(found["lengths"].values()) == pytest.approx(expected.tolist(), abs=1e-3)


def test_bad_images_are_named_and_the_good_ones_predicted(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture
) -> None:
    good = photo_of(digits.images[0, 0].numpy(), tmp_path / "good.png")
    (tmp_path / "half.png").write_bytes(good.read_bytes()[: len(good.read_bytes()) // 2])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "empty.png").write_bytes(b"")
    Image.new("L", (20_001, 2)).save(tmp_path / "wide.png")
    bad = [tmp_path / name for name in ("half.png", "text.png", "empty.png", "wide.png", "missing.png")]
    assert main(["predict", str(run), *map(str, bad), str(good), "--json"]) == 2
    shown = capsys.readouterr()
    record = json.loads(shown.out)
    assert [Path(p["file"]).name for p in record["predictions"]] == ["good.png"]
    assert len(record["errors"]) == 5
    for path, line in zip(bad, record["errors"], strict=True):
        assert path.name in line
    assert "Traceback" not in shown.err


def test_an_empty_folder_and_no_image_at_all_are_said(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["predict", run, tmp_path], "holds no images")
    fails(capsys, ["predict", run], "at least one image")


# --------------------------------------------------------------------------------------------------- reconstruct


@pytest.mark.parametrize("what", ["reconstructions", "tweaks"])
def test_reconstruct_paints_test_images_and_photos(
    run: Path, digits: data.Dataset, tmp_path: Path, capsys: Capture, what: str
) -> None:
    out = tmp_path / "picture.png"
    assert main(["reconstruct", str(run), "--what", what, "--class", "5", "--out", str(out)]) == 0
    assert min(Image.open(out).size) > 100
    fails(capsys, ["reconstruct", run, "--what", what, "--out", out], "exists already", "--force")
    photo = photo_of(digits.images[0, 0].numpy(), tmp_path / "photo.png")
    assert main(["reconstruct", str(run), str(photo), "--what", what, "--out", str(tmp_path / "p.svg")]) == 0
    assert (tmp_path / "p.svg").read_text().lstrip().startswith("<?xml")


def test_reconstruct_refuses_an_unknown_class_or_kind_of_picture(run: Path, tmp_path: Path, capsys: Capture) -> None:
    fails(capsys, ["reconstruct", run, "--class", "x"], "there is no class 'x'")
    fails(capsys, ["reconstruct", run, "--out", tmp_path / "a.bmp"], "neither .png nor .svg")


# --------------------------------------------------------------------------------------------------- checkpoints


def test_a_missing_damaged_half_or_strange_checkpoint_is_named(run: Path, tmp_path: Path, capsys: Capture) -> None:
    whole = (run / "model.safetensors").read_bytes()
    half, text = tmp_path / "half.safetensors", tmp_path / "text.safetensors"
    half.write_bytes(whole[: len(whole) // 2])
    text.write_text("hello")
    fails(capsys, ["evaluate", tmp_path / "none"], "there is no checkpoint")
    fails(capsys, ["evaluate", half], "half.safetensors", "damaged or only half there")
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
    fails(capsys, ["evaluate", out, "--data", "mnist"], "the model")


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
    assert next(row for row in listed if row["name"] == "mnist")["cached"]
    assert main(["data", "verify", "mnist", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["data"] == [{"name": "mnist", "good": True, "state": "good"}]
    fails(capsys, ["data", "fetch"], "fetch which data set")


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
