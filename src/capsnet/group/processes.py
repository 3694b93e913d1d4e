"""The group of several processes. The operations are those of `torch.distributed`: gloo on CPUs, NCCL on GPUs.

No operation sends Python objects, because that would be a pickle: values travel as JSON.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.group.base import ONE, Group, divided, member_of
from capsnet.group.gradients import Gradients
from capsnet.group.launch import Launch
from capsnet.group.watch import Lost, Watch
from capsnet.nn.shares import Share

Told = TypeVar("Told")


class Processes(Group):
    """One of several processes, after all of them have joined."""

    def __init__(self, launch: Launch, watch: Watch) -> None:
        self.rank, self.size, self.local_rank = launch.rank, launch.size, launch.local_rank
        self.restarts, self.watch = launch.restarts, watch
        self.wishes: Sequence[Callable[[], bool]] = ()
        self.granted: list[bool] = []
        self.bytes, self.exchanges, self.waited = 0, 0, 0.0

    # ---- Operations ----

    @contextmanager
    def waiting(self, patient: bool = False) -> Iterator[None]:
        """What happens inside waits for the other processes."""
        began = time.perf_counter()
        try:
            with self.watch.waiting(self.doing, patient), self.connected():
                yield
        finally:
            self.waited += time.perf_counter() - began

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Raise `Lost` if another process has gone."""
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise; they have no class for it
            raise Lost(f"the connection to another process was lost at {self.doing} ({first_line(error)}).") from None

    def count(self, tensor: Tensor) -> None:
        self.bytes, self.exchanges = self.bytes + tensor.nbytes, self.exchanges + 1

    def add_up(self, tensor: Tensor) -> Tensor:
        """The sum over the processes, in place; the same bits everywhere."""
        with self.waiting():
            dist.all_reduce(tensor)
        self.count(tensor)
        return tensor

    def gathered(self, tensor: Tensor) -> Tensor:
        """The tensors of all processes, stacked."""
        found = [torch.empty_like(tensor) for _ in range(self.size)]
        with self.waiting():
            dist.all_gather(found, tensor)
        self.count(tensor)
        return torch.stack(found)

    def sent(self, tensor: Tensor, patient: bool = False) -> Tensor:
        """The tensor of rank 0, in place."""
        with self.waiting(patient):
            dist.broadcast(tensor, 0)
        return tensor

    # ---- What a training needs ----

    def _share(self, start: int, stop: int, total: int, synchronised: bool) -> Share:
        start, stop = divided(start, stop, self.size)[self.rank]
        if not synchronised:
            return Share(start, stop, total)
        return Share(start, stop, total, self.gathered, lambda tensor: self.add_up(tensor.clone()))

    def from_leader(self, make: Callable[[], Told], patient: bool = False) -> Told:
        content = b""
        if self.leads:
            with member_of(ONE):  # rank 0 works alone meanwhile
                content = json.dumps(make()).encode()
        length = self.sent(torch.tensor([len(content)]), patient=patient)
        told = torch.zeros(int(length), dtype=torch.uint8)
        if self.leads:
            told.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        return json.loads(bytes(self.sent(told).numpy()))

    def tensors_from_leader(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        kinds: dict[str, Any] = {n: (str(t.dtype).removeprefix("torch."), list(t.shape)) for n, t in tensors.items()}
        found = {}
        for name, (dtype, shape) in self.from_leader(lambda: kinds).items():
            like = torch.empty(shape, dtype=getattr(torch, dtype))
            found[name] = self.sent(tensors[name].cpu().contiguous() if self.leads else like)
        return found

    def rows(self, tensor: Tensor, total: int) -> Tensor:
        start, stop = divided(0, total, self.size)[self.rank]
        kind = torch.uint8 if tensor.dtype == torch.bool else tensor.dtype
        found = torch.zeros(total, *tensor.shape[1:], dtype=kind)
        found[start:stop] = tensor.cpu()
        return self.add_up(found).to(tensor.dtype)

    @torch.no_grad()
    def align(self, model: nn.Module) -> None:
        for tensor in model.state_dict().values():
            self.sent(tensor)

    def agree(self, facts: Mapping[str, str]) -> None:
        ours = json.dumps(dict(facts)).encode()
        longest = int(self.gathered(torch.tensor([len(ours)])).max())
        padded = torch.tensor(list(ours.ljust(longest)), dtype=torch.uint8)
        told = [json.loads(bytes(row.numpy())) for row in self.gathered(padded)]
        for rank, theirs in enumerate(told):
            if other := [name for name in told[0] | theirs if told[0].get(name) != theirs.get(name)]:
                raise UserError(
                    f"rank {rank} has other {' and other '.join(other)} than rank 0: give all processes the same, "
                    f"because they would compute something else."
                )

    def together(self, *wishes: Callable[[], bool]) -> Sequence[Callable[[], bool]]:
        self.wishes, self.granted = wishes, [False] * len(wishes)
        return [partial(self.is_granted, number) for number in range(len(wishes))]

    def is_granted(self, number: int) -> bool:
        return self.granted[number]

    def settle(self, values: Sequence[float]) -> list[float]:
        """The sums of a few numbers over the processes; on the way all learn the wishes of each."""
        told = torch.tensor([*values, *(float(wish()) for wish in self.wishes)], dtype=torch.float64)
        sums = self.add_up(told).tolist()
        self.granted = [votes > 0 for votes in sums[len(values) :]]
        return sums[: len(values)]

    def barrier(self) -> None:
        with self.waiting():
            dist.all_reduce(torch.zeros(1))

    def gradients(self, parameters: Sequence[nn.Parameter]) -> Gradients:
        return Gradients(parameters, self)


def first_line(error: BaseException) -> str:
    """The end of a message of gloo, which begins with the place in its source code.

    >>> first_line(RuntimeError("[a/pair.cc:534] Connection closed by peer [127.0.0.1]:2"))
    'Connection closed by peer [127.0.0.1]:2'
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0].partition("] ")[2] or lines[0] if lines[0].startswith("[") else lines[0]
