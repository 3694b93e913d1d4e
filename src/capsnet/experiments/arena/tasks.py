"""The datasets of the arena, the algorithms that take part, and the training that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from capsnet.data import Augment
from capsnet.experiments.core.networks import compact_capsules
from capsnet.experiments.core.plan import Budget, tiny, with_model
from capsnet.models.config import CapsNetConfig
from capsnet.registry import BUILT_IN
from capsnet.routing.base import ROUTINGS, options_for
from capsnet.train.config import Config
from capsnet.train.presets import get_preset

CONTROL = "uniform"
ALGORITHMS = (
    *(CONTROL, "dynamic", "max-min", "self-attention"),
    *("inverted-attention", "self-routing", "em", "vb", "kuramoto"),
)
MANY_SEEDS = ("mnist", "fashion-mnist")  # five seeds there, three elsewhere


@dataclass(frozen=True)
class Task:
    """A dataset of the arena: its images, and the epochs that a training gets at each budget."""

    name: str
    data: str
    side: int
    channels: int
    epochs: Mapping[str, float]
    shift: int = 0
    flip: bool = False


TASKS = {
    task.name: task
    for task in (
        Task("mnist", "mnist", 28, 1, {"hour": 1, "day": 2}, shift=2),
        Task("fashion-mnist", "fashion-mnist", 28, 1, {"hour": 1, "day": 2}, shift=2, flip=True),
        Task("multimnist", "multimnist:test=20000", 36, 1, {"day": 2}),
        Task("affine-mnist", "affine-mnist:per_digit=2", 40, 1, {"day": 1}),
        Task("cifar10", "cifar10", 32, 3, {"day": 2}, shift=4, flip=True),
    )
}
LABELS = {
    "mnist": "MNIST",
    "fashion-mnist": "Fashion-MNIST",
    "multimnist": "MultiMNIST",
    "affine-mnist": "affine MNIST",
    "cifar10": "CIFAR-10",
}


def algorithms_of(budget: Budget) -> Sequence[str]:
    """The built-in algorithms (at `smoke` two of them), and those of loaded plugins."""
    plugins = [name for name in ROUTINGS.names() if ROUTINGS.origin(name) != BUILT_IN]
    return [*(ALGORITHMS[:2] if budget == "smoke" else ALGORITHMS), *plugins]


def tasks_of(budget: Budget) -> list[Task]:
    return [task for task in TASKS.values() if budget in task.epochs or (budget == "smoke" and task.name == "mnist")]


def config_of(task: Task, algorithm: str, rate: float, budget: Budget, seed: int) -> Config:
    """The training of the quick preset on `network_of`: bfloat16 in the stem, float32 in the routing."""
    model = replace(network_of(task), routing=options_for(algorithm))
    config = replace(
        get_preset("quick"), data=task.data, model=model, lr=rate, seed=seed,
        epochs=task.epochs.get(budget, 1), augment=Augment(shift=task.shift, flip=task.flip),
    )  # fmt: skip
    return with_model(tiny(config), routing=options_for(algorithm)) if budget == "smoke" else config


def network_of(task: Task) -> CapsNetConfig:
    """The quick preset's network with half the capsules and without a decoder, so that the loss judges classes alone:
    144 lower capsules for digits of 28 pixels, 256 for all larger images."""
    stride = 3 if task.side >= 36 else 2
    return replace(compact_capsules(task.side, task.channels), primary_types=16, primary_stride=stride, decoder=())
