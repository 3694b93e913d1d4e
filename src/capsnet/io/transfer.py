"""Transfer learning: `create_model(NAME, pretrained=True)` and `capsnet train --init NAME`.

Every tensor that fits is copied from the trained model and the others are initialised anew; a `LoadReport` lists both.
Tensors that belong to a class (the transformations of its capsule, its part of the decoder) are matched by class name,
so that a model of the digits 0, 1 and 7 keeps what was learnt about them. A first convolution adapts between grey and
colour images: its kernels are repeated and divided by the number of channels, so that a grey image gives the same
output as before; in the other direction they are summed.
"""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from capsnet.errors import UserError, unknown
from capsnet.evaluate import few
from capsnet.files import sha256
from capsnet.io import checkpoint, zoo
from capsnet.models.base import Model
from capsnet.models.config import ModelConfig
from capsnet.models.registry import build, model_from_dict
from capsnet.train.config import Config
from capsnet.train.presets import PRESETS, get_preset

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadReport:
    """Which tensors of a network were copied from a trained one."""

    source: str
    sha256: str
    loaded: tuple[str, ...]
    adapted: dict[str, str]  # tensor → how it was adapted
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
        """In brackets, what was adapted or initialised anew in a part."""
        names = self.names_of(part)
        notes = [*dict.fromkeys(self.adapted[name] for name in names if name in self.adapted)]
        notes += [f"but fresh {name}" for name in names if name in self.fresh]
        return f" ({', '.join(notes)})" if notes else ""

    def record(self) -> dict[str, Any]:
        """The report as JSON, for a birth certificate."""
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
    in_chans: int | None = None,
    image_shape: tuple[int, int, int] | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """The network of a preset or of a trained model, for any image size, channels and classes.

    With `pretrained`, the weights of the trained model are copied wherever they fit; `model.loaded` reports where. A
    different number of classes needs new class capsules, except for `classes` that the trained model knows by name.
    `in_chans` is timm's name for `channels`.

    >>> sum(p.numel() for p in create_model("paper").parameters())
    8215568
    >>> print(create_model("quick-mnist", pretrained=True, classes=["cat", "dog"], channels=3).loaded)  # doctest: +SKIP
    from quick-mnist: stem (1 → 3 channels), primary, decoder (but fresh …); fresh: caps
    """
    source = open_trained(name) if pretrained else None
    config, named, multi_label = header_of(name, source)
    known = classes is not None or num_classes in (None, config.num_classes)
    names = choose_classes(named, num_classes, classes)
    shape = choose_shape(image_shape or config.image_shape, image_size, choose_channels(channels, in_chans))
    model = build(replace(config, image_shape=shape, num_classes=len(names)), device=device, dtype=dtype)
    model.classes, model.multi_label = names, multi_label
    if source is not None:
        model.loaded = take_over(model, source, name, by_name=known)
    return model


def list_models(
    filter: str | Sequence[str] = "", pretrained: bool = False, exclude_filters: str | Sequence[str] = ()
) -> list[str]:
    """Names that `create_model` takes, presets and trained models, or only those with weights.

    Filters are patterns with wildcards; a name is listed if it matches any of `filter` and none of `exclude_filters`.

    >>> list_models("*mnist", pretrained=True, exclude_filters="expanded*")
    ['best-mnist', 'efficient-mnist', 'multimnist', 'paper-mnist', 'quick-mnist', 'sync-multimnist']
    """
    wanted, unwanted = ([f] if isinstance(f, str) else list(f) for f in (filter or "*", exclude_filters))
    every = {*zoo.names(), *(() if pretrained else PRESETS)}
    return sorted(name for name in every if matches(name, wanted) and not matches(name, unwanted))


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def open_trained(name: str) -> Model:
    if name in PRESETS and not zoo.is_shipped(name) and not Path(name).exists():
        raise UserError(f"'{name}' is a preset and has no weights; the trained models are: {', '.join(zoo.names())}.")
    return checkpoint.load(name)


def header_of(name: str, source: Model | None) -> tuple[ModelConfig, tuple[str, ...], bool]:
    """Config, class names, and whether the model is multi-label."""
    if source is not None:
        return source.config, source.classes, source.multi_label
    if zoo.is_shipped(name):
        card = zoo.card(name)
        return model_from_dict(card.config["model"]), card.classes, card.multi_label
    if name not in PRESETS:
        raise unknown("preset or model", name, [*PRESETS, *zoo.names()])
    config = get_preset(name).model
    return config, tuple(map(str, range(config.num_classes))), False


