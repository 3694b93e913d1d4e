"""`--precision auto`: bfloat16 where the processor has it in hardware and where it was measured to cost no accuracy.

Errors of the capsule network in both precisions, with paired seeds: results/precision.json for the quick network and
results/ablation for the paper's. Other models were not compared and stay in float32. A run records the precision that
was chosen, so resuming it elsewhere changes nothing.
"""

from __future__ import annotations

from typing import Literal

import torch

from capsnet.kernels.dispatch import has_bf16

Precision = Literal["fp32", "bf16", "auto"]
HARMLESS = {"capsnet"}  # models


def choose(precision: Precision, model: str, device: torch.device) -> Precision:
    """fp32 or bf16 for a model of this kind on this device.

    >>> choose("auto", "matrix", torch.device("cpu"))
    'fp32'
    """
    if precision != "auto":
        return precision
    return "bf16" if model in HARMLESS and device.type == "cpu" and has_bf16() else "fp32"


def describe(precision: Precision, device: torch.device) -> str:
    """One line for the user, or nothing for float32."""
    if precision != "bf16":
        return ""
    if device.type == "cpu" and not has_bf16():
        return "precision: faster, less exact float32 convolutions (--precision fp32 for exact ones)"
    return "precision: bfloat16 (--precision fp32 for float32)"


def autocast(precision: Precision, device: torch.device) -> torch.autocast:
    """The context in which a model computes in this precision."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
