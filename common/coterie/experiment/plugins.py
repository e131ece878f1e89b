"""Names from outside: those of installed packages, and import paths of files beside the experiment.

An installed package registers names in entry-point groups. Its code needs no permission, because the owner installed it. An import path
"module:name" is code that the experiment names, and a client imports it only with `--allow-code`. Built-in names take precedence, so
packages are not searched for them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from coterie.errors import ConfigError
from coterie.findings import Finding
from coterie.text.quoting import quoted
from coterie.text.suggestions import suggestion

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Kind = Literal["method", "loss", "model", "source", "partition", "compressor", "rule"]
T = TypeVar("T")
GROUPS: Final[Mapping[Kind, str]] = {
    "method": "coterie.methods",
    "loss": "coterie.losses",  # convex ones and those of networks
    "model": "coterie.models",
    "source": "coterie.data",
    "partition": "coterie.partitions",
    "compressor": "coterie.compressors",
    "rule": "coterie.rules",
}
PLACES: Final[Mapping[Kind, str]] = {  # the key of an experiment that names one
    "method": "method.name",
    "loss": "problem.loss",
    "model": "model.build",
    "source": "data.path",
    "partition": "data.partition.by",
    "compressor": "federation.compress.up.by",
    "rule": "federation.robust.rule",
}
PACKAGE: Final = r"^[a-z0-9]([a-z0-9-]{0,98}[a-z0-9])?$"  # a distribution's normalised name
_NOUNS: Final[Mapping[Kind, str]] = {"source": "data source"}
_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_PACKAGE = re.compile(PACKAGE)
_UNEXPECTED = re.compile(r"(\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'")


@dataclass(frozen=True)
class Package:
    name: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


def is_path(name: str) -> bool:
    """Whether this is an import path "package.module:name"."""
    return bool(_PATH.fullmatch(name))


def is_there(kind: Kind, name: str) -> bool:
    """Whether an installed package has this name. ConfigError if two do."""
    return _entry(kind, name) is not None


def package_of(kind: Kind, name: str) -> Package | None:
    """The package with this name; None for an import path, or if there is none. ConfigError if two have it."""
    entry = _entry(kind, name)
    return None if entry is None else _package(entry)


def names(kind: Kind) -> Sequence[str]:
    """All names of installed packages, in alphabetical order."""
    return sorted({entry.name for entry in _entries(kind, tuple(sys.path))})


def unknown(kind: Kind, name: object, built_in: Sequence[str]) -> str:
    """The sentence for a name that is not built in, not of a package, and not an import path."""
    listed = [*built_in, *names(kind)]
    some = f"one of {', '.join(listed)}, or " if listed else ""
    wanted = f"want {some}an import path 'package.module:name'"
    return f"{noun(kind)} {quoted(name)} is unknown: {wanted}{suggestion(name, listed)}"


def check_known(kind: Kind, name: str, built_in: Sequence[str]) -> str:
    """The name. ValueError if it is unknown."""
    if name in built_in or is_path(name) or is_there(kind, name):
        return name
    raise ValueError(unknown(kind, name, built_in))


def noun(kind: Kind) -> str:
    """The word for this kind in messages."""
    return _NOUNS.get(kind, kind)


@dataclass(frozen=True)
class Place:
    """Where the code of a name is."""

    kind: Kind
    what: str  # its name in messages
    module: str
    attribute: str  # in the module; "" if only the module is named

    @property
    def finding(self) -> Finding:
        """For mistakes in this code."""
        return Finding("L4", place=PLACES[self.kind])

    def imported(self) -> ModuleType:
        """The module. ConfigError if it cannot be imported."""
        try:
            found = importlib.import_module(self.module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # foreign modules may raise anything, even SystemExit
            said = f"{type(error).__name__}: {error}{_of_field(error)}"
            raise ConfigError(f"{self.what} cannot be imported: {said}", self.finding) from error
        if found.__spec__ is not None and found.__spec__.origin is None and hasattr(found, "__path__"):  # a namespace package
            said = f"{self.module!r} is a folder here, want a module; if the module is in the folder: cd {self.module}"
            raise ConfigError(f"{self.what} cannot be imported: {said}", self.finding)
        return found

    def loaded(self) -> Any:
        """The attribute. ConfigError if it does not exist."""
        found: Any = self.imported()
        for part in filter(None, self.attribute.split(".")):
            if not hasattr(found, part):
                raise ConfigError(f"{self.what} does not exist: module {self.module!r} has no {self.attribute!r}", self.finding)
            found = getattr(found, part)
        return found

    def at(self, path: str) -> Place:
        """The place of one of its parts, "package.module:name"."""
        module, _, attribute = path.partition(":")
        return replace(self, module=module, attribute=attribute)


def _of_field(error: BaseException) -> str:
    """The field of an author's class that was probably meant by an unknown one, as the end of a sentence."""
    found = _UNEXPECTED.match(str(error)) if isinstance(error, TypeError) else None
    if found is None:
        return ""
    public = importlib.import_module("coterie.plugin")
    fields = getattr(getattr(public, found[1], None), "__dataclass_fields__", {})
    return suggestion(found[2], fields)


