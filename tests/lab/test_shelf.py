"""The table of models: which test images suit a model."""

from __future__ import annotations

import pytest
import torch

from capsnet.data import Dataset
from capsnet.errors import UserError
from capsnet.lab.models import Shelf, dataset_of, has_examples
from capsnet.lab.samples import recorded_mistakes


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return Shelf()


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("quick-mnist", "mnist"),
        ("multimnist", "mnist"),
        ("expanded-cnn", "mnist"),
        ("viewpoints-matrix", "viewpoints:size=32"),
    ],
)
def test_test_images_are_prepared_as_those_that_a_model_was_trained_on(shelf: Shelf, model: str, data: str) -> None:
    assert dataset_of(shelf.find(model)) == data


def test_a_model_of_unknown_images_has_no_examples(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = shelf.find("cifar10")
    monkeypatch.setattr(type(entry), "trained_on", property(lambda _: "folder:/somewhere"))
    assert not has_examples(entry)
    with pytest.raises(UserError, match="no test images"):
        dataset_of(entry)


def test_the_card_knows_the_mistakes_among_the_same_images_only(shelf: Shelf) -> None:
    entry = shelf.find("viewpoints-matrix")
    images, labels = torch.zeros(2, 2, 32, 32, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
    same, other = (Dataset(images, labels, ("a", "b"), name) for name in ("viewpoints:size=32", "viewpoints:crop=32"))
    assert recorded_mistakes(entry, same)
    assert recorded_mistakes(entry, other) is None
