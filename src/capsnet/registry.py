"""Names for what can be extended: routings, datasets and models, built in or from a plugin.

A registry knows its built-in entries by the module that defines them and imports that module on first use. Everything
else comes from a plugin: an installed package with an entry point in the registry's group, or a Python file given
with `--plugin` (`capsnet.plugins`). Each entry remembers where it came from, so a checkpoint can say what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from capsnet.errors import UserError, unknown

T = TypeVar("T")
BUILT_IN = "capsnet"
_origin: ContextVar[str] = ContextVar("origin", default="")


@contextmanager
def registering_from(origin: str) -> Iterator[None]:
    """Everything registered inside is recorded as coming from this plugin."""
    token = _origin.set(origin)
    try:
        yield
    finally:
        _origin.reset(token)


def owned(settings: type, owner: type, tag: str, name: str) -> Any:
    """The dataclass of an entry's settings with the entry's name in its attribute `tag`.

    Settings that another entry already owns, or that come from a base class, are subclassed first, so that a name read
    from a file always means one entry.
    """
    current = getattr(settings, tag)
    if current != name and (current or settings.__module__ != owner.__module__):
        members = {"__doc__": settings.__doc__, "__module__": owner.__module__}
        settings = dataclass(frozen=True)(type(f"{owner.__name__}Settings", (settings,), members))
    setattr(settings, tag, name)
    return settings


class Registry(Generic[T]):
    """Entries of one kind by name.

    >>> shapes = Registry[type]("shape", "capsnet.shapes")
    >>> @shapes.register("square")
    ... class Square: ...
    >>> shapes.names(), shapes.get("square").__name__
    (['square'], 'Square')
    """

    def __init__(self, kind: str, group: str, built_in: Mapping[str, str] | None = None) -> None:
        self.kind, self.group = kind, group
        self._modules = dict(built_in or {})  # name → module that registers it
        self._entries: dict[str, T] = {}
        self._origins: dict[str, str] = {}

    def prepare(self, name: str, entry: T) -> T:
        """Override to check an entry, or to tell it its name, before it is added."""
        return entry

    def module_of(self, entry: T) -> str:
        """The module that defines an entry; override it for entries that are not classes or functions."""
        return getattr(entry, "__module__", "") or ""

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds an entry under a name; a name that another origin has taken is refused."""

        def add(entry: T) -> T:
            prepared = self.prepare(name, entry)
            module = self.module_of(prepared)
            # a plugin may be the first to import one of our own modules
            origin = BUILT_IN if module.split(".")[0] == BUILT_IN else _origin.get() or module
            taken = BUILT_IN if name in self._modules else self._origins.get(name)
            if taken is not None and taken != origin:
                raise UserError(f"{origin} registers the {self.kind} '{name}', which {taken} already has: rename it.")
            self._entries[name], self._origins[name] = prepared, origin
            return prepared

        return add

    def get(self, name: str) -> T:
        """The entry of that name; an unknown name lists the choices."""
        if name not in self._entries:
            self._import(name)
        if name not in self._entries:
            raise UserError(f"{unknown(self.kind, name, self.names())} A {self.kind} of a plugin needs --plugin FILE.")
        return self._entries[name]

    def names(self) -> list[str]:
        """All names: built-in ones, those of installed packages and those of loaded plugin files."""
        return sorted({*self._modules, *self._entries, *(point.name for point in self._entry_points())})

    def origin(self, name: str) -> str:
        """Where an entry came from: "capsnet", a package with its version, or a plugin's file name."""
        self.get(name)
        return self._origins[name]

    def __contains__(self, name: object) -> bool:
        return name in self.names()

    def _import(self, name: str) -> None:
        """Import what defines a name: our own module, or the entry point of an installed package."""
        if name in self._modules:
            import_module(self._modules[name])
            return
        for point in self._entry_points():
            if point.name == name:
                self._load(point)

    def _load(self, point: EntryPoint) -> None:
        package = f"{point.dist.name} {point.dist.version}" if point.dist else point.module
        with registering_from(package):
            try:
                entry = point.load()
            except Exception as error:  # somebody else's code may fail in any way
                raise UserError(
                    f"the {self.kind} '{point.name}' of {package} cannot be imported: {error!r}."
                ) from error
            if point.name not in self._entries:  # the package does not register the entry itself
                self._add(point, entry, package)

    def _add(self, point: EntryPoint, entry: T, package: str) -> None:
        """Register what an entry point names, unless the package registers it under another name."""
        other = next((name for name, known in self._entries.items() if known is entry), None)
        if other is not None:
            raise UserError(
                f"{package} registers the {self.kind} '{other}', and its entry point names it '{point.name}': "
                f"use one name for both."
            )
        self.register(point.name)(entry)

    def _entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.group))
