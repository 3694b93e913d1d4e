"""Export a model to one file that runs without this package: ONNX, or a PyTorch program (`torch.export`).

The file computes the plain equations without our kernels, for batches of any size, and returns named outputs:
activations, poses, the reconstruction and the couplings of every routing iteration (`docs/export.md`). Before a file is
written its content is loaded again and compared with the model.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from capsnet import __version__, data
from capsnet.errors import UserError, unknown
from capsnet.files import check_writable, write_bytes
from capsnet.kernels import plain
from capsnet.models.base import Model
from capsnet.models.registry import model_to_dict
from capsnet.nn.layers import DenseCaps
from capsnet.timing import alternate

Format = Literal["onnx", "torch"]
Runner = Callable[[Tensor], dict[str, Tensor]]  # images (b, c, h, w) → the outputs by name
SUFFIXES: dict[str, str] = {"onnx": ".onnx", "torch": ".pt2"}
RECORD = "capsnet.json"  # the description inside a .pt2
TOLERANCE = 1e-4  # float32 sums in another order; an activation is at most 1
CHECKED_BATCHES = (1, 2, 17)
TIMED_BATCHES = (1, 128)
LARGEST_ONNX = 2_000_000_000  # bytes; the limit of a protobuf is 2 GiB
MOST_VOTES = 1 << 30  # bytes of û in a check: without kernels all votes are in memory
MEANINGS = {
    "activations": "(b, j): from 0 to 1, how likely each class is present",
    "poses": "(b, j, q): the class capsules v_j",
    "reconstruction": "(b, c, h, w): decoded from the most active class",
    "couplings": "(b, t, i, j): c_ij of every routing iteration of the class capsules",
    "logits": "(b, j): the logits of the probabilities in activations",
}
RECONSTRUCTIONS = "(b, k, c, h, w): decoded from each of the k most active classes, the most active first"


class Exportable(nn.Module):
    """A model whose outputs are a dictionary of tensors with the batch first, as a file needs it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()  # the model of the caller stays unchanged

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        output = self.model(images, trace=True)
        found = {"activations": output.activations, "poses": output.poses, "logits": output.logits}
        if output.poses is not None:
            found["reconstruction"] = self.reconstruct(output.poses, output.activations)
        if output.trace is not None:
            found["couplings"] = output.trace.couplings.transpose(0, 1)
        return {name: found[name] for name in MEANINGS if found.get(name) is not None}

    def reconstruct(self, poses: Tensor, activations: Tensor) -> Tensor | None:
        """Decode the most active class: (b, c, h, w); if multi-label, the two most active: (b, 2, c, h, w)."""
        if not self.model.multi_label:
            return self.model.reconstruct(poses, activations.argmax(1))
        return self.model.reconstruct(poses, activations.topk(min(2, activations.shape[1]), dim=1).indices)

    def examples(self, b: int) -> Tensor:
        return torch.zeros(b, *self.model.config.image_shape)


# ------------------------------------------------------------------------------------------------ writing


def metadata(model: Model) -> dict[str, Any]:
    """The metadata of a file: class names, inputs and outputs with shapes and meanings, architecture, version."""
    exportable = Exportable(model)
    with plain(), torch.inference_mode():
        outputs = exportable(exportable.examples(1))
    shapes = {"images": model.config.image_shape, **{name: found.shape[1:] for name, found in outputs.items()}}
    sizes = {name: ["b", *shape] for name, shape in shapes.items()}
    meanings = MEANINGS | ({"reconstruction": RECONSTRUCTIONS} if model.multi_label else {})
    return {
        "classes": list(model.classes),
        "multi_label": model.multi_label,
        "inputs": {"images": {"shape": sizes["images"], "meaning": "(b, c, h, w): float32 from 0 to 1"}},
        "outputs": {name: {"shape": sizes[name], "meaning": meanings[name]} for name in outputs},
        "model": model_to_dict(model.config),
        "written_by": f"capsnet {__version__}, torch {torch.__version__}",
    }


def trace_program(model: Model) -> torch.export.ExportedProgram:
    """The model as a graph of plain operations for any batch size."""
    exportable = Exportable(model)
    batch = torch.export.Dim("batch", min=1)
    with plain(), torch.no_grad():
        # two images, because torch specialises a batch of 1
        program = torch.export.export(exportable, (exportable.examples(2),), dynamic_shapes={"images": {0: batch}})
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # contains paths of this machine
    return program


