"""Draw the time of a training step by part, one picture for each kind of processor, from results/ into docs/images.

    capsnet bench --json > results/bench.json          on a processor without bfloat16
    capsnet bench --json > results/bench-bf16.json     on a processor with bfloat16 in AMX tiles
    capsnet bench --json > results/bench-amd.json      on a processor with bfloat16 in AVX-512
    python tools/step_bills.py

Results of `capsnet bench --quick` have no breakdown by part: they are skipped with a message.
"""

from __future__ import annotations

import json
from pathlib import Path

from capsnet.report import figures

ROOT = Path(__file__).parents[1]
PICTURES = {"bench": "step-bill", "bench-bf16": "step-bill-bf16", "bench-amd": "step-bill-amd"}


def main() -> None:
    for name, picture in PICTURES.items():
        result = json.loads((ROOT / "results" / f"{name}.json").read_text())
        if "breakdown_ms" not in result:
            print(f"results/{name}.json has no breakdown by part: measure it without --quick")
            continue
        target = ROOT / "docs" / "images" / f"{picture}.svg"
        figures.save(figures.step_bill(result), target)
        print(target.relative_to(ROOT))


if __name__ == "__main__":
    main()
