"""Figures of a round that are computed when somebody looks at them, which the engine does while the hosts work on the next round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping


class Figures(Mapping[str, float]):
    """The figures by name; those that are None are computed together by `later`, once, when the first of them is looked at."""

    def __init__(self, values: Mapping[str, float | None], later: Callable[[], Mapping[str, float]]) -> None:
        self._values = dict(values)
        self._later = later

    def __getitem__(self, name: str) -> float:
        value = self._values[name]
        if value is None:
            found = self._later()
            self._values.update(found)
            value = found[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


__all__ = ["Figures"]
