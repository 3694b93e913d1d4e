"""What every model has in common: its output, its loss, its description, and `predict` on an array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.models.config import LossConfig, ModelConfig
from capsnet.nn.losses import classification_loss, margin_loss, reconstruction_loss, spread_loss
from capsnet.routing.base import Trace
from capsnet.sync.kuramoto import Oscillations

if TYPE_CHECKING:
    from capsnet.data.examples import Batch
    from capsnet.nn.layers import DenseCaps

PRESENT = 0.5  # the activation from which a class counts as present, where an image may have several


class Output(NamedTuple):
    """What a forward pass returns."""

    activations: Tensor  # (b, j) in [0, 1]: of the class capsules, or the probabilities of a CNN
    poses: Tensor | None = None  # (b, j, q) of the class capsules; None without capsules
    primary: Tensor | None = None  # (b, i, p) poses of the primary capsules; None without capsules
    logits: Tensor | None = None  # (b, j) from which the activations were computed, if there are any
    trace: Trace | None = None  # of the last layer's routing, if asked for
    oscillations: Oscillations | None = None  # of a synchronisation network, if a trace is asked for


class Prediction(NamedTuple):
    """What `predict` returns, on the CPU."""

    labels: Tensor  # (b,) the most active class; (b, k) with top=k; (b, j) bool with threshold=…
    activations: Tensor  # (b, j)
    poses: Tensor | None = None  # (b, j, q)
    reconstructions: Tensor | None = None  # (b, c, h, w) of the most active class; (b, k, c, h, w) with top=k
    trace: Trace | None = None


class Losses(NamedTuple):
    """What a step minimises, and its parts."""

    total: Tensor
    classification: Tensor  # margin, spread or cross-entropy loss
    reconstruction: Tensor
    teacher: Tensor | None = None


class Divided(NamedTuple):
    """A network divided where routing begins, for programs that route by themselves: the Lab without a server."""

    primary: Callable[[Tensor], tuple[Tensor, ...]]  # images → the primary capsules (b, i, p) of each branch
    branches: tuple[tuple[DenseCaps, ...], ...]  # the capsule layers after it
    squashed: bool = True  # whether the lengths of primary capsules are activations, or those of squashed ones are


class Model(nn.Module):
    """A classifier that knows its config and the names of its classes.

    A subclass names its `Config`, implements `forward` and overrides what it can do beyond that: `reconstruct`,
    `describe`, `shown`. The default loss is the one that suits its output.
    """

    Config: ClassVar[type[ModelConfig]] = ModelConfig
    default_loss: ClassVar[str] = "margin"
    first_convolution: str = ""
    """Name of the weight that reads the image channels, so that `--init` can adapt it to grey or colour images."""
    given_stem: str = ""
    """Class of a stem that was given in Python, whose code a checkpoint lacks."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config: Any = config
        self.decoder: nn.Module | None = None
        self.classes: tuple[str, ...] = tuple(str(j) for j in range(config.num_classes))
        self.loaded: object = None  # what was taken from a trained model: see `capsnet.io.transfer.LoadReport`
        self.certificate: object = None  # of the training: see `capsnet.io.records.Certificate`
        self.multi_label = False  # True: images have several labels or none, and `predict` names all that are present

    def forward(self, images: Tensor, trace: bool = False, routing: Mapping[str, Any] | None = None) -> Output:
        """Images (b, c, h, w) in [0, 1] → `Output`; `routing` replaces options of the routing for this call."""
        raise NotImplementedError

    def loss(self, output: Output, batch: Batch, config: LossConfig, progress: float = 1.0) -> Losses:
        """Classification loss plus weighted reconstruction; `progress` in [0, 1] is the share of the training done."""
        classification = self.classification_loss(output, batch.targets, config, progress)
        error = output.activations.new_zeros(())
        if config.reconstruction:
            reconstruction, wanted = self.reconstruct_targets(output, batch)
            error = error if reconstruction is None else reconstruction_loss(reconstruction.float(), wanted)
        return Losses(classification + config.reconstruction * error, classification, error)

    def classification_loss(self, output: Output, targets: Tensor, config: LossConfig, progress: float) -> Tensor:
        kind = self.default_loss if config.kind == "auto" else config.kind
        if kind == "entropy":
            # log-odds: with a sigmoid they undo activations into logits, and the binary loss sees the activations
            scores = output.activations.float().logit(1e-6) if output.logits is None else output.logits
            return classification_loss(scores.float(), targets, self.multi_label)
        activations = output.activations
        if self.default_loss == "entropy" and output.logits is not None:
            activations = output.logits.float().sigmoid()  # a softmax leaves no room for absent classes
        if kind == "spread":
            return spread_loss(activations, targets, 0.2 + (config.present - 0.2) * progress)
        return margin_loss(
            activations, targets, present=config.present, absent=config.absent, down_weight=config.down_weight,
            reduction=config.margin_reduction,
        )  # fmt: skip

    def reconstruct_targets(self, output: Output, batch: Batch) -> tuple[Tensor | None, Tensor]:
        """Reconstructions from the poses of the TRUE classes, and what they should look like; None without decoder.

        Where the digits of an image are known one by one, each is reconstructed from its own pose alone (section 6);
        the second of an image that has only one counts nothing.
        """
        if output.poses is None or self.decoder is None:
            return None, batch.images
        if batch.parts is None or batch.digits is None or batch.present is None:
            return self.reconstruct_set(output.poses, batch.targets), batch.images
        parts = self.reconstruct(output.poses, batch.digits)
        return None if parts is None else parts * batch.present[:, :, None, None, None], batch.parts

    def describe(self) -> str:
        """A description of the network, from the image to the classes."""
        return f"{describe_image(self.config.image_shape)} → {type(self).__name__} → {self.config.num_classes} classes"

    def stages(self, images: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
        """Parts of a training step, each as a forward and backward pass that can be timed alone."""
        return {"network": lambda: self(images).activations.sum().backward()}

    def shown(self) -> dict[str, Any]:
        """What the Lab can show of this model in addition to its activations."""
        return {"capsules": False, "has_decoder": self.decoder is not None}

    def divided(self) -> Divided | None:
        """The network up to its primary capsules, and its capsule layers; None if it has no such parts."""
        return None

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        """A view of a tensor of the state dict with the classes as its first axis; None if it has no such axis."""
        return None

    def save_pretrained(self, folder: str | Path, **card: str) -> Path:
        """Write a folder with weights (safetensors), config and model card, for `from_pretrained` and `capsnet.load`.

        `title` and `license` are for the card; a card that exists is kept.
        """
        return publishing().save_folder(self, folder, **card)

    @classmethod
    def from_pretrained(cls, name: str | Path) -> Self:
        """A trained model from a folder, or from the Hugging Face Hub by its name, user/name."""
        return publishing().open_folder(cls, name)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Upload the model to the Hugging Face Hub as user/name and return the URL of the commit.

        Options are those of `huggingface_hub.ModelHubMixin.push_to_hub`, such as `private` and `token`; `card` has the
        arguments of the model card. Needs the extra `hub`.
        """
        return publishing().push(self, repo_id, **options)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def check(self, images: Tensor, came: Sequence[int] | None = None) -> None:
        """Report a wrong shape more clearly than a convolution would."""
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
        """Labels, activations, poses, reconstructions and, if asked, the routing trace of an array of images.

        images: uint8 (0 to 255) or float (0 to 1), of shape (h, w), (b, h, w), (c, h, w) or (b, c, h, w).
        One label by default; `top=2` gives the two most active classes, `threshold=0.5` all with at least that
        activation, which is the default of a multi-label model.
        """
        if self.multi_label and top is None and threshold is None:
            threshold = PRESENT
        top = 1 if top is None else top
        if top < 1 or batch_size < 1:
            raise UserError(f"top and batch_size should be at least 1, not {top} and {batch_size}.")
        with evaluating(self):
            chunks = self._as_batch(images).split(batch_size)
            parts = [self._predict_batch(chunk.to(self.device), top, threshold, trace) for chunk in chunks]
        return join(parts)

    def _predict_batch(self, images: Tensor, top: int, threshold: float | None, trace: bool) -> Prediction:
        output = self(images, trace=True) if trace else self(images)
        longest = output.activations.topk(min(top, self.config.num_classes), dim=1).indices
        decoded = self.reconstruct(output.poses, longest) if output.poses is not None else None
        labels = longest if threshold is None else output.activations >= threshold
        if top == 1:
            labels = labels[:, 0] if threshold is None else labels
            decoded = decoded[:, 0] if decoded is not None else None
        return Prediction(labels, output.activations, output.poses, decoded, output.trace)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor | None:
        """Images decoded from the pose of each class, all others masked to zero; None without a decoder.

        poses (b, j, q), classes (b,) or (b, k) → (b, c, h, w) or (b, k, c, h, w).
        """
        return None

    def reconstruct_set(self, poses: Tensor, targets: Tensor) -> Tensor | None:
        """One image decoded from all classes of a set: targets (b, j) → (b, c, h, w); None without a decoder."""
        return None

    def tweaks(self, pose: Tensor, label: int, span: float = 0.25, steps: int = 11) -> Tensor:
        """Each dimension of a class capsule's pose varied in steps over [−span, span], decoded (Fig. 4).

        pose (q,) of class `label` → (q, steps, c, h, w).
        """
        q = len(pose)
        moves = torch.linspace(-span, span, steps, device=pose.device, dtype=pose.dtype)
        poses = pose.new_zeros(q, steps, self.config.num_classes, q)
        poses[:, :, label] = pose + torch.eye(q, device=pose.device, dtype=pose.dtype)[:, None] * moves[:, None]
        images = self.reconstruct(poses.flatten(0, 1), torch.full((q * steps,), label, device=pose.device))
        if images is None:
            raise UserError("this model has no decoder, so its poses cannot be decoded: train one with a decoder.")
        return images.unflatten(0, (q, steps))

    def _as_batch(self, images: Tensor | np.ndarray) -> Tensor:
        # copied, because an array may be read-only (Pillow's are) or mirrored, which torch does not take
        came = images if isinstance(images, Tensor) else torch.from_numpy(np.array(images))
        if not (came.is_floating_point() or came.dtype in (torch.uint8, torch.bool)):
            raise UserError(
                f"images should be uint8 (0 to 255) or float (0 to 1), not {came.dtype}: convert them first."
            )
        if came.is_floating_point() and came.numel() and came.max() > 2:
            raise UserError(
                f"float images should range from 0 to 1, and these reach {came.max():g}: divide them by 255."
            )
        x = came.float() / 255 if came.dtype == torch.uint8 else came
        if x.dim() == 2:
            x = x[None, None]
        elif x.dim() == 3:
            x = x[None] if x.shape == tuple(self.config.image_shape) else x[:, None]
        self.check(x, came.shape)
        return x.to(self.dtype)


def publishing() -> Any:
    """The module that stores models, imported by name, because it imports this one."""
    return import_module("capsnet.io.publish")


def describe_image(shape: tuple[int, int, int]) -> str:
    """
    >>> describe_image((1, 28, 28))
    '28×28 grey'
    """
    c, h, w = shape
    colour = {1: "grey", 3: "RGB"}.get(c, f"{c} channels")
    return f"{h}×{w} {colour}"


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put every part of a model in evaluation mode, and afterwards back: a part may have been frozen before."""
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
    steps = {name: cat([getattr(t, name) for t in traces], int(name != "votes")) for name in Trace._fields}
    fields = {name: cat([getattr(part, name) for part in parts]) for name in Prediction._fields[:4]}
    return Prediction(**fields, trace=Trace(**steps) if traces else None)  # type: ignore[arg-type]
