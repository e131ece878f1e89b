"""The door of a gRPC server: how many strangers may stand in it, how long, and how much is kept for them.

A stranger is a stream that is not a host's session, or not yet. Hosts that have joined must not notice what strangers do, so the number
and the memory of these are bounded: where there are too many, the one that came first goes, since who means well is gone in a moment. What
does not even speak HTTP/2 is left to gRPC's own limits (`coterie_server.transport.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

MOST_STRANGERS = 32  # beside the hosts of the run, who may all come at once. gRPC keeps up to a frame for each
MOST_BYTES = 128 << 20  # that unfinished hellos may take together
_REST = 2.0  # so many times as long as a large frame of theirs took, strangers wait for the next one to be looked at


@dataclass(eq=False)
class Stranger:
    """One stream at the door."""

    give_up: Callable[[str], None]
    task: asyncio.Task[Any] | None
    n_bytes: int = 0


class Door:
    """All strangers of one server; `most` may stand there at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._strangers: dict[Stranger, None] = {}  # in the order of arrival
        self._n_bytes = 0
        self._looking = asyncio.Lock()
        self.is_closed = False

    def enter(self, give_up: Callable[[str], None]) -> Stranger:
        """A stranger arrives; `give_up` will be called with a reason if it must go before it has left by itself."""
        if len(self._strangers) >= self._most:
            self._send_away(next(iter(self._strangers)), f"more than {self._most} streams are without a hello, and this one is the oldest")
        stranger = Stranger(give_up, asyncio.current_task())
        self._strangers[stranger] = None
        return stranger

    def leave(self, stranger: Stranger) -> None:
        """It has gone, or is a host now."""
        if stranger in self._strangers:
            del self._strangers[stranger]
            self._n_bytes -= stranger.n_bytes

    def keep(self, stranger: Stranger, n_bytes: int) -> None:
        """So many bytes more are kept for it."""
        if stranger not in self._strangers:
            return
        stranger.n_bytes += n_bytes
        self._n_bytes += n_bytes
        if self._n_bytes > MOST_BYTES:
            largest = max(self._strangers, key=lambda one: one.n_bytes)
            self._send_away(largest, f"unfinished hellos take more than {MOST_BYTES} bytes, and this one is the largest")

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A large frame is looked at while the block runs: one at a time, and with rests, so that most of the time is the hosts'."""
        loop = asyncio.get_running_loop()
        async with self._looking:
            start = loop.time()
            try:
                yield
            finally:
                await asyncio.sleep(_REST * (loop.time() - start))

    async def close(self, seconds: float) -> None:
        """Sends everybody away, and waits that long for their tasks, which gRPC itself does not wait for."""
        self.is_closed = True
        tasks = [stranger.task for stranger in self._strangers if stranger.task is not None]
        for stranger in tuple(self._strangers):
            self._send_away(stranger, "the parent is stopping")
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _send_away(self, stranger: Stranger, reason: str) -> None:
        self.leave(stranger)
        stranger.give_up(reason)


class Doorkeeper(grpc.aio.ServerInterceptor):
    """Lets rpcs of one request in for as long as the request takes to come and the answer to be taken, at most `longest_s` seconds each.

    gRPC itself waits for both without an end. Streams of answers (the health service's Watch) stay until there are too many strangers.
    `turned_away` is told who is given up, and why.
    """

    def __init__(self, door: Door, longest_s: float, turned_away: Callable[[str], None]) -> None:
        self._door, self._longest_s, self._turned_away = door, longest_s, turned_away

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The rpc's handler between the door's two sides; that of a stream of requests has its own rules."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        rpc = handler_call_details.method

        async def answer(_: Any, context: Any) -> None:
            await self._answered(rpc, handler, context)

        return grpc.stream_stream_rpc_method_handler(answer, response_serializer=handler.response_serializer)

    async def _answered(self, rpc: str, handler: Any, context: Any) -> None:
        loop, reasons = asyncio.get_running_loop(), list[str]()

        def give_up(reason: str) -> None:
            if not limit.expired():
                reasons.append(reason)
                limit.reschedule(loop.time())

        limit = asyncio.timeout(self._longest_s)
        stranger = self._door.enter(give_up)
        try:
            async with limit:
                await self._served(handler, context, limit)
        except TimeoutError:
            self._door.leave(stranger)
            code = grpc.StatusCode.UNAVAILABLE if reasons else grpc.StatusCode.DEADLINE_EXCEEDED
            reason = (reasons or [f"its request did not come, or its answer was not taken, within {self._longest_s:g} s"])[0]
            if not self._door.is_closed:
                self._turned_away(f"a stranger at {context.peer()} is given up in the middle of {rpc}: {reason}")
            await ended(context, code, reason)
        finally:
            self._door.leave(stranger)

    async def _served(self, handler: Any, context: Any, limit: asyncio.Timeout) -> None:
        data = await context.read()
        if not isinstance(data, bytes):
            return
        try:
            request = handler.request_deserializer(data)
        except Exception as error:  # protobuf's DecodeError type is not part of its typed interface
            self._turned_away(f"a stranger at {context.peer()} sent {len(data)} bytes that are no request: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(data)} bytes are no request: {error}")
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(request, context))
            return
        limit.reschedule(None)
        answers = handler.unary_stream(request, context)
        if inspect.isawaitable(answers):
            await answers


async def ended(context: Any, code: grpc.StatusCode, reason: str) -> None:
    """Ends the rpc with a status. CancelledError where a write that the other side never took leaves no place for one."""
    try:
        await context.abort(code, reason)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        raise asyncio.CancelledError(reason) from error
