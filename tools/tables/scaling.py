"""Several processes: what was measured, and what is expected on many machines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from capsnet.bench_processes import CORES, LINKS, MACHINES, expected, pairs
from tables import ROOT, read, table
from tables.speed import machine

NAME = "bench-processes"
MISSING = f"Not measured yet: `capsnet bench --processes 1,2 --json > results/{NAME}.json`.\n"


def is_measured() -> bool:
    return (ROOT / "results" / f"{NAME}.json").exists()


def measured() -> str:
    """Training steps by one process and by several."""
    if not is_measured():
        return MISSING
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


def scaling() -> str:
    """The expected efficiency on many machines."""
    if not is_measured():
        return MISSING
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
    return (picture if (ROOT / "docs" / "images" / "scaling.png").exists() else "") + table(columns, rows)


def cells(step: Mapping[str, Any], alone: float, gigabits: float) -> list[str]:
    """Efficiency by number of machines, and what the last of them waits for."""
    found = [expected(step, alone, n, gigabits) for n in MACHINES[1:]]
    waits = [f"{1e3 * seconds:.0f}" for seconds in (found[-1].exposed, found[-1].blocking)]
    return [*(f"{100 * each.efficiency:.0f} %" for each in found), *waits]


TABLES: dict[str, Callable[[], str]] = {"processes": measured, "scaling": scaling}
