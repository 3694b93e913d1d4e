"""The group of one process, whose operations do nothing, and which group is the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.nn.shares import Share

Told = TypeVar("Told")


class Group:
    """A process by itself. `Processes` overrides what several of them do together."""

    rank = 0
    size = 1
    local_rank = 0
    restarts = 0
    doing = "the start"
    """Where the processes are, for messages."""
    bytes, exchanges = 0, 0
    """Bytes that this process has given to the others in sums and gathers, and the number of these."""
    waited = 0.0
    """Seconds in which this process has waited for the others."""

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and talks to the user: rank 0."""
        return self.rank == 0

    def shares(self, total: int, parts: int = 1, synchronised: bool = True) -> list[Share]:
        """The images of a batch of `total` that this process computes, one share for each part.

        The batch is divided into consecutive parts, and each part among the processes; sizes differ by one at most.

        >>> [(share.start, share.stop) for share in Group().shares(10, parts=3)]
        [(0, 3), (3, 6), (6, 10)]
        """
        if total < parts * self.size:
            raise UserError(
                f"a batch of {total} images cannot be divided into {parts} × {self.size} shares (--accumulate × "
                f"processes): use a larger --batch-size, or fewer of them."
            )
        return [self._share(start, stop, total, synchronised) for start, stop in divided(0, total, parts)]

    def _share(self, start: int, stop: int, total: int, synchronised: bool) -> Share:
        start, stop = divided(start, stop, self.size)[self.rank]
        return Share(start, stop, total)

    def from_leader(self, make: Callable[[], Told], patient: bool = False) -> Told:
        """A JSON value that rank 0 makes and tells the others; patience removes the limit for how long it takes."""
        return make()

    def tensors_from_leader(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of rank 0, on the CPU."""
        return dict(tensors)

    def rows(self, tensor: Tensor, total: int) -> Tensor:
        """Rows of all processes, each of which has computed its share of `total` rows, one after the other."""
        return tensor

    def align(self, model: nn.Module) -> None:
        """Give all processes the weights and statistics of rank 0."""

    def agree(self, facts: Mapping[str, str]) -> None:
        """Refuse to work together if a process knows other facts than rank 0: what each is called → its checksum."""

    def together(self, *wishes: Callable[[], bool]) -> Sequence[Callable[[], bool]]:
        """Whether any process wishes something, such as to stop, known to all of them after the same step."""
        return wishes

    def barrier(self) -> None:
        """Wait until all processes are here."""

    def gradients(self, parameters: Sequence[nn.Parameter]) -> Any:
        raise NotImplementedError("one process has nothing to add up")


def divided(start: int, stop: int, parts: int) -> list[tuple[int, int]]:
    """A range in consecutive parts, whose sizes differ by one at most.

    >>> divided(0, 10, 4)
    [(0, 2), (2, 5), (5, 7), (7, 10)]
    """
    n = stop - start
    return [(start + n * k // parts, start + n * (k + 1) // parts) for k in range(parts)]


ONE = Group()
_current: Group = ONE


def current() -> Group:
    """The group of this process."""
    return _current


@contextmanager
def member_of(group: Group) -> Iterator[Group]:
    """Inside the context, `group` is the current group of this process."""
    global _current
    before, _current = _current, group
    try:
        yield group
    finally:
        _current = before


def device_of(kind: str) -> torch.device:
    """The device of this kind that is this process's own: with CUDA, one for each process of a machine."""
    return torch.device(kind, current().local_rank) if kind == "cuda" and current().size > 1 else torch.device(kind)
