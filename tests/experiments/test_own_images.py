"""Small folders: the candidates fit the images, the drawings differ by class, and findings follow the numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from capsnet.experiments.core.plan import Record
from capsnet.experiments.own_images import (
    CANDIDATES,
    FOLDERS,
    SHAPES,
    OwnImages,
    candidate,
    chosen,
    draw_shape,
    sentence,
)
from capsnet.models.registry import build, parameters


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_takes_the_images_of_every_folder(folder: object, name: str) -> None:
    model = build(candidate(folder, name), device=torch.device("meta"))  # type: ignore[arg-type]
    channels, height, width = model.config.image_shape
    assert (channels, height, width) == (folder.channels, folder.side, folder.side)  # type: ignore[attr-defined]
    images = torch.empty(2, channels, height, width, device="meta")
    assert model(images).activations.shape == (2, folder.classes)  # type: ignore[attr-defined]


def test_the_cnn_is_as_large_as_the_capsules() -> None:
    for folder in FOLDERS:
        cnn, capsules = parameters(candidate(folder, "cnn")), parameters(candidate(folder, "capsules"))
        assert abs(cnn / capsules - 1) < 0.02


def test_no_row_looks_at_the_test_images() -> None:
    rows = OwnImages().rows("hour", 0)
    assert len(rows) == len(FOLDERS) * len(CANDIDATES)
    assert all(row.validated for row in rows)


def test_a_drawing_depends_on_its_seed_and_its_class_alone() -> None:
    drawn = [draw_shape(np.random.default_rng(3), label) for label in (*range(len(SHAPES)), 0)]
    assert np.array_equal(drawn[0], drawn[-1])
    for one in range(len(SHAPES)):
        assert drawn[one].shape == (48, 48, 3)
        assert not any(np.array_equal(drawn[one], drawn[two]) for two in range(one))


def test_findings_are_made_from_the_numbers() -> None:
    errors = {"scans": (30.0, 20.0, 21.0, 22.0, 25.0), "shapes": (10.0, 4.0, 5.0, 6.0, 5.0)}
    groups = {
        f"{folder}-{name}": [Record(method=f"{folder}-{name}", outcome={"error_percent": error})]
        for folder, found in errors.items()
        for name, error in zip(CANDIDATES, found, strict=True)
    }
    assert sentence(FOLDERS[0], groups).startswith("synthetic scans: CapsNet, convolutional stem 30.00 %, CapsNet, res")
    assert "is the one with the residual stem (12.00 %)" in chosen(groups)
    assert "has 14.00 % (CNN of similar size)" in chosen(groups)


def test_a_network_that_diverged_or_was_not_trained_is_never_the_better_one() -> None:
    names = [name for name in CANDIDATES if name != "resnet"]
    records = [
        Record(method=f"scans-{name}", shown={"folder": "scans"}, outcome={"error_percent": 9.0}) for name in names
    ]
    diverged = [replace(r, outcome={"diverged": "…"}) if r.method == "scans-residual" else r for r in records]
    first, mean = OwnImages().findings(diverged)
    assert "CapsNet, residual stem diverged" in first
    assert "resnet" not in first
    assert "with the convolutional stem (9.00 %)" in mean
    assert OwnImages().pictures(diverged)
    assert len(OwnImages().findings(diverged[1:2])) == 1


def test_it_writes_its_folders_once(tmp_path: Path) -> None:
    from capsnet.experiments.own_images import write_folders

    write_folders(tmp_path, "smoke")
    first = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
    assert len(first) == 2 * (40 + 40 + 20)
    write_folders(tmp_path, "smoke")
    assert first == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.png")}