def choose_classes(own: tuple[str, ...], number: int | None, names: Sequence[str] | None) -> tuple[str, ...]:
    """Class names: those given, those of the model, or numbers if the number of classes differs."""
    names = names if names is None or isinstance(names, str) else [str(name) for name in names]  # 7 means "7"
    if names is None:
        return own if number in (None, len(own)) else tuple(map(str, range(number or 0)))
    if isinstance(names, str) or number not in (None, len(names)) or len(set(names)) != len(names):
        raise UserError(
            f"classes={names!r} should be a list of {number or 'some'} different names: leave num_classes out."
        )
    return tuple(names)


def choose_shape(
    shape: tuple[int, int, int], size: int | tuple[int, int] | None, channels: int | None
) -> tuple[int, int, int]:
    """(c, h, w) with the given size and number of channels, if any."""
    height, width = (size, size) if isinstance(size, int) else size or shape[1:]
    return shape[0] if channels is None else channels, height, width


def choose_channels(channels: int | None, in_chans: int | None) -> int | None:
    """The number of channels under either of its names."""
    if None not in (channels, in_chans) and channels != in_chans:
        raise UserError(f"channels={channels} and in_chans={in_chans} mean the same: give one of them.")
    return in_chans if channels is None else channels


def starting_from(config: Config, name: str) -> Config:
    """The config of a run that starts from a trained model, with the architecture of that model."""
    return replace(config, init=name, model=checkpoint.load(name).config)


def start_from(model: Model, name: str) -> LoadReport:
    """Copy the weights of a trained model: the name of a shipped one, a run folder or a file."""
    return take_over(model, checkpoint.load(name), name)


@torch.no_grad()
def take_over(model: Model, source: Model, name: str, by_name: bool = True) -> LoadReport:
    """Copy all tensors that fit from `source` into `model`, classes by name; refuse if no convolution fits."""
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
    report = LoadReport(name, sha256(checkpoint.model_file(name)), tuple(loaded), adapted, tuple(fresh))
    check_worth(report, model)
    log.info("%s", report)
    return report


def check_worth(report: LoadReport, model: Model) -> None:
    """Refuse a transfer that copies no convolution."""
    kernels = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Conv2d)]
    if kernels and all(key in report.fresh for key in kernels):
        raise UserError(
            f"not one convolution of {report.source} fits this network: leave out flags that change the architecture "
            f"(such as --model.stem-channels), or train without --init."
        )


def copy_tensor(
    key: str, target: Tensor, found: Tensor | None, model: Model, source: Model, classes: Sequence[str]
) -> str | None:
    """Copy one tensor. Returns "" if it was copied unchanged, how it was adapted, or None if it does not fit."""
    if found is None or target.dim() != found.dim():
        return None
    ours, theirs = model.by_class(key, target), source.by_class(key, found)
    if ours is not None and theirs is not None:
        return copy_classes(ours, theirs, classes, model, source)
    if target.shape == found.shape:
        target.copy_(found)
        return ""
    return copy_channels(target, found) if key == model.first_convolution else None


def copy_classes(ours: Tensor, theirs: Tensor, classes: Sequence[str], model: Model, source: Model) -> str | None:
    """Copy the classes that both models have; None if there are none or the shapes differ otherwise."""
    shared = [c for c in classes if c in source.classes]
    if ours.shape[1:] != theirs.shape[1:] or not shared:
        return None
    for c in shared:
        ours[model.classes.index(c)].copy_(theirs[source.classes.index(c)])
    return "" if model.classes == source.classes else f"of the classes {few(set(shared))}"


def copy_channels(target: Tensor, found: Tensor) -> str | None:
    """Adapt kernels (out, c, k, k) from grey to colour images or vice versa."""
    ours, theirs = target.shape[1], found.shape[1]
    alike = target.shape[0] == found.shape[0] and target.shape[2:] == found.shape[2:]
    if not alike or 1 not in (ours, theirs):
        return None
    target.copy_(found.expand_as(target) / ours if theirs == 1 else found.sum(1, keepdim=True))
    return f"{theirs} → {ours} channels"


def open_teacher(name: str, model: Model) -> Model:
    """A trained model to learn from; it must have the same classes and image shape."""
    teacher = checkpoint.load(name, model.device)
    wanted, found = ((m.classes, m.config.image_shape, m.multi_label) for m in (model, teacher))
    if found != wanted:
        raise UserError(
            f"{name} cannot teach this network: it has the classes {few(set(teacher.classes))} and images of "
            f"{tuple(teacher.config.image_shape)} instead of {few(set(model.classes))} and "
            f"{tuple(model.config.image_shape)}; choose another --teacher."
        )
    return teacher
