"""A grid: one run of a method at several settings, one stage for each, so that held-out rows can choose among them.

It works for any method whose configuration inherits `Grid`; `coterie_server.run.plan` makes the stages. Each stage starts from the result
of the one before, so an order with similar neighbours saves rounds.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field, JsonValue, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from coterie.experiment.settings import Settings
from coterie.text.quoting import quoted

MAX_POINTS = 1000

# Characters of a point's name, which is also a file name.
_PLAIN = re.compile(r"[A-Za-z0-9=+\-_ ][A-Za-z0-9=+\-_. ]{0,99}")


class Grid(Settings):
    """The base class of configurations with a key `grid`: a list of mappings, each a change of the method's other settings.

    An entry replaces whole settings; null removes one. The settings beside the grid must be valid by themselves.
    """

    #: List of settings: each entry changes some of the method's other keys, and becomes a stage of its own. `coterie tune` makes grids and
    #: chooses by held-out rows.
    grid: tuple[dict[str, JsonValue], ...] | None = Field(default=None, min_length=1, max_length=MAX_POINTS)

    @model_validator(mode="after")
    def _every_entry_is_right(self) -> Self:
        self.points()
        return self

    def points(self) -> tuple[tuple[str, Self], ...]:
        """Name and settings of each point, in order, each without a grid; () without a grid.

        Raises ValidationError (in a validator, a mistake of the experiment) for an entry that changes nothing, names the method or a grid,
        does not fit the method, or repeats another.
        """
        if self.grid is None:
            return ()
        given = self.model_dump(exclude={"grid"}, exclude_unset=True)
        points: dict[str, Self] = {}
        place_of: dict[str, int] = {}
        for place, entry in enumerate(self.grid, 1):
            point = _point(type(self), given, entry, place)
            first = place_of.setdefault(point.model_dump_json(), place)
            if first != place:
                raise ValueError(f"entries {first} and {place} of the grid are the same settings, want each once")
            name = self._name_of(entry)
            points[f"point-{place}" if name is None or name in points else name] = point
        return tuple(points.items())

    def _name_of(self, entry: Mapping[str, JsonValue]) -> str | None:
        """Such as "gamma=1 lam=3", in the order of the method's settings. None if that is not a valid file name."""
        name = " ".join(f"{key}={value_text(entry[key])}" for key in type(self).model_fields if key in entry)
        return name if _PLAIN.fullmatch(name) else None


def value_text(value: Any) -> str:
    """A short text for a value of a grid: numbers in their shortest exact form, other values as in YAML."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    return value if isinstance(value, str) else json.dumps(value)


def _point(config: type[Any], given: Mapping[str, Any], entry: Mapping[str, JsonValue], place: int) -> Any:
    """The settings of one entry."""
    if not entry:
        raise ValueError(f"entry {place} of the grid is {quoted(entry)}, want at least one setting that it changes")
    for key in ("name", "grid"):
        if key in entry:
            raise ValueError(f"entry {place} of the grid sets {key!r}, want only the method's other settings")
    try:
        return config.model_validate({**given, **entry})
    except ValidationError as error:
        mistakes = [
            InitErrorDetails(type=item["type"], loc=("grid", f"entry {place}", *item["loc"]), input=item["input"], ctx=item.get("ctx", {}))
            for item in error.errors(include_url=False)
        ]
        raise ValidationError.from_exception_data(config.__name__, mistakes) from None
