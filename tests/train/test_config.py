"""Settings: what makes no sense is refused where it comes in, in one line, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from capsnet.cli import main
from capsnet.errors import UserError
from capsnet.models.branched import BranchedConfig
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig
from capsnet.routing.options import DynamicOptions
from capsnet.train.config import Config

Capture = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("kind", "field", "value", "said"),
    [
        (Config, "lr", -1.0, "lr=-1.0 is too small: it should be 0 or more"),
        (Config, "lr", float("nan"), "lr=nan is not a number"),
        (Config, "lr", float("inf"), "lr=inf is too large"),
        (Config, "epochs", 0, "epochs=0 is too small: it should be between 0.001 and 1,000,000"),
        (Config, "batch_size", 0, "batch_size=0 is too small"),
        (Config, "seed", 2**63, "too large"),
        (Config, "seed", -1, "too small"),
        (Config, "average", 2.0, "average=2.0 is too large: it should be between 0 and 1"),
        (Config, "clip", -1.0, "too small"),
        (Config, "warmup", 5.0, "too large"),
        (Config, "weight_decay", -1.0, "too small"),
        (Config, "validation", -1, "too small"),
        (Config, "patience", -1, "too small"),
        (Config, "image_size", -1, "too small"),
        (Config, "save_every", float("inf"), "too large"),
        (CapsNetConfig, "primary_stride", 0, "too small"),
        (CapsNetConfig, "primary_types", 0, "too small"),
        (CapsNetConfig, "primary_kernel", 0, "too small"),
        (CapsNetConfig, "class_dim", 0, "too small"),
        (DynamicOptions, "iterations", 0, "out of range: routing takes between 1 and 1000 iterations"),
        (CapsNetConfig, "hidden_caps", ((8, 8), (0, 4)), "too small"),
        (CapsNetConfig, "stem_channels", (256, 0), "too small"),
        (CapsNetConfig, "decoder", (10**12,), "it should be between 1 and 1,000,000"),
        (CNNConfig, "kernels", (5, -1, 5), "too small"),
        (CNNConfig, "pool", (0, 1, 1), "too small"),
        (CNNConfig, "dropout", 1.5, "too large"),
        (LossConfig, "present", 1.5, "too large"),
        (LossConfig, "reconstruction", -0.1, "too small"),
    ],
)
def test_a_value_out_of_range_is_refused(kind: type, field: str, value: object, said: str) -> None:
    with pytest.raises(UserError, match=f"{field}=.*") as error:
        kind(**{field: value})
    assert said in str(error.value)


def test_every_number_of_a_config_has_its_range() -> None:
    for kind in (Config, CapsNetConfig, CNNConfig, LossConfig, BranchedConfig, DynamicOptions):
        for field, value in vars(kind()).items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                with pytest.raises(UserError, match=field):
                    replace(kind(), **{field: -1})


@pytest.mark.parametrize(
    "words",
    [
        ["--lr", "-1"],
        ["--lr", "nan"],
        ["--seed", "100000000000000000000"],
        ["--model.routing.iterations", "0"],
        ["--model.hidden-caps", "0", "4"],
        ["--device", "cpu:x"],
        ["--preset", "quick", "--preset", "nonsense"],
        ["--preset=quick", "--preset=paper"],
    ],
)
def test_a_setting_that_makes_no_sense_is_one_message_and_no_folder(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    try:
        code = main(["train", "--out", str(tmp_path / "run"), *words])
    except SystemExit as exit_:  # the parser of flags exits by itself
        code = int(exit_.code or 0)
    assert code == 2
    assert "Traceback" not in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", [["--lr", "0.0001"], ["--preset", "paper"], ["--out=x"], ["--model.shared"]])
def test_settings_beside_resume_are_refused_and_not_lost(words: list[str], tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", "--resume", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert words[0].partition("=")[0] in error
    assert "continues a run with its own settings" in error


def test_resume_may_be_told_what_to_write(tmp_path: Path, capsys: Capture) -> None:
    assert main(["train", "--resume", str(tmp_path), "--no-report", "--no_tensorboard", "--json"]) == 2
    assert "there is no run to resume in" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
