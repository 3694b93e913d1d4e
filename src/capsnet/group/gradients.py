"""Gradients added over the processes while the backward pass still runs.

The parameters, last layer first, fill buckets of about four megabytes. As soon as the backward pass has computed all
gradients of a bucket, its sum over the processes starts in the background, and the backward pass continues with the
layers before it. So the network sends while the processor computes, and only the last bucket has to be waited for.

`DistributedDataParallel` does the same, but it arranges its buckets anew after the first step. Then the order of a sum
of three or more processes depends on when a run was started, and a run that was resumed would not end with the same
bits. Here the buckets depend on the network alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from capsnet.group.processes import Processes

BUCKET = 4 * 2**20  # bytes; small enough to start early, large enough for the latency of a network


@dataclass
class Bucket:
    """Parameters whose gradients travel together."""

    parameters: list[nn.Parameter]
    flat: Tensor = field(init=False)  # their gradients, one after the other
    views: list[Tensor] = field(init=False)
    ready: set[int] = field(default_factory=set)
    work: Any = None

    def __post_init__(self) -> None:
        sizes = [p.numel() for p in self.parameters]
        self.flat = torch.zeros(sum(sizes), dtype=self.parameters[0].dtype, device=self.parameters[0].device)
        self.views = [
            part.as_strided(p.shape, p.stride(), part.storage_offset())  # laid out like the parameter
            for part, p in zip(self.flat.split(sizes), self.parameters, strict=True)
        ]

    def fill(self) -> None:
        for p, view in zip(self.parameters, self.views, strict=True):
            view.zero_() if p.grad is None else view.copy_(p.grad)


def in_buckets(parameters: Sequence[nn.Parameter]) -> list[Bucket]:
    """The parameters in buckets, last first; the parameters of a bucket have one dtype and one device."""
    groups: list[list[nn.Parameter]] = []
    room = 0
    for p in reversed(parameters):
        if not groups or room < p.nbytes or (p.dtype, p.device) != (groups[-1][0].dtype, groups[-1][0].device):
            groups.append([])
            room = BUCKET
        groups[-1].append(p)
        room -= p.nbytes
    return [Bucket(group) for group in groups]


class Gradients:
    """The gradients of some parameters. In a step: `begin`, the backward passes (`last` before the last), `finish`."""

    def __init__(self, parameters: Sequence[nn.Parameter], group: Processes) -> None:
        self.group, self.parameters = group, list(parameters)
        self.buckets = in_buckets(self.parameters)
        self.launched, self.armed = 0, False
        for bucket in self.buckets:
            for number, p in enumerate(bucket.parameters):
                p.register_post_accumulate_grad_hook(self.note(bucket, number))

    def note(self, bucket: Bucket, number: int) -> Any:
        """The hook of a parameter, called when its gradient is complete."""

        def ready(_: Tensor) -> None:
            if self.armed:
                bucket.ready.add(number)
                self.launch()

        return ready

    def last(self) -> None:
        """The backward pass that follows completes the gradients of this step."""
        self.armed, self.launched = True, 0

    def launch(self, all_of_them: bool = False) -> None:
        """Start the sums of complete buckets, in the same order in every process."""
        while self.launched < len(self.buckets):
            bucket = self.buckets[self.launched]
            if not all_of_them and len(bucket.ready) < len(bucket.parameters):
                return
            bucket.fill()
            with self.group.connected():
                bucket.work = dist.all_reduce(bucket.flat, async_op=True)
            self.group.count(bucket.flat)
            self.launched += 1

    def finish(self, values: Sequence[float]) -> list[float]:
        """Put the sums into the parameters; returns the sums of `values`, a few numbers of each process.

        A parameter has a gradient if it has one in any process.
        """
        self.armed = False
        mine = [float(p.grad is not None) for p in self.parameters]
        with self.group.waiting():
            self.launch(all_of_them=True)
            for bucket in self.buckets:
                bucket.work.wait()
                bucket.work = None
                bucket.ready.clear()
        sums = self.group.settle([*values, *mine])
        used = {id(p) for p, any_of in zip(self.parameters, sums[len(values) :], strict=True) if any_of}
        for bucket in self.buckets:
            for p, view in zip(bucket.parameters, bucket.views, strict=True):
                p.grad = view if id(p) in used else None
        return sums[: len(values)]