def to_torch(model: Model) -> bytes:
    """The content of a .pt2: a program for `torch.export.load` with its metadata in `capsnet.json`."""
    file = io.BytesIO()
    description = json.dumps(metadata(model), ensure_ascii=False)
    torch.export.save(trace_program(model), file, extra_files={RECORD: description})
    return file.getvalue()


def to_onnx(model: Model) -> bytes:
    """The content of an .onnx with the weights inside and the metadata as JSON."""
    for name in ("onnx", "onnxscript"):
        library(name)
    if (size := sum(p.numel() * p.element_size() for p in model.parameters())) > LARGEST_ONNX:
        raise UserError(f"this model has {size / 1e9:.1f} GB and an ONNX file at most 2 GB: use --format torch.")
    record = metadata(model)
    proto = convert(trace_program(model), list(record["outputs"]))
    tidy(proto)
    for key, value in record.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        proto.metadata_props.add(key=key, value=text)
    return proto.SerializeToString()


def convert(program: torch.export.ExportedProgram, outputs: list[str]) -> Any:
    """A traced program as an ONNX protobuf."""
    try:
        with quiet_exporter():
            converted = torch.onnx.export(
                program, input_names=["images"], output_names=outputs, dynamo=True, external_data=False, verbose=False
            )
    except torch.onnx.OnnxExporterError as error:
        why = str(error.__cause__ or error).strip().partition("\n")[0]
        raise UserError(f"this model cannot be converted to ONNX ({why}): use --format torch.") from error
    assert converted is not None
    return converted.model_proto


def tidy(proto: Any) -> None:
    """Name the batch dimension and remove the notes of the exporter."""
    graph = proto.graph
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    remove_notes(proto)
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == symbol:
                dim.dim_param = "b"


def remove_notes(proto: Any) -> None:
    """Remove what the exporter adds for debugging, which contains paths of this machine."""
    graph = proto.graph
    proto.producer_name, proto.producer_version = "capsnet", __version__
    for part in (proto, graph, *graph.input, *graph.output, *graph.value_info, *graph.node, *graph.initializer):
        del part.metadata_props[:]


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Silence warnings of the exporter that users cannot act on."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def library(name: str) -> Any:
    """Import a library that only ONNX needs, or say how to install it."""
    try:
        return import_module(name)
    except ImportError:
        raise UserError(f"ONNX needs {name}, which is not installed: pip install 'capsnet[export]'.") from None


# ---------------------------------------------------------------------------------------------- reading


