"""Search spaces: what is typed is what is searched, and what makes no sense is refused in one sentence."""

from __future__ import annotations

from dataclasses import dataclass, replace

import optuna
import pytest
import torch

from capsnet.cli.flags import parse
from capsnet.cli.train import Train, take_preset
from capsnet.errors import UserError
from capsnet.models.config import CNNConfig
from capsnet.models.registry import build
from capsnet.nn.functional import squash
from capsnet.routing import Parents, Routed, Routing, RoutingOptions, register
from capsnet.search.space import SPACES, Range, combinations, own_values, read, suggest
from capsnet.train.config import Config
from capsnet.train.presets import get_preset
from capsnet.train.settings import read_values, train_flags, with_values


def test_a_space_contains_what_was_typed() -> None:
    words = ["lr=0.001..0.01:log", "shift=0..3", "model.decoder=512-1024,none", "hidden-caps=none,20x12-10x8"]
    space = read(words, Config())
    assert space == {
        "lr": Range((0.001, 0.01), "float", log=True),
        "augment.shift": Range((0, 3), "int"),
        "model.decoder": Range(((512, 1024), ())),
        "model.hidden_caps": Range(((), ((20, 12), (10, 8)))),
    }
    assert read([f"{name}={choices}" for name, choices in space.items()], Config()) == space


def test_a_later_entry_replaces_an_earlier_one() -> None:
    assert str(read(["training", "lr=0.1,0.2"], Config())["lr"]) == "0.1,0.2"


@pytest.mark.parametrize("name", SPACES)
def test_every_named_space_makes_networks_that_can_be_built(name: str) -> None:
    base = get_preset("quick")
    space = read([name], base)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1))
    made = {suggest(study.ask(), space, base) for _ in range(20)}
    assert len(made) > 5
    for config in made:
        build(config.model, device=torch.device("meta"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the space is empty"),
        (["trainig"], "did you mean 'training'"),
        (["model.class_dmi=1,2"], "did you mean 'model.class_dim'"),
        (["learning_rate=1,2"], "did you mean 'lr'"),
        (["seed=1,2"], "same for all trainings"),
        (["image_shape=1,2"], "same for all trainings"),
        (["lr=0.01"], "leaves nothing to choose"),
        (["lr=0.01,0.01"], "leaves nothing to choose"),
        (["lr=0.01..0.001"], "not a range"),
        (["lr=0..0.01:log"], "not a range"),
        (["lr=0.001..0.01:lin"], "not a range"),
        (["lr=0.001.."], "takes a number, got ''"),
        (["lr=0.001,x"], "takes a number, got 'x'"),
        (["lr=nan,1"], "takes a number, got 'nan'"),
        (["batch_size=1.5,2"], "takes an integer, got '1.5'"),
        (["model.stem_norm=maybe,no"], "takes true or false, got 'maybe'"),
        (["model.decoder=8-x,none"], "joined by dashes, or none, got '8-x'"),
        (["schedule=constant..one-cycle"], "is not a number: list its values"),
        (["schedule=constant,cosine"], "there is no value of schedule 'cosine'"),
        (["warmup=0.5..2"], "warmup=2.0 is"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_in_a_sentence(words: list[str], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(words, Config())
    assert said in str(refused.value)


def test_a_network_without_capsules_has_no_capsules_to_search() -> None:
    with pytest.raises(UserError, match="there is no field 'class_dim'"):
        read(["class_dim=8,16"], replace(Config(), model=CNNConfig()))


def test_a_small_space_has_combinations_and_a_continuous_one_has_none() -> None:
    space = read(["model.stem_norm=false,true", "class_dim=8..10"], Config())
    assert len(combinations(space, Config())) == 6
    assert {"model.stem_norm": "true", "model.class_dim": 9} in combinations(space, Config())
    assert combinations(read(["lr=0.1..0.2"], Config()), Config()) == []
    assert combinations(read(["class_dim=1..51"], Config()), Config()) == []


def test_the_values_of_the_base_are_known_where_they_lie_in_the_space() -> None:
    space = read(["lr=0.0005..0.01", "class_dim=8,16", "batch_size=1..2", "decoder=512-1024,none"], Config())
    assert own_values(space, Config()) == {"lr": 0.001, "model.class_dim": "16", "model.decoder": "512-1024"}


@pytest.mark.parametrize("name", ["quick", "paper", "expanded-cnn"])
def test_the_flags_lead_back_to_the_same_config(name: str) -> None:
    base = get_preset(name)
    space = read(["training", "augmentation", "loss", *(["compact"] if "cnn" not in name else [])], base)
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=3))
    for _ in range(5):
        config = suggest(study.ask(), space, base)
        preset, rest = take_preset(["--preset", name, *train_flags(config, base)])
        assert parse(Train, "train", rest, default=Train(config=get_preset(preset))).config == config
    assert train_flags(base, base) == []


@pytest.fixture
def sharp(forget_plugins: None) -> str:
    """Another routing algorithm, with an option of its own."""

    @dataclass(frozen=True)
    class SharpOptions(RoutingOptions):
        sharpness: float = 1.0

    @register("sharp")
    class Sharp(Routing):
        Options = SharpOptions

        def route(self, u_hat: torch.Tensor, a: torch.Tensor | None, parents: Parents, trace: bool) -> Routed:
            poses = squash(u_hat.mean(1) * self.options.sharpness)
            return Routed(poses, poses.norm(dim=-1))

    return "sharp"


def test_any_registered_routing_can_be_searched_with_the_options_it_has(sharp: str) -> None:
    base = get_preset("quick")
    space = read(["routing=dynamic,sharp", "routing.iterations=1,2", "sharpness=0.5,2"], base)
    assert list(space) == ["model.routing", "model.routing.iterations", "model.routing.sharpness"]
    assert own_values(space, base) == {"model.routing": "dynamic"}
    tried = combinations(space, base)
    assert [set(values) for values in tried] == [{"model.routing", "model.routing.iterations"}] * 2 + [
        {"model.routing", "model.routing.sharpness"}
    ] * 2
    study = optuna.create_study()
    for values in tried:
        study.enqueue_trial(values)
    made = [suggest(study.ask(), space, base).model.routing for _ in tried]  # type: ignore[attr-defined]
    assert [(routing.algorithm, getattr(routing, "bias", None)) for routing in made] == [
        ("dynamic", True), ("dynamic", True), ("sharp", None), ("sharp", None),
    ]  # fmt: skip
    changed = with_values(base, {"model.routing": sharp, "model.routing.sharpness": 2.0})
    assert train_flags(changed, base) == ["--model.routing", "sharp", "--model.routing.sharpness", "2.0"]
    assert read_values("routing=sharp+sharpness=2", base) == {"model.routing": sharp, "model.routing.sharpness": 2.0}
    assert own_values(read(["routing=dynamic,sharp", "sharpness=0.5..2"], base), base) == {"model.routing": "dynamic"}
    with pytest.raises(UserError, match="there is no routing 'dinamic'; did you mean 'dynamic'"):
        read(["routing=dinamic,sharp"], base)
