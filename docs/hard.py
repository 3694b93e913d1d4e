"""What several networks all have wrong: digits that no setting will get right.

    python docs/hard.py runs/a runs/b runs/c        trainings that held the same digits back

Written are results/search/best-hard.json, from which docs/generate.py makes a table, and a picture of the digits of
which the last network is most certain.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from capsnet import checkpoint, figures
from capsnet.cli.use import birth_of, splits_for
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation, evaluate

ROOT = Path(__file__).resolve().parent.parent
RESULT, PICTURE = ROOT / "results" / "search" / "best-hard.json", ROOT / "docs" / "images" / "hard-digits.png"
SHOWN = 24


def common(judged: list[Evaluation]) -> torch.Tensor:
    """Which examples all of the networks have wrong."""
    return torch.stack([evaluation.wrong for evaluation in judged]).all(0)


def main(folders: list[Path]) -> int:
    births = [birth_of(str(folder)) for folder in folders]
    held_back = splits_for(checkpoint.load(folders[0]), str(folders[0]), None).validation
    if len({(b["config"]["seed"], b["config"]["validation"]) for b in births}) > 1 or not len(held_back):
        raise UserError("these trainings did not hold the same digits back, so their mistakes cannot be compared.")
    judged = [evaluate(checkpoint.load(folder), held_back) for folder in folders]
    wrong = common(judged)
    alike = torch.stack([evaluation.lengths.argmax(1) == judged[0].lengths.argmax(1) for evaluation in judged]).all(0)
    networks = [
        {**birth, "validation_error_percent": evaluation.error_percent, "wrong": evaluation.errors}
        for birth, evaluation in zip(births, judged, strict=True)
    ]
    found = {
        "held_back": len(held_back),
        "wrong_by_all": int(wrong.sum()),
        "wrong_by_all_in_the_same_way": int((wrong & alike).sum()),
        "wrong_by_any": int(torch.stack([evaluation.wrong for evaluation in judged]).any(0).sum()),
        "places": wrong.nonzero()[:, 0].tolist(),  # in the held-back part
        "networks": networks,
    }
    checkpoint.write_json(RESULT, found)
    last = judged[-1]
    those = replace(
        last, lengths=last.lengths[wrong], targets=last.targets[wrong], predicted=last.predicted[wrong], measures={}
    )
    images = held_back.gather(wrong.nonzero()[:, 0]).images
    title = f"Taken for something else by all {len(folders)} networks"
    figures.save(figures.mistakes(images, those, SHOWN, title), PICTURE)
    print(f"{found['wrong_by_all']} of {len(held_back):,} are wrong by all: {RESULT}, {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(word) for word in sys.argv[1:]]))
