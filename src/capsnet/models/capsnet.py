"""The capsule network of section 4: convolutional stem → PrimaryCaps → DenseCaps → Decoder.

With the default config it is the paper's network for MNIST (Fig. 1 and 2); every size is a field of the config. Ours
and not the paper's: a stem may part into branches, which come together again in the class capsules.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn

from capsnet.config import CapsNetConfig
from capsnet.errors import UserError
from capsnet.functional import lengths, mask
from capsnet.layers import Conv2d, Decoder, DenseCaps, PrimaryCaps
from capsnet.models.base import Classifier, Output


class CapsNet(Classifier):
    """Images (b, c, h, w) → class capsules, whose lengths say what is there and whose directions say how it looks.

    >>> from capsnet.config import CapsNetConfig
    >>> output = CapsNet(CapsNetConfig())(torch.rand(2, 1, 28, 28))
    >>> output.lengths.shape, output.poses.shape
    (torch.Size([2, 10]), torch.Size([2, 10, 16]))
    """

    config: CapsNetConfig

    def __init__(
        self,
        config: CapsNetConfig,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config)
        factory = {"device": device, "dtype": dtype}
        self.grid = grid_size(config)
        check_branches(config)
        self.stem = build_stem(config, **factory)  # type: ignore[arg-type]
        self.primary = PrimaryCaps(
            config.stem_channels[-1] if config.stem_channels else config.image_shape[0],
            config.primary_types, config.primary_dim, config.primary_kernel, config.primary_stride,
            factor=1 / config.primary_types if config.primary_factor else 1.0, groups=config.branches,
            init=config.init, **factory,  # type: ignore[arg-type]
        )  # fmt: skip
        self.caps = nn.Sequential(*self._capsule_layers(factory))
        self.decoder = None
        if config.decoder:
            self.decoder = Decoder(
                config.num_classes, config.class_dim, config.image_shape, config.decoder,
                init=config.init, **factory,  # type: ignore[arg-type]
            )  # fmt: skip

    def _capsule_layers(self, factory: dict) -> list[DenseCaps]:
        c = self.config
        sizes = [(self.grid[0] * self.grid[1] * c.primary_types, c.primary_dim)]
        sizes += [*c.hidden_caps, (c.num_classes, c.class_dim)]
        options = {
            "iterations": c.iterations, "routing": c.routing, "bias": c.routing_bias, "leaky": c.leaky,
            "detach": c.detach, "init": c.init, "groups": c.branches, **factory,
        }  # fmt: skip
        return [
            DenseCaps(*lower, *upper, shared=c.primary_types if c.shared and depth == 0 else None, **options)
            for depth, (lower, upper) in enumerate(itertools.pairwise(sizes))
        ]

    def forward(self, images: Tensor, trace: bool = False) -> Output:
        """Lengths, poses, primary capsules and, if asked for, the trace of the class capsules' routing."""
        self.check(images)
        u = primary = self.primary.after(self.stem, images)
        *hidden, top = self.caps
        for layer in hidden:
            u = layer(u)
        assert isinstance(top, DenseCaps)
        v, how = top.route(u, trace=True) if trace else (top(u), None)  # called, for hooks and pruning wait for that
        return Output(lengths(v), v, primary, None, how)

    def reconstruct(self, poses: Tensor, classes: Tensor) -> Tensor | None:
        """Decode the pose of each chosen class by itself, all others masked to zero.

        poses (b, j, q), classes (b,) or (b, k) → (b, c, h, w) or (b, k, c, h, w); None without a decoder.
        """
        if self.decoder is None:
            return None
        kept = nn.functional.one_hot(classes, self.config.num_classes)
        return self.decoder(mask(poses if classes.dim() == 1 else poses.unsqueeze(1), kept))

    def reconstruct_set(self, poses: Tensor, targets: Tensor) -> Tensor | None:
        """Decode all classes of a set together: targets (b, j) → (b, c, h, w)."""
        return None if self.decoder is None else self.decoder(mask(poses, targets))

    def tweaks(self, pose: Tensor, label: int, span: float = 0.25, steps: int = 11) -> Tensor:
        """Each dimension of a class capsule's pose moved in steps over [−span, span], decoded (Fig. 4).

        pose (q,) of class `label` → (q, steps, c, h, w).
        """
        if self.decoder is None:
            raise UserError("this model has no decoder, so its poses cannot be painted: train one with a decoder.")
        q = len(pose)
        moves = torch.linspace(-span, span, steps, device=pose.device, dtype=pose.dtype)
        moved = pose + torch.eye(q, device=pose.device, dtype=pose.dtype)[:, None] * moves[:, None]  # q steps q
        poses = pose.new_zeros(q, steps, self.config.num_classes, q)
        poses[:, :, label] = moved
        return self.decoder(poses)


