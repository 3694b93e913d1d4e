"""Batches out of a data set that lies on the device, or is made there: no worker processes, no state.

The batch of a step is a function of (seed, step) alone (and of the number of epochs, where the augmentation ends
before they do), so a run that is resumed at step 7,003 sees what it would have seen. Training drops the incomplete
tail of each shuffled pass; evaluation drops nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Generator, Tensor

from capsnet.data.augment import Augment, augment
from capsnet.data.examples import Batch, Examples
from capsnet.data.seeds import generator
from capsnet.errors import UserError


class Batches:
    """The training batches of a data set, by number: `len` of them are one epoch, and step n has batch(n)."""

    def __init__(
        self,
        dataset: Examples,
        batch_size: int,
        seed: int = 0,
        augment: Augment | None = None,
        shuffle: bool = True,
        epochs: float = 1,
    ) -> None:
        if batch_size < 1:
            raise UserError(f"a batch needs at least 1 image and batch_size is {batch_size}.")
        if not len(dataset):
            raise UserError(f"{dataset.name} has no images to train on: choose other data to train with.")
        if batch_size > len(dataset):
            raise UserError(
                f"a batch of {batch_size} does not fit into the {len(dataset)} training images "
                f"of {dataset.name}: choose a --batch-size of at most {len(dataset)}."
            )
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.augment, self.shuffle, self.epochs = augment or Augment(), shuffle, epochs
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))  # the last epoch's, kept only for speed

    def __len__(self) -> int:
        """Steps in an epoch."""
        return len(self.dataset) // self.batch_size

    def batch(self, step: int) -> Batch:
        """The batch of a step, counted from 0 over all epochs; the same whenever it is asked for."""
        if step < 0:
            raise UserError(f"steps are counted from 0 and this one is {step}.")
        epoch, place = divmod(step, len(self))
        index = self._permutation(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        batch = self.dataset.gather(index + epoch * len(self.dataset) if self.dataset.endless else index)
        spec = self.augment.at(step / (self.epochs * len(self)))
        return batch if spec == Augment() else vary(batch, spec, generator(self.seed, "augment", step))

    def _permutation(self, epoch: int) -> Tensor:
        if self._order[0] != epoch:
            n, device = len(self.dataset), self.dataset.device
            shuffled = torch.randperm(n, generator=generator(self.seed, "shuffle", epoch))
            self._order = (epoch, (shuffled if self.shuffle else torch.arange(n)).to(device))
        return self._order[1]


def in_order(dataset: Examples, batch_size: int) -> Iterator[Batch]:
    """Everything once, in order and as it is, the last partial batch too: for evaluation."""
    if batch_size < 1:
        raise UserError(f"a batch needs at least 1 image and batch_size is {batch_size}.")
    for index in dataset.numbers().split(batch_size) if len(dataset) else ():
        yield dataset.gather(index)


def vary(batch: Batch, spec: Augment, random: Generator) -> Batch:
    """A batch with its images varied; the digits that an image is made of move with it."""
    if batch.parts is None:
        return replace(batch, images=augment(batch.images, spec, random))
    b, k, c, h, w = batch.parts.shape
    layers = torch.cat([batch.images[:, None], batch.parts], 1).flatten(1, 2)  # channels of one image move together
    varied = augment(layers, spec, random).view(b, k + 1, c, h, w)
    return replace(batch, images=varied[:, 0], parts=varied[:, 1:])
