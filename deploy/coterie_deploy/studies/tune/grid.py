"""The grid as the command line gives it: `--grid method.gamma=0.1,1,10 --grid method.lam=0.1..100:7`, all values with all others.

Values are read as YAML; LOW..HIGH:N stands for N numbers from LOW to HIGH, evenly spaced on a logarithmic scale.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from coterie.errors import ConfigError
from coterie.families.grid import MAX_POINTS
from coterie.text import yaml_text
from coterie.text.quoting import quoted

_RANGE = re.compile(r"(\S+?)\.\.(\S+):(\S+)")
_DIGITS = 4  # of the numbers inside of a range: they are read and typed by people
_EXAMPLES = "for example method.gamma=0.1,1,10 or method.lam=0.1..100:7"


def entries_of(options: Sequence[str]) -> list[dict[str, Any]]:
    """The points of the grid, as `coterie.families.grid` wants them, in an order in which neighbours differ in one step of one setting.

    Numbers descend, so that the largest penalties come first: from them on a warm start is short, as along a path. ConfigError for an
    option that is not of the form above, a setting without values or with a value twice, and a grid of one point or too many.
    """
    values: dict[str, list[Any]] = {}
    for option in options:
        key, listed = _setting(option)
        if key in values:
            raise ConfigError(f"--grid has method.{key} twice, want each setting once")
        values[key] = listed
    n_points = math.prod(len(listed) for listed in values.values())
    if not 2 <= n_points <= MAX_POINTS:
        raise ConfigError(f"the grid has {n_points} point{'' if n_points == 1 else 's'}, want 2 to {MAX_POINTS} to choose from")
    points: list[dict[str, Any]] = [{}]
    for key, listed in values.items():
        turns = (listed, listed[::-1])
        points = [{**point, key: value} for place, point in enumerate(points) for value in turns[place % 2]]
    return points


def _setting(option: str) -> tuple[str, list[Any]]:
    """One option: the method's setting, and its values."""
    place, equals, text = option.partition("=")
    room, _, key = place.strip().partition(".")
    if not equals or room != "method" or not key.isidentifier():
        raise ConfigError(f"--grid {quoted(option)} wants the form method.setting=values, {_EXAMPLES}")
    found = yaml_text.parsed(f"[{text}]", f"--grid {quoted(option)}: the list of values")
    listed = [value for item in found for value in _values(item, option)]
    if not listed:
        raise ConfigError(f"--grid {quoted(option)} has no values, want at least one, {_EXAMPLES}")
    twice = next((value for place, value in enumerate(listed) if value in listed[:place]), None)
    if twice is not None:
        raise ConfigError(f"--grid {quoted(option)} has the value {twice} twice, want each once")
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in listed):
        listed.sort(reverse=True)
    return key, listed


def _values(item: Any, option: str) -> list[Any]:
    """The values that one item of the list stands for. YAML reads 1e-3, without a point, as text."""
    if not isinstance(item, str):
        return [item]
    if match := _RANGE.fullmatch(item):
        return _range(match[1], match[2], match[3], option)
    number = _number(item)
    return [item if number is None else number]


def _range(first: str, last: str, count: str, option: str) -> list[float]:
    low, high = _number(first), _number(last)
    if low is None or high is None or not 0 < low < high or not count.isdecimal() or not 2 <= int(count[:9]) <= MAX_POINTS:
        raise ConfigError(f"--grid {quoted(option)}: a range is LOW..HIGH:N with 0 < LOW < HIGH and N from 2 to {MAX_POINTS}")
    steps = int(count) - 1
    inner = [float(f"{low * (high / low) ** (step / steps):.{_DIGITS}g}") for step in range(1, steps)]
    return [low, *inner, high]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
