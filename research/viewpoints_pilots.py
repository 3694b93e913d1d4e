"""The learning rate and the threshold of the experiment `viewpoints`, chosen on validation images.

    python research/viewpoints_pilots.py        about forty minutes on two cores; run it again to resume

Each network is trained at two learning rates on familiar azimuths, with a seed that the experiment does not use, and
evaluated after every epoch on the toys that are held out for validation; the CNN and EM routing also on images as they
are rendered, and on standardized images under constant light. The test images are not used. It writes
results/viewpoints-pilots.json; `capsnet.experiments.viewpoints` takes the rate with the lowest error of each network,
and a threshold that every network reaches.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from capsnet.data import Augment
from capsnet.experiments.viewpoints import NETWORKS, config_of
from capsnet.io import checkpoint
from capsnet.kernels.allocator import keep_memory
from capsnet.notice import say
from capsnet.train import loop, runs
from capsnet.train.config import Config

RESULT = Path(__file__).resolve().parent.parent / "results" / "viewpoints-pilots.json"
RATES = (0.001, 0.003)
EPOCHS = {"em": 7, "vb": 7}  # 20 for the others, which are faster
SEED = 100
PREPARED = ("as rendered", "standardized", "standardized, light varies")


def config_for(network: str, rate: float, prepared: str) -> Config:
    """The training of the experiment without its stop, and with other images if asked."""
    config = config_of(network, "azimuth", "day", SEED)
    config = replace(config, lr=rate, epochs=EPOCHS.get(network, 20), stop_at=0.0)
    if prepared != PREPARED[2]:
        config = replace(config, augment=Augment())
    return replace(config, data=config.data.replace(",standardize=1", "")) if prepared == PREPARED[0] else config


def train(network: str, rate: float, prepared: str) -> dict[str, Any]:
    """Train one network, and note its validation error after every epoch."""
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        loop.train_and_validate(loop.start(config_for(network, rate, prepared), run))
        epochs = [line for line in runs.read_metrics(run) if line["kind"] == "epoch"]
    return {
        "network": network,
        "learning_rate": rate,
        "images": prepared,
        "validation_errors_percent": [line["validation_error_percent"] for line in epochs],
        "seconds": epochs[-1]["seconds"],
    }


def trials(network: str) -> list[tuple[str, float, str]]:
    """Both rates with the experiment's images; for two networks other images as well."""
    found = [(network, rate, PREPARED[2]) for rate in RATES]
    return found + [(network, 0.001, prepared) for prepared in PREPARED[:2] if network in ("cnn", "em")]


def main() -> int:
    keep_memory()
    done: list[dict[str, Any]] = checkpoint.read_json(RESULT)["rows"] if RESULT.exists() else []
    for trial in [trial for network in sys.argv[1:] or NETWORKS for trial in trials(network)]:
        if not any((row["network"], row["learning_rate"], row["images"]) == trial for row in done):
            done.append(train(*trial))
            checkpoint.write_json(RESULT, {"data": "viewpoints, familiar azimuths", "seed": SEED, "rows": done})
            say(str(done[-1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
