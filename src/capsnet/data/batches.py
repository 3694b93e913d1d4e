"""Batches of a dataset that is stored or generated on the device: no worker processes, no state.

The batch of a step is a function of (seed, step) alone (and of the number of epochs, if augmentation ends early), so a
run resumed at step 7,003 sees the same batches as an uninterrupted one. Training drops the incomplete last batch of
each shuffled epoch; evaluation drops nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from capsnet.data.augment import augment
from capsnet.data.config import Augment
from capsnet.data.examples import Batch, Examples
from capsnet.data.seeds import generator
from capsnet.errors import UserError


class Batches:
    """Training batches by step: an epoch has `len` steps, and step n uses batch(n).

    A dataset that is smaller than one batch is used whole in every step.
    """

    def __init__(
        self,
        dataset: Examples,
        batch_size: int,
        seed: int = 0,
        augment: Augment | None = None,
        epochs: float = 1,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"batch_size should be at least 1, not {batch_size}.")
        if not len(dataset):
            raise UserError(f"{dataset.name} has no training images: choose another dataset to train on.")
        self.dataset, self.batch_size, self.seed = dataset, min(batch_size, len(dataset)), seed
        self.augment, self.epochs = augment or Augment(), epochs
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # of the last epoch, cached for speed

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.dataset) // self.batch_size

    def batch(self, step: int, part: slice | None = None) -> Batch:
        """The batch of a step, counted from 0 over all epochs; always the same for the same step.

        A `part` of it has the images that these places have in the whole batch, augmented in the same way.
        """
        if step < 0:
            raise UserError(f"step should be 0 or more, not {step}.")
        epoch, place = divmod(step, len(self))
        order, size, places = self._permutation(epoch), self.batch_size, part or slice(None)
        index = order[place * size : (place + 1) * size][places]
        self.dataset.expect(order[(place + 1) * size : (place + 2) * size][places])
        batch = self.dataset.gather(index + epoch * len(self.dataset) if self.dataset.endless else index)
        spec = self.augment.at(step / (self.epochs * len(self)))
        if spec == Augment():
            return batch
        return augment_batch(batch, spec, generator(self.seed, "augment", step), part, self.batch_size)

    def _permutation(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            shuffled = torch.randperm(len(self.dataset), generator=generator(self.seed, "shuffle", epoch))
            self._order = (epoch, shuffled.to(self.dataset.device))
        return self._order[1]


def in_order(
    dataset: Examples, batch_size: int, limit: int | None = None, part: slice | None = None
) -> Iterator[Batch]:
    """Every example once, in order and without augmentation, including the last partial batch.

    With a `limit`, that many evenly spaced examples; with a `part`, those of them at these places.
    """
    if batch_size < 1:
        raise UserError(f"batch_size should be at least 1, not {batch_size}.")
    chosen = dataset.numbers() if limit is None else dataset.sample(limit)
    chosen = chosen if part is None else chosen[part]
    parts = chosen.split(batch_size) if len(chosen) else ()
    for number, index in enumerate(parts, 1):
        for after in parts[number : number + 1]:
            dataset.expect(after)
        yield dataset.gather(index)


def augment_batch(batch: Batch, spec: Augment, random: Generator, part: slice | None = None, of: int = 0) -> Batch:
    """Augment the images of a batch, and their parts in the same way; see `augment` for a part of a batch."""
    if batch.parts is None:
        return replace(batch, images=augment(batch.images, spec, random, part, of))
    b, k, c, h, w = batch.parts.shape
    layers = torch.cat([batch.images[:, None], batch.parts], 1).flatten(1, 2)  # augmented alike
    augmented = augment(layers, spec, random, part, of).view(b, k + 1, c, h, w)
    return replace(batch, images=augmented[:, 0], parts=augmented[:, 1:])
