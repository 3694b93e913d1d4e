"""Several processes: what was measured, and what is expected on many machines.

`expected` extends the measurement to many machines by arithmetic. A step of one machine takes t; on N of them

    ring(S, m) = 2 (N − 1) (S / (N β) + m λ)      m sums of S bytes in all; links of β bytes/s and a latency of λ
    exposed    = max(ring(last bucket, 1), ring(gradients, buckets) − ⅔ t)     they travel while backward runs, ⅔ t
    blocking   = ring(others, m)                  statistics of norms and losses, for which everything waits
    efficiency = t / (t + exposed + blocking)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tables import read, table
from tables.speed import machine

NAME = "bench-processes"

LATENCY = 50e-6  # λ: seconds from one machine to the next by TCP, an assumption
BACKWARD = 2 / 3  # share of a step in which gradients can travel: forward, and twice as much backward
MACHINES = (1, 2, 4, 8, 16, 32, 64)
LINKS = (10, 100)  # gigabit per second
CORES = (1, 32)  # of a machine, as a multiple of what a process had when it was measured


@dataclass(frozen=True)
class Expected:
    """The arithmetic for one number of machines: seconds, and t / (t + exposed + blocking)."""

    machines: int
    alone: float
    exposed: float
    blocking: float

    @property
    def efficiency(self) -> float:
        return self.alone / (self.alone + self.exposed + self.blocking)


def measured() -> str:
    """Training steps by one process and by several."""
    result = read(NAME)
    rates = {row["network"]: row["images_per_second"] for row in result["processes"] if row["processes"] == 1}
    rows = [
        (
            f"`{row['network']}`",
            str(row["processes"]),
            f"{row['seconds']:.3f}",
            f"{row['images_per_second']:,.0f}",
            f"{100 * row['images_per_second'] / row['processes'] / rates[row['network']]:.0f} %",
            f"{row['waiting_percent']:.0f} %",
            *(
                (f"{row['gradient_bytes'] / 1e6:.1f} in {row['buckets']}", others_of(row))
                if row["processes"] > 1
                else ("–", "–")
            ),
        )
        for row in result["processes"]
    ]
    columns = [
        "preset",
        "processes",
        "step, s",
        "images/s",
        "efficiency",
        "waiting",
        "gradients, MB, in sums",
        "statistics, MB, in sums",
    ]
    return f"{machine(result)} per process\n\n{table(columns, rows)}"


def others_of(row: dict[str, Any]) -> str:
    return f"{row['other_bytes'] / 1e6:.3f} in {row['other_exchanges']}"


def expected(step: Mapping[str, Any], alone: float, machines: int, gigabits: float) -> Expected:
    """A step on that many machines, from one measured in several processes and its seconds in one."""

    def ring(size: float, exchanges: int) -> float:
        return 2 * (machines - 1) * (size / (machines * gigabits * 1e9 / 8) + exchanges * LATENCY)

    gradients = ring(step["gradient_bytes"], step["buckets"])
    exposed = max(ring(step["last_bucket_bytes"], 1), gradients - BACKWARD * alone)
    return Expected(machines, alone, exposed, ring(step["other_bytes"], step["other_exchanges"]))


def pairs(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """For each network, its step in one process and in the most processes."""
    networks = dict.fromkeys(row["network"] for row in rows)
    groups = [sorted((r for r in rows if r["network"] == name), key=lambda r: int(r["processes"])) for name in networks]
    return [(group[0], group[-1]) for group in groups if group[0]["processes"] == 1 < group[-1]["processes"]]


def scaling() -> str:
    """The expected efficiency on many machines."""
    rows = [
        (f"`{step['network']}`", f"{cores}", f"{gigabits} Gbit/s", *cells(step, alone["seconds"] / cores, gigabits))
        for alone, step in pairs(read(NAME)["processes"])
        for cores in CORES
        for gigabits in LINKS
    ]
    last = MACHINES[-1]
    columns = [
        "preset",
        "machine",
        "link",
        *map(str, MACHINES[1:]),
        f"exposed at {last}, ms",
        f"blocking at {last}, ms",
    ]
    picture = "![Expected efficiency against the number of machines](images/scaling.png)\n\n"
    return picture + table(columns, rows)


def cells(step: Mapping[str, Any], alone: float, gigabits: float) -> list[str]:
    """Efficiency by number of machines, and what the last of them waits for."""
    found = [expected(step, alone, n, gigabits) for n in MACHINES[1:]]
    waits = [f"{1e3 * seconds:.0f}" for seconds in (found[-1].exposed, found[-1].blocking)]
    return [*(f"{100 * each.efficiency:.0f} %" for each in found), *waits]


TABLES: dict[str, Callable[[], str]] = {"processes": measured, "scaling": scaling}
