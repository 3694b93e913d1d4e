"""Datasets by name: what is known about each, and how strings such as "multimnist:canvas=56" are read.

A dataset is one file that registers a `DatasetInfo`, in this package or in a plugin:

    def load(request: Request) -> Splits: ...

    register(DatasetInfo("shapes", "coloured shapes", load, classes=("disc", "square"), image_shape=(3, 24, 24)))

No other module takes a dataset string apart: `parse` turns it into a `Spec`, and everyone asks that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from capsnet.errors import UserError, unknown
from capsnet.registry import Registry

if TYPE_CHECKING:
    from capsnet.data.sources.cache import Source
    from capsnet.data.splits import Splits

DEFAULT_VALIDATION = 10_000
Choice = Literal["seeded", "first"]
Size = int | tuple[int, int] | None  # side, or (h, w); None keeps the size


@dataclass(frozen=True)
class DatasetInfo:
    """What the package knows about a dataset before it is loaded."""

    name: str
    description: str
    """One line for `capsnet data list`."""
    load: Callable[[Request], Splits]
    """Return the three splits in the requested size. `capsnet.data.split` cuts them from tensors in memory."""
    classes: tuple[str, ...] = ()
    """Class names; empty if they depend on the files."""
    image_shape: tuple[int, int, int] | None = None
    """(c, h, w) by default; None if it depends on the files."""
    sizes: tuple[int, int] | None = None
    """Number of training and test examples. An options class may override it with a property of this name."""
    labels_per_image: int | None = 1
    """None if it varies. An options class may override it with a property of this name."""
    options: type | None = None
    """Dataclass of the options after the colon, such as `multimnist:canvas=56`; a field is an int, a float or a str."""
    takes_path: bool = False
    """Whether a path follows the colon instead, such as `folder:PATH`."""
    preset: str = "quick"
    """Preset that `capsnet train` uses for this dataset by default."""
    measures: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Bin edges of each entry of `Batch.measures`; errors are counted per bin."""
    made_of: str = ""
    """Dataset whose images this one is made of, split by split; `Request.load_base` loads it."""
    seeded_test: bool = False
    """Whether the seed decides which images are in the test split."""
    checksum: Callable[[Path], int] | None = None
    """Checksum of the files at a path, for images that the user may change between runs."""
    source: Source | None = None
    """Published files that `capsnet data fetch` downloads."""
    digit_side: int = 0
    """Side of the field that contains one MNIST-like digit; photos are then prepared as MNIST was. 0 for other data."""

    @property
    def usage(self) -> str:
        """How the name is written: "folder:PATH"."""
        return f"{self.name}:PATH" if self.takes_path else self.name


class DatasetRegistry(Registry[DatasetInfo]):
    """Datasets by name."""

    def prepare(self, name: str, entry: DatasetInfo) -> DatasetInfo:
        """Refuse anything but the record of a dataset of that name."""
        if not isinstance(entry, DatasetInfo):
            raise UserError(f"the dataset '{name}' should be a capsnet.data.DatasetInfo, and is {entry!r}.")
        if entry.name != name:
            raise UserError(f"the dataset '{entry.name}' cannot be registered as '{name}': use one name for both.")
        return entry

    def module_of(self, entry: DatasetInfo) -> str:
        return entry.load.__module__


DATASETS = DatasetRegistry(
    "dataset",
    "capsnet.datasets",
    {
        "mnist": "capsnet.data.sources.mnist",
        "fashion-mnist": "capsnet.data.sources.fashion_mnist",
        "cifar10": "capsnet.data.sources.cifar10",
        "multimnist": "capsnet.data.synthetic.multimnist",
        "expanded-mnist": "capsnet.data.synthetic.affine",
        "affine-mnist": "capsnet.data.synthetic.affine",
        "affnist": "capsnet.data.sources.affnist",
        "digits-and-shapes": "capsnet.data.synthetic.shapes",
        "parts": "capsnet.data.synthetic.parts",
        "viewpoints": "capsnet.data.synthetic.viewpoints",
        "smallnorb": "capsnet.data.sources.smallnorb",
        "svhn": "capsnet.data.sources.svhn",
        "folder": "capsnet.data.folder",
        "csv": "capsnet.data.folder",
    },
)


@dataclass(frozen=True)
class Spec:
    """A parsed dataset string: the dataset, with its options or its path."""

    text: str
    info: DatasetInfo
    options: Any = None
    path: Path = Path()

    @property
    def sizes(self) -> tuple[int, int] | None:
        return getattr(self.options, "sizes", self.info.sizes)

    @property
    def labels_per_image(self) -> int | None:
        return getattr(self.options, "labels_per_image", self.info.labels_per_image)

    @property
    def base(self) -> DatasetInfo:
        """The dataset that supplies the images: MNIST for everything made of its digits."""
        return parse(self.info.made_of).base if self.info.made_of else self.info

    @property
    def images(self) -> str:
        """Identifies the underlying images: equal for datasets that are made of the same ones.

        >>> parse("multimnist:canvas=56").images, parse("folder:a/../b").images == parse("folder:b").images
        ('mnist', True)
        """
        return f"{self.info.name}:{self.path.resolve()}" if self.info.takes_path else self.base.name

    def checksum(self) -> int | None:
        """Checksum of the user's files, by name, size and label; None for images that do not change."""
        return self.info.checksum(self.path) if self.info.checksum else None


