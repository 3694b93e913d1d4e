"""Dynamic routing between capsules: correct, fast on an ordinary machine, and easy to inspect.

>>> import capsnet
>>> model = capsnet.load("runs/demo")           # doctest: +SKIP
>>> model.predict(images).labels                # doctest: +SKIP

Names are imported on first use, so `import capsnet` does not import PyTorch.
"""

from typing import TYPE_CHECKING

from capsnet.lazy import exports

if TYPE_CHECKING:
    from capsnet.errors import UserError
    from capsnet.io.checkpoint import load
    from capsnet.io.transfer import create_model, list_models
    from capsnet.models.base import Model, Output, Prediction
    from capsnet.models.capsnet import CapsNet
    from capsnet.models.cnn import CNN
    from capsnet.models.config import CapsNetConfig, CNNConfig
    from capsnet.nn.conv import ClassCaps, ConvCaps
    from capsnet.nn.decoder import Decoder
    from capsnet.nn.functional import lengths, squash, votes
    from capsnet.nn.layers import DenseCaps, PrimaryCaps
    from capsnet.nn.losses import margin_loss, reconstruction_loss
    from capsnet.plugins import load_plugin
    from capsnet.routing.base import Routed, Routing, Trace
    from capsnet.routing.dynamic import DynamicRouting, dynamic_routing

__version__ = "0.1.0"

__all__ = [
    "CNN",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "ClassCaps",
    "ConvCaps",
    "Decoder",
    "DenseCaps",
    "DynamicRouting",
    "Model",
    "Output",
    "Prediction",
    "PrimaryCaps",
    "Routed",
    "Routing",
    "Trace",
    "UserError",
    "create_model",
    "dynamic_routing",
    "lengths",
    "list_models",
    "load",
    "load_plugin",
    "margin_loss",
    "reconstruction_loss",
    "squash",
    "votes",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "errors": ["UserError"],
        "io.checkpoint": ["load"],
        "io.transfer": ["create_model", "list_models"],
        "models.base": ["Model", "Output", "Prediction"],
        "models.capsnet": ["CapsNet"],
        "models.cnn": ["CNN"],
        "models.config": ["CNNConfig", "CapsNetConfig"],
        "nn.conv": ["ClassCaps", "ConvCaps"],
        "nn.decoder": ["Decoder"],
        "nn.functional": ["lengths", "squash", "votes"],
        "nn.layers": ["DenseCaps", "PrimaryCaps"],
        "nn.losses": ["margin_loss", "reconstruction_loss"],
        "plugins": ["load_plugin"],
        "routing.base": ["Routed", "Routing", "Trace"],
        "routing.dynamic": ["DynamicRouting", "dynamic_routing"],
    },
)
