"""The config of a training run: each field is a command-line flag, its help text and an entry of the JSON record.

Values out of range are refused on construction. This module imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from capsnet.data.config import Augment
from capsnet.models.config import CapsNetConfig, LossConfig, ModelConfig
from capsnet.ranges import MOST, WIDEST, check_range


@dataclass(frozen=True)
class Config:
    """All settings of a training run."""

    preset: str = "quick"
    """Settings to start from: quick, best, own-images, paper, official, … (`capsnet models` lists them)."""
    data: str = "mnist"
    """Dataset: a name from `capsnet data list`, such as mnist, multimnist:canvas=56 or folder:PATH."""
    init: str = ""
    """Start from the weights of a trained model as far as they fit: a model name, a run folder or a .safetensors file.
    Its network becomes the default, and images from a folder are converted to its size and channels."""
    teacher: str = ""
    """Distillation: also learn from the activations of a trained model (name, run folder or .safetensors file) that has
    the same classes and image size."""
    image_size: int = 0
    """Resize images to this many pixels; 0 keeps their size (images from a folder become 64×64 if they are larger or
    differ in size)."""
    validation: int = 10_000
    """Number of training images held out for validation; 0 trains on all of them."""
    validation_choice: Literal["seeded", "first"] = "seeded"
    """Validation images: drawn by the seed, or the first ones as in the authors' code."""
    train_limit: int = 0
    """Train on this many of the remaining images, balanced over the classes and drawn by the seed; 0 for all."""
    epochs: float = 10
    """Number of epochs; may be fractional, such as 2.5."""
    batch_size: int = 128
    """Images per step, over all processes."""
    accumulate: int = 1
    """Compute a step's batch in this many parts and add up their gradients: needs less memory and takes the same step,
    except that batch norms see one part at a time."""
    sync_norm: bool = True
    """With several processes (torchrun), compute batch norms over the images of all of them."""
    optimizer: Literal["adam", "adamw"] = "adam"
    """Optimiser: Adam, or Adam with decoupled weight decay."""
    lr: float = 0.001
    """Learning rate; the peak of one-cycle."""
    schedule: Literal["constant", "exponential", "one-cycle"] = "constant"
    """Learning rate schedule: constant; exponential decay by 0.96 per 2,000 steps; one-cycle with a cosine decay."""
    warmup: float = 0.2
    """Fraction of the steps in which one-cycle increases the learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay of adamw."""
    average: float = 0.0
    """Decay of the moving average of the weights, which is then evaluated and saved; 0 for no averaging."""
    clip: float = 0.0
    """Maximum norm of the gradient; 0 for no clipping."""
    precision: Literal["fp32", "bf16", "auto"] = "fp32"
    """bf16 uses bfloat16 for large matrix products and between the layers of a deep stem if the processor supports it,
    and a faster, less exact float32 convolution otherwise; auto chooses bf16 only where the processor supports it and
    the network was measured to lose no accuracy. A run records what was chosen."""
    patience: int = 0
    """Early stopping: stop after this many epochs without a lower validation error; 0 disables it."""
    stop_at: float = 0.0
    """Stop after the first epoch with a validation error of at most this many percent; 0 disables it."""
    seed: int = 0
    """Seed of the initial weights, the split, the batches and the augmentation."""
    device: str = "auto"
    """Device: auto, cpu, cuda or mps."""
    save_every: float = 60.0
    """Seconds between checkpoints; one is also written after every epoch that takes more than a few seconds."""
    model: ModelConfig = field(default_factory=CapsNetConfig)
    """Network; `--model NAME` selects another kind, such as cnn or a plugin's."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Loss."""
    augment: Augment = field(default_factory=Augment)
    """Augmentation of the training images; validation and test images are never augmented."""

    def __post_init__(self) -> None:
        check_range(self, 1, MOST, "batch_size", "accumulate")
        check_range(self, 0.001, WIDEST, "epochs")
        if self.epochs == int(self.epochs):
            object.__setattr__(self, "epochs", int(self.epochs))  # shown as 2, not as 2.0
        check_range(self, 0, MOST, "validation", "train_limit", "lr", "weight_decay", "clip", "patience", "save_every")
        check_range(self, 0, 1, "warmup", "average")
        check_range(self, 0, 100, "stop_at")
        check_range(self, 0, WIDEST, "image_size")
        check_range(self, 0, 2**63 - 1, "seed")
