"""Data: published datasets, your own images and generated images as tensors, with batches and augmentation.

Names are imported on first use, so that importing this package does not import PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from capsnet.lazy import exports

if TYPE_CHECKING:
    from capsnet.data.batches import Batches, in_order
    from capsnet.data.config import Augment
    from capsnet.data.examples import Batch, Dataset, Examples, multi_hot
    from capsnet.data.photo import Prepared, fit, prepare_like_mnist, read_image
    from capsnet.data.registry import DatasetInfo, Request, Spec, is_cached, list_datasets, load, parse, register
    from capsnet.data.sources.cache import cache_folder
    from capsnet.data.splits import Splits, split

__all__ = [
    "Augment",
    "Batch",
    "Batches",
    "Dataset",
    "DatasetInfo",
    "Examples",
    "Prepared",
    "Request",
    "Spec",
    "Splits",
    "cache_folder",
    "fit",
    "in_order",
    "is_cached",
    "list_datasets",
    "load",
    "multi_hot",
    "parse",
    "prepare_like_mnist",
    "read_image",
    "register",
    "split",
]

__getattr__, __dir__ = exports(
    __name__,
    {
        "config": ("Augment",),
        "batches": ("Batches", "in_order"),
        "examples": ("Batch", "Dataset", "Examples", "multi_hot"),
        "photo": ("Prepared", "fit", "prepare_like_mnist", "read_image"),
        "registry": ("DatasetInfo", "Request", "Spec", "is_cached", "list_datasets", "load", "parse", "register"),
        "sources.cache": ("cache_folder",),
        "splits": ("Splits", "split"),
    },
)
