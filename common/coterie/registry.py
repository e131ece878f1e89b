"""The registry of methods, and their parts.

A method is one name and three values: `METHOD` in `coterie`, `SERVER` in `coterie_server`, `CLIENT` or `UPDATE` in `coterie_client`. There
is no list: a value is looked up by the method's name, and all modules are imported only to list all methods.

A method from outside is one module with these values. An installed package names the module; or it is a file beside the experiment, named
by the import path of its `METHOD`. A value may be a text "package.module:NAME", which is imported on demand.
"""

import functools
import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, Final, TypeVar

from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.experiment.method import Kind, Method, Room
from coterie.experiment.plugins import Place
from coterie.findings import Finding
from coterie.record import snapshot
from coterie.text.quoting import quoted
from coterie.text.suggestions import suggestion
from coterie.wire.messages import declared, find_kinds_with

MODULES = {"global": "global_"}  # names that are keywords
T = TypeVar("T")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_CALLED: Final[Mapping[str, str]] = {"ServerHalf": "SERVER", "ClientHalf": "CLIENT", "LocalUpdate": "UPDATE"}
_beside: dict[str, str] = {}  # name -> import path, for methods beside an experiment that this process has met


def part(package: str, name: str, value: str) -> Any:
    """The `value` of a method, or of steps of every run, in a package, such as "SERVER" in "coterie_server"; None if there is none.

    Only this function looks up values by name. ConfigError if code from outside fails.
    """
    if not _NAME.fullmatch(name):
        return None
    if (module := _own_module(package, name)) is not None:
        return getattr(module, value, None)
    place = _place(name)
    return None if place is None else _value(place, value)


def typed_part(package: str, name: str, value: str, kind: type[T]) -> T | None:
    """As `part`, of this class. ConfigError if code from outside has another class."""
    found = part(package, name, value)
    if found is None or isinstance(found, kind):
        return found
    sentence = f"method {name!r} has as {value} a value of class {type(found).__name__}, want a coterie.plugin.{kind.__name__}"
    raise ConfigError(sentence, Finding("L4", place=plugins.PLACES["method"]))


def _own_module(package: str, name: str) -> ModuleType | None:
    """Our own module `PACKAGE.methods.NAME`, or its `half` if it is a folder."""
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
    """A method, or steps of every run, by name. LookupError if there is none."""
    found = part("coterie", name, "METHOD") or part("coterie", name, "ROOM")
    if not isinstance(found, Room):
        raise LookupError(f"there is no method {name!r}")
    return found


def method(name: str) -> Method:
    """A method by its name or import path. LookupError if there is none; ConfigError if code from outside cannot be used."""
    found = _method(name)
    if found is None:
        raise LookupError(f"there is no method {name!r}")
    return found


def is_method(name: Any) -> bool:
    """Whether a method has this name or import path. ConfigError if code from outside cannot be used."""
    return isinstance(name, str) and _method(name) is not None


def unknown_method(name: object) -> str:
    """The sentence for a name that no method has, with what the author of a method may have forgotten."""
    known = methods()
    hint = suggestion(name, known)
    if not hint and isinstance(name, str) and _NAME.fullmatch(name):
        hint = f"; if it is a package of yours: pip install -e . in its folder, or method.name={name}:METHOD there"
    return f"the method {quoted(name)} is unknown, want one of {', '.join(known)}{hint}"


def is_built_in(name: str) -> bool:
    """Whether our own packages have a method, or steps of every run, of this name."""
    return _NAME.fullmatch(name) is not None and _own_module("coterie", name) is not None


def methods(kind: Kind | None = None) -> Sequence[str]:
    """The names of all methods, or of those for one kind of models: built-in ones first, then usable ones of installed packages."""
    return (*built_in_methods(kind), *(name for name in plugins.names("method") if _is_usable(name, kind)))


@functools.cache
def built_in_methods(kind: Kind | None = None) -> Sequence[str]:
    """The names of our own methods, or of those for one kind of models, in alphabetical order."""
    package = importlib.import_module("coterie.methods")
    of_module = {module: name for name, module in MODULES.items()}
    listed = sorted(of_module.get(module.name, module.name) for module in pkgutil.iter_modules(package.__path__))
    return tuple(name for name in listed if (found := _method(name)) is not None and (kind is None or kind in found.models))


