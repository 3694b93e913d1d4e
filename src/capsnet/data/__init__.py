"""Data: published sets and your own images as tensors; batches, augmentation, single photos."""

from capsnet.data.augment import Augment
from capsnet.data.batches import Batches, in_order
from capsnet.data.datasets import NAMES, Dataset, Splits, load, multi_hot
from capsnet.data.examples import Batch, Examples
from capsnet.data.photo import Prepared, fit, prepare_like_mnist, read_image
from capsnet.data.sources import cache_folder, is_cached

__all__ = [
    "NAMES",
    "Augment",
    "Batch",
    "Batches",
    "Dataset",
    "Examples",
    "Prepared",
    "Splits",
    "cache_folder",
    "fit",
    "in_order",
    "is_cached",
    "load",
    "multi_hot",
    "prepare_like_mnist",
    "read_image",
]
