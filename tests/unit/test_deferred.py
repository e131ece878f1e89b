"""What is computed when it is looked at."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import pytest

from coterie.record.snapshot import dumps, loads
from coterie_server.interface.deferred import Deferred, Figures


@dataclass(eq=False)
class Two(Deferred):
    """Of both fields."""

    a: np.ndarray
    b: float


def test_a_figure_is_computed_once_and_only_when_somebody_looks():
    times: list[str] = []

    def b() -> float:
        times.append("b")
        return 2.0

    figures = Figures({"a": 1.0, "b": b, "c": 4.0})
    assert figures["a"] == 1.0
    assert figures.get("e", 0.0) == 0.0
    assert list(figures) == ["a", "b", "c"]
    assert not times
    assert dict(figures) == dict(figures) == {"a": 1.0, "b": 2.0, "c": 4.0}
    assert times == ["b"]
    with pytest.raises(KeyError):
        figures["e"]


def test_the_fields_are_computed_together_at_the_first_look():
    times: list[int] = []

    def compute() -> Two:
        times.append(1)
        return Two(np.arange(3), 4.0)

    found = Two.deferred(compute)
    assert not times
    assert found.b == 4.0
    assert found.a.tolist() == [0, 1, 2]
    assert times == [1]
    with pytest.raises(AttributeError, match="c"):
        found.c  # noqa: B018
    assert not hasattr(Two(np.zeros(1), 0.0), "c")


def test_a_snapshot_has_what_nobody_has_looked_at_yet():
    found = loads(dumps({"two": Two.deferred(lambda: Two(np.arange(3), 4.0))}))["two"]
    assert type(found) is Two
    assert [field.name for field in fields(found)] == ["a", "b"]
    assert found.a.tolist() == [0, 1, 2]
    assert found.b == 4.0
