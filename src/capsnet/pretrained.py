"""A trained model as the beginning of another: `create_model(NAME, pretrained=True)` and `capsnet train --init NAME`.

Every tensor that fits is taken over and the rest stays fresh; a `LoadReport` says which. What belongs to a class (its
capsule's transformations, its part of the decoder) goes by the class's name: digits 0, 1 and 7 out of ten keep what
was learnt about them. A first convolution of grey images serves colour ones too: its kernels are repeated and divided
by the number of channels, so that a grey picture gives what it gave before; the other way round they are summed.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsnet import checkpoint, zoo
from capsnet.config import PRESETS, Config, ModelConfig, model_from_dict
from capsnet.data.datasets import Choice, fingerprint, listing, load, same_images
from capsnet.errors import UserError, unknown
from capsnet.evaluation import few
from capsnet.models.capsnet import CapsNet
from capsnet.models.registry import Model, build

CONVOLUTIONS = ("stem.", "primary.", "features.")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """What a network has taken over from a trained one, by the names of its tensors."""

    source: str
    sha256: str
    loaded: tuple[str, ...]
    adapted: dict[str, str]  # what had to be changed to fit, and how
    fresh: tuple[str, ...]

    def __str__(self) -> str:
        """
        >>> print(LoadReport("quick-mnist", "", ("stem.0.weight",), {}, ("caps.0.weight",)))
        from quick-mnist: stem; fresh: caps
        """
        parts = dict.fromkeys(name.partition(".")[0] for name in (*self.loaded, *self.adapted, *self.fresh))
        new = {part for part in parts if all(n in self.fresh for n in self.names_of(part))}
        kept = [part + self.remark(part) for part in parts if part not in new]
        return f"from {self.source}: {', '.join(kept)}" + (f"; fresh: {', '.join(sorted(new))}" if new else "")

    def names_of(self, part: str) -> list[str]:
        return [name for name in (*self.loaded, *self.adapted, *self.fresh) if name.startswith(f"{part}.")]

    def remark(self, part: str) -> str:
        """In brackets, what of a part is not as it was."""
        names = self.names_of(part)
        notes = [*dict.fromkeys(self.adapted[name] for name in names if name in self.adapted)]
        notes += [f"but fresh {name}" for name in names if name in self.fresh]
        return f" ({', '.join(notes)})" if notes else ""

    def record(self) -> dict[str, Any]:
        """For a birth certificate."""
        taken = {"loaded": list(self.loaded), "adapted": self.adapted, "fresh": list(self.fresh)}
        return {"model": self.source, "sha256": self.sha256, **taken}


def create_model(
    name: str = "paper",
    pretrained: bool = False,
    *,
    num_classes: int | None = None,
    classes: Sequence[str] | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """The network of a preset or of a trained model, for any image size, channels and classes.

    With `pretrained` it begins with the trained model's weights wherever they fit; `model.loaded` says where. Another
    number of classes means fresh class capsules, unless `classes` names some that the trained model knows.

    >>> sum(p.numel() for p in create_model("paper").parameters())
    8215568
    >>> print(create_model("quick-mnist", pretrained=True, classes=["cat", "dog"], channels=3).loaded)  # doctest: +SKIP
    from quick-mnist: stem (1 → 3 channels), primary, decoder (but fresh …); fresh: caps
    """
    source = open_trained(name) if pretrained else None
    config, named, multi_label = describe(name, source)
    known = classes is not None or num_classes in (None, config.num_classes)
    names = choose_classes(named, num_classes, classes)
    shape = choose_shape(image_shape or config.image_shape, image_size, channels)
    model = build(replace(config, image_shape=shape, num_classes=len(names)), device=device, dtype=dtype)
    model.classes, model.multi_label = names, multi_label
    if source is not None:
        model.loaded = take_over(model, source, name, by_name=known)
    return model


def open_trained(name: str) -> Model:
    if name in PRESETS and not zoo.is_shipped(name) and not Path(name).exists():
        raise UserError(
            f"'{name}' is a preset and comes without weights; trained models are: {', '.join(zoo.names())}."
        )
    return checkpoint.load(name)


def describe(name: str, source: Model | None) -> tuple[ModelConfig, tuple[str, ...], bool]:
    """Architecture, classes and whether an image may have several of them."""
    if source is not None:
        return source.config, source.classes, source.multi_label
    if zoo.is_shipped(name):
        card = zoo.card(name)
        return model_from_dict(card["config"]["model"]), tuple(card["classes"]), card["multi_label"]
    if name not in PRESETS:
        raise unknown("preset or model", name, [*PRESETS, *zoo.names()])
    config = PRESETS[name].model
    return config, tuple(map(str, range(config.num_classes))), False


def choose_classes(own: tuple[str, ...], number: int | None, names: Sequence[str] | None) -> tuple[str, ...]:
    """The classes' names: those given, the model's own, or numbers where there are more or fewer."""
    names = names if names is None or isinstance(names, str) else [str(name) for name in names]  # 7 means "7"
    if names is None:
        return own if number in (None, len(own)) else tuple(map(str, range(number or 0)))
    if isinstance(names, str) or number not in (None, len(names)) or len(set(names)) != len(names):
        raise UserError(f"classes={names!r} should be {number or 'some'} different names: leave out num_classes.")
    return tuple(names)


def choose_shape(
    shape: tuple[int, int, int], size: int | tuple[int, int] | None, channels: int | None
) -> tuple[int, int, int]:
    """(c, h, w) with another size or number of channels, where they are given."""
    height, width = (size, size) if isinstance(size, int) else size or shape[1:]
    return shape[0] if channels is None else channels, height, width


def starting_from(config: Config, name: str) -> Config:
    """A training's config with the architecture of a trained model, and that model as its beginning."""
    return replace(config, init=name, model=checkpoint.load(name).config)