def check_branches(config: CapsNetConfig) -> None:
    """Branches part within the stem, share out what comes after, and are joined in the class capsules."""
    k, trunk, depth = config.branches, config.trunk, len(config.stem_channels)
    if k == 1 and trunk:
        raise UserError(f"trunk={trunk} is for a network with branches: set branches above 1, or trunk to 0.")
    if k == 1:
        return
    if trunk >= depth:
        raise UserError(
            f"branches={k} part within the stem, and it has {depth} convolutions of which trunk={trunk} are shared: "
            f"use a longer stem or a smaller trunk."
        )
    if config.hidden_caps:
        raise UserError(f"branches={k} have no capsules between primary and class capsules: leave hidden_caps empty.")
    shared_out = {"primary_types": (config.primary_types,), "class_dim": (config.class_dim,)}
    for name, sizes in {"stem_channels": config.stem_channels[trunk:], **shared_out}.items():
        if wrong := [size for size in sizes if size % k]:
            raise UserError(
                f"{name}={wrong[0]} cannot be shared out among {k} branches: choose a multiple of "
                f"{k}, or another number of branches."
            )


def grid_size(config: CapsNetConfig) -> tuple[int, int]:
    """Height and width of the primary capsules' grid; an image that is too small is said so here."""
    sides = list(config.image_shape[1:])
    kernels = [*config.stem_kernels, config.primary_kernel]
    strides = [*config.stem_strides, config.primary_stride]
    if not len(config.stem_channels) == len(config.stem_kernels) == len(config.stem_strides):
        raise UserError("stem_channels, stem_kernels and stem_strides need one number for each convolution.")
    for kernel, stride in zip(kernels, strides, strict=True):
        sides = [(side - kernel) // stride + 1 for side in sides]
    if min(sides) < 1:
        height, width = config.image_shape[1:]
        raise UserError(
            f"an image of {height}×{width} px is too small for kernels of {kernels} with strides {strides}: "
            f"use larger images or smaller kernels."
        )
    return sides[0], sides[1]


def build_stem(
    config: CapsNetConfig, device: torch.device | None = None, dtype: torch.dtype | None = None
) -> nn.Sequential:
    """Convolution, batch norm if asked for, ReLU; for each entry of the config."""
    layers: list[nn.Module] = []
    before = config.image_shape[0]
    options = {"init_std": 0.05 if config.init == "official" else None, "device": device, "dtype": dtype}
    sizes = zip(config.stem_channels, config.stem_kernels, config.stem_strides, strict=True)
    for depth, (channels, kernel, stride) in enumerate(sizes):
        bias = not config.stem_norm  # a norm takes any bias away again
        groups = config.branches if depth > config.trunk else 1  # the first after the trunk sees all of it
        layers.append(Conv2d(before, channels, kernel, stride, bias, groups=groups, **options))  # type: ignore[arg-type]
        if config.stem_norm:
            layers.append(nn.BatchNorm2d(channels, device=device, dtype=dtype))
        layers.append(nn.ReLU(inplace=True))
        before = channels
    return nn.Sequential(*layers)
