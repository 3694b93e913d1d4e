"""Leakage: a model that knows the images that would be held out is refused, whoever trained it before."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from capsnet.data import parse
from capsnet.data.registry import same_images
from capsnet.errors import UserError
from capsnet.io import checkpoint, hub
from capsnet.io.leakage import check_unseen
from capsnet.io.records import Certificate
from capsnet.models.config import CapsNetConfig
from capsnet.models.registry import build
from capsnet.train.config import Config
from capsnet.train.config_records import to_dict
from pictures import write_folder

TINY = CapsNetConfig(stem_channels=(4,), stem_strides=(4,), primary_types=2, primary_kernel=3, decoder=())
CONFIG = Config(validation=100, model=TINY)


def trained(file: Path, **changes: object) -> str:
    """A model that says it was trained with these settings."""
    birth = Certificate(config=to_dict(replace(CONFIG, **changes)))  # type: ignore[arg-type]
    checkpoint.save_model(file, build(TINY), birth)
    return str(file)


@pytest.mark.parametrize("role", ["init", "teacher"])
def test_a_model_with_another_split_of_the_same_images_is_refused(role: str, tmp_path: Path) -> None:
    model = trained(tmp_path / "model.safetensors")
    check_unseen(replace(CONFIG, **{role: model}))
    for change in ({"seed": 7}, {"validation": 50}, {"validation_choice": "first"}, {"data": "affine-mnist"}):
        with pytest.raises(UserError, match=r"trained on images that would be held out.*--seed 0"):
            check_unseen(replace(CONFIG, **{role: model}, **change))
    check_unseen(replace(CONFIG, **{role: model}, data="fashion-mnist", seed=7))


def test_a_model_on_the_hub_is_checked_like_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "download", lambda name: Path(trained(tmp_path / "model.safetensors")))
    with pytest.raises(UserError, match="hf-hub:me/digits was trained on images that would be held out"):
        check_unseen(replace(CONFIG, init="hf-hub:me/digits", seed=7))


def test_models_before_a_model_count_too(tmp_path: Path) -> None:
    first = trained(tmp_path / "first.safetensors")
    for between in ("mnist", "fashion-mnist"):
        second = trained(tmp_path / "second.safetensors", seed=7, data=between, teacher=first)
        with pytest.raises(UserError, match=r"first\.safetensors was trained on images"):
            check_unseen(replace(CONFIG, init=second, seed=7))
    Path(first).unlink()
    check_unseen(replace(CONFIG, init=trained(tmp_path / "second.safetensors", seed=7, teacher=first), seed=7))


def test_a_run_is_refused_if_it_is_stopped_by_leaked_images_and_warned_otherwise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(CONFIG, init=trained(tmp_path / "model.safetensors"), seed=7)
    check_unseen(config, strict=False)
    assert "too optimistic" in capsys.readouterr().err
    check_unseen(replace(config, validation=0), strict=False)
    assert not capsys.readouterr().err
    for change in ({"patience": 2}, {"stop_at": 1.0}):
        with pytest.raises(UserError, match="held out"):
            check_unseen(replace(config, **change), strict=False)


@pytest.mark.parametrize("kind", ["folder", "csv"])
def test_the_checksum_of_images_changes_with_the_files_and_not_with_their_place(kind: str, tmp_path: Path) -> None:
    one = write_folder(tmp_path / "one" / "photos", ("cat", "dog"), n=4)
    rows = [f"{file.relative_to(one.parent)},{file.parent.name}" for file in one.glob("*/*.png")]
    (one.parent / "labels.csv").write_text("\n".join(rows))
    shutil.copytree(one.parent, tmp_path / "two")
    place = "labels.csv" if kind == "csv" else "photos"
    first, second = (parse(f"{kind}:{tmp_path / folder / place}") for folder in ("one", "two"))
    assert first.checksum() == second.checksum()
    file = next(iter((one / "cat").iterdir()))
    file.write_bytes(file.read_bytes() + b" ")
    assert first.checksum() != second.checksum()
    assert parse("mnist").checksum() is None


def test_the_same_folder_is_the_same_images() -> None:
    assert same_images("folder:photos", "folder:./photos")
    assert not same_images("folder:photos", "folder:others")
    assert same_images("multimnist:canvas=56", "expanded-mnist")
    assert not same_images("a-missing-plugin", "mnist")
