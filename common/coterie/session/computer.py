"""Executes a member's work, one piece at a time and in order.

A host's work runs in its own thread, so that heartbeats continue. Kinds of tasks that have been quick run at once, because a thread switch
takes longer. An aggregator's work mostly waits for its own hosts, so it runs on the event loop.
"""

import asyncio
import inspect
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from coterie.session.member import Member
from coterie.v1 import session_pb2
from coterie.wire.codec import Received

QUICK_S = 0.005  # faster tasks are not worth a thread switch
QUICK_TIMES = 3  # quick tasks of a kind in a row before it counts as quick; they may be for different users

T = TypeVar("T")


class OnLoop:
    """Runs the work on the event loop, where it may wait. A piece continues to its end if its stream is lost."""

    def __init__(self) -> None:
        self._under_way: list[asyncio.Task[Any]] = []  # and queued pieces

    async def run(self, work: Callable[..., Any], *args: Any, waits: bool = True) -> Any:
        """Runs a piece of work, and awaits its result if it is awaitable.

        With `waits` it comes after the earlier pieces. Without, it does not: one of these may wait for another aggregator, which waits for
        the coordinator, which waits for this answer.
        """
        before = self._under_way = [piece for piece in self._under_way if not piece.done()]
        piece = asyncio.create_task(_after(before if waits else [], work, args))
        self._under_way = [*before, piece]
        return await asyncio.shield(piece)

    def is_quick(self, _: Received) -> bool:
        """Never, because the reader must go on reading."""
        return False

    def handle(self, handler: Member, task: Received) -> Any:
        """The result of the handler, which `run` awaits."""
        return handler.handle(task)

    async def close(self) -> None:
        """Cancels the current piece; a restarted member repeats it."""
        for piece in self._under_way:
            piece.cancel()
        await asyncio.gather(*self._under_way, return_exceptions=True)


async def _after(before: Sequence[asyncio.Task[Any]], work: Callable[..., Any], args: Sequence[Any]) -> Any:
    if before:
        await asyncio.wait(before)
    result = work(*args)
    return await result if inspect.isawaitable(result) else result


class Thread:
    """Runs the work on one thread, or at once if its kind has taken less than `quick_s` seconds (0: never)."""

    def __init__(self, quick_s: float = QUICK_S) -> None:
        self._quick_s = quick_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="coterie-compute")
        self._last: Future[Any] | None = None
        self._quick_times: dict[tuple[Any, ...], int] = {}

    async def run(self, work: Callable[..., T], *args: Any, waits: bool = True) -> T:  # noqa: ARG002 - nothing here waits for others
        future = self._last = self._thread.submit(work, *args)
        try:
            return await asyncio.wrap_future(future)
        finally:
            if future.done() and self._last is future:
                self._last = None  # frees the result, which may be large

    def is_quick(self, task: Received) -> bool:
        """Whether this kind of task has been quick, and the thread is free. Work for a lost stream may still be running.

        Never for a task with a snapshot, which `settle` writes: a disk may be slow.
        """
        if getattr(task.frame, "snapshot", 0):
            return False
        return (self._last is None or self._last.done()) and self._quick_times.get(_sort_of(task), 0) >= QUICK_TIMES

    def handle(self, handler: Member, task: Received) -> Any:
        """Handles a task in the calling thread, and measures its kind."""
        start = time.perf_counter()
        encoded = handler.handle(task)
        sort, is_quick = _sort_of(task), time.perf_counter() - start < self._quick_s
        self._quick_times[sort] = self._quick_times.get(sort, 0) + 1 if is_quick else 0
        return encoded

    async def close(self) -> None:
        """Waits for the current piece, which cannot be interrupted."""
        if self._last is not None and not self._last.done():
            await asyncio.wait((asyncio.wrap_future(self._last),))
        self._thread.shutdown(wait=True, cancel_futures=True)


Computer = OnLoop | Thread


def _sort_of(task: Received) -> tuple[Any, ...]:
    """The kind of a task: same messages, same side work, all small or not. Tasks of one kind take about the same time."""
    frame = task.frame
    if not isinstance(frame, session_pb2.Task):
        return ()
    return (bool(frame.stage_json), frame.snapshot, bool(task.tails), task.kinds)
