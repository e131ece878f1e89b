"""The methods there are, and what each of them is.

A method is one name and three values: `METHOD` in `coterie`, `SERVER` in `coterie_server`, `CLIENT` or `UPDATE` in `coterie_client`. No
list has to be kept: what is asked by name is looked up by name, and all modules are read only where all methods are to be listed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from coterie.experiment.method import Kind, Method, Room
from coterie.wire.messages import find_kinds_with

MODULES = {"global": "global_"}  # whose name would be a keyword
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def part(package: str, name: str, value: str) -> Any:
    """What a method, or steps of every run, has as `value` in a package, such as "SERVER" in "coterie_server"; None for nothing.

    The only place that looks for a value by its name; those who call it check the type.
    """
    module = _module(package, name) if _NAME.fullmatch(name) else None
    return None if module is None else getattr(module, value, None)


def _module(package: str, name: str) -> ModuleType | None:
    """The module of a name in a package. Installed packages and files beside an experiment are to be looked up here, too."""
    return _own_module(package, name)


def _own_module(package: str, name: str) -> ModuleType | None:
    """By the convention of our own packages: `PACKAGE.methods.NAME`, or `.half` in a folder of that name."""
    for folder in ("methods", "families"):
        place = f"{package}.{folder}.{MODULES.get(name, name)}"
        try:
            module = importlib.import_module(place)
            return importlib.import_module(f"{place}.half") if hasattr(module, "__path__") else module
        except ModuleNotFoundError as error:
            if error.name not in (place, f"{package}.{folder}"):
                raise
    return None


def room(name: str) -> Room:
    """A method, or steps of every run, by name. LookupError where there is none."""
    found = part("coterie", name, "METHOD") or part("coterie", name, "ROOM")
    if not isinstance(found, Room):
        raise LookupError(f"there is no method {name!r}")
    return found


def method(name: str) -> Method:
    """A method by its name. LookupError where there is none."""
    found = _method(name)
    if found is None:
        raise LookupError(f"there is no method {name!r}")
    return found


def is_method(name: Any) -> bool:
    """Whether there is a method of this name."""
    return isinstance(name, str) and _method(name) is not None


@functools.cache
def methods(kind: Kind | None = None) -> Sequence[str]:
    """The names of all methods, or of those for one kind of models, in order of the alphabet."""
    package = importlib.import_module("coterie.methods")
    of_module = {module: name for name, module in MODULES.items()}
    listed = sorted(of_module.get(module.name, module.name) for module in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in listed if (found := _method(name)) is not None and (kind is None or kind in found.models))


def _method(name: str) -> Method | None:
    found = part("coterie", name, "METHOD")
    return found if isinstance(found, Method) and found.name == name else None


find_kinds_with(lambda name: _module("coterie", name))
