"""The scikit-learn estimator: its contract, images of every layout, labels of every kind, and its training."""

from __future__ import annotations

import pickle
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from capsnet import UserError
from capsnet.models.config import CNNConfig
from capsnet.routing.options import DynamicOptions
from capsnet.sklearn import CapsNetClassifier, padded_size, suitable_network
from tiny_models import TINY

pytestmark = pytest.mark.usefixtures("one_thread")
ENOUGH_TRAINING = "check_classifiers_train"  # asks for 83 % right answers, for which one epoch is not enough


def checks(estimator: CapsNetClassifier, leave_out: str = "") -> Any:
    """Parametrises a test with scikit-learn's own checks of an estimator."""
    found = [(name(check), estimator, check) for estimator, check in estimator_checks_generator(estimator)]
    chosen = [pytest.param(*rest, id=called) for called, *rest in found if called != leave_out]
    return pytest.mark.parametrize(("estimator", "check"), chosen)


def name(check: Any) -> str:
    return check.func.__name__ if hasattr(check, "func") else check.__name__


def halves(n: int = 60, side: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Noise whose left (class 0) or right half (class 1) is bright."""
    random, labels = np.random.RandomState(0), np.arange(n) % 2
    images = random.rand(n, side, side) / 4
    for image, label in zip(images, labels, strict=True):
        image[:, side // 2 :][:] += 0.7 * label
        image[:, : side // 2][:] += 0.7 * (1 - label)
    return images, labels


def small(**changes: Any) -> CapsNetClassifier:
    return CapsNetClassifier(**{"network": TINY, "epochs": 4, "learning_rate": 0.01, "random_state": 0} | changes)


# --- The contract ------------------------------------------------------------------------------------------------


@checks(CapsNetClassifier(TINY, epochs=1, batch_size=64), leave_out=ENOUGH_TRAINING)
def test_it_keeps_the_contract_of_scikit_learn(estimator: CapsNetClassifier, check: Any) -> None:
    check(estimator)


@pytest.mark.slow
@checks(CapsNetClassifier())
def test_it_keeps_the_contract_as_it_comes(estimator: CapsNetClassifier, check: Any) -> None:
    check(estimator)


def test_it_learns_the_digits_of_scikit_learn() -> None:
    images, labels = load_digits(return_X_y=True)
    classifier = CapsNetClassifier(epochs=3, random_state=0).fit(images[:600], labels[:600])
    assert classifier.score(images[600:1000], labels[600:1000]) > 0.85
    assert classifier.image_shape_ == (1, 8, 8)
    assert classifier.pixel_range_ == (0, 16)


def test_a_grid_search_over_routings_in_a_pipeline_works() -> None:
    images, labels = halves()
    pipeline = make_pipeline(StandardScaler(), small(epochs=2, image_shape=(12, 12)))
    routings = ["uniform", DynamicOptions(iterations=2)]
    search = GridSearchCV(pipeline, {"capsnetclassifier__routing": routings}, cv=2).fit(images.reshape(60, -1), labels)
    assert search.best_score_ > 0.9
    assert search.best_estimator_[-1].model_.config.routing.algorithm in ("uniform", "dynamic")


def test_cross_validation_takes_images_as_they_are() -> None:
    assert cross_val_score(small(), *halves(), cv=2).mean() > 0.9


def test_parameters_can_be_read_set_and_cloned() -> None:
    classifier = small().set_params(routing="em", epochs=7)
    assert clone(classifier).get_params() == classifier.get_params()
    assert classifier.get_params()["epochs"] == 7


def test_a_fitted_classifier_survives_being_stored() -> None:
    images, labels = halves()
    classifier = small(epochs=1).fit(images, labels)
    again = pickle.loads(pickle.dumps(classifier))
    assert np.array_equal(again.activations(images), classifier.activations(images))


def test_before_fit_it_says_so() -> None:
    with pytest.raises(NotFittedError):
        small().predict(halves()[0])


# --- Images ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "number", "channels"), [(-1, 1, "auto"), (-1, 3, "auto"), (1, 3, "auto"), (-1, 7, "last"), (1, 5, "first")]
)
def test_images_come_in_every_layout(axis: int, number: int, channels: Any) -> None:
    images, labels = halves()
    X = np.stack([images] * number, axis)
    classifier = small(channels=channels).fit(X, labels)
    assert classifier.score(X, labels) == 1
    assert classifier.model_.config.image_shape == (number, 12, 12)


def test_bytes_and_fractions_are_the_same_image() -> None:
    images, labels = halves()
    bytes_ = (images * 255).astype(np.uint8)
    one, other = (small(epochs=1).fit(X, labels).activations(X) for X in (bytes_, bytes_ / 255))
    assert np.allclose(one, other, atol=1e-5)


def test_pixels_are_scaled_as_in_training_even_in_a_brighter_picture() -> None:
    images, labels = halves()
    classifier = small().fit(1000 * images - 300, labels)
    together = classifier.activations(1000 * images - 300)
    alone = np.concatenate([classifier.activations(1000 * image[None] - 300) for image in images[:4]])
    assert np.allclose(alone, together[:4], atol=1e-6)


@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 2, 3), (3, 19, 8), (1, 28, 28), (3, 64, 64), (4, 224, 300), (1, 9, 900)]
)
def test_there_is_a_network_for_every_size(shape: tuple[int, int, int]) -> None:
    from capsnet.models.registry import parameters

    padded = (shape[0], *padded_size(*shape[1:]))
    assert parameters(suitable_network(padded)) < 20_000_000


def test_tiny_images_are_padded_and_keep_their_content() -> None:
    labels = np.arange(40) % 2
    images = np.repeat(labels, 6).reshape(40, 2, 3).astype(float)
    assert CapsNetClassifier(epochs=3, random_state=0).fit(images, labels).score(images, labels) == 1


# --- Labels ------------------------------------------------------------------------------------------------------


def test_labels_may_be_words() -> None:
    images, labels = halves()
    words = np.array(["left", "right"])[labels]
    classifier = small().fit(images, words)
    assert list(classifier.classes_) == ["left", "right"]
    assert list(classifier.predict(images)) == list(words)
    assert classifier.model_.classes == ("left", "right")


def test_probabilities_are_the_activations_divided_by_their_sum() -> None:
    images, labels = halves()
    classifier = small(epochs=1).fit(images, labels)
    activations, shares = classifier.activations(images), classifier.predict_proba(images)
    assert np.allclose(shares, activations / activations.sum(1, keepdims=True))
    assert not hasattr(classifier, "decision_function")


def test_several_labels_are_predicted_and_have_no_probabilities() -> None:
    images, labels = halves()
    images[::3] = images[::3].max()  # both halves bright
    several = np.stack([labels == 0, labels == 1], 1).astype(int)
    several[::3] = 1
    classifier = small(epochs=12, batch_size=8).fit(images, several)
    assert (classifier.predict(images) == several).mean() > 0.95
    assert np.array_equal(classifier.decision_function(images) >= 0, classifier.predict(images).astype(bool))
    assert not hasattr(classifier, "predict_proba")


# --- Training ----------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_network_and_another_one_another() -> None:
    images, labels = halves()
    first, again, other = (
        small(epochs=1, random_state=seed).fit(images, labels).activations(images) for seed in (0, 0, 1)
    )
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)


def test_training_ends_when_its_time_is_over() -> None:
    images, labels = halves(2000)
    began = time.monotonic()
    classifier = small(epochs=500, max_minutes=0.03).fit(images, labels)
    assert time.monotonic() - began < 30
    assert classifier.history_[-1]["epoch"] < 500


def test_early_stopping_keeps_the_best_weights() -> None:
    images, labels = halves()
    classifier = small(epochs=40, validation_fraction=0.25, patience=2).fit(images, labels)
    errors = [record["validation_error_percent"] for record in classifier.history_ if record["kind"] == "epoch"]
    assert len(errors) < 40
    assert min(errors) == 0


def test_verbose_shows_the_training_and_silence_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = halves()
    small(epochs=1).fit(images, labels)
    assert capsys.readouterr().err == ""
    small(epochs=1, verbose=1).fit(images, labels)
    assert "60 training images" in capsys.readouterr().err


def test_it_starts_from_a_trained_model() -> None:
    images, labels = halves(40, side=28)
    classifier = CapsNetClassifier(init="quick-mnist", epochs=1, random_state=0).fit(images, labels)
    assert "stem.0.weight" in classifier.model_.loaded.loaded


def test_any_network_can_be_chosen() -> None:
    images, labels = halves()
    baseline = CNNConfig(channels=(4,), kernels=(3,), pool=(2,), hidden=(8,), dropout=0.0)
    assert small(network=baseline, epochs=20).fit(images, labels).score(images, labels) == 1
    paper = small(network="quick", epochs=1).fit(*halves(40, side=28))
    assert paper.model_.config.stem_channels == (32, 64, 64)


# --- Mistakes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"routing": "dinamic"}, "did you mean 'dynamic'"),
        ({"network": "quik"}, "did you mean 'quick'"),
        ({"network": CNNConfig(), "routing": "em"}, "has no routing"),
        ({"validation_fraction": 1.0}, "validation_fraction"),
        ({"patience": 3}, "validation images"),
        ({"max_minutes": 0}, "max_minutes"),
        ({"epochs": 0}, "epochs"),
    ],
)
def test_a_wrong_parameter_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        small(**changes).fit(*halves())


def test_an_unclear_layout_and_other_sizes_are_refused() -> None:
    images, labels = halves()
    with pytest.raises(UserError, match="holds the channels"):
        small().fit(np.stack([images] * 12, 1), labels)
    with pytest.raises(UserError, match="training images had"):
        small(epochs=1).fit(images, labels).predict(images[:, :, :10])
    with pytest.raises(UserError, match="two to four axes"):
        small().fit(images[:, None, None], labels)
    with pytest.raises(UserError, match="144 pixels"):
        small(image_shape=(12, 13)).fit(images.reshape(60, -1), labels)


# --- The guide ---------------------------------------------------------------------------------------------------


def test_the_code_of_the_guide_runs(capsys: pytest.CaptureFixture[str]) -> None:
    guide = (Path(__file__).parent.parent / "docs" / "scikit-learn.md").read_text()
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE):
        exec(block.replace("epochs=5", "epochs=0.2"), names)
    assert "routing" in names["search"].best_params_
