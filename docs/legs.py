"""Write down trainings of the paper's network, most of them from leg to leg, for a table: results/legs.json.

    python docs/legs.py "shifts alone" runs/a "from there: turns besides" runs/b+runs/c

Each is said in a few words, and whether it began with the weights of the one before; runs joined by + are one leg in
two parts. Beside the errors stands what became of the first convolution: how much of its output is zero.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from capsnet import checkpoint
from capsnet.cli.use import splits_for
from capsnet.data import in_order
from capsnet.evaluation import evaluate

ROOT = Path(__file__).resolve().parent.parent


@torch.inference_mode()
def leg(what: str, folders: list[str]) -> dict[str, Any]:
    """A leg's errors and certificate; of one in parts, the last part's."""
    print(f"{folders[-1]}: looking at it", file=sys.stderr)
    model = checkpoint.load(folders[-1])
    validation = splits_for(model, folders[-1], None).validation
    zero = [(model.stem(batch.images) == 0).float().mean() for batch in in_order(validation, 500)]
    births = [checkpoint.read_tensors(checkpoint.model_file(folder))[1]["certificate"] for folder in folders]
    return {
        "what": what,
        "epochs": round(sum(birth["epochs"] for birth in births), 4),
        "validation": evaluate(model, validation).summary(),
        "stem_zero_percent": round(100 * float(torch.stack(zero).mean()), 1),
        "primary_weight_rms": round(float(model.primary.conv.weight.square().mean().sqrt()), 4),
        **checkpoint.read_json(Path(folders[-1]) / "results.json"),
    }


def main(words: list[str]) -> int:
    rows = [leg(what, runs.split("+")) for what, runs in zip(words[::2], words[1::2], strict=True)]
    note = "The paper's network with a routing bias: a training in legs, then one of its own; seed 0, 5,000 held back."
    checkpoint.write_json(ROOT / "results" / "legs.json", {"note": note, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
