"""Dynamic routing between capsules: correct, fast on an ordinary machine, and easy to look into.

>>> import capsnet
>>> model = capsnet.load("runs/demo")           # doctest: +SKIP
>>> model.predict(images).labels                # doctest: +SKIP
"""

from capsnet.checkpoint import load
from capsnet.errors import UserError
from capsnet.functional import lengths, squash, votes
from capsnet.layers import Decoder, DenseCaps, PrimaryCaps
from capsnet.losses import margin_loss, reconstruction_loss
from capsnet.models import CNN, CapsNet, Output, Prediction
from capsnet.pretrained import create_model
from capsnet.routing import Routed, Trace, dynamic_routing

__version__ = "0.1.0"

__all__ = [
    "CNN",
    "CapsNet",
    "Decoder",
    "DenseCaps",
    "Output",
    "Prediction",
    "PrimaryCaps",
    "Routed",
    "Trace",
    "UserError",
    "create_model",
    "dynamic_routing",
    "lengths",
    "load",
    "margin_loss",
    "reconstruction_loss",
    "squash",
    "votes",
]
