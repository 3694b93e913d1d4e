"""What a routing algorithm is: a module that turns the votes of lower capsules into upper capsules.

An algorithm subclasses `Routing`, names its options in a frozen dataclass and implements `route`, which gets the votes
û_{j|i} (b, i, j, q) and returns upper poses, upper activations and, if asked, a trace:

    @dataclass(frozen=True)
    class MyOptions(RoutingOptions):
        sharpness: float = 1.0
        "How strongly a vote's length counts."

    @register("mine")
    class MyRouting(Routing):
        Options = MyOptions

        def route(self, u_hat, a, parents, trace): ...

Parameters are created in `build`, when the layer that owns the algorithm knows its sizes. An algorithm that can work
without forming the votes also implements `without_votes`; `route` remains its readable form.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from capsnet.errors import UserError, unknown
from capsnet.kernels.private import is_transformed
from capsnet.nn.functional import at_least_float32, matrix_votes, votes, without_autocast
from capsnet.registry import Registry, owned
from capsnet.routing.options import RoutingOptions

ROUNDING = 1e-4  # by which a computed activation may exceed 1


class Trace(NamedTuple):
    """What an algorithm decided at every step t. Figures, tests and the Lab read it; nothing is computed twice."""

    couplings: Tensor  # (t, b, i, j) c_ij: couplings or responsibilities
    outputs: Tensor  # (t, b, j, q) upper poses
    activations: Tensor  # (t, b, j) upper activations
    votes: Tensor  # (b, i, j, q) û_{j|i}
    logits: Tensor | None = None  # (t, b, i, j) what the couplings were computed from
    variances: Tensor | None = None  # (t, b, j, q) of the Gaussians, where an algorithm fits any
    oscillators: Tensor | None = None  # (t, b, i, j, q) phases on a sphere, where votes are oscillators


class Routed(NamedTuple):
    """Upper capsules and, if requested, the trace of the routing."""

    poses: Tensor  # (b, j, q)
    activations: Tensor  # (b, j) in [0, 1]
    trace: Trace | None = None


@dataclass(frozen=True)
class Sizes:
    """What an algorithm may size its parameters by."""

    lower: int  # i: lower capsules that vote for an upper capsule
    lower_dim: int  # p
    upper: int  # j
    upper_dim: int  # q
    types: int  # n: distinct transformations; fewer than `lower` where positions of a grid share them
    matrix: bool = False  # poses are square matrices, stored row by row


class Parents:
    """The upper capsules among which a lower capsule divides its output. In a dense layer: all j.

    A convolutional layer passes a subclass that also reaches the parents at other positions of the grid.
    """

    partial: ClassVar[bool] = False
    """Whether the layer routes its batch in parts and calls `Routing.over_batch` itself."""

    def sum(self, x: Tensor) -> Tensor:
        """x (b, i, j) summed over the parents of each lower capsule, in a shape that broadcasts against x."""
        return x.sum(-1, keepdim=True)

    def amax(self, x: Tensor) -> Tensor:
        return x.amax(-1, keepdim=True)

    def amin(self, x: Tensor) -> Tensor:
        return x.amin(-1, keepdim=True)

    def softmax(self, b_ij: Tensor) -> Tensor:
        """Couplings that sum to 1 over the PARENTS of a lower capsule, never over the lower capsules."""
        return b_ij.softmax(-1)


ALL = Parents()


class Routing(nn.Module):
    """Base class of routing algorithms; see the top of this file."""

    name: ClassVar[str] = ""
    own_activations: ClassVar[bool] = False
    """Whether activations are computed by the algorithm; otherwise they are the lengths of the poses."""
    couplings: ClassVar[str] = "coupling coefficient"
    """What the algorithm calls one of its c_ij."""
    couplings_sum_to_one: ClassVar[bool] = True
    """Whether the couplings of a lower capsule sum to 1 over its parents."""
    decayed: ClassVar[tuple[str, ...]] = ()
    """Parameters that weight decay applies to: weights, but not biases or temperatures."""
    Options: ClassVar[type[RoutingOptions]] = RoutingOptions

    def __init__(self, options: RoutingOptions | None = None, **changes: Any) -> None:
        super().__init__()
        self.sizes: Sizes | None = None
        self.options: Any = changed(self.Options() if options is None else options, self.name, changes)

    def build(self, sizes: Sizes, *, device: torch.device | None = None, dtype: torch.dtype | None = None) -> None:
        """Called once by the layer that owns this algorithm. Subclasses with parameters create them here."""
        if self.sizes is not None:
            raise UserError(f"this {self.name} routing already belongs to a layer: give each layer its own.")
        self.sizes = sizes

    def check_built(self) -> None:
        """Refuse to run without the parameters that `build` creates."""
        if self.sizes is None:
            raise UserError(
                f"the routing '{self.name}' has parameters and is not part of a layer yet: use it in one, such as "
                f"DenseCaps(…, routing='{self.name}'), or call `build` and `reset_parameters`."
            )

    def reset_parameters(self, init: str = "default") -> None:
        """Initialise the parameters; called by the layer after `build`."""

    def expect_spread(self, spread: float) -> None:
        """Adapt the initial parameters to votes that spread by this much: the Lab's votes are larger than a layer's."""

    def initial_std(self) -> float | None:
        """Standard deviation of the layer's initial transformations; None leaves it to the layer."""
        return None

    def forward(
        self, u: Tensor, W: Tensor, a: Tensor | None = None, *, parents: Parents = ALL, trace: bool = False
    ) -> Routed:
        """Lower poses u (b, i, p) and transformations W (n, j, q, p) → upper capsules.

        `a` (b, i) are the lower activations, by default the lengths of the poses where an algorithm needs them.
        """
        check(u, W, self.matrix, a)
        with without_autocast(u):
            u, W = at_least_float32(u), at_least_float32(W)  # bfloat16 would round the agreement away
            if not trace and parents is ALL and (routed := self.without_votes(u, W, a)) is not None:
                return routed
            a = lower_activations(u, a) if self.own_activations else None
            u_hat = self.votes(u, W)
            return check_routed(self.route(u_hat, a, parents, trace), u_hat, self.name)

    def without_votes(self, u: Tensor, W: Tensor, a: Tensor | None) -> Routed | None:
        """Route a dense layer without forming votes, if an algorithm can and it is faster; None is the plain way."""
        return None

    def on_grid(self, u: Tensor, W: Tensor, a: Tensor | None, windows: Any) -> Routed | None:
        """Route a grid without forming votes, if an algorithm can and it is faster; None is the plain way.

        u (b, cells·n, p), W (blocks·n, j, …) and a (b, cells·n) → (b·o, j, q); `windows` is a
        `capsnet.kernels.grid.Windows`, which tells the windows o that see each cell.
        """
        return None

    def votes(self, u: Tensor, W: Tensor) -> Tensor:
        """û_{j|i} (b, i, j, q) of vector or matrix poses."""
        return matrix_votes(u, W) if self.matrix else votes(u, W)

    def route(self, u_hat: Tensor, a: Tensor | None, parents: Parents, trace: bool) -> Routed:
        """The algorithm on votes û_{j|i} (b, i, j, q) in float32 or wider.

        `a` (b, i) are the lower activations where the algorithm computes activations of its own, and None otherwise:
        then the lengths of the votes carry them. Called with votes alone, an algorithm takes None as all 1.
        """
        raise UserError(f"the routing '{self.name}' has no method route(self, u_hat, a, parents, trace): write one.")

    def over_batch(self, activations: Tensor) -> Tensor:
        """What remains to be done with activations (…, j) once the whole batch is known, such as a batch norm.

        `route` calls it, unless `parents.partial`: a layer that routes a batch in parts, or recomputes them in the
        backward pass, calls it once for all of them.
        """
        return activations

    def initial_coupling(self, sizes: Sizes) -> float:
        """The weight of a vote in the first pass: a layer scales its initial transformations by it."""
        return 1 / sizes.upper

    def by_class(self, name: str, tensor: Tensor) -> Tensor | None:
        """A view of a parameter with the upper capsules as its first axis; None if it has no such axis."""
        return None

    @property
    def matrix(self) -> bool:
        return self.sizes is not None and self.sizes.matrix

    def with_options(self, **changes: Any) -> Routing:
        """The same algorithm with the same parameters and other options; this one is unchanged."""
        other = copy.copy(self)
        other.options = changed(self.options, self.name, changes)
        return other

    def extra_repr(self) -> str:
        return ", ".join(f"{field.name}={getattr(self.options, field.name)}" for field in fields(self.options))


