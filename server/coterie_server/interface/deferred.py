"""What a round leaves to be computed when somebody looks at it, which is mostly while the hosts work on the next round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self


class Deferred:
    """Base of dataclasses whose fields may be computed together at the first look; to a snapshot they are dataclasses like others."""

    @classmethod
    def deferred(cls, compute: Callable[[], Self]) -> Self:
        """The one that `compute` gives; it is called once."""
        found = cls.__new__(cls)
        vars(found)["compute"] = compute
        return found

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is missing: the fields, before the first look."""
        compute = vars(self).get("compute")
        if compute is None:
            raise AttributeError(name)
        found = vars(compute())
        del vars(self)["compute"]
        vars(self).update(found)
        return getattr(self, name)


class Figures(Mapping[str, float]):
    """The figures of a round by name; one that is given as a function is computed when it is looked at, once."""

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


__all__ = ["Deferred", "Figures"]