def start_from(model: Model, name: str) -> LoadReport:
    """Begin with a trained model's weights: a shipped one by its name, a run's folder or a file."""
    return take_over(model, checkpoint.load(name), name)


@torch.no_grad()
def take_over(model: Model, source: Model, name: str, by_name: bool = True) -> LoadReport:
    """Copy what fits from `source` into `model`, classes by their names; refuse where no convolution fits."""
    classes = model.classes if by_name else ()
    theirs, loaded, adapted, fresh = source.state_dict(), [], {}, []
    for key, target in model.state_dict().items():
        how = copy_tensor(key, target, theirs.get(key), model, source, classes)
        if how is None:
            fresh.append(key)
        elif how:
            adapted[key] = how
        else:
            loaded.append(key)
    report = LoadReport(name, zoo.sha256(checkpoint.model_file(name)), tuple(loaded), adapted, tuple(fresh))
    check_worth(report, model)
    log.info("%s", report)
    return report


def check_worth(report: LoadReport, model: Model) -> None:
    """Refuse a beginning that is none."""
    kernels = [k for k, t in model.state_dict().items() if k.startswith(CONVOLUTIONS) and t.dim() == 4]
    if all(key in report.fresh for key in kernels):
        raise UserError(
            f"not one convolution of {report.source} fits the network asked for: leave out what changes its "
            f"architecture (such as --model.stem-channels), or train without it as a beginning."
        )


def copy_tensor(
    key: str, target: Tensor, found: Tensor | None, model: Model, source: Model, classes: Sequence[str]
) -> str | None:
    """Copy one tensor: "" as it is, a few words on how it was made to fit, or None where it cannot be."""
    if found is None or target.dim() != found.dim():
        return None
    ours, theirs = by_class(key, target, model), by_class(key, found, source)
    if ours is not None and theirs is not None:
        return copy_classes(ours, theirs, classes, model, source)
    if target.shape == found.shape:
        target.copy_(found)
        return ""
    return copy_channels(target, found) if key == first_convolution(model) else None


def by_class(key: str, tensor: Tensor, model: Model) -> Tensor | None:
    """A view of the tensor with the classes as its first axis; None where it does not belong to classes."""
    if not isinstance(model, CapsNet):
        return tensor if key.startswith(f"head.{len(model.head) - 1}.") else None
    last = f"caps.{len(model.caps) - 1}"
    if key == f"{last}.weight":
        return tensor.transpose(0, 1)  # i j q p
    if key == "decoder.linears.0.weight":
        return tensor.unflatten(1, (len(model.classes), -1)).transpose(0, 1)
    return tensor if key == f"{last}.bias" else None