@dataclass(frozen=True)
class Request:
    """The arguments of `load`, as a dataset's own `load` function receives them."""

    spec: Spec
    validation: int = DEFAULT_VALIDATION
    validation_choice: Choice = "seeded"
    seed: int = 0
    train_limit: int = 0
    image_size: Size = None
    channels: int | None = None

    def __post_init__(self) -> None:
        if self.validation < 0:
            raise UserError(f"validation should be a number of images, 0 or more, not {self.validation}.")
        if self.validation_choice not in ("seeded", "first"):
            raise unknown("validation choice", self.validation_choice, ("seeded", "first"))
        if not all(1 <= side <= 1024 for side in self.size or ()):
            raise UserError(f"image_size should be between 1 and 1024 pixels, not {self.image_size}.")
        if self.channels not in (None, 1, 3):
            raise UserError(f"channels should be 1 (grey) or 3 (colour), not {self.channels}.")

    @property
    def size(self) -> tuple[int, int] | None:
        """(h, w) to convert images to, or None to keep their size."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    def load_base(self) -> Splits:
        """The splits of the dataset that this one is made of, in their own image size."""
        return load_request(replace(self, spec=parse(self.spec.info.made_of), image_size=None, channels=None))


def register(info: DatasetInfo) -> DatasetInfo:
    """Make a dataset known by its name."""
    return DATASETS.register(info.name)(info)


def list_datasets() -> list[str]:
    """Names of all datasets, including those of plugins; `parse(name).info` describes one.

    >>> "mnist" in list_datasets()
    True
    """
    return DATASETS.names()


def parse(text: str) -> Spec:
    """Read a dataset string: NAME, NAME:OPTION=VALUE,… or NAME:PATH.

    >>> parse("multimnist:canvas=56,shift=14").options.canvas
    56
    """
    name, colon, rest = text.partition(":")
    info = find(text)
    if info is None:
        if text and Path(text).is_dir():
            raise UserError(f"there is no dataset '{text}', but a folder of that name: did you mean folder:{text}?")
        choices = [DATASETS.get(known).usage for known in DATASETS.names()]
        raise UserError(f"{unknown('dataset', text, choices)} A dataset of a plugin needs --plugin FILE.")
    if info.takes_path:
        if not rest:
            raise UserError(f"{name} needs a path: write {name}:PATH.")
        return Spec(text, info, path=Path(rest).expanduser())
    if info.options is None and colon:
        raise UserError(f"{name} has no options and was given '{rest}': write {name}.")
    return Spec(text, info, options=_read_options(info.options, name, rest) if info.options else None)


def _read_options(cls: type, name: str, text: str) -> Any:
    """An options dataclass from "canvas=56,shift=14"; missing options keep their defaults."""
    kinds = {option.name: get_type_hints(cls)[option.name] for option in fields(cls)}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        option, _, value = (word.strip() for word in part.partition("="))
        if option not in kinds:
            raise unknown(f"option of {name}", option, kinds)
        if option in values:
            raise UserError(f"{name}:{text} sets {option} twice: leave one of them out.")
        try:
            values[option] = kinds[option](value)
        except ValueError:
            wanted = "an integer" if kinds[option] is int else "a number"
            raise UserError(f"{name}:{option} should be {wanted}, not '{value}': write {name}:{option}=…") from None
    return cls(**values)


def load(
    name: str,
    *,
    validation: int = DEFAULT_VALIDATION,
    validation_choice: Choice = "seeded",
    seed: int = 0,
    train_limit: int = 0,
    image_size: Size = None,
    channels: int | None = None,
) -> Splits:
    """The splits of a dataset, downloaded on first use.

    `validation` images are held out of the training split: drawn by `seed`, or the first ones. `train_limit` keeps
    that many of the remaining ones, drawn by `seed` and balanced over the classes; 0 keeps all. `image_size` (side, or
    height and width) and `channels` (1 or 3) convert images.

    >>> load("mnist", validation=5000).train  # doctest: +SKIP
    """
    return load_request(Request(parse(name), validation, validation_choice, seed, train_limit, image_size, channels))


def load_request(request: Request) -> Splits:
    """Load what is requested, and check that the images have the requested size."""
    splits = request.spec.info.load(request)
    c, h, w = shape = splits.test.image_shape
    wanted = (request.channels or c, *(request.size or (h, w)))
    if wanted != shape:
        raise UserError(
            f"{request.spec.text} has images of (channels, height, width) {shape}, and {wanted} was requested: leave "
            f"the image size out, or choose data of that size."
        )
    return splits


def name_of(text: str) -> str:
    """The name in a dataset string, without options or path and whether it is registered or not."""
    return text.partition(":")[0]


def find(text: str) -> DatasetInfo | None:
    """The record of a dataset string; None for data that is not registered."""
    return DATASETS.get(name_of(text)) if name_of(text) in DATASETS else None


def same_images(one: str, other: str) -> bool:
    """Whether two datasets are made of the same images; the datasets of a missing plugin differ from all others.

    >>> same_images("multimnist", "mnist"), same_images("mnist", "fashion-mnist")
    (True, False)
    """
    try:
        return parse(one).images == parse(other).images
    except UserError:
        return one == other


def bin_edges(text: str) -> Mapping[str, tuple[float, ...]]:
    """Bin edges of the measures of a dataset; none for data that is not registered."""
    info = find(text)
    return info.measures if info else {}


def is_cached(name: str) -> bool:
    """Whether everything that the dataset downloads is on this machine."""
    from capsnet.data.sources import cache

    source = parse(name).base.source
    return source is None or cache.is_cached(source)
