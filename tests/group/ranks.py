"""What two processes compute together for `test_group.py`: one JSON file with everything, to start them only once."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bars import CONFIGS, toy_set, toy_splits
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.evaluate import evaluate
from capsnet.group.base import current
from capsnet.group.launch import launch
from capsnet.group.member import take_part
from capsnet.io.transfer import starting_from
from capsnet.models.config import LossConfig
from capsnet.nn.shares import SharedBatchNorm2d, within
from capsnet.train import loop, steps
from capsnet.train.config import Config
from capsnet.train.presets import PRESETS, get_preset


def losses_of(config: Config) -> dict[str, Any]:
    """The loss of every step of a training, and a checksum of the weights it ends with."""
    run = loop.assemble(config, Path(), toy_splits())
    losses = [steps.train_step(run).total.item() for _ in range(min(run.steps, 200))]
    state = run.model.state_dict()
    weights = hashlib.sha256(b"".join(t.numpy().tobytes() for t in state.values())).hexdigest()
    return {"losses": losses, "weights": weights, "names": list(state), "error": tested(run)}


def tested(run: loop.Run) -> float:
    return evaluate(run.model, run.splits.test, batch_size=4).error_percent


def norm_case() -> tuple[nn.BatchNorm2d, Tensor, Tensor]:
    """A norm, its input and the gradient of its output, in float64."""
    draw = torch.Generator().manual_seed(3)
    norm = nn.BatchNorm2d(3, dtype=torch.float64)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(3, generator=draw))
    x = 5 + torch.randn(7, 3, 2, 2, generator=draw, dtype=torch.float64)
    return norm, x, torch.randn(7, 3, 2, 2, generator=draw, dtype=torch.float64)


def norm_in_shares() -> dict[str, Any]:
    """Output and gradients of a synchronised batch norm: those of all images, put together from the shares."""
    group = current()
    norm, x, dy = norm_case()
    norm.__class__ = SharedBatchNorm2d
    (share,) = group.shares(len(x))
    ours = slice(share.start, share.stop)
    x = x[ours].requires_grad_()
    with within(share):
        y = norm(x)
    y.backward(dy[ours])
    total = [group.rows(t.detach(), 7) for t in (y, x.grad)]  # type: ignore[arg-type]
    weights = [group.add_up(t.grad) for t in (norm.weight, norm.bias)]  # type: ignore[attr-defined]
    return {"tensors": [t.tolist() for t in [*total, *weights, norm.running_mean, norm.running_var]]}


def counted() -> dict[str, Any]:
    """How an evaluation over two processes counts: every image once, also few and odd numbers of them."""
    run = loop.assemble(CONFIGS["capsnet"], Path(), toy_splits())
    found = {}
    for n, limit in ((21, None), (21, 5), (1, None)):
        result = evaluate(run.model, toy_set(n, 2), batch_size=4, limit=limit)
        found[f"{n} {limit}"] = {"n": result.n, "activations": result.activations.tolist()}
    return found


def told() -> dict[str, Any]:
    """What rank 0 says arrives, and different facts are refused by all."""
    group = current()
    value = group.from_leader(lambda: {"rank": group.rank, "size": current().size})
    tensors = group.tensors_from_leader({"w": torch.full((2, 3), group.rank, dtype=torch.bfloat16)})
    try:
        group.agree({"code": "same", "images of bars": str(group.rank)})
        refused = ""
    except UserError as error:
        refused = str(error)
    return {"value": value, "w": tensors["w"].float().sum().item(), "refused": refused}


def presets() -> dict[str, Config]:
    """A few steps of every preset with a tiny network, of distillation and of fine-tuning."""
    common = {"batch_size": 6, "train_limit": 30, "validation": 0, "patience": 0, "stop_at": 0.0, "precision": "fp32"}
    found = {}
    for name in PRESETS:
        config = get_preset(name)
        data = config.data if "mnist" in config.data else "mnist"
        found[name] = replace(config, data=data, model=config.model.tiny(), epochs=1, **common)  # type: ignore[arg-type]
    found["teacher"] = replace(found["quick"], teacher="quick-mnist", loss=LossConfig(teacher=1.0))
    found["init"] = replace(starting_from(get_preset("quick"), "quick-mnist"), init="quick-mnist", epochs=1, **common)
    return found


def losses_of_presets() -> dict[str, list[float]]:
    found = {}
    for name, config in presets().items():
        run = loop.begin(config, Path())
        found[name] = [steps.train_step(run).total.item() for _ in range(3)]
    return found


def work() -> int:
    group = current()
    if sys.argv[2:]:
        Path(sys.argv[1], f"presets{group.rank}.json").write_text(json.dumps(losses_of_presets()))
        return 0
    found = {
        "trained": {name: losses_of(config) for name, config in CONFIGS.items()},
        "norm": norm_in_shares(),
        "counted": counted(),
        "told": told(),
    }
    Path(sys.argv[1], f"rank{group.rank}.json").write_text(json.dumps(found))
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = launch()
    assert place is not None
    sys.exit(take_part(place, work))
