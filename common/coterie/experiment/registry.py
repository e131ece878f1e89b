"""The methods there are. A method is one name in three rooms: a module of `coterie.methods` with a `Config` of that name makes it one.

No list has to be kept: what is asked by name is looked up by name, and all modules are read only where all methods are to be told.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
from collections.abc import Sequence
from typing import Any, Final, Literal

Kind = Literal["convex", "network"]  # of users' models
CONVEX: Final[frozenset[Kind]] = frozenset({"convex"})
NETWORK: Final[frozenset[Kind]] = frozenset({"network"})
ANY_MODEL = CONVEX | NETWORK
MODULES = {"global": "global_"}  # whose name would be a keyword
_NAME = re.compile(r"[a-z][a-z0-9_]*")


def method_module(package: str, name: str) -> Any:
    """The room of a method, for example method_module("coterie_server", "pdmm")."""
    for folder in ("methods", "families"):
        place = f"{package}.{folder}.{MODULES.get(name, name)}"
        try:
            module = importlib.import_module(place)
            return importlib.import_module(f"{place}.half") if hasattr(module, "__path__") else module
        except ModuleNotFoundError as error:
            if error.name not in (place, f"{package}.{folder}"):
                raise
    raise ModuleNotFoundError(f"there is no {name!r} in {package}", name=f"{package}.methods.{name}")


def is_method(name: Any) -> bool:
    """Whether there is a method of this name."""
    return _config(name) is not None


@functools.cache
def methods(kind: Kind | None = None) -> Sequence[str]:
    """The names of all methods, or of those for one kind of models, in order of the alphabet."""
    package = importlib.import_module("coterie.methods")
    of_module = {module: name for name, module in MODULES.items()}
    listed = sorted(of_module.get(module.name, module.name) for module in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in listed if (config := _config(name)) is not None and (kind is None or kind in kinds(config)))


def kinds(config: Any) -> frozenset[Kind]:
    """What models a method of this `Config`, or with this configuration, is for: convex ones unless it says otherwise."""
    found: frozenset[Kind] = getattr(config, "models", CONVEX)
    return found


def _config(name: Any) -> Any:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        return None
    try:
        module = method_module("coterie", name)
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("coterie.methods"):
            raise
        return None
    config = getattr(module, "Config", None)
    named = getattr(config, "model_fields", {}).get("name")
    return config if named is not None and named.default == name else None