def copy_classes(ours: Tensor, theirs: Tensor, classes: Sequence[str], model: Model, source: Model) -> str | None:
    """Copy the classes that both know; None if there are none or the rest of the shape differs."""
    shared = [c for c in classes if c in source.classes]
    if ours.shape[1:] != theirs.shape[1:] or not shared:
        return None
    for c in shared:
        ours[model.classes.index(c)].copy_(theirs[source.classes.index(c)])
    return "" if model.classes == source.classes else f"of the classes {few(set(shared))}"


def first_convolution(model: Model) -> str:
    if not isinstance(model, CapsNet):
        return "features.0.weight"
    return "stem.0.weight" if len(model.stem) else "primary.conv.weight"


def copy_channels(target: Tensor, found: Tensor) -> str | None:
    """Kernels (out, c, k, k) of grey images for colour ones, and the other way round."""
    ours, theirs = target.shape[1], found.shape[1]
    alike = target.shape[0] == found.shape[0] and target.shape[2:] == found.shape[2:]
    if not alike or 1 not in (ours, theirs):
        return None
    target.copy_(found.expand_as(target) / ours if theirs == 1 else found.sum(1, keepdim=True))
    return f"{theirs} → {ours} channels"


def check_unseen(config: Config, sure: bool = True) -> None:
    """Refuse to begin with a model, or learn from one, that has been trained on what is held back here.

    What that model itself began with, or was taught by, is looked at too, where it still lies there. `sure` refuses
    one that does not say what it was trained on.
    """
    ahead, looked_at = [config.init, config.teacher], {""}
    while ahead:
        if (trained := ahead.pop(0)) not in looked_at:
            looked_at.add(trained)
            ahead += _check_unseen_by(trained, config, sure)


def _check_unseen_by(trained: str, config: Config, sure: bool) -> list[str]:
    """What `check_unseen` does for one model; gives those before it that are there to be looked at."""
    _, record = checkpoint.read_tensors(checkpoint.model_file(trained))
    theirs = record.get("certificate", {}).get("config", {})
    if not theirs and sure:
        raise UserError(f"{trained} does not say on which images it was trained: do without it here.")
    before = [theirs.get("init", ""), theirs.get("teacher", "")]
    before = [name for name in before if name and (zoo.is_shipped(name) or Path(name).exists())]
    if not theirs or same_images(theirs["data"]) != same_images(config.data):
        return before
    names = ("data", "validation", "validation_choice", "seed")
    if any(theirs.get(name) != getattr(config, name) for name in names):
        same = " ".join(f"--{name.replace('_', '-')} {theirs.get(name)}" for name in names)
        raise UserError(
            f"{trained} was trained on images that would be held back here: hold back those that it held back "
            f"({same}, and no other seed), or do without it."
        )
    _check_unchanged(trained, record["certificate"], config)
    return before


def _check_unchanged(trained: str, birth: dict[str, Any], config: Config) -> None:
    """Refuse one's own images where they have changed since: they are cut apart in another way then."""
    if "images" not in birth:
        return
    shape = model_from_dict(birth["config"]["model"]).image_shape
    cut = config.validation, config.validation_choice, config.seed
    now = _fingerprint(config.data, listing(config.data), cut, shape)
    if any(now[part] != birth["images"].get(part) for part in ("validation", "test")):
        raise UserError(
            f"{config.data} has changed since {trained} was trained on it, or is read in another way now, and what "
            f"would be held back here may have been learnt: put its images back as they were, or do without {trained}."
        )


@lru_cache(maxsize=8)  # a search asks for each of its trials
def _fingerprint(
    data: str, files: int | None, cut: tuple[int, Choice, int], shape: tuple[int, int, int]
) -> dict[str, int]:
    """The checksums of one's own images in a size; `files` is what tells that they have changed."""
    (validation, choice, seed), (channels, height, width) = cut, shape
    splits = load(
        data, validation=validation, validation_choice=choice, seed=seed, image_size=(height, width), channels=channels
    )
    return fingerprint(splits, data)