def _is_usable(name: str, kind: Kind | None) -> bool:
    try:
        found = _method(name)
    except ConfigError:  # `method` gives the reason
        return False
    return found is not None and (kind is None or kind in found.models)


def _method(name: str) -> Method | None:
    if plugins.is_path(name):
        return _met(name)
    found = part("coterie", name, "METHOD")
    if isinstance(found, Method) and found.name == name:
        return found
    if (place := _place(name)) is not None:  # a method of an installed package
        raise _unusable(place, found)
    return None


def written(name: str) -> str:
    """The name of a method in an experiment: the import path, for a method beside the experiment."""
    return _beside.get(name, name)


def _met(path: str) -> Method:
    """The method at an import path, which from now on is also found by its name. ConfigError if there is none, or its name is taken."""
    place = plugins.place("method", path)
    assert place is not None  # noqa: S101 - all paths lead to a place
    found = place.loaded()
    if not isinstance(found, Method):
        raise _unusable(place, found)
    name, taken = found.name, ""
    if is_built_in(name):
        taken = "a built-in method"
    elif (package := plugins.package_of("method", name)) is not None:
        one = plugins.place("method", name)
        if one is not None and (one.module, one.attribute or "METHOD") == (place.module, place.attribute):
            return found  # installed from the folder at hand
        taken = f"the method of the package {package}"
    elif written(name) not in (name, path):
        taken = f"the method {written(name)!r}"
    if taken:
        raise ConfigError(f"{place.what} calls itself {name!r} as {taken} does: want another name in its configuration", place.finding)
    _beside[name] = path
    _checked(place)
    return found


def _place(name: str) -> Place | None:
    """Where the code of a method from outside is; None for other names."""
    if not _NAME.fullmatch(name) or is_built_in(name):
        return None
    return plugins.place("method", written(name))


def _value(place: Place, value: str) -> Any:
    """A value of a method from outside. ConfigError if its code cannot be used."""
    listed = _checked(place)
    key = place.attribute or value if value == "METHOD" else value
    found = listed.get(key)
    return place.at(found).loaded() if isinstance(found, str) else found


def _checked(place: Place) -> Mapping[str, Any]:
    """The names in the module. ConfigError if a half is missing or misnamed, before the run waits for it."""
    listed = vars(place.imported())
    method = listed.get(place.attribute or "METHOD")
    for key, value in listed.items():
        kind = type(value)
        called = _CALLED.get(kind.__name__) if kind.__module__.startswith(("coterie_client.", "coterie_server.")) else None
        if called is not None and called not in listed:
            raise ConfigError(f"{place.what} calls its {kind.__name__} {key}, want it called {called}", place.finding)
    for called in ("SERVER", "CLIENT"):
        if isinstance(method, Method) and not method.room and called not in listed:
            half = f"has no {called.lower()} half"
            raise ConfigError(f"{place.what} {half}: want {called} in module {place.module!r}, or the room of a family", place.finding)
    if isinstance(method, Method):
        if fault := method.fault(listed):
            raise ConfigError(f"{place.what} {fault}", place.finding)
        rooms = {step.partition("/")[0] for reveal in method.reveals for step in reveal.steps}
        if declared(method.name) and method.name not in rooms:
            said = f"declares messages of {method.name!r}, but no Reveal of its METHOD names {method.name!r} among its steps"
            raise ConfigError(f"{place.what} {said}: want Reveal(up, concluded, ({method.name!r},))", place.finding)
    snapshot.PACKAGES.add(place.module.partition(".")[0])
    return listed


def _unusable(place: Place, found: object) -> ConfigError:
    if isinstance(found, Method):
        return ConfigError(f"{place.what} calls itself {found.name!r}: want the same name in the package and in `config`", place.finding)
    what = (
        f"{place.attribute or 'METHOD'} in module {place.module!r} is {'missing' if found is None else f'of class {type(found).__name__}'}"
    )
    return ConfigError(f"{place.what} is no method: {what}, want a coterie.plugin.Method", place.finding)


find_kinds_with(lambda name: _own_module("coterie", name))  # the experiment imports modules from outside
