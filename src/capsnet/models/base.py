"""What every model of ours has in common: its output, and `predict` on an array."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.routing import Trace

if TYPE_CHECKING:
    from capsnet.config import ModelConfig

PRESENT = 0.5  # the length from which a class counts as there, where an image may have several


class Output(NamedTuple):
    """What a forward pass gives."""

    lengths: Tensor  # (b, j) in [0, 1]: ‖v_j‖ of a capsule network, probabilities of a CNN
    poses: Tensor | None = None  # (b, j, q) v_j; None for a CNN
    primary: Tensor | None = None  # (b, i, p) u_i; None for a CNN
    logits: Tensor | None = None  # (b, j) of a CNN; None for a capsule network
    trace: Trace | None = None  # how the last layer's routing went, if asked for


class Prediction(NamedTuple):
    """What `predict` gives, on the CPU."""

    labels: Tensor  # (b,) the longest class; (b, k) with top=k; (b, j) bool with threshold=…
    lengths: Tensor  # (b, j)
    poses: Tensor | None = None  # (b, j, q)
    reconstructions: Tensor | None = None  # (b, c, h, w), decoded from the longest; (b, k, c, h, w) with top=k
    trace: Trace | None = None


class Classifier(nn.Module):
    """A model that knows its config and its classes' names, and predicts on arrays."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.classes: tuple[str, ...] = tuple(str(j) for j in range(config.num_classes))
        self.loaded: object = None  # what was taken over from a trained model: see `capsnet.pretrained.LoadReport`
        self.multi_label = False  # True: images have several labels or none, and `predict` names all that are there

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def check(self, images: Tensor, came: Sequence[int] | None = None) -> None:
        """Say what came and what was expected before a convolution says it less well."""
        expected = tuple(self.config.image_shape)
        if images.dim() != 4 or images.shape[1:] != expected:
            shape = ", ".join(map(str, expected))
            raise UserError(
                f"the model expects images of shape (b, {shape}) and got {tuple(came or images.shape)}: "
                f"resize them, or build a model with the image_shape (channels, height, width) that they have."
            )

    @torch.no_grad()
    def predict(
        self,
        images: Tensor | np.ndarray,
        *,
        top: int | None = None,
        threshold: float | None = None,
        trace: bool = False,
        batch_size: int = 128,
    ) -> Prediction:
        """Labels, lengths, poses, reconstructions and, if asked for, the routing trace of an array of images.

        images: uint8 (0 to 255) or float (0 to 1), of shape (h, w), (b, h, w), (c, h, w) or (b, c, h, w).
        One label by default; `top=2` gives the two longest classes, `threshold=0.5` all that are at least so long,
        which is what a multi-label model does unless told otherwise.
        """
        if self.multi_label and top is None and threshold is None:
            threshold = PRESENT
        top = 1 if top is None else top
        if top < 1 or batch_size < 1:
            raise UserError(f"top and batch_size are at least 1 and are {top} and {batch_size}.")
        with evaluating(self):
            chunks = self._as_batch(images).split(batch_size)
            parts = [self._predict_batch(chunk.to(self.device), top, threshold, trace) for chunk in chunks]
        return join(parts)

    def _predict_batch(self, images: Tensor, top: int, threshold: float | None, trace: bool) -> Prediction:
        output = self(images, trace=True) if trace else self(images)
        longest = output.lengths.topk(min(top, self.config.num_classes), dim=1).indices
        painted = self.reconstruct(output.poses, longest) if output.poses is not None else None
        labels = longest if threshold is None else output.lengths >= threshold
        if top == 1:
            labels = labels[:, 0] if threshold is None else labels
            painted = painted[:, 0] if painted is not None else None
        return Prediction(labels, output.lengths, output.poses, painted, output.trace)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor | None:
        """Images decoded from the poses of some classes; None for a model without a decoder."""
        return None

    def _as_batch(self, images: Tensor | np.ndarray) -> Tensor:
        # copied, because an array may be read-only (Pillow's are) or mirrored, which torch does not take
        came = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
        if not (came.is_floating_point() or came.dtype in (torch.uint8, torch.bool)):
            raise UserError(
                f"images are uint8 (0 to 255) or floats (0 to 1) and these are {came.dtype}: convert them first."
            )
        if came.is_floating_point() and came.numel() and came.max() > 2:
            raise UserError(f"images as floats go from 0 to 1 and these go up to {came.max():g}: divide them by 255.")
        x = came.float() / 255 if came.dtype == torch.uint8 else came
        if x.dim() == 2:
            x = x[None, None]
        elif x.dim() == 3:
            x = x[None] if x.shape == tuple(self.config.image_shape) else x[:, None]
        self.check(x, came.shape)
        return x.to(self.dtype)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every part of a model in evaluation mode, and afterwards each as it was: one may have been frozen."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def join(parts: Sequence[Prediction]) -> Prediction:
    """Batches of predictions as one, on the CPU."""

    def cat(tensors: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
        present = [t.cpu() for t in tensors if t is not None]
        return torch.cat(present, dim) if present else None

    traces = [part.trace for part in parts if part.trace is not None]
    trace = None
    if traces:
        over_time = {f: torch.cat([getattr(t, f).cpu() for t in traces], 1) for f in Trace._fields[:3]}
        trace = Trace(**over_time, votes=torch.cat([t.votes.cpu() for t in traces]))
    fields = {name: cat([getattr(part, name) for part in parts]) for name in Prediction._fields[:4]}
    return Prediction(**fields, trace=trace)  # type: ignore[arg-type]
