"""One step of a training: the losses and gradients of its batch, and the optimiser.

Batch, augmentation, dropout and learning rate are functions of (seed, step). Where the batch is divided among processes
or computed in parts, the gradients of the shares add up to those of the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from capsnet.data import Batch
from capsnet.data.seeds import generator
from capsnet.models.base import Losses, Model
from capsnet.nn.losses import teacher_loss
from capsnet.nn.shares import within
from capsnet.train import precision
from capsnet.train.config import Config
from capsnet.train.runs import Run, gone_bad


def compute_loss(
    model: Model, batch: Batch, config: Config, teacher: Model | None = None, progress: float = 1.0
) -> Losses:
    """The model's own loss and, with a teacher, how far the activations are from the teacher's."""
    output = model(batch.images)
    losses = model.loss(output, batch, config.loss, progress)
    if teacher is None:
        return losses
    with torch.no_grad():
        taught = teacher(batch.images).activations
    apart = teacher_loss(output.activations, taught)
    return losses._replace(total=losses.total + config.loss.teacher * apart, teacher=apart)


def learning_rate(config: Config, step: int, steps: int) -> float:
    """The learning rate at a step, of `steps` in total."""
    if config.schedule == "exponential":
        return max(config.lr * 0.96 ** (step / 2000), 1e-6)
    if config.schedule == "one-cycle":
        peak = max(1, round(config.warmup * steps))
        if step < peak:
            return config.lr * (0.04 + 0.96 * step / peak)
        done = (step - peak) / max(1, steps - peak)
        return config.lr * (0.001 + 0.999 * (1 + math.cos(math.pi * done)) / 2)
    return config.lr


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the random numbers inside the context and restore the caller's generator afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def train_step(run: Run) -> Losses:
    """One batch and one optimiser step."""
    config, step = run.config, run.step
    run.model.train()
    run.optimizer.zero_grad(set_to_none=True)
    losses = shared_gradients(run) if run.group.size > 1 or config.accumulate > 1 else gradients(run)
    if config.clip:
        torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip)
    for each in run.optimizer.param_groups:
        each["lr"] = learning_rate(config, step, run.steps)
    run.optimizer.step()
    run.step += 1
    update_average(run)
    return losses


def gradients(run: Run, part: slice | None = None, weight: float = 1.0) -> Losses:
    """Add the gradients of a step's batch, or of a part of it that has this weight; returns the mean losses."""
    config, step = run.config, run.step
    batch = run.batches.batch(step, part)
    dropout = generator(config.seed, "dropout", step).initial_seed()
    with own_randomness(dropout, run.device), precision.autocast(config.precision, run.device):
        losses = compute_loss(run.model, batch, config, run.teacher, step / run.steps)
    if run.group.size == 1:
        require_finite_loss(run, losses.total.item())
    (losses.total if weight == 1 else losses.total * weight).backward()
    return losses


def shared_gradients(run: Run) -> Losses:
    """The gradients of a step's whole batch, from the shares of all processes and parts; returns its mean losses.

    A loss is a mean over images, so a share counts by its number of images: L = Σ_r (n_r / n) L_r.
    """
    run.group.doing = f"step {run.step}"
    shares = run.group.shares(run.batches.batch_size, run.config.accumulate, run.config.sync_norm)
    means: list[float] = [0.0] * 4
    for share in shares:
        if run.gradients and share is shares[-1]:
            run.gradients.last()
        with within(share):
            weight = len(share) / share.total
            losses = gradients(run, slice(share.start, share.stop), weight)
        parts = (0.0 if part is None else part.item() for part in losses)
        means = [mean + weight * part for mean, part in zip(means, parts, strict=True)]
    means = run.gradients.finish(means) if run.gradients else means
    require_finite_loss(run, means[0])
    total, classification, reconstruction, teacher = map(torch.tensor, means)
    return Losses(total, classification, reconstruction, teacher if run.teacher else None)


def require_finite_loss(run: Run, loss: float) -> None:
    if not math.isfinite(loss):
        raise gone_bad(run, f"the loss became {loss} at step {run.step}")


@torch.no_grad()
def update_average(run: Run) -> None:
    """Update the exponential moving average of the weights; its horizon grows from 0."""
    if not run.config.average:
        return
    decay = min(run.config.average, run.step / (run.step + 9))
    for name, value in run.model.state_dict().items():
        if name not in run.average or not value.is_floating_point():
            run.average[name] = value.clone()
        else:
            run.average[name].lerp_(value, 1 - decay)
