"""Figures that are computed when they are looked at."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from coterie_server.figures import Figures


def test_what_is_not_known_is_computed_once_and_only_when_somebody_looks() -> None:
    times: list[int] = []

    def later() -> Mapping[str, float]:
        times.append(1)
        return {"b": 2.0, "c": 3.0}

    figures = Figures({"a": 1.0, "b": None, "c": None, "d": 4.0}, later)
    assert figures["a"] == 1.0
    assert figures.get("e", 0.0) == 0.0
    assert list(figures) == ["a", "b", "c", "d"]
    assert not times
    assert dict(figures) == {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    assert times == [1]
    with pytest.raises(KeyError):
        figures["e"]
