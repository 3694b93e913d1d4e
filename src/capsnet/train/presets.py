"""Presets: named settings. The docstring of each has its command and, where measured, its cost and error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from capsnet.data.config import Augment
from capsnet.errors import unknown
from capsnet.models.config import CapsNetConfig, CNNConfig, LossConfig
from capsnet.routing.options import DynamicOptions
from capsnet.train.config import Config

PRESETS: dict[str, Callable[[], Config]] = {}
PROMISES: dict[str, str] = {}
QUICK_NETWORK = CapsNetConfig(
    stem_channels=(32, 64, 64),
    stem_kernels=(5, 3, 3),
    stem_strides=(2, 1, 1),
    stem_norm=True,
    primary_types=32,
    primary_kernel=3,
    primary_stride=2,
    routing=DynamicOptions(bias=True),
)
OWN_IMAGES_NETWORK = replace(
    QUICK_NETWORK,
    stem="residual",
    stem_channels=(32, 64, 64, 128, 128),
    stem_kernels=(3, 3, 3, 3, 3),
    stem_strides=(1, 2, 1, 2, 2),
    primary_types=16,
    primary_kernel=2,
    primary_squash=False,
    shared=True,
)


def preset(function: Callable[[], Config]) -> Callable[[], Config]:
    """Register a preset under its function's name; its docstring is its promise."""
    name = function.__name__.replace("_", "-")
    PRESETS[name] = function
    PROMISES[name] = " ".join((function.__doc__ or "").split())
    return function


