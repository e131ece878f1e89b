"""Where a member does its work, one piece at a time and in order.

A host's work is done in one thread of its own, so that heartbeats go on while it computes; tasks of a sort that has been quick are done at
once, since the way to a thread and back takes longer than they do. An aggregator's work is waiting for its own hosts, and is done on the
event loop.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

from coterie.v1 import session_pb2
from coterie.wire.codec import Received

QUICK_S = 0.005  # a task that takes less is not worth the way to the thread
QUICK_TIMES = 3  # so often in a row a sort of task must have been quick, which may be of other users each time

T = TypeVar("T")


class Handler(Protocol):
    """Whose tasks these are."""

    def handle(self, received: Received, /) -> Any:
        """The reply to a task."""


class Computer(Protocol):
    """Where the work is done: one piece at a time."""

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Does a piece of work."""

    def is_quick(self, task: Received, /) -> bool:
        """Whether the task may be handled here and now by `handle`."""

    def handle(self, handler: Handler, task: Received) -> Any:
        """Handles a task."""

    async def close(self) -> None:
        """Waits for the piece under way, or ends it."""


class OnLoop:
    """Does the work on the event loop, where it may wait; a piece goes on to its end when the stream that brought it is lost."""

    def __init__(self) -> None:
        self._under_way: list[asyncio.Task[Any]] = []  # and those that wait for their turn

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Does a piece of work after those before, and awaits its result where that is awaitable."""
        before = self._under_way = [piece for piece in self._under_way if not piece.done()]
        piece = asyncio.create_task(_after(before, work, args))
        self._under_way = [*before, piece]
        return await asyncio.shield(piece)

    def is_quick(self, _: Received) -> bool:
        """Never: whoever reads must go on reading."""
        return False

    def handle(self, handler: Handler, task: Received) -> Any:
        """Handles a task; `run` awaits it."""
        return handler.handle(task)

    async def close(self) -> None:
        """Ends the piece under way: whoever is started again repeats it."""
        for piece in self._under_way:
            piece.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)


async def _after(before: Sequence[asyncio.Task[Any]], work: Callable[..., Any], args: Sequence[Any]) -> Any:
    if before:
        await asyncio.wait(before)
    result = work(*args)
    return await result if inspect.isawaitable(result) else result


class Thread:
    """Does the work on one thread or, where its sort has taken less than `quick_s` seconds (0: never), at once."""

    def __init__(self, quick_s: float = QUICK_S) -> None:
        self._quick_s = quick_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coterie-compute")
        self._last: Future[Any] | None = None
        self._quick_times: dict[tuple[Any, ...], int] = {}

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Does a piece of work in the thread."""
        future = self._last = self._thread.submit(work, *args)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if future.done() and self._last is future:
                self._last = None  # a result may be large, and is not kept for longer than it is needed

    def is_quick(self, task: Received) -> bool:
        """Whether tasks of this sort have been quick, and the thread is free (what was begun for a lost stream may still be under way).

        Never with a snapshot, which is written when the host settles: a disk may take its time.
        """
        if getattr(task.frame, "snapshot", 0):
            return False
        return (self._last is None or self._last.done()) and self._quick_times.get(_sort_of(task), 0) >= QUICK_TIMES

    def handle(self, handler: Handler, task: Received) -> Any:
        """Handles a task, in the calling thread, and learns how long its sort takes."""
        start = time.perf_counter()
        encoded = handler.handle(task)
        sort, is_quick = _sort_of(task), time.perf_counter() - start < self._quick_s
        self._quick_times[sort] = self._quick_times.get(sort, 0) + 1 if is_quick else 0
        return encoded

    async def close(self) -> None:
        """Waits for the piece under way, which cannot be interrupted."""
        if self._last is not None and not self._last.done():
            await asyncio.wait((asyncio.wrap_future(self._last),))
        self._thread.shutdown(wait=True, cancel_futures=True)


def _sort_of(task: Received) -> tuple[Any, ...]:
    """Tasks of the same sort take about the same time: same messages, same side work, all small or not."""
    frame = task.frame
    if not isinstance(frame, session_pb2.Task):
        return ()
    return (bool(frame.stage_json), frame.snapshot, bool(task.tails), task.kinds)


__all__ = ["Computer", "Handler", "OnLoop", "Thread"]
