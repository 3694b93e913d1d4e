"""Networks put together from layers."""

from capsnet.models.base import Output, Prediction
from capsnet.models.baseline import CNN
from capsnet.models.capsnet import CapsNet
from capsnet.models.registry import Model, build

__all__ = ["CNN", "CapsNet", "Model", "Output", "Prediction", "build"]
