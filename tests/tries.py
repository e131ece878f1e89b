"""Bounds on durations, and the end of tasks, on a machine that others use too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def soon_enough(measure: Callable[[int], tuple[float, float]], n_tries: int = 3) -> None:
    """Passes once `measure(number of the try)` gives seconds below their limit, its second number.

    A pause of the machine spoils one try, a fault all of them. What must hold in every try is asserted by `measure` itself.
    """
    found = []
    for number in range(n_tries):
        seconds, limit_s = measure(number)
        if seconds < limit_s:
            return
        found.append(seconds)
    raise AssertionError(f"took {found} s, wanted less than {limit_s} s once")


async def no_task_is_left() -> None:
    """Whoever serves or dials leaves no task of ours behind. Those of gRPC may take a moment to see that they are cancelled."""
    left = [task for task in asyncio.all_tasks() - {asyncio.current_task()} if "coterie" in repr(task)]
    assert not left or not (await asyncio.wait(left, timeout=10.0))[1], left
