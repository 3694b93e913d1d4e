"""Models on disk: what is written comes back bit-identical, and a damaged or foreign file is refused in a sentence."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor

import capsnet
from capsnet.errors import UserError
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.base import Model
from capsnet.models.cnn import CNN
from capsnet.models.matrix import MatrixCapsNet, MatrixConfig
from tiny_models import TINY_CNN, tiny


def matrix() -> MatrixCapsNet:
    """A model with tensors that are computed and not stored: the coordinates that are added to the votes."""
    return MatrixCapsNet(MatrixConfig((1, 20, 20), 3).tiny())


def saved(folder: Path, model: Model | None = None) -> Path:
    path = folder / checkpoint.MODEL_FILE
    checkpoint.save_model(path, model or tiny(), Certificate(more={"why": "test"}))
    return path


def rewritten(path: Path, change: Callable[[dict, dict], object]) -> Path:
    """The file with its tensors or its record changed."""
    tensors, record = checkpoint.read_tensors(path)
    change(tensors, record)
    checkpoint.write_tensors(path, tensors, record)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        capsnet.load(path)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "make", [tiny, lambda: tiny(stem_norm=True, hidden_caps=((5, 4),)), lambda: CNN(TINY_CNN), matrix]
)
def test_a_saved_model_comes_back_the_same(tmp_path: Path, make: Callable[[], Model]) -> None:
    model = make()
    model.classes = ("apple", "pear", "Käse ☂")
    images = torch.rand(3, *model.config.image_shape[1:])
    path = saved(tmp_path, model)
    for place in (tmp_path, path, str(path)):
        loaded = capsnet.load(place)
        assert loaded.classes == model.classes
        assert loaded.config == model.config
        assert not loaded.training
        assert torch.equal(loaded.predict(images).activations, model.predict(images).activations)


def test_a_cnn_for_several_labels_stays_one(tmp_path: Path) -> None:
    model = CNN(TINY_CNN)
    model.multi_label = True
    images = torch.rand(2, 12, 12)
    loaded = capsnet.load(saved(tmp_path, model))
    assert torch.equal(loaded.predict(images).activations, model.predict(images).activations)


def test_a_checkpoint_is_readable_by_everyone_who_may_read_new_files(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("")
    assert saved(tmp_path).stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, 0.3, 0.5, 0.999, -1])
def test_half_a_file_is_refused(tmp_path: Path, cut: float) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    at = int(cut * len(whole)) if 0 < cut < 1 else int(cut)
    path.write_bytes(whole[:at])
    assert "damaged or incomplete" in refusal(path)


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" + b"x" * 500, b"{}", b"\xff" * 4096])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    assert "damaged" in refusal(path)


class Payload:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("executed",)


def test_a_pickle_is_never_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(pickle.dumps(Payload()))
    assert "damaged" in refusal(path)
    torch.save(tiny().state_dict(), path)
    assert "damaged" in refusal(path)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, value: float) -> None:
    model = tiny()
    with torch.no_grad():
        model.get_parameter("caps.0.weight")[0, 0, 0, 0] = value
    assert "caps.0.weight that are not finite" in refusal(saved(tmp_path, model))


def renamed(tensors: dict[str, Tensor], record: dict) -> None:
    tensors["stem.0.wait"] = tensors.pop("stem.0.weight")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors, record: record["model"].update(class_dim=7),
            r"\(64, 3, 6, 4\) in the file and \(64, 3, 7, 4\)",
        ),
        (lambda tensors, record: tensors.pop("stem.0.bias"), "stem.0.bias is missing or unexpected"),
        (lambda tensors, record: tensors.update(more=torch.ones(1)), "more is missing or unexpected"),
        (renamed, "stem.0.wait"),
        (lambda tensors, record: record["model"].update(weird=1), "weird"),
        (lambda tensors, record: record["model"].update(num_classes="x"), "num_classes"),
        (lambda tensors, record: record["model"].update(image_shape=[1, -4, 12]), "too small"),
        (lambda tensors, record: record["model"].update(class_dim=-1), "describe a network"),
        (lambda tensors, record: record.update(model=3), "describe a network"),
        (lambda tensors, record: record.update(classes=["one"]), "3 classes"),
        (lambda tensors, record: record.pop("classes"), "3 classes"),
        (lambda tensors, record: record.pop("model"), "not a model"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(tmp_path: Path, change: Callable, said: str) -> None:
    assert re.search(said, refusal(rewritten(saved(tmp_path), change)))


def test_a_file_of_another_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    for metadata in ({}, {"capsnet": "1", "record": "{}"}):
        safetensors.torch.save_file({"x": torch.ones(1)}, path, metadata)
        assert "not a checkpoint of format 2" in refusal(path)


def test_a_file_or_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no checkpoint" in refusal(tmp_path / "nothing.safetensors")
    with pytest.raises(UserError, match="no checkpoint"):
        capsnet.load(tmp_path)
    (tmp_path / checkpoint.STATE_FILE).write_bytes(b"")
    with pytest.raises(UserError, match="has not finished"):
        capsnet.load(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path
from capsnet.io import checkpoint
from capsnet.io.records import Certificate
from capsnet.models.config import CapsNetConfig
from capsnet.models import CapsNet
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))  # the system refuses to write more, as a full disk does
try:
    model = CapsNet(CapsNetConfig((1, 28, 28), 3, primary_types=2, decoder=()))
    checkpoint.save_model(Path(sys.argv[1]), model, Certificate())
except checkpoint.UserError as error:
    sys.exit(f"refused: {error}")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs resource limits")
def test_a_full_disk_leaves_the_previous_file_good(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=False)
    assert "refused" in done.stderr, done.stderr
    assert str(path) in done.stderr
    assert "The previous file is still good" in done.stderr
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert capsnet.load(path).classes == ("0", "1", "2")


def test_a_kill_while_writing_leaves_the_previous_file_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saved(tmp_path, tiny(class_dim=9))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_file_is_replaced_in_one_stroke_and_never_rewritten(tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    with path.open("rb") as reader:
        saved(tmp_path, tiny(class_dim=9))
        assert reader.read() == before  # whoever reads the old one reads it whole
    assert path.read_bytes() != before


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"could not write .*file"):
        saved(tmp_path / "file")
