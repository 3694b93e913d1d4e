"""The models that come with the package: whole, as good as their cards say, and found by name wherever a run is."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import capsnet
from capsnet import data
from capsnet.cli import main
from capsnet.cli.models import card_lines
from capsnet.errors import UserError
from capsnet.evaluate import Evaluation, mean_and_std
from capsnet.experiments.core.conduct import same_training
from capsnet.io import checkpoint, zoo
from capsnet.io.records import Card, Certificate
from capsnet.train.config_records import from_dict
from capsnet.train.presets import PROMISES, get_preset
from pictures import photo_of

ROOT = Path(__file__).resolve().parent.parent.parent
CARD = {
    "name", "title", "data", "image_shape", "classes", "multi_label", "parameters", "training_images", "seed", "epochs",
    "training_seconds", "legs", "validation", "test", "mistakes", "weaknesses", "chosen_by", "seeds",
    "certificate", "weights",
}  # fmt: skip


def script(name: str, folder: str = "tools") -> ModuleType:
    """A script of tools/ or research/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ship = script("ship")


@pytest.fixture
def own_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the shipped models that may be spoilt."""
    folder = tmp_path / "weights"
    folder.mkdir()
    for path in zoo.FOLDER.glob("quick-mnist.*"):
        shutil.copy(path, folder)
    monkeypatch.setattr(zoo, "FOLDER", folder)
    return folder


# ------------------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("name", zoo.names())
def test_a_shipped_model_loads_and_its_card_is_complete(name: str) -> None:
    card, model = zoo.card(name), capsnet.load(name)
    assert set(card.to_json()) == CARD
    assert sum(p.numel() for p in model.parameters()) == card.parameters
    assert model.classes == card.classes
    assert model.multi_label == card.multi_label
    assert model.config.image_shape == card.image_shape
    assert from_dict(card.config).data == card.data
    assert card.weights.precision in ("half", "stem-full", "mixed")
    assert sum(row["shipped"] for row in card.seeds) == 1
    assert card.weaknesses


def test_the_best_model_was_trained_as_the_best_preset_is() -> None:
    card = zoo.card("best-mnist")
    assert same_training(card.config, replace(get_preset("best"), seed=0))
    mean, _ = mean_and_std([row["test_error_percent"] for row in card.seeds])
    assert f"mean test error of three seeds is {mean:.2f} %" in PROMISES["best"]
    timed = json.loads((ROOT / "results" / "search" / "best-stems.json").read_text())
    assert same_training(timed["certificate"]["config"], get_preset("best"))
    minutes = card.epochs * (60_000 // get_preset("best").batch_size) * timed["seconds_a_step"]["branches"] / 60
    assert f"about {minutes:.0f} minutes" in PROMISES["best"]


@pytest.mark.parametrize("name", zoo.names())
def test_a_card_counts_its_mistakes(name: str) -> None:
    card = zoo.card(name)
    assert len(card.mistakes) == min(ship.MOST_MISTAKES, card.test["errors"])
    assert card.test["error_percent"] == pytest.approx(100 * card.test["errors"] / card.test["n"], abs=1e-4)


@pytest.mark.parametrize("name", zoo.names())
def test_no_seed_was_chosen_on_the_test_set(name: str) -> None:
    seeds = zoo.card(name).seeds
    shipped = next(row for row in seeds if row["shipped"])
    judged = [(row["validation_error_percent"] or 0, row["seed"]) for row in seeds]
    assert (shipped["validation_error_percent"] or 0, shipped["seed"]) == min(judged)


def test_the_shipped_weights_are_small_and_the_ones_of_the_cards() -> None:
    sizes = {name: zoo.weight_file(name).stat().st_size for name in zoo.names()}
    assert "quick-mnist" in sizes
    assert max(sizes.values()) <= zoo.MOST_BYTES
    assert sizes == {name: zoo.card(name).weights.bytes for name in sizes}


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.names())
def test_evaluating_a_shipped_model_gives_the_figure_of_its_card(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", name, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    card = zoo.card(name).test
    assert found["n"] == card["n"]
    # on another machine the last bits of a sum may tip an image that lies on the edge
    assert abs(found["errors"] - card["errors"]) <= max(2, card["n"] // 5000)


@pytest.mark.parametrize(
    ("machine", "words"), [("1 threads", "1 thread"), ("2 threads", "2 threads"), ("21 threads",) * 2]
)
def test_a_card_says_how_long_the_training_took_on_how_many_threads(machine: str, words: str) -> None:
    card = zoo.card("quick-mnist")
    card = replace(card, certificate=replace(card.certificate, machine=f"Linux x86_64, {machine}"))
    assert dict(card_lines(card))["training"].startswith(f"4 epochs, 2 min 42 s on {words}, seed 2 (")


# ------------------------------------------------------------------------------------------------------- by name


def test_a_shipped_model_reads_a_photo_by_its_name(
    digits: data.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    photo = photo_of(digits.images[0, 0].numpy(), tmp_path / "seven.png")
    assert main(["predict", "quick-mnist", str(photo), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["predictions"][0]["label"] == "7"


def test_a_name_is_the_shipped_model_and_with_a_slash_it_is_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick-mnist").mkdir()
    assert checkpoint.model_file("quick-mnist") == zoo.FOLDER / "quick-mnist.safetensors"
    assert checkpoint.model_file("./quick-mnist") == Path("quick-mnist/model.safetensors")
    assert checkpoint.model_file(Path("quick-mnist")) == Path("quick-mnist/model.safetensors")


def test_an_unknown_name_shows_the_nearest_and_all_of_them() -> None:
    with pytest.raises(
        UserError, match=r"no model 'quick-mnst'; did you mean 'quick-mnist'\?.*Give a run by its folder"
    ):
        capsnet.load("quick-mnst")
    with pytest.raises(UserError, match="did you mean 'quick-mnist'"):
        zoo.card("quick-mnis")


def test_damaged_weights_are_refused_in_one_line(own_zoo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = own_zoo / "quick-mnist.safetensors"
    content = bytearray(file.read_bytes())
    content[-1000] ^= 1  # one bit, in the middle of the numbers
    file.write_bytes(content)
    assert main(["evaluate", "quick-mnist"]) == 2
    assert "are damaged" in capsys.readouterr().err
    file.unlink()
    with pytest.raises(UserError, match="missing"):
        capsnet.load("quick-mnist")


def test_a_damaged_card_is_refused_in_one_line(own_zoo: Path) -> None:
    (own_zoo / "quick-mnist.json").write_text("{")
    with pytest.raises(UserError, match="card of quick-mnist cannot be read"):
        capsnet.load("quick-mnist")
    (own_zoo / "quick-mnist.json").write_text("[]")
    with pytest.raises(UserError, match="the card of quick-mnist is damaged"):
        zoo.card("quick-mnist")


# ------------------------------------------------------------------------------------------------ capsnet models


def test_models_lists_what_is_shipped_and_shows_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--runs", str(tmp_path), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [card["name"] for card in listed["models"]] == zoo.names()
    assert main(["models", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "test error" in text
    assert "error_percent" not in text
    assert main(["models", "quick-mnist"]) == 0
    text = capsys.readouterr().out
    assert zoo.card("quick-mnist").weaknesses[0] in text
    assert "95 % interval" in text
    assert main(["models", "quick-mnist", "--json"]) == 0
    assert Card.from_json(json.loads(capsys.readouterr().out)) == zoo.card("quick-mnist")
    assert main(["models", "nothing"]) == 2


# ------------------------------------------------------------------------------------------------------ shipping


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """What a search leaves of its best trial: the shipped model in a folder of its own."""
    folder, card = tmp_path / "run", zoo.card("quick-mnist")
    checkpoint.save_model(folder / checkpoint.MODEL_FILE, capsnet.load("quick-mnist"), card.certificate)
    return folder


def test_shipping_writes_weights_and_card_that_fit_each_other(
    finished: Path, digits: data.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "FOLDER", tmp_path / "weights")
    few = data.Splits(digits.subset(torch.arange(0)), digits.subset(torch.arange(0)), digits.subset(torch.arange(500)))
    monkeypatch.setattr(ship, "splits_for", lambda *_: few)  # five hundred digits are enough to see a difference
    card = ship.ship([finished], "quick-mnist")
    assert zoo.card("quick-mnist") == card
    assert zoo.weight_file("quick-mnist").stat().st_size < (finished / checkpoint.MODEL_FILE).stat().st_size * 0.6
    assert capsnet.load("quick-mnist").dtype == torch.float32

    def coarse(tensors: dict[str, torch.Tensor], begin: tuple[str, ...] = ("",)) -> dict[str, torch.Tensor]:
        return {n: (8 * t).round() / 8 if n.startswith(begin) else t for n, t in tensors.items()}

    assert card.legs == ()
    went_on = ship.ship([finished], "quick-mnist", [finished])  # as if it had begun with the weights of another
    assert [leg["epochs"] for leg in went_on.legs] == [card.epochs] * 2
    assert went_on.epochs == 2 * card.epochs
    monkeypatch.setattr(ship, "halve", coarse)
    assert ship.ship([finished], "quick-mnist").weights.precision == "mixed"  # the decoder predicts nothing
    mixed = zoo.card("quick-mnist")
    monkeypatch.setattr(ship, "halve", lambda tensors, _: coarse(tensors))
    with pytest.raises(UserError, match="changes its predictions when stored"):
        ship.ship([finished], "quick-mnist")
    assert zoo.card("quick-mnist") == mixed != card


def test_a_model_shipped_without_its_decoder_predicts_the_same(
    finished: Path, digits: data.Dataset, tmp_path: Path
) -> None:
    run = ship.Trained(finished, *[None] * 6)
    whole, bare = (ship.write_weights(run, tmp_path / f"{kept}.st", "half", kept) for kept in (True, False))
    assert bare.decoder is None
    images = digits.images[:20].float() / 255
    assert torch.equal(whole(images).poses, bare(images).poses)


def test_a_model_that_cannot_be_written_is_said_so(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not write"):
        ship.write_weights(ship.Trained(finished, *[None] * 6), tmp_path / "file" / "x.safetensors", "half")
    with pytest.raises(UserError, match=r"no model to ship 'quick'"):
        ship.ship([finished], "quick")
    monkeypatch.setattr(zoo, "MOST_BYTES", 1000)
    with pytest.raises(UserError, match="more than the 1,000"):
        ship.write_weights(ship.Trained(finished, *[None] * 6), tmp_path / "x.safetensors", "half")


def test_halving_leaves_norms_and_what_has_no_room_as_they_are() -> None:
    tensors = {
        "kernel": torch.rand(2, 3),
        "bias": torch.rand(3),
        "huge": torch.full((2, 2), 1e5),
        "count": torch.tensor([[1]]),
    }
    halved = ship.halve(tensors)
    assert {name for name, tensor in halved.items() if tensor.dtype == torch.float16} == {"kernel"}
    assert torch.equal(halved["huge"], tensors["huge"])


def judged(seed: int, wrong: int) -> object:
    """A run of a seed with so many of 100 validation images wrong."""
    targets = torch.eye(2).repeat(50, 1)
    predicted = targets.bool().clone()
    predicted[:wrong] = ~predicted[:wrong]
    held_back = Evaluation("x", targets, targets, predicted, ("a", "b"), False)
    config = replace(from_dict(zoo.card("quick-mnist").config), seed=seed)
    return ship.Trained(Path(f"run-{seed}"), config, Certificate(), None, None, held_back, held_back)


def test_the_seed_with_the_lowest_validation_error_is_shipped_and_of_equals_the_lowest() -> None:
    runs = [judged(3, 5), judged(2, 4), judged(1, 4), judged(0, 6)]
    assert min(runs, key=lambda run: run.rank).config.seed == 1  # type: ignore[attr-defined]
    unjudged = [replace(run, validation=None) for run in runs]  # type: ignore[type-var]
    assert min(unjudged, key=lambda run: run.rank).config.seed == 0  # type: ignore[attr-defined]


def test_a_card_says_how_its_seed_was_chosen() -> None:
    assert ship.chosen_by(1, True) == "the only seed"
    assert ship.chosen_by(3, True) == "lowest validation error"
    assert "lowest seed" in ship.chosen_by(3, False)


def test_only_runs_that_differ_in_their_seed_alone_are_chosen_among() -> None:
    one, other = judged(0, 1), judged(1, 1)
    ship.check_alike([one, other])
    with pytest.raises(UserError, match="same seed"):
        ship.check_alike([one, one])
    strange = replace(other, config=replace(other.config, lr=1.0))  # type: ignore[attr-defined,type-var]
    with pytest.raises(UserError, match="more than its seed"):
        ship.check_alike([one, strange])
