"""capsnet evaluate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from capsnet.cli.flags import MaybeFloat, MaybeInt, MaybeStr, ModelName, Switch, parse
from capsnet.cli.inputs import splits_for
from capsnet.errors import UserError
from capsnet.evaluate import check_names
from capsnet.evaluate import evaluate as count_errors
from capsnet.group.base import current
from capsnet.io import checkpoint
from capsnet.terminal import Counter, error_text, print_table
from capsnet.train import loop, precision
from capsnet.train.facts import facts_of_code, facts_of_model, images_checksum


@dataclass(frozen=True)
class Evaluate:
    """Measure a model's error on a dataset that it was not trained on.

    Examples:
      capsnet evaluate runs/demo
      capsnet evaluate runs/demo --data mnist --json
      capsnet evaluate multimnist --limit 1000
      torchrun --nproc-per-node 2 -m capsnet evaluate runs/demo     two processes
    """

    model: ModelName
    """Model name (see `capsnet models`), run folder or .safetensors file."""
    data: MaybeStr = None
    """Dataset from `capsnet data list`, with options (default: the dataset that the model was trained on)."""
    split: Literal["test", "validation", "train"] = "test"
    """Split to evaluate."""
    top: MaybeInt = None
    """Multi-label data: predict this many classes per image (default: the number of labels, if it is constant)."""
    threshold: MaybeFloat = None
    """Multi-label data: predict all classes with at least this activation (default: 0.5, unless --top applies)."""
    limit: MaybeInt = None
    """Evaluate only this many images, evenly spaced over the split (default: all)."""
    batch_size: int = 250
    """Images per batch; does not affect the result."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """fp32 gives the error that training reported, on any processor. bf16 and auto (bf16 where the processor supports
    it) are faster, and may decide differently about an image that lies between two classes."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    json: Switch = False
    """Print JSON: n, errors, error_percent and more."""


def evaluate(argv: list[str]) -> int:
    flags = parse(Evaluate, "evaluate", argv)
    check_naming(flags.top, flags.threshold)
    model = checkpoint.load(flags.model, loop.choose_device(flags.device))
    dataset = getattr(splits_for(model, flags.model, flags.data), flags.split)
    if not len(dataset):
        raise UserError(f"{dataset.name} has no {flags.split} split here: choose another --split.")
    check_names(model, dataset)
    if current().size > 1:
        images = {f"images of {dataset.name}": images_checksum(dataset)}
        current().agree(facts_of_code() | facts_of_model(flags.model) | images)
    chosen = precision.choose(flags.precision, model.config.kind, model.device)
    with Counter("evaluating") as counter, precision.autocast(chosen, model.device):
        found = count_errors(
            model,
            dataset,
            batch_size=flags.batch_size,
            top=flags.top,
            threshold=flags.threshold,
            limit=flags.limit,
            on_batch=counter,
        )
    summary = {
        "model": flags.model, "split": flags.split, "split_size": len(dataset), "precision": chosen, **found.summary()
    }  # fmt: skip
    if flags.json:
        print(json.dumps(summary))
        return 0
    part = flags.split if found.n == len(dataset) else f"{found.n:,} of {len(dataset):,} {flags.split} images"
    print(f"{flags.model} on {summary['data']} ({part}): error {error_text(summary)}")
    if "error_percent_by_class" in summary and len(found.classes) <= 30:
        print_table(["class", "error %"], [(k, f"{v:.2f}") for k, v in summary["error_percent_by_class"].items()])
    return 0


def check_naming(top: int | None, threshold: float | None) -> None:
    if top is not None and threshold is not None:
        raise UserError("--top and --threshold exclude each other: choose one of them.")
    if top is not None and top < 1:
        raise UserError(f"--top is the number of classes to predict: it should be at least 1, not {top}.")
