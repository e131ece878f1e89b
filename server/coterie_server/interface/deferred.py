"""Results of a round that are computed when they are read first, mostly while the hosts work on the next round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self


class Deferred:
    """Base of dataclasses whose fields may be computed together when one is first read; a snapshot stores them like others."""

    @classmethod
    def deferred(cls, compute: Callable[[], Self]) -> Self:
        """The value of `compute`, which is called once."""
        found = cls.__new__(cls)
        vars(found)["compute"] = compute
        return found

    def __getattr__(self, name: str) -> Any:
        """Called for missing attributes alone: the fields, before they are computed."""
        compute = vars(self).get("compute")
        if compute is None:
            raise AttributeError(name)
        found = vars(compute())
        del vars(self)["compute"]
        vars(self).update(found)
        return getattr(self, name)


class Figures(Mapping[str, float]):
    """The figures of a round by name; a function is called when its figure is first read."""

    def __init__(self, values: Mapping[str, float | Callable[[], float]]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if callable(value):
            value = self._values[name] = value()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)
