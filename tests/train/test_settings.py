"""Settings: fields are found by the end of their name at any depth, and assignments that make no sense are refused."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from capsnet.errors import UserError
from capsnet.search.space import read
from capsnet.train.config import Config
from capsnet.train.settings import leaves, read_values, train_flags, value_of, with_values


@dataclass(frozen=True)
class Inner:
    depth: int = 1
    lr: float = 0.5


@dataclass(frozen=True)
class Outer:
    lr: float = 0.1
    inner: Inner = field(default_factory=Inner)
    other: Inner = field(default_factory=Inner)


def test_fields_are_found_at_any_depth_and_by_the_end_of_their_name() -> None:
    outer = Outer()
    assert dict(leaves(outer)) == {
        "lr": float, "inner.depth": int, "inner.lr": float, "other.depth": int, "other.lr": float,
    }  # fmt: skip
    changed = with_values(outer, {"lr": 1.0, "inner.depth": 3, "other.lr": 2.0})
    assert changed == Outer(1.0, Inner(3), Inner(lr=2.0))
    assert (value_of(changed, "inner.depth"), value_of(changed, "inner.width")) == (3, None)
    assert train_flags(changed, outer) == ["--lr", "1.0", "--inner.depth", "3", "--other.lr", "2.0"]
    assert list(read(["lr=0.5..1", "inner.depth=1,2"], outer)) == ["lr", "inner.depth"]  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"depth is ambiguous: write one of inner\.depth, other\.depth"):
        read(["depth=1,2"], outer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lr=0.1+lr=0.2", "sets lr twice"),
        ("lr=0.1+bias", "takes a number"),
        ("bias+lr=0.1", "is not FIELD=VALUE"),
    ],
)
def test_assignments_that_make_no_sense_are_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_values(word, Config())
