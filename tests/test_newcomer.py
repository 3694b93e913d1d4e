"""What a newcomer gets wrong in the first minutes: each mistake is met with the sentence that mends it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from capsnet import create_model
from capsnet.cli import main
from capsnet.cli.train import take_preset
from capsnet.errors import UserError
from capsnet.train.presets import get_preset


def test_floats_up_to_255_are_refused_and_floats_up_to_1_are_not() -> None:
    model = create_model("quick")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 28, 28)).astype(np.float32)
    with pytest.raises(UserError, match="divide them by 255"):
        model.predict(pixels)
    assert len(model.predict(pixels / 255).labels) == 2


def test_own_images_take_the_preset_made_for_them_unless_another_is_named() -> None:
    assert take_preset(["--data", "folder:photos"])[0] == "own-images"
    assert take_preset(["--data=csv:labels.csv"])[0] == "own-images"
    assert take_preset(["--data", "folder:photos", "--preset", "paper"])[0] == "paper"
    assert take_preset(["--data", "mnist"])[0] == "quick"
    assert get_preset("own-images").batch_size < get_preset("quick").batch_size


def test_a_folder_named_without_its_prefix_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["train", "--data", "photos"]) == 2
    assert "did you mean folder:photos?" in capsys.readouterr().err


def test_a_picture_in_the_place_of_the_model_is_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "photo.png")
    assert main(["predict", str(tmp_path / "photo.png")]) == 2
    assert "give the model first" in capsys.readouterr().err
