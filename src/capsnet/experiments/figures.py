"""Fig. 3, 4 and 5 of the paper: reconstructions, what each number of a pose means, and overlapping digits told apart.

The networks are those of `table1`, taken from there where they are trained already. Of a network of yours, and of any
image: `capsnet reproduce figures --model RUN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet.data import Examples
from capsnet.errors import UserError
from capsnet.experiments.plan import Budget, Experiment, Row
from capsnet.experiments.table1 import config_of, row_of
from capsnet.models import CapsNet, Model
from capsnet.training import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKED_AT = 4000  # test images among which mistakes are looked for
DIGITS = ("5", "0", "3")  # whose poses are tweaked, where the classes are digits


class Figures(Experiment):
    name = "figures"
    title = "Fig. 3, 4 and 5: what the capsules know"
    question = (
        "The decoder sees nothing of an image but the pose of one class capsule. What does it paint, when the network "
        "is right and when it is wrong (Fig. 3)? What does each number of the pose mean (Fig. 4)? And can two "
        "overlapping digits be painted apart, also from the capsule of a digit that is not there (Fig. 5)?"
    )

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(data, 3, True, budget, seed) for data in ("mnist", "multimnist")] if seed == 0 else []

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        assert isinstance(result.model, CapsNet)
        return {**result.evaluation.summary(), "pixel_error": painting_error(result.model, result.splits.test)}

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        assert result is not None
        return paper_figures(result.model, *looked_at(result.model, result.splits.test))

    def captions(self) -> Mapping[str, str]:
        return CAPTIONS


CAPTIONS = {
    "fig3": "Fig. 3: inputs above what is painted from one capsule's pose; wrong ones also from their label.",
    "fig4": "Fig. 4: one of the pose's numbers moved in steps of 0.05, a row a number.",
    "fig5": "Fig. 5: two digits painted apart; wrong pairs decoded both ways; and a capsule whose digit is not there.",
}
__all__ = ["CAPTIONS", "Figures", "config_of", "looked_at", "paper_figures"]


def looked_at(model: Model, test: Examples) -> tuple[Tensor, Tensor]:
    """Test images that show something, wrong ones too, and their classes: (n, 1) or (n, 2) where all have as many."""
    k = test.labels_per_image
    if k not in (1, 2):
        raise UserError(f"{test.name} has images with one digit and with two: the figures need one kind.")
    batch = test.gather(test.numbers()[:LOOKED_AT])
    true = batch.targets.topk(k, dim=1).indices.sort(1).values
    named = model.predict(batch.images, top=k).labels.view(len(true), k).sort(1).values
    wrong = (named != true.cpu()).any(1)
    some = torch.cat([(~wrong).nonzero()[:10, 0], wrong.nonzero()[:10, 0]])
    return batch.images[some].cpu(), true[some].cpu()


def paper_figures(model: Model, images: Tensor, true: Tensor | None) -> dict[str, Figure]:
    """Fig. 3 and 4 of a model for single objects, Fig. 5 and 4 of one for pairs."""
    from capsnet import figures

    if not isinstance(model, CapsNet) or model.decoder is None:
        raise UserError(
            "the figures are painted by a decoder and this model has none: name a capsule network with one."
        )
    drawn: dict[str, Figure] = {}
    if model.multi_label:
        drawn["fig5"] = figures.told_apart(model, images, true)
    else:
        drawn["fig3"] = figures.reconstructions(model, images, None if true is None else true[:, 0])
    for name in [digit for digit in DIGITS if digit in model.classes] if true is not None else [None]:
        label = None if name is None else model.classes.index(name)
        chosen = images[0] if label is None or true is None else example_of(images, true, label)
        if chosen is not None:
            drawn["fig4" if name is None else f"fig4-{name}"] = figures.tweak_grid(model, chosen, label)
    return drawn


def example_of(images: Tensor, true: Tensor, label: int) -> Tensor | None:
    """The first image that has a class."""
    has = (true == label).any(1).nonzero()
    return images[int(has[0])] if len(has) else None


@torch.inference_mode()
def painting_error(model: CapsNet, test: Examples, n: int = 500) -> float:
    """Sum of squared pixel differences of an image and what is painted from its true classes, on average."""
    batch = test.gather(test.numbers()[:n])
    poses = model.predict(batch.images).poses
    assert poses is not None
    k = test.labels_per_image or 1
    painted = model.reconstruct(poses.to(model.device), batch.targets.topk(k, dim=1).indices.to(model.device))
    assert painted is not None
    whole = painted.sum(1).clamp(max=1).cpu() - batch.images.cpu()
    return float(whole.square().flatten(1).sum(1).mean())
