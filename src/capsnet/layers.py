"""Capsule layers as ordinary PyTorch modules (section 4, Fig. 1 and 2 of the paper).

`PrimaryCaps` turns feature maps into capsules, `DenseCaps` routes capsules to capsules and stacks on itself,
`Decoder` paints an image from poses. Each takes `device` and `dtype`, has `reset_parameters`, and computes the
paper's equations of `capsnet.functional` and `capsnet.routing`.

Deviations on purpose: `PrimaryCaps` orders its capsules as (h w type), because that is how a channels-last
convolution leaves them in memory; the order is of no consequence for the paper. Capsules may fall into `groups` that do
not see each other, the branches of a network, which the paper has not: group g has the capsules i with i % groups = g.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capsnet.errors import UserError, unknown
from capsnet.functional import squash
from capsnet.kernels import convolution, enabled
from capsnet.kernels.stem import stem_conv2d, stem_pays
from capsnet.routing import Routed, Trace
from capsnet.routing import get as find_routing

Init = Literal["default", "official"]


def check_init(init: str) -> None:
    if init not in get_args(Init):
        raise unknown("initialisation", init, get_args(Init))


def truncated_normal_(weight: Tensor, std: float) -> None:
    """The authors' initialisation: a normal cut off at two standard deviations."""
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


def check_groups(groups: int, **sizes: int) -> None:
    """What is divided into groups has to be a multiple of their number."""
    if groups < 1:
        raise UserError(f"groups={groups} is too small: it should be 1 or more.")
    for name, size in sizes.items():
        if size % groups:
            raise UserError(f"{name}={size} cannot be divided into {groups} groups: choose a multiple of {groups}.")


class Conv2d(nn.Conv2d):
    """A convolution without padding that takes the fastest path for its shape (see `capsnet.kernels.convolution`)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        groups: int = 1,
        init_std: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.init_std = init_std
        factory = {"device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, kernel_size, stride, groups=groups, bias=bias, **factory)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        """PyTorch's own initialisation, or the authors' where `init_std` is given (biases 0.1)."""
        super().reset_parameters()
        if self.init_std is not None:
            truncated_normal_(self.weight, self.init_std)
            if self.bias is not None:
                nn.init.constant_(self.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return convolution.conv2d(x, self.weight, self.bias, self.stride[0], self.groups)


class Linear(nn.Linear):
    """A fully connected layer that autocast leaves in float32 where bfloat16 would have to be emulated."""

    def forward(self, x: Tensor) -> Tensor:
        emulated = enabled() and x.device.type == "cpu" and convolution.precision_for(x) == "rough"
        if x.dtype != torch.float32 or not emulated:
            return super().forward(x)
        with torch.autocast("cpu", enabled=False):
            return super().forward(x)


def has_hooks(module: nn.Module) -> bool:
    """Whether something happens when the module is called, besides its forward pass: pruning works that way."""
    own = module._forward_pre_hooks or module._forward_hooks or module._backward_pre_hooks or module._backward_hooks
    return bool(own) or torch.nn.modules.module._has_any_global_hook()


def in_half(stem: nn.Sequential, images: Tensor) -> Tensor:
    """stem(images); where bfloat16 is asked for and in hardware, all that lies between its layers is in bfloat16 too.

    Convolutions round what they read to bfloat16 anyhow; norms and ReLUs then move half as many bytes, which is what
    they wait for. Statistics are added up in float32, and float32 comes out.
    """
    cpu = enabled() and images.device.type == "cpu" and images.dtype == torch.float32 and images.dim() == 4
    if not cpu or convolution.precision_for(images) != "bf16":
        return stem(images)
    return stem(images.to(torch.bfloat16, memory_format=torch.channels_last)).float()


class PrimaryCaps(nn.Module):
    """The first capsules: a convolution whose channels are read as `types` capsules of `dim` numbers at each place.

    (b, c, h, w) → (b, h' w' types, dim). Eight CHANNELS at one position make a capsule, never eight pixels.
    `factor` multiplies the convolution before bias and squash; the authors' code does so with 1/types. With `groups`
    channels and types fall into that many groups which do not see each other; capsule i belongs to group i % groups.

    >>> PrimaryCaps(256, types=32, dim=8)(torch.randn(2, 256, 20, 20)).shape
    torch.Size([2, 1152, 8])
    """

    def __init__(
        self,
        in_channels: int,
        types: int = 32,
        dim: int = 8,
        kernel_size: int = 9,
        stride: int = 2,
        *,
        factor: float = 1.0,
        groups: int = 1,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_init(init)
        check_groups(groups, in_channels=in_channels, types=types)
        self.types, self.dim, self.factor, self.groups = types, dim, factor, groups
        std, factory = 0.1 if init == "official" else None, {"device": device, "dtype": dtype}
        self.conv = Conv2d(in_channels, types * dim, kernel_size, stride, groups=groups, init_std=std, **factory)  # type: ignore[arg-type]

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return self.group(self.conv(x))

    def after(self, stem: nn.Sequential, images: Tensor) -> Tensor:
        """The same as self(stem(images)); where the stem is a convolution and a ReLU one kernel may do it, faster.

        That kernel calls none of the modules, so it is not taken where one of them has a hook that waits for a call.
        Under autocast a stem's numbers may be rounded between its layers: see `in_half`.
        """
        conv1, conv2 = stem[0] if len(stem) else None, self.conv
        fits = len(stem) == 2 and type(conv1) is type(conv2) is Conv2d and isinstance(stem[1], nn.ReLU)
        fits = fits and self.groups == 1
        if not fits or any(map(has_hooks, (stem, *stem, self, conv2))):
            return self(in_half(stem, images))
        assert isinstance(conv1, Conv2d)
        strides = conv1.stride[0], conv2.stride[0]
        if not stem_pays(images, conv1.weight, conv2.weight, *strides):
            return self(in_half(stem, images))
        return self.group(stem_conv2d(images, conv1.weight, conv1.bias, conv2.weight, conv2.bias, *strides))

    def group(self, s: Tensor) -> Tensor:
        """Channels of the convolution's output (b, types dim, h', w') as squashed capsules (b, h' w' types, dim)."""
        if self.factor != 1.0 and self.conv.bias is not None:
            s = s * self.factor + (1 - self.factor) * self.conv.bias.view(-1, 1, 1)  # factor · conv(x) + bias
        capsules = s.permute(0, 2, 3, 1).unflatten(-1, (self.groups, -1, self.dim))  # b h w group type p
        return squash(capsules.transpose(3, 4).flatten(1, 4))

    def check(self, x: Tensor) -> None:
        """Say what came and what was expected before a convolution says it less well."""
        channels, side = self.conv.in_channels, self.conv.kernel_size[0]
        if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < side:
            raise UserError(
                f"PrimaryCaps expects (b, {channels}, h, w) with h and w of at least {side} and got {tuple(x.shape)}: "
                f"set in_channels to what the layer below gives, or use a smaller kernel_size."
            )

    def extra_repr(self) -> str:
        groups = f", groups={self.groups}" if self.groups > 1 else ""
        return f"types={self.types}, dim={self.dim}, factor={self.factor:g}{groups}"


