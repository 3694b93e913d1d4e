"""The constants of EM routing, chosen on validation images.

    python research/em_defaults.py        about eight minutes on two cores; run it again to resume

λ, the variance floor and the initial scale of the transformations are varied one at a time, then the best values
together. The quick network is trained for one epoch on 50,000 images of Fashion-MNIST and evaluated on the other 10,000
training images; the test set is not used. It writes results/em-defaults.json; `capsnet.routing.em` takes the values
with the fewest errors.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from capsnet.io import checkpoint
from capsnet.kernels.allocator import keep_memory
from capsnet.models.config import CapsNetConfig
from capsnet.notice import say
from capsnet.routing import em
from capsnet.train import loop
from capsnet.train.presets import get_preset

RESULT = Path(__file__).resolve().parent.parent / "results" / "em-defaults.json"
DATA = "fashion-mnist"
VALIDATION = 10_000
RATE = 0.003  # the middle of the arena's grid


@dataclass(frozen=True)
class Choice:
    """One setting of the constants."""

    inverse_temperature: float = 4.0
    floor: float = 0.01
    std: float = 0.1  # of W before training


CHOICES = [
    Choice(),
    *(Choice(inverse_temperature=value) for value in (0.5, 1.0, 2.0, 8.0)),
    *(Choice(floor=value) for value in (0.003, 0.03)),
    *(Choice(std=value) for value in (0.03, 0.3)),
    *(Choice(inverse_temperature=value, std=0.3) for value in (8.0, 16.0)),  # the two best ends of the lines above
    Choice(inverse_temperature=8.0, std=1.0),
    Choice(inverse_temperature=8.0, floor=0.03, std=0.3),
]


def train(choice: Choice) -> dict[str, Any]:
    """Train the quick network with these constants and count its errors on validation images."""
    em.FLOOR = choice.floor
    em.EMRouting.initial_std = lambda _: choice.std  # type: ignore[method-assign]
    quick = get_preset("quick")
    assert isinstance(quick.model, CapsNetConfig)
    model = replace(quick.model, routing=em.EMOptions(inverse_temperature=choice.inverse_temperature))
    config = replace(quick, data=DATA, model=model, lr=RATE, precision="fp32", epochs=1, validation=VALIDATION)
    with TemporaryDirectory() as folder:
        found = loop.train_and_validate(loop.start(config, Path(folder) / "run"))
    return {**asdict(choice), "wrong": found.errors, "images": found.n}


def main() -> int:
    keep_memory()
    done: list[dict[str, Any]] = checkpoint.read_json(RESULT)["rows"] if RESULT.exists() else []
    for choice in CHOICES:
        if not any(asdict(choice).items() <= row.items() for row in done):
            done.append(train(choice))
            checkpoint.write_json(RESULT, {"data": DATA, "epochs": 1, "learning_rate": RATE, "seed": 0, "rows": done})
            say(f"{len(done)} of {len(CHOICES)}: {done[-1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
