"""Overrides of an experiment: `--set KEY=VALUE`, on its content before it is validated."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from coterie.errors import ConfigError, SettingsDropped
from coterie.experiment.method import Kind, shared_keys
from coterie.registry import is_method, method
from coterie.text.quoting import quoted
from coterie.text.suggestions import method_of

_MAX_KEYS = 20  # of an override, in each other


def apply_overrides(content: Any, overrides: Sequence[str]) -> Any:
    """A copy of `content` with each "a.b.c=VALUE" applied; the last one wins. VALUE is read as YAML, and null removes a key.

    Setting one of several alternative keys removes the others: a penalty replaces a path. Another method keeps the settings that mean the
    same to it, and those that an earlier override has set; a `SettingsDropped` warning names the others.
    """
    from coterie.text import yaml_text  # noqa: PLC0415 - a client never reads YAML, and stays smaller without

    given: set[str] = set()  # keys of the method
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--set {quoted(override)} wants the form key.key=value, for example method.penalty=0.05")
        if len(keys) > _MAX_KEYS:
            raise ConfigError(f"--set {quoted(override)} has {len(keys)} keys, want at most {_MAX_KEYS}")
        value = yaml_text.parsed(text, f"--set {quoted(override)}: the value")
        if value is not None and tuple(keys[:-1]) == ("method",):
            for other in _alternatives(content, keys[-1]):
                content = _with_value(content, ("method", other), None, override)
        if keys == ["method", "name"]:
            content = _for_method(content, value, given)
        elif keys[0] == "method":
            given.update(keys[1:2] or (value if isinstance(value, Mapping) else ()))
        content = _with_value(content, keys, value, override)
    return content


def _for_method(content: Any, name: Any, given: Collection[str]) -> Any:
    """The content without the settings of its method that mean nothing, or something else, to the method `name`."""
    old = method_of(content)
    if old is None or not (is_method(old) and is_method(name)):
        return content
    kind: Kind = "convex" if content.get("model") is None else "network"
    section = content["method"]
    kept = {"name", *given, *shared_keys(section, method(old), method(name), kind)}
    if dropped := [key for key in section if key not in kept]:
        why = "they have another meaning there, or none; its defaults hold"
        said = f"method {quoted(name)} does not take over {', '.join(dropped)} from {quoted(old)}: {why}"
        warnings.warn(said, SettingsDropped, stacklevel=3)
    return {**content, "method": {key: value for key, value in section.items() if key in kept}}


def _alternatives(content: Any, key: str) -> Iterator[str]:
    """The other keys of a method that say the same thing."""
    name = method_of(content) if isinstance(content, Mapping) else None
    for alternatives in method(name).alternatives if name is not None and is_method(name) else ():
        if key in alternatives:
            yield from alternatives - {key}


def _with_value(content: Any, keys: Sequence[str], value: Any, override: str) -> Any:
    if content is None:
        content = {}
    if not isinstance(content, Mapping):
        raise ConfigError(f"--set {quoted(override)}: {quoted(keys[0])} would be a key of {quoted(content)}, which is not a mapping")
    changed = dict(content)
    if len(keys) > 1:
        changed[keys[0]] = _with_value(changed.get(keys[0]), keys[1:], value, override)
    elif value is None:
        changed.pop(keys[0], None)
    else:
        changed[keys[0]] = value
    return changed
