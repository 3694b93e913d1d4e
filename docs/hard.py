"""What several networks all have wrong: digits that no setting will get right.

    python docs/hard.py runs/a runs/b runs/c        trainings that held the same digits back

Written are results/search/best-hard.json, from which docs/generate.py makes a paragraph, and a picture of the digits of
which the last network is most certain.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor

from capsnet import checkpoint, figures
from capsnet.cli.use import birth_of, splits_for
from capsnet.data import Examples
from capsnet.errors import UserError
from capsnet.evaluation import Evaluation, evaluate

ROOT = Path(__file__).resolve().parent.parent
RESULT, PICTURE = ROOT / "results" / "search" / "best-hard.json", ROOT / "docs" / "images" / "hard-digits.png"
SHOWN = 24
SPLIT = ("data", "seed", "validation", "validation_choice")  # what decides which digits are held back


def held_back_by(folders: list[Path], births: list[dict[str, Any]]) -> Examples:
    """The digits that all of these trainings held back."""
    if len(folders) < 2:
        raise UserError("name two trainings or more: what one network has wrong says nothing about the digits.")
    split = {tuple(birth["config"][name] for name in SPLIT) for birth in births}
    if len(split) > 1 or not births[0]["config"]["validation"]:
        raise UserError("these trainings did not hold the same digits back, so their mistakes cannot be compared.")
    return splits_for(checkpoint.load(folders[0]), str(folders[0]), None).validation


def compared(births: list[dict[str, Any]], judged: list[Evaluation]) -> dict[str, Any]:
    """How many are wrong by one network, by any and by all, and which the last ones are."""
    wrong = torch.stack([evaluation.wrong for evaluation in judged])
    named = torch.stack([evaluation.lengths.argmax(1) for evaluation in judged])
    return {
        "held_back": judged[0].n,
        "wrong_by_any": int(wrong.any(0).sum()),
        "wrong_by_all": int(wrong.all(0).sum()),
        "wrong_by_all_in_the_same_way": int((wrong.all(0) & (named == named[0]).all(0)).sum()),
        "places": wrong.all(0).nonzero()[:, 0].tolist(),  # in the part that was held back
        "networks": [
            {**birth, "validation_error_percent": evaluation.error_percent, "wrong": evaluation.errors}
            for birth, evaluation in zip(births, judged, strict=True)
        ],
    }


def picture(images: Tensor, last: Evaluation, places: list[int], networks: int) -> Figure:
    """Those digits, with what the last network makes of them."""
    parts = {name: getattr(last, name)[places] for name in ("lengths", "targets", "predicted")}
    title = f"Taken for something else by all {networks} networks"
    return figures.mistakes(images, replace(last, **parts, measures={}), SHOWN, title)


def write(folders: list[Path]) -> None:
    births = [birth_of(str(folder)) for folder in folders]
    held_back = held_back_by(folders, births)
    judged = [evaluate(checkpoint.load(folder), held_back) for folder in folders]
    found = compared(births, judged)
    if not found["wrong_by_all"]:
        raise UserError("no digit is wrong by all of these networks, so there is nothing to show.")
    checkpoint.write_json(RESULT, found)
    images = held_back.gather(torch.tensor(found["places"])).images
    figures.save(picture(images, judged[-1], found["places"], len(folders)), PICTURE)
    print(f"{found['wrong_by_all']} of {found['held_back']:,} are wrong by all: {RESULT}, {PICTURE}")


def main(words: list[str]) -> int:
    try:
        write([Path(word) for word in words])
    except UserError as error:
        print(f"hard: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
