"""Private APIs of PyTorch and OpenMP, all in this file, so that a new version has to be checked against one file only.

Where a version of PyTorch lacks one of them, the function returns what disables the fast path that depends on it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Function = TypeVar("Function", bound=Callable[..., Any])
TEAM_MEMBER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def is_transformed() -> bool:
    """Whether a `torch.func` transform or forward-mode differentiation is active."""
    if torch.compiler.is_compiling():
        return False
    functorch = getattr(torch._C, "_are_functorch_transforms_active", bool)()
    return functorch or getattr(forward_ad, "_current_level", -1) >= 0


def constant(function: Function) -> Function:
    """`torch.compiler.assume_constant_result`, without the second that importing the compiler takes."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def skip_compiler() -> None:
    """Let optimisers and operators of this process work without importing `torch.compile`, which takes a second.

    PyTorch imports it to tell it that it should leave them alone. So this is for a program that compiles nothing: the
    command line may call it, a library may not. Where a version of PyTorch differs, nothing is gained.
    """
    try:
        for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
            function = getattr(torch.optim.Optimizer, name).__wrapped__
            function.__dynamo_disable = function
        step = torch.no_grad()(torch.optim.Adam.step.__wrapped__)  # type: ignore[attr-defined]
        torch.optim.Adam.step = step  # type: ignore[method-assign]
        torch._disable_dynamo = lambda fn=None, recursive=True: fn or (lambda f: f)  # type: ignore[assignment]
    except AttributeError:
        return


def processor_has_bf16() -> bool:
    """Whether the processor multiplies bfloat16 in hardware."""
    return any(getattr(torch.cpu, name, bool)() for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"))


def processor_has_amx() -> bool:
    """Whether the processor multiplies tiles of bfloat16 matrices in hardware."""
    return getattr(torch.cpu, "_is_amx_tile_supported", bool)()


@cache
def onednn_is_faster() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL does: on AMD processors with AVX-512 (`products`)."""
    wide = getattr(torch.cpu, "_is_avx512_supported", bool)() and torch.backends.mkldnn.is_available()
    return wide and processor_vendor() == "AuthenticAMD" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def processor_vendor() -> str:
    """The vendor of an x86 processor as Linux reports it, or nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id")), "")


def onednn_linear(x: Tensor, weight: Tensor, plus: Tensor | None = None) -> Tensor:
    """x (m, k) times the transpose of weight (n, k) by oneDNN, plus a matrix (m, n)."""
    if plus is None:
        return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return torch.ops.mkldnn._linear_pointwise.binary(x, plus, weight, None, "add")


def has_hooks(module: nn.Module) -> bool:
    """Whether calling the module does more than its forward pass: pruning, for example, works by hooks."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own) or torch.nn.modules.module._has_any_global_hook()


def relu_backward(grad: Tensor, output: Tensor) -> Tensor:
    """The gradient of a ReLU from its output, in one pass: grad where output > 0, otherwise 0."""
    return torch.ops.aten.threshold_backward(grad, output, 0)


@cache
def openmp_parallel() -> Any:
    """The function that starts a team of PyTorch's OpenMP threads, or None if PyTorch was built without OpenMP.

    The name is looked up in PyTorch's own library, so it resolves to the OpenMP runtime that PyTorch is linked with.
    """
    try:
        start = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    start.argtypes, start.restype = [TEAM_MEMBER, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return start