def get_preset(name: str) -> Config:
    """The preset of that name; an unknown name lists the choices."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return replace(PRESETS[name](), preset=name)


@preset
def quick() -> Config:
    """A compact capsule network with 1,984,272 parameters, trained on all 60,000 digits: at least 99.5 % test accuracy
    after less than 2 minutes on two cores.

    `capsnet train`
    """
    return Config(
        validation=0, epochs=4, batch_size=128, optimizer="adamw", lr=0.006, schedule="one-cycle", weight_decay=0.01,
        precision="bf16", model=QUICK_NETWORK, augment=Augment(shift=2),
    )  # fmt: skip


@preset
def best() -> Config:
    """The lowest error of a single network within an hour on two cores: three branches after a shared trunk,
    3,600,544 parameters, averaged weights, a larger weight of the reconstruction loss, shifts, and affine and elastic
    deformations of half the digits. The mean test error of three seeds is 0.25 %; training takes about 37 minutes on a
    processor with bfloat16.

    `capsnet train --preset best`
    """
    from capsnet.models.branched import BranchedConfig  # here, because it imports torch

    return Config(
        validation=0, epochs=24, optimizer="adamw", lr=0.004, schedule="one-cycle", warmup=0.1, weight_decay=0.05,
        average=0.999, precision="bf16",
        model=BranchedConfig(
            stem_channels=(32, 32, 32, 192, 288, 384, 384), stem_kernels=(3, 3, 3, 3, 3, 3, 3),
            stem_strides=(1, 1, 1, 2, 1, 1, 1), stem_norm=True, branches=3, trunk=3, primary_types=96,
            primary_kernel=3, primary_stride=1, class_dim=24, routing=DynamicOptions(bias=True),
        ),
        loss=LossConfig(reconstruction=0.004),
        augment=Augment(shift=2, rotate=12, scale=0.12, shear=0.15, elastic=0.8, share=0.5, until=0.85),
    )  # fmt: skip


@preset
def efficient() -> Config:
    """Efficient-CapsNet: few capsules and self-attention routing, 161,824 parameters without the decoder,
    for 15 epochs of 468 steps. One seed, trained on all 60,000 digits, has a test error of 0.39 % (42 minutes on two
    busy cores).

    `capsnet train --preset efficient`
    """
    from capsnet.models.efficient import EfficientConfig  # here, because it imports torch

    return Config(
        validation=0, epochs=15, optimizer="adamw", lr=0.002, schedule="one-cycle", weight_decay=0.01,
        precision="bf16", model=EfficientConfig(),
        augment=Augment(shift=2, rotate=12, scale=0.12, shear=0.15, share=0.5, until=0.85),
    )  # fmt: skip


@preset
def matrix() -> Config:
    """Matrix capsules with EM routing: convolutional capsules, coordinates added to the votes of the last ones, spread
    loss with a margin that grows from 0.2 to 0.9. 68,444 parameters on MNIST, for 10 epochs in batches of 64.

    `capsnet train --preset matrix`
    """
    from capsnet.models.matrix import MatrixConfig  # here, because it imports torch

    return Config(
        epochs=10, batch_size=64, optimizer="adamw", lr=0.003, schedule="one-cycle", weight_decay=0.01,
        model=MatrixConfig(), augment=Augment(shift=2),
    )  # fmt: skip


@preset
def cifar10() -> Config:
    """Capsules on a residual stem for CIFAR-10: 2,441,040 parameters, 155 million multiply-adds per image, averaged
    weights, flips, shifts of up to 4 px and erased squares of 8 px, for 32 epochs of 352 steps; 5,000 training images
    are held out for validation. One seed has a test error of 7.70 % (91 minutes on one busy core with bfloat16).

    `capsnet train --preset cifar10`
    """
    return Config(
        data="cifar10", validation=5000, epochs=32, optimizer="adamw", lr=0.006, schedule="one-cycle",
        weight_decay=0.05, average=0.999, precision="bf16",
        model=CapsNetConfig(
            (3, 32, 32), stem="residual", stem_channels=(48, 96, 96, 192, 192), stem_kernels=(3, 3, 3, 3, 3),
            stem_strides=(1, 2, 1, 2, 1), primary_types=16, primary_kernel=2, primary_stride=2, shared=True,
            routing=DynamicOptions(bias=True), decoder=(128, 256),
        ),
        loss=LossConfig(reconstruction=0.0001),
        augment=Augment(shift=4, flip=True, erase=8),
    )  # fmt: skip


@preset
def own_images() -> Config:
    """Capsules on a residual stem for a folder of your images, and the default for `--data folder:PATH` and `csv:PATH`:
    30 epochs in batches of 16. Time and error depend on the data; the network was chosen on three small folders
    (`capsnet reproduce own-images`).

    `capsnet train --data folder:PATH`
    """
    return replace(
        quick(), validation=10_000, epochs=30, batch_size=16, lr=0.003, precision="auto", model=OWN_IMAGES_NETWORK
    )


@preset
def paper() -> Config:
    """The network of the paper's text: 8,215,568 parameters, Adam, margin loss summed over the classes, shifts of up to
    2 px. 11,700 steps of 0.29 s on two cores: about 57 minutes. In float32, as in the paper, so that results do not
    depend on the processor. In bfloat16, with a one-cycle rate and no validation images, one seed of this network has a
    test error of 0.34 % after as many epochs (`capsnet reproduce table1 --budget day`).

    `capsnet train --preset paper`
    """
    return Config(epochs=30, schedule="exponential", augment=Augment(shift=2))


@preset
def official() -> Config:
    """The network of the authors' code, with every choice that the paper does not mention. 11,700 steps of 0.29 s on
    two cores: about 57 minutes. In float32, like the authors' code.

    `capsnet train --preset official`, with `--epochs 769` for the authors' 300,000 steps: about a day.
    """
    return Config(
        epochs=30, schedule="exponential", validation_choice="first",
        model=CapsNetConfig(primary_factor=True, routing=DynamicOptions(bias=True), init="official"),
        loss=LossConfig(margin_reduction="half-mean"),
        augment=Augment(shift=2),
    )  # fmt: skip


@preset
def multimnist() -> Config:
    """Two overlapping digits on 36×36 pixels: a compact capsule network with 2,988,944 parameters and a deep stem,
    trained on new pairs in every epoch. One seed with 5,000 validation pairs has a test error of 6.68 % of 100,000
    pairs after 30 epochs (114 minutes on two busy cores).

    `capsnet train --preset multimnist`
    """
    return Config(
        data="multimnist", epochs=30, optimizer="adamw", lr=0.004, schedule="one-cycle", weight_decay=0.01,
        model=CapsNetConfig(
            (1, 36, 36), stem_channels=(32, 64, 128, 128, 128), stem_kernels=(5, 3, 3, 3, 3),
            stem_strides=(2, 1, 1, 1, 1), stem_norm=True, primary_types=32, primary_kernel=3, primary_stride=2,
            routing=DynamicOptions(bias=True),
        ),
    )  # fmt: skip


@preset
def expanded() -> Config:
    """A compact capsule network with 3,926,592 parameters for digits at any position on 40×40 pixels, trained to a
    validation accuracy of 99.2 % and then tested on transformed digits. One seed has a test error of 0.51 % after 7
    epochs (8.5 minutes on two busy cores).

    `capsnet train --preset expanded`, then `capsnet evaluate RUN --data affine-mnist`
    """
    model = replace(QUICK_NETWORK, image_shape=(1, 40, 40))
    return Config(
        data="expanded-mnist", epochs=8, optimizer="adamw", lr=0.004, schedule="one-cycle", weight_decay=0.01,
        stop_at=0.8, model=model,
    )  # fmt: skip


@preset
def expanded_cnn() -> Config:
    """The baseline for `expanded`: a convolutional network with max-pooling and dropout, 3,908,520 parameters, trained
    to the same validation accuracy. One seed has a test error of 0.61 % after 8 epochs (12 minutes on two busy cores).

    `capsnet train --preset expanded-cnn`, then `capsnet evaluate RUN --data affine-mnist`
    """
    model = CNNConfig((1, 40, 40), 10, (32, 64, 128), (5, 5, 3), (2, 2, 2), (1178,))
    return replace(expanded(), lr=0.002, model=model)


@preset
def baseline_mnist() -> Config:
    """The paper's convolutional baseline for MNIST: 35,445,522 parameters, 3,900 steps. A step takes about ten times
    the arithmetic of `paper`, so use a GPU.

    `capsnet train --preset baseline-mnist`
    """
    return Config(epochs=10, model=CNNConfig(), augment=Augment(shift=2))


@preset
def baseline_multimnist() -> Config:
    """The paper's convolutional baseline for MultiMNIST at 36×36 pixels: 24,563,978 parameters, one sigmoid per class,
    3,900 steps. A step takes about five times the arithmetic of `paper` on MNIST, so use a GPU.

    `capsnet train --preset baseline-multimnist`
    """
    model = CNNConfig((1, 36, 36), 10, (512, 256), (9, 5), (2, 2), (1024,), dropout=0.0)
    return Config(data="multimnist", epochs=10, model=model)
