"""capsnet export."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from capsnet.cli.flags import MaybePath, ModelName, Switch, parse
from capsnet.io import checkpoint
from capsnet.io import export as exporting
from capsnet.notice import say
from capsnet.terminal import print_table


@dataclass(frozen=True)
class Export:
    """Export a model to one file that runs without this package: ONNX, or a PyTorch program (torch.export).

    The file takes images (b, c, h, w) in [0, 1] and returns activations, poses, the reconstruction and the couplings of
    each routing iteration; class names and shapes are in its metadata. Its outputs are compared with the model's before
    it is written, and its speed is measured. ONNX needs pip install 'capsnet[export]'. Load a .pt2 file only if you
    trust its author: PyTorch unpickles parts of it.

    Examples:
      capsnet export runs/demo
      capsnet export runs/demo --format torch --out digits.pt2
    """

    model: ModelName
    """Model name (see `capsnet models`), run folder or .safetensors file."""
    format: exporting.Format = "onnx"
    """onnx for ONNX Runtime and others; torch for torch.export.load."""
    out: MaybePath = None
    """File to write (default: the model's name with .onnx or .pt2, in the current folder)."""
    force: Switch = False
    """Overwrite the file if it exists."""
    skip_speed: Switch = False
    """Do not measure the speed."""
    json: Switch = False
    """Print JSON: file, inputs, outputs, differences from the model, images per second."""


def export(argv: list[str]) -> int:
    flags = parse(Export, "export", argv)
    out = flags.out or default_file(flags.model, flags.format)
    exporting.check_target(out, flags.format, flags.force)
    model = checkpoint.load(flags.model)
    done = exporting.export_model(model, out, flags.format, force=flags.force, on_stage=say)
    rates = None
    if not flags.skip_speed:
        say("measuring the speed of the file and of the model")
        rates = exporting.speed(model, done.run)
    result = {
        "config": done.description["model"],
        **done.description,
        "model": flags.model,
        "format": flags.format,
        "file": str(done.path),
        "bytes": done.bytes,
        "differences": done.differences,
        "images_per_second": rates,
    }
    if flags.json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        show(result)
    return 0


def default_file(model: str, format: str) -> Path:
    """The model's name in the current folder; a model.safetensors is named after its run folder."""
    path = Path(model)
    if path.name == checkpoint.MODEL_FILE or path.name in ("", ".."):
        path = path.resolve()
        path = path.parent if path.name == checkpoint.MODEL_FILE else path
    return Path(f"{path.name.removesuffix('.safetensors')}{exporting.SUFFIXES[format]}")


def show(result: dict[str, Any]) -> None:
    """Print the file, its outputs, and its speed compared with the model's."""
    print(f"{result['file']}: {result['bytes'] / 1e6:.1f} MB, {len(result['classes'])} classes")
    rows = []
    for name, output in result["outputs"].items():
        shape = ", ".join(map(str, output["shape"]))
        rows.append((name, f"({shape})", f"{result['differences'][name]:.1g}"))
    print_table(["output", "shape", "largest difference"], rows)
    if result["images_per_second"]:
        who = {"file": result["file"], "model": "the model in PyTorch"}
        sizes = list(result["images_per_second"]["file"])
        rates = [(who[side], *(f"{rate[b]:,.0f}" for b in sizes)) for side, rate in result["images_per_second"].items()]
        print_table(["images/s", *(f"batch {b}" for b in sizes)], rates)
