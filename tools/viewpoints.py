"""Draw docs/images/viewpoints.png: every toy of the dataset `viewpoints`, and one through its views and lightings.

python tools/viewpoints.py
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from capsnet.data.synthetic.studio import render
from capsnet.data.synthetic.toys import toy
from capsnet.data.views import AZIMUTHS, CATEGORIES, ELEVATIONS, INSTANCES, LIGHTINGS
from capsnet.report.figures import save
from capsnet.report.figures.gallery import Caption, gallery

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "images" / "viewpoints.png"
Lines = dict[str, tuple[Tensor, Sequence[Caption]]]


def photo(category: str, instance: int, elevation: int = 35, azimuth: int = 40, lighting: int = 0) -> Tensor:
    """One stereo pair, uint8 (2, 96, 96)."""
    solids = toy(CATEGORIES.index(category), instance)
    return torch.from_numpy(render(solids, [elevation], azimuth)[0, lighting])


def captions(words: Iterable[object]) -> list[Caption]:
    return [Caption(str(word)) for word in words]


def lines() -> Lines:
    found: Lines = {}
    for category in CATEGORIES:
        toys = [photo(category, k, lighting=k % LIGHTINGS) for k in range(INSTANCES)]
        found[category] = torch.stack(toys), captions(range(INSTANCES)) if category == CATEGORIES[-1] else []
    azimuths = AZIMUTHS[::2]
    turned = torch.stack([photo("animal", 1, azimuth=a) for a in azimuths])
    found["azimuth"] = turned, captions(f"{a}°" for a in azimuths)
    found["elevation"] = torch.stack([photo("lorry", 3, e) for e in ELEVATIONS]), captions(f"{e}°" for e in ELEVATIONS)
    lamps = range(LIGHTINGS)
    found["lighting"] = torch.stack([photo("aeroplane", 0, lighting=k) for k in lamps]), captions(lamps)
    found["stereo pair"] = photo("human", 2, azimuth=20)[:, None], captions(["left", "right"])
    return found


def main() -> None:
    note = "Instances 4, 6, 7, 8 and 9 are for training, the others for testing."
    print(save(gallery("viewpoints: five categories of ten toys", note, lines()), PICTURE))


if __name__ == "__main__":
    main()
