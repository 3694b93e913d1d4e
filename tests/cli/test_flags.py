"""Mistakes in flags: each one is a sentence that names the flag, and exit code 2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from capsnet.cli import main
from capsnet.cli.flags import parse
from capsnet.cli.train import Train, defaults, take_preset
from capsnet.models.config import CNNConfig
from capsnet.routing.options import DynamicOptions
from capsnet.train.config import Config
from capsnet.train.presets import get_preset


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["train", "--augment.shift", "2.5"], "--augment.shift 2.5 is not valid: expected --augment.shift INT"),
        (["train", "--model.decoder", "a", "b", "--seed", "1"], "--model.decoder a b is not valid"),
        (["train", "--augment.share", "2"], "share=2.0 should be at most 1"),
        (["train", "--modle.decoder", "2"], "not a flag of capsnet train: did you mean --model.decoder"),
        (["train", "--batch_sise=3"], "did you mean --batch-size"),
        (["train", "--epoch", "3"], "--epoch is not a flag of capsnet train: did you mean --epochs?"),
        (["train", "--modle", "cnn"], "did you mean --model?"),
        (
            ["train", "--model.routing.iteration", "3"],
            "not an option of this routing: did you mean --model.routing.iter",
        ),
        (
            ["train", "--model", "cnn", "--model.stem-channels", "3"],
            "--model.stem-channels is not an option of this model",
        ),
        (["train", "--epochs"], "--epochs needs a value"),
        (["evaluate", "m", "--split", "half"], "'half' is not valid for --split: choose one of 'test', "),
        (["evaluate"], "capsnet evaluate needs MODEL: "),
        (["train", "--model.routing", "dinamic"], "there is no routing 'dinamic'; did you mean 'dynamic'?"),
        (["train", "--model", "cnm"], "there is no model 'cnm'; did you mean 'cnn'?"),
        (["train", "--model=cnn", "--model.routing=dynamic"], "the model cnn has no routing"),
        (["train", "--model", "cnn", "--init", "quick-mnist"], "--init and --model both select the network"),
        (["train", "--preset", "quick", "--preset=paper"], "--preset is given 2 times (quick, paper)"),
        (["train", "--preset", "--epochs", "1"], "--preset needs a value"),
        (["demo", "quick"], "quick is one argument too many"),
    ],
)
def test_a_mistake_in_a_flag_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert "│" not in error


def test_a_flag_that_an_algorithm_lacks_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "--model.routing", "uniform", "--model.routing.iterations"]  # an example in the help names it
    assert main([*words, "3"]) == 2
    assert capsys.readouterr().err.count("--model.routing.iterations") == 1


def settings(words: list[str]) -> Config:
    preset, rest = take_preset(words)
    return parse(Train, "train", rest, default=Train(config=defaults(preset, rest))).config


def test_a_model_is_selected_by_name_and_its_fields_are_flags() -> None:
    config = settings(["--epochs", "2", "--model", "cnn", "--model.dropout", "0.25"])
    assert isinstance(config.model, CNNConfig)
    assert config.model.dropout == 0.25
    assert config.epochs == 2
    assert settings(["--model", "capsnet"]).model == get_preset("quick").model


def test_a_routing_is_selected_by_name_and_its_options_are_flags() -> None:
    quick = get_preset("quick").model
    assert settings(["--model.routing=dynamic", "--model.routing.iterations", "1"]).model == replace(
        quick, routing=DynamicOptions(iterations=1, bias=True)
    )
    assert settings(["--model", "branched", "--model.routing", "dynamic"]).model.routing == DynamicOptions()
