"""Capsule layers as ordinary PyTorch modules (section 4, Fig. 1 and 2 of the paper).

`PrimaryCaps` turns feature maps into capsules and `DenseCaps` routes capsules to capsules; both stack in an
`nn.Sequential`. Each takes `device` and `dtype` and has `reset_parameters`. The equations are those of
`capsnet.nn.functional` and `capsnet.routing`.

Deliberate deviation: `PrimaryCaps` orders its capsules as (h w type), because that is how a channels-last convolution
leaves them in memory. The paper does not depend on their order.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from capsnet.errors import UserError
from capsnet.kernels import dispatch
from capsnet.nn.functional import Capsules, squash
from capsnet.nn.initial import check_init, truncated_normal_
from capsnet.nn.options import Init
from capsnet.routing.base import Routed, Routing, Sizes, create, options_for
from capsnet.routing.options import RoutingOptions


class Conv2d(nn.Conv2d):
    """A convolution that takes the fastest path for its shape (see `capsnet.kernels`)."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        bias: bool = True,
        *,
        padding: int = 0,
        groups: int = 1,
        init_std: float | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.init_std = init_std
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=bias, **where)

    def reset_parameters(self) -> None:
        """PyTorch's initialisation, or the authors' where `init_std` is given (biases 0.1)."""
        super().reset_parameters()
        if self.init_std is not None:
            truncated_normal_(self.weight, self.init_std)
            if self.bias is not None:
                nn.init.constant_(self.bias, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        if self.groups > 1:
            return super().forward(x)
        return dispatch.conv2d(x, self.weight, self.bias, self.stride[0], int(self.padding[0]))


class PrimaryCaps(nn.Module):
    """The first capsules: a convolution whose channels are read as `types` capsules of `dim` dimensions per position.

    (b, c, h, w) → (b, h' w' types, dim), or (b, h', w', types, dim) with `grid`. Eight CHANNELS at one position form a
    capsule, never eight pixels. `factor` multiplies the convolution before bias and squash; the authors' code uses
    1/types. `groups` are those of the convolution. If not `squashed`, poses are as long as the convolution makes them.
    With `activations` each capsule has one channel more, whose sigmoid is its activation; poses are then not squashed,
    and `Capsules(poses, activations)` are returned, as EM routing of matrix poses wants them.

    >>> PrimaryCaps(256, types=32, dim=8)(torch.randn(2, 256, 20, 20)).shape
    torch.Size([2, 1152, 8])
    >>> matrices = PrimaryCaps(64, types=8, dim=16, kernel_size=1, stride=1, grid=True, activations=True)
    >>> poses, activations = matrices(torch.randn(2, 64, 14, 14))
    >>> poses.shape, activations.shape
    (torch.Size([2, 14, 14, 8, 16]), torch.Size([2, 14, 14, 8]))
    """

    def __init__(
        self,
        in_channels: int,
        types: int = 32,
        dim: int = 8,
        kernel_size: int = 9,
        stride: int = 2,
        *,
        groups: int = 1,
        factor: float = 1.0,
        squashed: bool = True,
        grid: bool = False,
        activations: bool = False,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_init(init)
        self.types, self.dim, self.factor, self.grid, self.activations = types, dim, factor, grid, activations
        self.squashed = squashed
        std = 0.1 if init == "official" else None
        channels = types * (dim + activations)
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.conv = Conv2d(in_channels, channels, kernel_size, stride, groups=groups, init_std=std, **where)

    def reset_parameters(self) -> None:
        self.conv.reset_parameters()

    def forward(self, x: Tensor) -> Tensor | Capsules:
        self.check(x)
        return self.to_capsules(self.conv(x))

    def to_capsules(self, s: Tensor) -> Tensor | Capsules:
        """Channels of the convolution's output (b, types dim, h', w') as capsules (b, h' w' types, dim)."""
        if self.factor != 1.0 and self.conv.bias is not None:
            s = s * self.factor + (1 - self.factor) * self.conv.bias.view(-1, 1, 1)  # factor · conv(x) + bias
        channels = s.permute(0, 2, 3, 1)  # b h w (type p)
        if not self.activations:
            s = channels.unflatten(-1, (-1, self.dim))
            return self._listed(self.squash(s) if self.squashed else s)
        poses, a = channels.split([self.types * self.dim, self.types], -1)
        return Capsules(self._listed(poses.unflatten(-1, (-1, self.dim))), self._listed(a.sigmoid()))

    def squash(self, s: Tensor) -> Tensor:
        """Equation 1; a subclass may use another nonlinearity."""
        return squash(s)

    def _listed(self, x: Tensor) -> Tensor:
        """(b, h, w, type, …) → (b, h w type, …), unless a grid is wanted."""
        return x if self.grid else x.flatten(1, 3)

    def check(self, x: Tensor) -> None:
        """Report a wrong shape more clearly than the convolution would."""
        channels, side = self.conv.in_channels, self.conv.kernel_size[0]
        if x.dim() != 4 or x.shape[1] != channels or min(x.shape[2:]) < side:
            raise UserError(
                f"PrimaryCaps expects (b, {channels}, h, w) with h and w of at least {side} and got {tuple(x.shape)}: "
                f"set in_channels to the channels of the layer below, or use a smaller kernel_size."
            )

    def extra_repr(self) -> str:
        extra = "".join(f", {name}" for name in ("grid", "activations") if getattr(self, name))
        extra += "" if self.squashed or self.activations else ", squashed=False"
        return f"types={self.types}, dim={self.dim}, factor={self.factor:g}{extra}"


class DenseCaps(nn.Module):
    """Capsules fully connected to capsules by routing: DigitCaps in the paper. (b, i, p) → (b, j, q).

    A grid of capsules (b, h, w, n, p) is read as the list (b, h w n, p).

    `routing` is the name of a registered algorithm, its options or a `Routing` module; options of a named algorithm may
    follow as keywords. `shared` is the number of lower capsule types when one transformation serves all positions of a
    grid: W is then (types, j, q, p), which lets large images and many classes fit. With `matrix`, poses
    are square matrices of as many numbers and W_ij is such a matrix too.

    A routing with activations of its own returns `Capsules(poses, activations)` instead of poses alone, and the next
    layer accepts them. Large batches take a kernel that can be differentiated once: compute second derivatives inside
    `with capsnet.kernels.plain():`. Layers stack:

    >>> hidden, top = DenseCaps(1152, 8, 20, 12), DenseCaps(20, 12, 10, 16, routing="dynamic", iterations=2)
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
        routing: str | RoutingOptions | Routing = "dynamic",
        shared: int | None = None,
        matrix: bool = False,
        init: Init = "default",
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if shared is not None and (shared < 1 or lower % shared):
            raise UserError(
                f"DenseCaps shares transformations over {shared} capsule types, but {lower} lower capsules are not a "
                f"multiple of {shared}: set shared to the types of PrimaryCaps."
            )
        check_init(init)
        self.lower, self.lower_dim, self.upper, self.upper_dim = lower, lower_dim, upper, upper_dim
        self.shared, self.init, self.matrix = shared, init, matrix
        side = matrix_side(lower_dim, upper_dim) if matrix else 0
        transform = (side, side) if matrix else (upper_dim, lower_dim)
        n = shared or lower
        self.weight = nn.Parameter(torch.empty(n, upper, *transform, device=device, dtype=dtype))  # i j q p
        self.routing = routing_of(routing, options)
        self.routing.build(Sizes(lower, self.voting_dim(), upper, upper_dim, n, matrix), device=device, dtype=dtype)
        self.reset_parameters()

    def voting_dim(self) -> int:
        """The dimension of the lower poses that the routing sees."""
        return self.lower_dim

    def reset_parameters(self) -> None:
        """Default: s_j starts with entries of about 0.1 for any sizes. Official: σ = 0.1, biases 0.1."""
        if self.init == "official":
            truncated_normal_(self.weight, 0.1)
        else:
            # s_j sums over i with couplings that start at 1/j: without the factor j/√i many classes never wake up. On
            # MNIST (i = 1152, j = 10) this is the authors' 0.1. Votes that share a transformation do not cancel out
            # over the positions of a grid, so there the sum over positions counts in full.
            assert self.routing.sizes is not None
            types = self.shared or self.lower
            votes = self.lower / types * math.sqrt(types)
            coupling = self.routing.initial_coupling(self.routing.sizes)
            std = self.routing.initial_std() or min(1.0, 1 / (3 * votes * coupling))
            nn.init.normal_(self.weight, std=std)
        self.routing.reset_parameters(self.init)

    def route(self, u: Tensor, a: Tensor | None = None, trace: bool = False, **options: Any) -> Routed:
        """Route lower poses u (b, i, p) with activations a (b, i), and return all that routing gives.

        `options` replace those of the routing for this call only.
        """
        came = tuple(u.shape)
        fits = len(came) == 3 or (len(came) == 5 and self.shared in (None, came[3]))
        if fits and len(came) == 5:
            u, a = u.flatten(1, 3), None if a is None else a.flatten(1, 3)
        if not fits or u.shape[1:] != (self.lower, self.lower_dim):
            raise UserError(
                f"{type(self).__name__} expects (b, {self.lower}, {self.lower_dim}) and got {came}: "
                f"set lower and lower_dim to what the layer below gives, or check its types and dim."
            )
        routing = self.routing.with_options(**options) if options else self.routing
        u, W, a = self.voters(u, a)
        return routing(u, W, a, trace=trace)

    def voters(self, u: Tensor, a: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Lower poses, transformations and lower activations as the routing sees them."""
        return u, self.weight, a

    def forward(self, capsules: Tensor | Capsules) -> Tensor | Capsules:
        u, a = (capsules, None) if isinstance(capsules, Tensor) else capsules
        routed = self.route(u, a)
        return Capsules(routed.poses, routed.activations) if self.routing.own_activations else routed.poses

    def extra_repr(self) -> str:
        shared = f", shared={self.shared}" if self.shared else ""
        matrix = ", matrix" if self.matrix else ""
        return f"{self.lower}×{self.lower_dim} → {self.upper}×{self.upper_dim}{shared}{matrix}"


def routing_of(routing: str | RoutingOptions | Routing, options: dict[str, Any]) -> Routing:
    """The routing module that a layer was asked for; keyword options go with a name only."""
    if not options:
        return create(routing)
    if not isinstance(routing, str):
        raise UserError(
            f"options such as {next(iter(options))} go with the name of a routing: set them in the routing itself."
        )
    return create(options_for(routing, **options))


def matrix_side(lower_dim: int, upper_dim: int) -> int:
    """The side of square poses: 4 for poses of 16 numbers."""
    side = math.isqrt(lower_dim)
    if side * side != lower_dim or upper_dim != lower_dim:
        raise UserError(
            f"matrix poses are square and of one size, such as 16 = 4×4, and these have {lower_dim} and {upper_dim} "
            f"dimensions: choose a square for both."
        )
    return side
