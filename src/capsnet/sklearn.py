"""A capsule network as a scikit-learn estimator: `fit` on an array of images and labels, then `predict`.

    from capsnet.sklearn import CapsNetClassifier

    classifier = CapsNetClassifier(epochs=10).fit(images, labels)
    classifier.score(new_images, new_labels)

Training is that of `capsnet train`: the same loop, losses and optimiser. Needs the extra `sklearn`.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets, type_of_target, unique_labels
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from capsnet.data import Augment, Batch, Dataset, Splits, multi_hot
from capsnet.data.examples import check_labels
from capsnet.data.splits import split_indices
from capsnet.errors import UserError
from capsnet.io import checkpoint
from capsnet.io.transfer import header_of, start_from
from capsnet.models.base import PRESENT, Model, evaluating
from capsnet.models.config import CapsNetConfig, LossConfig, ModelConfig
from capsnet.models.stem import grid_size
from capsnet.routing.base import options_for
from capsnet.routing.options import RoutingOptions
from capsnet.train import loop, runs
from capsnet.train.callbacks import TrainingBar
from capsnet.train.config import Config
from capsnet.train.pace import epochs_within
from capsnet.train.presets import QUICK_NETWORK, get_preset

SMALLEST = 8  # pixels: smaller images are padded
SMALL = 20  # pixels: images below need a smaller stem
MOST_POSITIONS = 144  # of the grid of primary capsules, 12×12
MOST_DECODED = 3 * 64 * 64  # pixels: a decoder of larger images would have more parameters than all else
PREDICTED_AT_ONCE = 250


class CapsNetClassifier(ClassifierMixin, BaseEstimator):
    """A capsule network that learns from arrays of images.

    X is an array of images in one size, of any size and number of channels: (n, h, w), (n, h, w, c) or (n, c, h, w).
    Rows of flat pixels, (n, h·w), are square images by default, or one row of pixels if their number is not a square.
    Pixels are uint8 from 0 to 255, floats from 0 to 1, or numbers of any other range, which is then taken from the
    training images.

    y has one label per image, or is a 0/1 matrix (n, j) for images with several labels or none.

    Args:
        network: Name of a preset or model whose architecture is used ("quick", "paper", "cnn" baselines, …), or a model
            config. By default a compact capsule network that suits the size of the images.
        init: Start from the weights of this trained model (name, run folder or file) as far as they fit. Its
            architecture is used unless `network` is given.
        routing: Routing algorithm: a name or its options. By default the network's own.
        image_shape: Shape of an image, (h, w), (h, w, c) or (c, h, w), if X has rows of flat pixels.
        channels: Position of the channels in four-dimensional X: "first", "last", or "auto" for the one of the two axes
            that has at most four entries.
        epochs: Number of epochs.
        batch_size: Images per step.
        learning_rate: Peak of the learning rate schedule (one-cycle).
        reconstruction: Weight of the reconstruction loss; 0 trains no decoder.
        augment: Augmentation of the training images, as a `capsnet.data.Augment` or a mapping of its fields.
        validation_fraction: Fraction of the training images held out to measure the validation error.
        patience: Stop after this many epochs without a lower validation error and keep the best weights; 0 disables it.
        max_minutes: Reduce the number of epochs to what fits into this time, and stop when it is over.
        device: "auto", "cpu", "cuda" or "mps".
        random_state: Seed, generator or None.
        verbose: 1 shows a progress bar with the time left.

    Attributes:
        classes_: The labels, or the columns of a label matrix.
        model_: The trained `capsnet.Model`, with `predict`, poses, reconstructions and routing traces.
        image_shape_: (c, h, w) of the images that the network reads, after padding.
        pixel_range_: The pixel values that the network reads as 0 and 1.
        history_: Records of the training: losses, learning rates and validation errors.
        n_features_in_: Length of the second axis of X.
        multi_label_: Whether y was a label matrix.

    >>> import numpy as np
    >>> images = np.zeros((40, 8, 8))
    >>> images[20:, :, 4:] = 1  # class 1 has a bright half
    >>> classifier = CapsNetClassifier(epochs=5, random_state=0).fit(images, np.repeat([0, 1], 20))
    >>> classifier.predict(images[[0, 30]])
    array([0, 1])
    """

    def __init__(
        self,
        network: str | ModelConfig | None = None,
        *,
        init: str | None = None,
        routing: str | RoutingOptions | None = None,
        image_shape: tuple[int, ...] | None = None,
        channels: Literal["auto", "first", "last"] = "auto",
        epochs: float = 10,
        batch_size: int = 32,
        learning_rate: float = 0.002,
        reconstruction: float = 0.0005,
        augment: Augment | Mapping[str, Any] | None = None,
        validation_fraction: float = 0.0,
        patience: int = 0,
        max_minutes: float | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: int = 0,
    ) -> None:
        self.network = network
        self.init = init
        self.routing = routing
        self.image_shape = image_shape
        self.channels = channels
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.reconstruction = reconstruction
        self.augment = augment
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.max_minutes = max_minutes
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.classifier_tags.multi_label = True
        return tags

    # --- Training ----------------------------------------------------------------------------------------------

    def fit(self, X: Any, y: Any) -> CapsNetClassifier:
        """Train a network on images and their labels."""
        deadline = self._deadline()
        X, y = validate_data(self, X, y, allow_nd=True, multi_output=True)
        labels = self._learn_labels(y)
        pixels = self._arrange(X)
        self.pixel_range_ = pixel_range(pixels)
        self.image_shape_ = (pixels.shape[1], *padded_size(*pixels.shape[2:]))
        classes = tuple(map(str, self.classes_))
        seed = int(check_random_state(self.random_state).randint(np.iinfo(np.int32).max))
        splits = self._split(Arrays(self._scale(pixels), labels, classes, "arrays"), seed)
        with tempfile.TemporaryDirectory(prefix="capsnet-") as folder:
            self._train(splits, seed, Path(folder), deadline)
        return self

    def _deadline(self) -> float | None:
        if self.max_minutes is None:
            return None
        if not self.max_minutes > 0:
            raise UserError(f"max_minutes should be above 0, or None for no limit, not {self.max_minutes}.")
        return time.monotonic() + 60 * self.max_minutes

    def _learn_labels(self, y: Any) -> Tensor:
        """Set `classes_`; int64 (n,) for labels, bool (n, j) for a label matrix."""
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y")
        if kind == "multiclass-multioutput":
            raise UserError("y should be a vector of labels or a 0/1 matrix, not a matrix with several values.")
        self.multi_label_ = kind == "multilabel-indicator"
        self.classes_ = unique_labels(y)
        if self.multi_label_:
            return torch.from_numpy(np.asarray(y).astype(bool))
        if len(self.classes_) < 2:
            raise UserError(f"y has one class, {self.classes_[0]!r}, and a classifier needs at least two.")
        return torch.from_numpy(np.searchsorted(self.classes_, column_or_1d(y, warn=True)))

    def _split(self, arrays: Arrays, seed: int) -> Splits[Dataset]:
        """Training images, and validation images drawn by the seed."""
        if not 0 <= self.validation_fraction < 1:
            raise UserError(f"validation_fraction should be from 0 to below 1, not {self.validation_fraction}.")
        stay, held_out = split_indices(len(arrays), round(self.validation_fraction * len(arrays)), "seeded", seed)
        if self.patience and not len(held_out):
            raise UserError(f"patience={self.patience} needs validation images: set validation_fraction above 0.")
        if not len(stay):
            raise UserError(f"validation_fraction={self.validation_fraction} leaves no image to train on: lower it.")
        return Splits(arrays.subset(stay), arrays.subset(held_out), arrays.subset(held_out[:0]))

    def _train(self, splits: Splits[Dataset], seed: int, folder: Path, deadline: float | None) -> None:
        """Train in a folder that exists during the training; early stopping and the time limit end it sooner."""
        config = self._config(len(splits.train), seed)
        if self.max_minutes is not None:
            fitting = epochs_within(self.max_minutes, loop.assemble(config, folder, splits))
            config = replace(config, epochs=min(config.epochs, fitting))
        run = loop.assemble(config, folder, splits)
        if self.init:
            run.model.loaded = start_from(run.model, self.init)
        watchers = [*([FitBar()] if self.verbose else []), *([TimeLimit(deadline)] if deadline else [])]
        try:
            with loop.watched(run, watchers):
                loop.train_weights(run, watchers)
        except TimeIsUp:
            pass  # the weights so far are the result
        self.model_, self.history_ = loop.checked_model(run), runs.read_metrics(folder)

    def _config(self, images: int, seed: int) -> Config:
        augment = self.augment if isinstance(self.augment, Augment) else Augment(**(self.augment or {}))
        return replace(
            get_preset("own-images"), preset="sklearn", data="arrays", validation=0, epochs=self.epochs,
            batch_size=min(self.batch_size, images), lr=self.learning_rate, patience=self.patience, seed=seed,
            device=self.device, model=self._network(), loss=LossConfig(reconstruction=self.reconstruction),
            augment=augment,
        )  # fmt: skip

    def _network(self) -> ModelConfig:
        """The architecture, for these images and classes."""
        config = self.network or suitable_network(self.image_shape_)
        if isinstance(config, str):
            config = header_of(config, None)[0]
        elif self.network is None and self.init:
            config = checkpoint.load(self.init).config
        if self.routing is not None:
            if not hasattr(config, "routing"):
                raise UserError(f"a network of the kind '{config.kind}' has no routing: leave routing out.")
            options = options_for(self.routing) if isinstance(self.routing, str) else self.routing
            config = replace(config, routing=options)
        return replace(config, image_shape=self.image_shape_, num_classes=len(self.classes_))

    # --- Prediction --------------------------------------------------------------------------------------------

    def predict(self, X: Any) -> np.ndarray:
        """The label of each image, (n,), or the 0/1 matrix (n, j) of the labels that are present."""
        activations = self.activations(X)
        if self.multi_label_:
            return (activations >= PRESENT).astype(int)
        return self.classes_[activations.argmax(1)]

    def activations(self, X: Any) -> np.ndarray:
        """Activations of the class capsules, (n, j) in [0, 1]: with dynamic routing, the lengths of their poses."""
        check_is_fitted(self)
        X = validate_data(self, X, allow_nd=True, reset=False)
        pixels = self._arrange(X)
        came = (pixels.shape[1], *padded_size(*pixels.shape[2:]))
        if came != self.image_shape_:
            raise UserError(
                f"X has images of (channels, height, width) {came}, but the training images had {self.image_shape_}: "
                f"resize them."
            )
        images = self._scale(pixels)
        with torch.inference_mode(), evaluating(self.model_):
            parts = [self._activations(some) for some in images.split(PREDICTED_AT_ONCE)]
        return np.concatenate(parts)

    def _activations(self, images: Tensor) -> np.ndarray:
        model: Model = self.model_
        return model(as_float(images).to(model.device)).activations.double().cpu().numpy()

    @available_if(lambda self: not getattr(self, "multi_label_", False))
    def predict_proba(self, X: Any) -> np.ndarray:
        """Activations divided by their sum, (n, j). They rank the classes of an image but are not calibrated.

        Not offered for multi-label y, where the labels are independent: `activations` has one number per label.
        """
        activations = self.activations(X)
        total = activations.sum(1, keepdims=True)
        uniform = np.full_like(activations, 1 / activations.shape[1])
        return np.divide(activations, total, out=uniform, where=total > 0)

    @available_if(lambda self: getattr(self, "multi_label_", False))
    def decision_function(self, X: Any) -> np.ndarray:
        """Activation of each label minus 0.5, (n, j): positive for labels that `predict` reports. Multi-label only."""
        return self.activations(X) - PRESENT

    # --- Arrays as images --------------------------------------------------------------------------------------

    def _arrange(self, X: np.ndarray) -> np.ndarray:
        """X as (n, c, h, w), in its own dtype."""
        if X.ndim == 2:
            shape = self.image_shape or square_or_row(X.shape[1])
            if math.prod(shape) != X.shape[1]:
                raise UserError(f"the rows of X have {X.shape[1]} pixels, which is not an image_shape of {shape}.")
            X = X.reshape(len(X), *shape)
        if X.ndim == 3:
            return X[:, None]
        if X.ndim != 4:
            raise UserError(f"X should have two to four axes, such as (n, h, w) or (n, h, w, c), and has {X.ndim}.")
        return X if self._channels(X.shape) == "first" else X.transpose(0, 3, 1, 2)

    def _channels(self, shape: tuple[int, ...]) -> str:
        if self.channels in ("first", "last"):
            return self.channels
        likely = [name for name, length in (("first", shape[1]), ("last", shape[3])) if length <= 4]
        if self.channels != "auto" or len(likely) != 1:
            raise UserError(
                f"it is not clear which axis of X, {shape}, holds the channels (channels={self.channels!r}): "
                f"set channels to 'first' or 'last'."
            )
        return likely[0]

    def _scale(self, pixels: np.ndarray) -> Tensor:
        """Pixels (n, c, h, w) as uint8 or as float32 with the learnt range mapped to [0, 1], padded with zeros."""
        if pixels.dtype != np.uint8 or self.pixel_range_ != (0, 255):
            low, high = self.pixel_range_
            pixels = ((pixels - low) / (high - low)).astype(np.float32)
        missing = [want - have for want, have in zip(padded_size(*pixels.shape[2:]), pixels.shape[2:], strict=True)]
        border = [(0, 0), (0, 0), *((gap // 2, gap - gap // 2) for gap in missing)]
        return torch.from_numpy(np.ascontiguousarray(np.pad(pixels, border)))


@dataclass(frozen=True, eq=False)
class Arrays(Dataset):
    """Images in memory as uint8 or as float32 in [0, 1]."""

    def __post_init__(self) -> None:
        check_labels(self.labels, len(self.images), len(self.classes), self.name)

    def gather(self, index: Tensor) -> Batch:
        index = index.to(self.device)
        labels = self.labels[index]
        return Batch(as_float(self.images[index]), multi_hot(labels, len(self.classes)), labels, index)


def as_float(images: Tensor) -> Tensor:
    return images.float().div_(255) if images.dtype == torch.uint8 else images


def pixel_range(pixels: np.ndarray) -> tuple[float, float]:
    """The values to be read as 0 and 1: those of the dtype, 0 and 1, or the lowest and highest.

    >>> pixel_range(np.array([0, 16])), pixel_range(np.array([0.2, 0.7])), pixel_range(np.zeros(1, np.uint8))
    ((0.0, 16.0), (0.0, 1.0), (0.0, 255.0))
    """
    if pixels.dtype == np.uint8:
        return 0.0, 255.0
    low, high = float(pixels.min()), float(pixels.max())
    return (0.0, 1.0) if (low >= 0 and high <= 1) or low == high else (low, high)


def square_or_row(pixels: int) -> tuple[int, int]:
    """The height and width of an image with so many pixels: a square, or else one row.

    >>> square_or_row(64), square_or_row(10)
    ((8, 8), (1, 10))
    """
    side = math.isqrt(pixels)
    return (side, side) if side * side == pixels else (1, pixels)


def padded_size(height: int, width: int) -> tuple[int, int]:
    """Height and width after padding: a network needs a few pixels, and more if the other side is long.

    >>> padded_size(28, 28), padded_size(1, 4), padded_size(3, 100)
    ((28, 28), (8, 8), (20, 100))
    """
    longest = max(height, width)
    least = SMALLEST if longest < SMALL else max(SMALL, longest // 8)
    return max(height, least), max(width, least)


def suitable_network(image_shape: tuple[int, int, int]) -> CapsNetConfig:
    """The quick network with a smaller stem for small images, more strides and no decoder for large ones.

    >>> suitable_network((3, 224, 224)).stem_strides
    (2, 2, 2)
    """
    config = replace(QUICK_NETWORK, image_shape=image_shape)
    if min(image_shape[1:]) < SMALL:
        return replace(
            config, stem_channels=(32, 64), stem_kernels=(3, 3), stem_strides=(1, 1), primary_stride=1, decoder=(256,)
        )
    while math.prod(grid_size(config)) > MOST_POSITIONS:
        config = with_one_more_stride(config)
    return replace(config, decoder=config.decoder if math.prod(image_shape) <= MOST_DECODED else ())


def with_one_more_stride(config: CapsNetConfig) -> CapsNetConfig:
    """The first convolution of the stem without a stride gets one; if all have one, another is appended."""
    strides = list(config.stem_strides)
    if 1 in strides:
        strides[strides.index(1)] = 2
        return replace(config, stem_strides=tuple(strides))
    return replace(
        config,
        stem_channels=(*config.stem_channels, config.stem_channels[-1]),
        stem_kernels=(*config.stem_kernels, 3),
        stem_strides=(*strides, 2),
    )


class FitBar(TrainingBar):
    """The progress bar of `fit`, which does not mention its temporary folder."""

    def place(self, run: runs.Run) -> str:
        return f"on {run.device}"


class TimeIsUp(Exception):
    """The training has used its time."""


class TimeLimit(loop.Watcher):
    """Ends the training at a moment of `time.monotonic`."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline

    def moved(self, run: runs.Run) -> None:
        if time.monotonic() > self.deadline:
            raise TimeIsUp
