"""Networks put together from layers. One file per model; `registry` builds them by name."""

from typing import TYPE_CHECKING

from capsnet.lazy import exports
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig, ModelConfig

if TYPE_CHECKING:
    from capsnet.models.base import Losses, Model, Output, Prediction
    from capsnet.models.capsnet import CapsNet
    from capsnet.models.cnn import CNN
    from capsnet.models.registry import MODELS, build, register

__all__ = [
    "CNN",
    "MODELS",
    "CNNConfig",
    "CapsNet",
    "CapsNetConfig",
    "LossConfig",
    "Losses",
    "Model",
    "ModelConfig",
    "Output",
    "Prediction",
    "build",
    "register",
]
__getattr__, __dir__ = exports(
    __name__,
    {
        "base": ("Losses", "Model", "Output", "Prediction"),
        "capsnet": ("CapsNet",),
        "cnn": ("CNN",),
        "registry": ("MODELS", "build", "register"),
    },
)