def place(kind: Kind, name: str) -> Place | None:
    """Where the code of an import path, or of a package's name, is; None for unknown names. ConfigError for a path without permission."""
    if is_path(name):
        if not _LEAVE.get():
            sentence = f"the coordinator's experiment wants to import {name!r} on this machine; allow it with --allow-code"
            raise ConfigError(sentence, Finding("L5"))
        module, _, attribute = name.partition(":")
        return Place(kind, f"{noun(kind)} {name!r}", module, attribute)
    entry = _entry(kind, name)
    return None if entry is None else Place(kind, f"{noun(kind)} {name!r} of the package {_package(entry)}", entry.module, entry.attr)


def load(kind: Kind, name: str) -> Any:
    """The value of a package's name or an import path. ConfigError if it cannot be imported, or does not exist."""
    found = place(kind, name)
    if found is None:
        raise ConfigError(f"{noun(kind)} {quoted(name)} is of no package that is installed here", Finding("L8", place=PLACES[kind]))
    return found.loaded()


def loaded(kind: Kind, name: str, cls: type[T]) -> T:
    """The same, of this class of `coterie.plugin`. ConfigError for another."""
    found = load(kind, name)
    if not isinstance(found, cls):
        sentence = f"{noun(kind)} {name!r} is a {type(found).__name__}, want a coterie.plugin.{cls.__name__}"
        raise ConfigError(sentence, Finding("L4", place=PLACES[kind]))
    return found


_LEAVE = ContextVar("leave to import by path", default=True)


@contextlib.contextmanager
def code_allowed(is_allowed: bool) -> Iterator[None]:
    """Sets whether the block may import code by path. An experiment from elsewhere may name any module."""
    token = _LEAVE.set(is_allowed)
    try:
        yield
    finally:
        _LEAVE.reset(token)


def _entry(kind: Kind, name: str) -> EntryPoint | None:
    if not _NAME.fullmatch(name):
        return None
    found = [entry for entry in _entries(kind, tuple(sys.path)) if entry.name == name]
    if len(found) > 1:
        listed = " and ".join(sorted(str(_package(entry)) for entry in found))
        sentence = f"{noun(kind)} {name!r} is of {len(found)} packages, {listed}: want one of them uninstalled"
        raise ConfigError(sentence, Finding("L9", place=PLACES[kind]))
    return found[0] if found else None


@functools.cache
def _entries(kind: Kind, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:  # noqa: ARG001 - another path has other packages
    from importlib.metadata import entry_points  # noqa: PLC0415 - of no use where all names are built in

    return tuple(entry for entry in entry_points(group=GROUPS[kind]) if _NAME.fullmatch(entry.name))


def _package(entry: EntryPoint) -> Package:
    assert entry.dist is not None  # noqa: S101 - it was found in one
    return Package(re.sub(r"[-_.]+", "-", entry.dist.name).lower(), entry.dist.version)


def installed(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 - as above

    try:
        return version(name)
    except PackageNotFoundError:
        return None


def check_installed(packages: object) -> None:
    """ConfigError naming a package of a run that is not installed here. Malformed mappings are reported elsewhere."""
    for name, version in packages.items() if isinstance(packages, Mapping) else ():
        if isinstance(name, str) and _PACKAGE.fullmatch(name) and installed(name) is None:
            sentence = f"the experiment needs the package {name} {quoted(version)}, which is not installed here"
            raise ConfigError(sentence, Finding("L8"))


def check_versions(packages: Mapping[str, str]) -> None:
    """ConfigError naming a package of a run that is not installed here, or in another version."""
    check_installed(packages)
    for name, version in packages.items():
        if (found := installed(name)) != version:
            sentence = f"the package {name} is installed here in version {found}, and the experiment needs version {version}"
            raise ConfigError(sentence, Finding("L10"))


def packages_of(named: Iterator[tuple[Kind, str]], given: Mapping[str, str]) -> dict[str, str]:
    """Name and version of each package that has one of the names. Given versions take precedence over installed ones."""
    found = {package.name: package.version for kind, name in named if (package := package_of(kind, name)) is not None}
    return {name: given.get(name, version) for name, version in sorted(found.items())}