def changed(options: RoutingOptions, name: str, changes: dict[str, Any]) -> RoutingOptions:
    """Options with some fields replaced; one that the algorithm does not have is refused."""
    known = [field.name for field in fields(options)]
    if strange := [key for key in changes if key not in known]:
        raise unknown(f"option of {name} routing", strange[0], known)
    try:
        return replace(options, **changes)
    except UserError:
        raise
    except (TypeError, ValueError) as error:  # a plugin's own check
        raise UserError(f"{name} routing refuses its options: {error}.") from error


def check(u: Tensor, W: Tensor, matrix: bool = False, a: Tensor | None = None) -> None:
    """Refuse shapes that do not fit: a compiled loop would read and write past the end of its arrays."""
    if a is not None:
        check_activations(u, a)
    fits = u.dim() == 3 and W.dim() == 4 and (u.shape[2] % W.shape[2] == 0 if matrix else u.shape[2] == W.shape[3])
    if not fits or not W.shape[0] or u.shape[1] % W.shape[0]:
        kind = "W (n, j, k, c) with k a divisor of p" if matrix else "W (n, j, q, p)"
        raise UserError(
            f"routing expects u (b, i, p) and {kind} with n equal to i or a divisor of it, and got "
            f"{tuple(u.shape)} and {tuple(W.shape)}."
        )


