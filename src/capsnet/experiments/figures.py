"""Fig. 3, 4 and 5 of the paper: reconstructions, pose dimensions, and overlapping digits separated.

The networks are those of `table1` and reused if they are already trained. For your own model and images, run
`capsnet reproduce figures --model RUN`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from capsnet.data import Examples
from capsnet.errors import UserError
from capsnet.experiments.core.plan import Budget, Experiment, Row
from capsnet.experiments.table1 import row_of
from capsnet.models.base import Model
from capsnet.train.loop import Result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOOKED_AT = 4000  # test images that are searched for errors
RECONSTRUCTED = 500  # test images whose reconstruction error is measured
DIGITS = ("5", "0", "3")  # classes whose poses are shown


class Figures(Experiment):
    name = "figures"
    title = "Figures 3, 4 and 5: what the capsules represent"
    question = (
        "The decoder sees nothing of an image but the pose of one class capsule. What does it reconstruct when the "
        "prediction is right and when it is wrong (Fig. 3)? What does each dimension of the pose represent (Fig. 4)? "
        "Can overlapping digits be reconstructed separately, also for a digit that is not present (Fig. 5)?"
    )

    def rows(self, budget: Budget, seed: int) -> list[Row]:
        return [row_of(data, 3, True, budget, seed) for data in ("mnist", "multimnist")] if seed == 0 else []

    def measure(self, row: Row, result: Result) -> dict[str, Any]:
        return {**result.evaluation.summary(), "pixel_error": reconstruction_error(result.model, result.splits.test)}

    def draw(self, row: Row, result: Result | None) -> dict[str, Figure]:
        assert result is not None
        return paper_figures(result.model, *looked_at(result.model, result.splits.test))

    def captions(self) -> Mapping[str, str]:
        return CAPTIONS


CAPTIONS = {
    "fig3": "Fig. 3: inputs and their reconstructions from one capsule; errors also decoded from the true class.",
    "fig4": "Fig. 4: each row moves one dimension of the pose in steps of 0.05.",
    "fig5": "Fig. 5: two digits reconstructed separately; errors decoded from both pairs; a digit that is not present.",
}


def looked_at(model: Model, test: Examples) -> tuple[Tensor, Tensor]:
    """Ten correct and ten wrong test images and their classes, (n, 1) or (n, 2)."""
    k = test.labels_per_image
    if k not in (1, 2):
        raise UserError(
            f"{test.name} has images with different numbers of classes, and the figures need one or two: choose "
            f"another model."
        )
    batch = test.gather(test.numbers()[:LOOKED_AT])
    true = batch.targets.topk(k, dim=1).indices.sort(1).values
    named = model.predict(batch.images, top=k).labels.view(len(true), k).sort(1).values
    wrong = (named != true.cpu()).any(1)
    some = torch.cat([(~wrong).nonzero()[:10, 0], wrong.nonzero()[:10, 0]])
    return batch.images[some].cpu(), true[some].cpu()


def paper_figures(model: Model, images: Tensor, true: Tensor | None) -> dict[str, Figure]:
    """Fig. 3 and 4 for a model of single objects, Fig. 5 and 4 for one of pairs."""
    from capsnet.report import figures

    if model.decoder is None:
        raise UserError("the figures need a decoder and this model has none: choose a capsule network with one.")
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
    """The first image of a class."""
    has = (true == label).any(1).nonzero()
    return images[int(has[0])] if len(has) else None


@torch.inference_mode()
def reconstruction_error(model: Model, test: Examples) -> float:
    """Mean sum of squared pixel differences between images and the reconstructions of their true classes."""
    batch = test.gather(test.numbers()[:RECONSTRUCTED])
    poses = model.predict(batch.images).poses
    assert poses is not None
    k = test.labels_per_image or 1
    decoded = model.reconstruct(poses.to(model.device), batch.targets.topk(k, dim=1).indices.to(model.device))
    assert decoded is not None
    whole = decoded.sum(1).clamp(max=1).cpu() - batch.images.cpu()
    return float(whole.square().flatten(1).sum(1).mean())
