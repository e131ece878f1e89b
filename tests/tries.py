"""Bounds on durations, on a machine that others use too."""

from __future__ import annotations

from collections.abc import Callable


def one_holds(check: Callable[[int], None], n_tries: int = 3) -> None:
    """Passes once `check(number of the try)` does; a pause of the machine spoils one try, a fault all of them."""
    for number in range(n_tries - 1):
        try:
            check(number)
        except AssertionError:
            continue
        return
    check(n_tries - 1)