def check_activations(u: Tensor, a: Tensor) -> None:
    """Refuse activations of a wrong shape or, on the CPU, outside [0, 1]; elsewhere looking would stop the device."""
    if a.shape != u.shape[:2]:
        raise UserError(f"lower activations are (b, i), here {tuple(u.shape[:2])}, and got {tuple(a.shape)}.")
    if a.device.type != "cpu" or not a.numel() or torch.compiler.is_compiling() or is_transformed():
        return
    low, high = (float(x) for x in a.detach().aminmax())
    if low < 0 or high > 1 + ROUNDING:
        raise UserError(
            f"lower activations are in [0, 1] and these go from {low:g} to {high:g}: "
            f"squash them, or pass None to use the lengths of the poses."
        )


def check_routed(routed: Routed, u_hat: Tensor, name: str) -> Routed:
    """Refuse what a plugin's `route` should not return; further up, nothing would point to it."""
    if not isinstance(routed, Routed):
        raise UserError(f"route of the routing '{name}' should return a Routed, not a {type(routed).__name__}.")
    poses, activations = routed.poses.shape, routed.activations.shape
    if poses[1:] != u_hat.shape[2:] or activations[1:] != u_hat.shape[2:3]:
        raise UserError(
            f"route of the routing '{name}' should return poses (b, j, q) and activations (b, j), here "
            f"(b, {u_hat.shape[2]}, {u_hat.shape[3]}) and (b, {u_hat.shape[2]}), and returned {tuple(poses)} and "
            f"{tuple(activations)}."
        )
    return routed


def lower_activations(u: Tensor, a: Tensor | None) -> Tensor:
    """Activations (b, i) of lower capsules: as given, or the lengths of their poses, at most 1."""
    return at_least_float32(u).norm(dim=-1).clamp(max=1) if a is None else at_least_float32(a)


class RoutingRegistry(Registry[type[Routing]]):
    """Routing algorithms by name."""

    def prepare(self, name: str, entry: type[Routing]) -> type[Routing]:
        """Tell an algorithm and its options their name."""
        if not (isinstance(entry, type) and issubclass(entry, Routing)):
            raise UserError(f"the routing '{name}' should be a subclass of capsnet.Routing, and is {entry!r}.")
        entry.name = name
        entry.Options = owned(entry.Options, entry, "algorithm", name)
        return entry


ROUTINGS = RoutingRegistry(
    "routing",
    "capsnet.routings",
    {
        "dynamic": "capsnet.routing.dynamic",
        "uniform": "capsnet.routing.uniform",
        "max-min": "capsnet.routing.max_min",
        "self-attention": "capsnet.routing.self_attention",
        "inverted-attention": "capsnet.routing.inverted_attention",
        "self-routing": "capsnet.routing.self_routing",
        "em": "capsnet.routing.em",
        "vb": "capsnet.routing.vb",
        "kuramoto": "capsnet.routing.kuramoto",
    },
)


def register(name: str) -> Any:
    """Class decorator: register a routing algorithm under a name that configs and checkpoints refer to."""
    return ROUTINGS.register(name)


def options_for(name: str, **changes: Any) -> RoutingOptions:
    """The options of an algorithm by its name; an unknown name or option lists the choices.

    >>> options_for("dynamic", iterations=1)
    DynamicOptions(iterations=1, leaky=False, bias=False, detach=False)
    """
    return changed(ROUTINGS.get(name).Options(), name, changes)


def create(routing: str | RoutingOptions | Routing) -> Routing:
    """A routing module from a name, from options, or unchanged."""
    if isinstance(routing, Routing):
        return routing
    options = options_for(routing) if isinstance(routing, str) else routing
    return ROUTINGS.get(options.algorithm)(options)