class DenseCaps(nn.Module):
    """Capsules fully connected to capsules by routing: DigitCaps in the paper. (b, i, p) → (b, j, q).

    `shared` is the number of lower capsule types when one transformation serves all positions of a grid: W is then
    (types, j, q, p), which is what lets large images and many classes fit. With `groups` the lower capsules i with the
    same i % groups are routed by themselves, to a part of each upper capsule's pose; the parts, joined and divided by
    √groups, are the upper capsule, whose squared length is so the mean of theirs. Large batches take a kernel that can
    be differentiated once: second derivatives need `with capsnet.kernels.plain():`. Layers stack:

    >>> hidden, top = DenseCaps(1152, 8, 20, 12), DenseCaps(20, 12, 10, 16)
    >>> top(hidden(torch.randn(2, 1152, 8))).shape
    torch.Size([2, 10, 16])
    """

    def __init__(
        self,
        lower: int,
        lower_dim: int,
        upper: int,
        upper_dim: int,
        *,
        iterations: int = 3,
        routing: str = "dynamic",
        bias: bool = False,
        leaky: bool = False,
        detach: bool = False,
        shared: int | None = None,
        groups: int = 1,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if shared is not None and lower % shared:
            raise UserError(
                f"DenseCaps shares transformations over {shared} capsule types and got {lower} lower capsules, "
                f"which is no multiple of it: set shared to the types of PrimaryCaps."
            )
        check_groups(groups, lower=lower, upper_dim=upper_dim, **({} if shared is None else {"shared": shared}))
        find_routing(routing)  # an unknown name is better refused here than in the first forward pass
        check_init(init)
        self.lower, self.lower_dim, self.upper, self.upper_dim = lower, lower_dim, upper, upper_dim
        self.iterations, self.routing, self.leaky, self.detach = iterations, routing, leaky, detach
        self.shared, self.groups, self.init = shared, groups, init
        n = shared or lower
        self.weight = nn.Parameter(
            torch.empty(n, upper, upper_dim // groups, lower_dim, device=device, dtype=dtype)  # i j q p
        )
        self.bias = nn.Parameter(torch.empty(upper, upper_dim, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Default: such that s_j starts with entries of about 0.1 whatever the sizes. Official: σ = 0.1, bias 0.1."""
        if self.init == "official":
            truncated_normal_(self.weight, 0.1)
        else:
            # s_j sums over i with couplings that start at 1/j: without the factor j/√i many classes never wake up. On
            # MNIST (i = 1152, j = 10) this is the authors' 0.1. Shared votes of a grid's positions do not cancel out,
            # so there the sum over positions counts in full and only that over types as a root.
            types = self.shared or self.lower
            votes = self.lower / types * math.sqrt(types / self.groups)
            nn.init.normal_(self.weight, std=min(1.0, self.upper / (3 * votes)))
        if self.bias is not None:
            nn.init.constant_(self.bias, 0.1 if self.init == "official" else 0.0)

    def route(
        self, u: Tensor, trace: bool = False, *, iterations: int | None = None, leaky: bool | None = None
    ) -> Routed:
        """Route, and return how it went as well: `Routed(v, trace)`; with other options than its own where given."""
        if u.dim() != 3 or u.shape[1:] != (self.lower, self.lower_dim):
            raise UserError(
                f"DenseCaps expects (b, {self.lower}, {self.lower_dim}) and got {tuple(u.shape)}: "
                f"set lower and lower_dim to what the layer below gives, or check its types and dim."
            )
        algorithm = partial(
            find_routing(self.routing),
            iterations=self.iterations if iterations is None else iterations,
            leaky=self.leaky if leaky is None else leaky, detach=self.detach, trace=trace,
        )  # fmt: skip
        if self.groups == 1:
            return algorithm(u, self.weight, self.bias)
        k = self.groups
        biases: Sequence[Tensor | None] = [None] * k if self.bias is None else self.bias.chunk(k, 1)
        return join_groups([algorithm(u[:, g::k].contiguous(), self.weight[g::k], biases[g]) for g in range(k)])

    def forward(self, u: Tensor) -> Tensor:
        return self.route(u).v

    def extra_repr(self) -> str:
        options = "".join(f", {name}" for name in ("leaky", "detach") if getattr(self, name))
        shared = f", shared={self.shared}" if self.shared else ""
        shared += f", groups={self.groups}" if self.groups > 1 else ""
        return (
            f"{self.lower}×{self.lower_dim} → {self.upper}×{self.upper_dim}, routing={self.routing}, "
            f"iterations={self.iterations}, bias={self.bias is not None}{shared}{options}"
        )


def join_groups(parts: Sequence[Routed]) -> Routed:
    """Capsules that were routed in groups as one layer's: lower ones in order, poses joined and divided by √groups.

    A vote of group g speaks of its own part of the pose alone, and is zero in the others. `outputs` are divided as v
    is; the logits grew by agreement with what the groups gave themselves, √groups times as long.
    """
    k, scale = len(parts), 1 / math.sqrt(len(parts))
    v = torch.cat([part.v for part in parts], -1) * scale
    traces = [part.trace for part in parts if part.trace is not None]
    if not traces:
        return Routed(v)
    logits, couplings = (
        torch.stack([getattr(trace, name) for trace in traces], 3).flatten(2, 3) for name in ("logits", "couplings")
    )
    outputs = torch.cat([trace.outputs for trace in traces], -1) * scale
    padded = [F.pad(t.votes, (g * t.votes.shape[-1], (k - 1 - g) * t.votes.shape[-1])) for g, t in enumerate(traces)]
    return Routed(v, Trace(logits, couplings, outputs, torch.stack(padded, 2).flatten(1, 2)))


def split_groups(v: Tensor, groups: int) -> Tensor:
    """What the groups gave themselves, out of what `join_groups` made of it: (b, j, q) → (groups, b, j, q / groups)."""
    return v.unflatten(-1, (groups, -1)).movedim(-2, 0) * math.sqrt(groups)


class Decoder(nn.Module):
    """Paint an image from masked poses (section 4.1): fully connected 512, 1024 with ReLU, pixels with a sigmoid.

    (…, j, q) → (…, c, h, w)

    >>> Decoder(10, 16, (1, 28, 28))(torch.randn(2, 10, 16)).shape
    torch.Size([2, 1, 28, 28])
    """

    def __init__(
        self,
        upper: int,
        upper_dim: int,
        image_shape: tuple[int, int, int],
        hidden: Sequence[int] = (512, 1024),
        *,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_init(init)
        self.upper, self.upper_dim, self.image_shape, self.init = upper, upper_dim, image_shape, init
        widths = [upper * upper_dim, *hidden, math.prod(image_shape)]
        self.linears = nn.ModuleList(
            Linear(before, after, device=device, dtype=dtype) for before, after in itertools.pairwise(widths)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in self.linears:
            assert isinstance(linear, nn.Linear)
            linear.reset_parameters()
            if self.init == "official":
                truncated_normal_(linear.weight, 0.1)
                nn.init.constant_(linear.bias, 0.1)

    def forward(self, poses: Tensor) -> Tensor:
        if poses.shape[-2:] != (self.upper, self.upper_dim):
            raise UserError(
                f"Decoder expects (…, {self.upper}, {self.upper_dim}) and got {tuple(poses.shape)}: "
                f"set upper and upper_dim to what the capsule layer below gives."
            )
        *hidden, pixels = self.linears
        # routing gives float32 even where the weights are bfloat16
        x = poses.flatten(-2).to(next(self.parameters()).dtype)
        for linear in hidden:
            x = torch.relu(linear(x))
        return torch.sigmoid(pixels(x)).unflatten(-1, self.image_shape)
