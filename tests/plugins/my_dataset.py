"""A dataset in a plugin: coloured discs and squares. Use it with `--plugin my_dataset.py --data shapes`."""

from dataclasses import dataclass

import torch

from capsnet.data import Dataset, DatasetInfo, Request, Splits, register, split

CLASSES = ("disc", "square")
SIDE = 24


@dataclass(frozen=True)
class Options:
    """The options after `shapes:`, for instance `shapes:train=500`."""

    train: int = 400
    test: int = 100


def draw(n: int, seed: int) -> Dataset:
    """n shapes of random colour, size and position."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % len(CLASSES)
    centre = 8 + 8 * torch.rand(n, 2, 1, 1, generator=random)
    radius = 4 + 3 * torch.rand(n, 1, 1, generator=random)
    y, x = (torch.arange(SIDE).view(shape) - centre[:, k] for k, shape in enumerate([(SIDE, 1), (1, SIDE)]))
    distance = torch.where(labels.view(n, 1, 1) == 0, (x**2 + y**2).sqrt(), torch.maximum(x.abs(), y.abs()))
    colour = torch.randint(80, 256, (n, 3, 1, 1), generator=random)
    images = ((distance < radius)[:, None] * colour).to(torch.uint8)
    return Dataset(images, labels, CLASSES, "shapes")


def load(request: Request) -> Splits:
    options = request.spec.options
    return split(draw(options.train, seed=1), draw(options.test, seed=2), request)


register(DatasetInfo("shapes", "coloured shapes", load, CLASSES, (3, SIDE, SIDE), (400, 100), options=Options))
