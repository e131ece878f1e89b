"""`--vary KEY=V1,V2`: settings as the rows of a comparison. Several keys are a grid, all values with all.

Values are YAML. `KEY=[v1, v2]` is the same list; so a value that is itself a list stands in one: `KEY=[[a, b], [c]]`, or `KEY=[a, b],[c]`.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coterie.errors import ConfigError
from coterie.text import yaml_text
from coterie.text.quoting import quoted
from coterie_deploy.terminal.printable import printable

_EXAMPLES = "for example method.penalty=0.05,0.09 or payload=float64,float32"
_ELSEWHERE = {  # keys that a comparison has options for, or sets itself
    "method": "want --methods, or keys such as method.penalty",
    "method.name": "want --methods",
    "method.grid": "want the key itself",
    "seed": "want --seeds",
    "name": "want another --output",
    "references": "a comparison has none: want local and global among --methods",
    "evaluate": "in a comparison users always judge their models",
}
_SHORT = re.compile(r"[\w.,=+-]{1,60}", re.ASCII)  # settings that can name a folder as they are


@dataclass(frozen=True)
class Row:
    """A line of a comparison: a method, and the values of the keys that vary."""

    name: str  # in tables and pictures
    method: str
    folder: str  # what the names of its runs' folders begin with
    values: Mapping[str, Any] = field(default_factory=dict)  # by dotted key

    @property
    def overrides(self) -> list[str]:
        return overrides_of(self.values)


def overrides_of(values: Mapping[str, Any]) -> list[str]:
    """What `--set` would take for these values."""
    return [f"{key}={json.dumps(value)}" for key, value in values.items()]


def parsed(options: Sequence[str]) -> dict[str, list[Any]]:
    """The values by key. ConfigError for an option that is not of the form above, and for a key twice."""
    found: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals:
            raise ConfigError(f"--vary {quoted(option)} wants the form KEY=V1,V2, {_EXAMPLES}")
        if key in found:
            raise ConfigError(f"--vary has {quoted(key)} twice, want each key once")
        listed = yaml_text.parsed(f"[{text}]", f"--vary {quoted(option)}: the list of values")
        found[key] = listed[0] if len(listed) == 1 and isinstance(listed[0], list) else listed
    return found


def checked(vary: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The values by key, as JSON has them. ConfigError for a key that cannot vary, and for fewer than two values or one twice."""
    found: dict[str, list[Any]] = {}
    for key, given in vary.items():
        if not isinstance(key, str) or not all(key.split(".")):
            raise ConfigError(f"--vary has the key {quoted(key)}, want one such as method.penalty")
        if key in _ELSEWHERE:
            raise ConfigError(f"--vary cannot have {key}: {_ELSEWHERE[key]}")
        if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
            raise ConfigError(f"--vary {key} has {quoted(given)}, want a list of values")
        try:
            values: list[Any] = json.loads(json.dumps(list(given), default=_plain, allow_nan=False))
        except TypeError as error:
            raise ConfigError(f"--vary {key} has a value that an experiment cannot hold: {error}") from None
        except ValueError:
            raise ConfigError(f"--vary {key} has a number that is not finite, want finite numbers") from None
        if len(values) < 2:
            many = "no value" if not values else f"only the value {said(values[0])}"
            raise ConfigError(f"--vary {key} has {many}, want at least two (--set {key}=VALUE sets one for all)")
        texts = [said(value) for value in values]
        if twice := next((text for place, text in enumerate(texts) if text in texts[:place]), None):
            raise ConfigError(f"--vary {key} has {quoted(twice)} twice, want each value once")
        found[key] = values
    if inside := next(((a, b) for a, b in itertools.permutations(found, 2) if b.startswith(f"{a}.")), None):
        raise ConfigError("--vary has {} and {}, which is a part of it: want one of them".format(*inside))
    return found


def _plain(value: Any) -> Any:
    """A number of numpy as JSON has it."""
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"one of type {type(value).__name__}")


def rows_of(methods: Sequence[str], vary: Mapping[str, Sequence[Any]]) -> list[Row]:
    """A row for each method, and for each of its settings: all values with all, the last key fastest."""
    if not vary:
        return [Row(name, name, name) for name in methods]
    short = short_names(list(vary))
    rows = []
    for method, values in itertools.product(methods, itertools.product(*vary.values())):
        settings = [f"{short[key]}={said(value)}" for key, value in zip(vary, values, strict=True)]
        name = " ".join([*[method] * (len(methods) > 1), *settings])
        rows.append(Row(name, method, f"{method}-{_in_a_folder(settings, values)}", dict(zip(vary, values, strict=True))))
    return rows


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Each key by as few of its last parts as tell it from the others: penalty for method.penalty."""
    ends = {key: [".".join(key.split(".")[-n:]) for n in range(1, key.count(".") + 2)] for key in keys}
    return {key: next((end for end in ends[key] if sum(end in other for other in ends.values()) == 1), key) for key in keys}


def said(value: Any) -> str:
    """A value as one would write it in YAML, on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{printable(str(key))}: {said(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(said, value))}]"
    return printable(value) if isinstance(value, str) else json.dumps(value)


def _in_a_folder(settings: Sequence[str], values: Sequence[Any]) -> str:
    """The settings as part of a folder's name: as they are if they can be, else shortened, with a hash of the values."""
    text = ",".join(settings)
    if _SHORT.fullmatch(text):
        return text
    kept = re.sub(r"[^\w.,=+-]+", "_", text, flags=re.ASCII)[:40].strip("_")
    return f"{kept}-{hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]}"
