"""A network in the parts that a browser runs: an ONNX graph up to the primary capsules, and capsule layers as arrays.

Routing is not part of the graph, because the page shows each of its steps: `static/js/routings.js` computes it. A graph
is run again and compared with the model before it is written.
"""

from __future__ import annotations

import copy
from dataclasses import asdict

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.io import export
from capsnet.kernels import plain
from capsnet.lab import protocol
from capsnet.lab.inference import field_of
from capsnet.models.base import Divided, Model
from capsnet.nn.layers import DenseCaps

ROUTINGS = (
    "dynamic", "uniform", "max-min", "self-attention", "inverted-attention", "self-routing", "em", "vb", "kuramoto",
)  # of routings.js  # fmt: skip


class Graph(nn.Module):
    """Images (1, c, h, w) → the primary capsules of each branch, or the activations of a model without capsules and,
    where units have phases, their mean field at every step."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()
        self.parts = self.model.divided()

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        if self.parts is not None:
            return self.parts.primary(images)
        output = self.model(images, trace="phases" in self.model.shown())
        field = () if output.oscillations is None else (field_of(output.oscillations),)
        return (output.activations, *field)


def divided(model: Model) -> Divided | None:
    """The parts of a model with capsules; None without capsules. A model that the page cannot route is refused."""
    parts = model.divided()
    if parts is None:
        if model.shown()["capsules"]:
            raise UserError(f"a {model.config.kind} model has no primary capsules followed by dense capsule layers")
        return None
    names = {layer.routing.name for layers in parts.branches for layer in layers}
    if unsupported := sorted(names - set(ROUTINGS)):
        raise UserError(f"the browser has no {unsupported[0]} routing")
    return parts


def to_graph(model: Model) -> bytes:
    """The content of the ONNX file."""
    export.library("onnx")
    graph = Graph(model)
    image = export.trial_images(model, 1)
    with plain(), torch.no_grad():
        expected = graph(image)
        program = torch.export.export(graph, (image,))
    proto = export.convert(program, [f"output{n}" for n in range(len(expected))])
    export.remove_notes(proto)
    content = proto.SerializeToString()
    found = export.load_onnx(content)(image)
    worst = max(float((found[f"output{n}"] - one).abs().max()) for n, one in enumerate(expected))
    if not worst <= export.TOLERANCE:
        raise UserError(f"its graph differs from the model by {worst:.2g}, more than {export.TOLERANCE:g}")
    return content


def to_layers(parts: Divided) -> bytes:
    """The capsule layers of every branch as a frame: W and the parameters of the routing."""
    header = {"branches": [[about(layer) for layer in layers] for layers in parts.branches], "squashed": parts.squashed}
    arrays: dict[str, Tensor] = {}
    for g, layers in enumerate(parts.branches):
        for n, layer in enumerate(layers):
            found = {"weight": layer.weight, **layer.routing.state_dict()}
            arrays |= {f"{g}.{n}.{name}": tensor.detach() for name, tensor in found.items()}
    return protocol.pack(header, arrays)


def about(layer: DenseCaps) -> dict[str, object]:
    routing = layer.routing
    return {
        "matrix": layer.matrix,
        "routing": routing.name,
        "options": asdict(routing.options),
        "own_activations": routing.own_activations,
        "parameters": list(routing.state_dict()),
    }