def load_onnx(content: bytes) -> Runner:
    """Run an ONNX file with onnxruntime on as many threads as torch uses."""
    onnxruntime = library("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> dict[str, Tensor]:
        found = session.run(names, {"images": images.numpy()})
        return {name: torch.from_numpy(array) for name, array in zip(names, found, strict=True)}

    return run


def load_torch(content: bytes) -> Runner:
    """Run a .pt2 with torch. Only for our own files: torch unpickles parts of it."""
    module = torch.export.load(io.BytesIO(content)).module()

    def run(images: Tensor) -> dict[str, Tensor]:
        with torch.inference_mode():
            return module(images)

    return run


WRITERS: dict[str, Callable[[Model], bytes]] = {"onnx": to_onnx, "torch": to_torch}
READERS: dict[str, Callable[[bytes], Runner]] = {"onnx": load_onnx, "torch": load_torch}


# ------------------------------------------------------------------------------------------- agreement and speed


def trial_images(model: Model, n: int) -> Tensor:
    """Images (n, c, h, w) from 0 to 1: MNIST test digits if they fit and are cached, noise otherwise."""
    if tuple(model.config.image_shape) == (1, 28, 28) and data.is_cached("mnist"):
        try:
            return data.load("mnist").test.images[:n] / 255
        except UserError:
            pass  # export in spite of a damaged cache
    return torch.rand(n, *model.config.image_shape, generator=torch.Generator().manual_seed(0))


def fitting(model: Model, batches: tuple[int, ...]) -> list[int]:
    """The batch sizes, reduced so that the votes of a check fit into memory."""
    layers = [layer for layer in model.modules() if isinstance(layer, DenseCaps)]
    largest = max((layer.lower * layer.upper * layer.upper_dim for layer in layers), default=1)
    return sorted({min(b, max(1, MOST_VOTES // (4 * largest))) for b in batches})


@torch.inference_mode()
def differences(model: Model, run: Runner) -> dict[str, float]:
    """The largest absolute difference of every output from that of the model, over batches of 1, 2 and 17 images.

    If two classes are equally active within rounding, the file may reconstruct the other one, so reconstructions are
    compared for the classes that the file found most active.
    """
    exportable, worst = Exportable(model), dict[str, float]()
    batches = fitting(model, CHECKED_BATCHES)
    images = trial_images(model, max(batches))
    for b in batches:
        found, expected = run(images[:b]), exportable(images[:b])
        if {name: x.shape for name, x in found.items()} != {name: x.shape for name, x in expected.items()}:
            raise UserError(
                f"the outputs of the exported file have wrong names or shapes for a batch of {b}, so nothing was "
                f"written: try the other --format."
            )
        if "reconstruction" in expected:
            decoded = exportable.reconstruct(expected["poses"], found["activations"])
            assert decoded is not None
            expected["reconstruction"] = decoded
        for name in expected:
            gap = (found[name] - expected[name]).abs().max()
            worst[name] = float(torch.maximum(gap, torch.tensor(worst.get(name, 0.0))))  # keeps a NaN
    return worst


def check(model: Model, run: Runner) -> dict[str, float]:
    """The differences, if all of them are within rounding."""
    gaps = differences(model, run)
    if wrong := [f"{name} by {gap:.2g}" for name, gap in gaps.items() if not gap <= TOLERANCE]:
        raise UserError(
            f"the exported file differs from the model in {', '.join(wrong)}, more than the allowed {TOLERANCE:g}, so "
            f"nothing was written: try the other --format or another version of the libraries."
        )
    return gaps


def speed(model: Model, run: Runner) -> dict[str, dict[str, float]]:
    """Images per second of the file and of the model with its kernels: medians for batches of 1 and 128.

    The model returns activations, poses and the reconstruction, the file the couplings as well. There are
    7 repetitions, fewer if they take more than 10 seconds for a batch size.
    """
    exportable = Exportable(model)
    own = exportable.model

    def fast(images: Tensor) -> object:
        with torch.inference_mode():
            output = own(images)
            return output.poses is not None and exportable.reconstruct(output.poses, output.activations)

    rates: dict[str, dict[str, float]] = {"file": {}, "model": {}}
    batches = fitting(own, TIMED_BATCHES)
    images = trial_images(own, max(batches))
    for b in batches:
        taken = alternate([partial(run, images[:b]), partial(fast, images[:b])], 7, at_most=10)
        for rate, times in zip(rates.values(), taken, strict=True):
            rate[str(b)] = round(b / statistics.median(times), 1)
    return rates


# ------------------------------------------------------------------------------------------------------ all steps


@dataclass(frozen=True)
class Exported:
    """A written file and its differences from the model."""

    path: Path
    bytes: int
    description: dict[str, Any]
    differences: dict[str, float]
    run: Runner


def export_model(
    model: Model,
    path: str | Path,
    format: Format = "onnx",
    *,
    force: bool = False,
    on_stage: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write a model as .onnx or .pt2 after comparing the loaded content with the model.

    >>> export_model(capsnet.load("runs/demo"), "demo.onnx").differences  # doctest: +SKIP
    """
    path = Path(path)
    check_target(path, format, force)
    on_stage(f"exporting: tracing the network for {path.name}")
    content = WRITERS[format](model)
    on_stage("checking: comparing the file with the model")
    run = READERS[format](content)
    gaps = check(model, run)
    write_bytes(path, content)
    return Exported(path, len(content), metadata(model), gaps, run)


def check_target(path: Path, format: str, force: bool) -> None:
    """Reject a file that cannot or should not be written before the work starts."""
    if format not in SUFFIXES:
        raise unknown("format", format, SUFFIXES)
    if format == "onnx":
        for name in ("onnx", "onnxscript", "onnxruntime"):
            library(name)
    if path.suffix != SUFFIXES[format]:
        raise UserError(f"{path} must end in {SUFFIXES[format]} for the format {format}: rename it.")
    if path.is_dir():
        raise UserError(f"{path} is a folder: choose another name for the file.")
    if path.exists() and not force:
        raise UserError(f"{path} exists already: choose another name with --out, or overwrite it with --force.")
    check_writable(path)
