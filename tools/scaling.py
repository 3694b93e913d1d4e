"""Draw docs/images/scaling.png: expected efficiency on many machines, from results/bench-processes.json.

capsnet bench --processes 1,2 --json > results/bench-processes.json
python tools/scaling.py && python tools/generate.py
"""

from __future__ import annotations

import sys

from capsnet.report import figures
from tables import ROOT, read
from tables.scaling import CORES, LINKS, MACHINES, expected, pairs


def main() -> int:
    panels = []
    for gigabits in LINKS:
        curves = []
        for cores in CORES:
            for (alone, step), colour in zip(
                pairs(read("bench-processes")["processes"]), figures.PALETTE, strict=False
            ):
                found = [100 * expected(step, alone["seconds"] / cores, n, gigabits).efficiency for n in MACHINES]
                name = step["network"] if cores == 1 else f"{step['network']}, {cores} times as fast"
                curves.append(figures.Line(name, list(MACHINES), found, colour, dashed=cores > 1, bare=cores > 1))
        panels.append(
            figures.Panel(f"{gigabits} Gbit/s", "machines", "efficiency, %", curves, log_x=True, from_zero=True,
                          ticks=MACHINES)
        )  # fmt: skip
    note = "Images per second and machine, relative to one machine; arithmetic from a measurement on one machine."
    figure = figures.lines("Expected efficiency on many machines", note, panels, 300, share=True)
    figures.save(figure, ROOT / "docs" / "images" / "scaling.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
