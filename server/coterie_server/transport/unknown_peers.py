"""Bounds what unknown peers of a gRPC server may use: the number and time of their streams, and their memory.

A peer is unknown until its hello is accepted. Such peers must not disturb hosts that have joined. Where there are too many, the oldest is
rejected first, since a proper host is unknown only for a moment. Peers that do not speak HTTP/2 meet gRPC's own limits
(`coterie_server.transport.serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

MOST_UNKNOWN = 32  # besides the hosts of the run, which may all come at once. gRPC keeps up to a frame for each
MOST_BYTES = 128 << 20  # of all unfinished hellos together
_REST = 2.0  # after a large frame of an unknown peer, the next one waits this many times as long as its parsing took


@dataclass(eq=False)
class UnknownPeer:
    """One stream without an accepted hello."""

    give_up: Callable[[str], None]
    task: asyncio.Task[Any] | None
    n_bytes: int = 0


class UnknownPeers:
    """All unknown peers of one server, `most` at once."""

    def __init__(self, most: int) -> None:
        self._peers: dict[UnknownPeer, None] = {}  # in the order of arrival
        self._most, self._n_bytes, self._parsing, self.is_closed = most, 0, asyncio.Lock(), False

    def add(self, give_up: Callable[[str], None]) -> UnknownPeer:
        """A stream begins; `give_up` is called with a reason if it must end."""
        if len(self._peers) >= self._most:
            self._reject(next(iter(self._peers)), f"more than {self._most} streams are without a hello, and this one is the oldest")
        peer = UnknownPeer(give_up, asyncio.current_task())
        self._peers[peer] = None
        return peer

    def remove(self, peer: UnknownPeer) -> None:
        """It has gone, or is a host now."""
        if peer in self._peers:
            del self._peers[peer]
            self._n_bytes -= peer.n_bytes

    def charge(self, peer: UnknownPeer, n_bytes: int) -> None:
        """So many bytes more are kept for it."""
        if peer not in self._peers:
            return
        peer.n_bytes += n_bytes
        self._n_bytes += n_bytes
        if self._n_bytes > MOST_BYTES:
            largest = max(self._peers, key=lambda one: one.n_bytes)
            self._reject(largest, f"unfinished hellos take more than {MOST_BYTES} bytes, and this one is the largest")

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """A large frame is parsed while the block runs: one at a time, and with rests, so that hosts have most of the time."""
        loop = asyncio.get_running_loop()
        async with self._parsing:
            start = loop.time()
            try:
                yield
            finally:
                await asyncio.sleep(_REST * (loop.time() - start))

    async def close(self, seconds: float) -> None:
        """Rejects all, and waits so many seconds for their tasks, which gRPC itself does not wait for."""
        self.is_closed = True
        tasks = [peer.task for peer in self._peers if peer.task is not None]
        for peer in tuple(self._peers):
            self._reject(peer, "the parent is stopping")
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)

    def _reject(self, peer: UnknownPeer, reason: str) -> None:
        self.remove(peer)
        peer.give_up(reason)


class UnaryLimits(grpc.aio.ServerInterceptor):
    """Bounds rpcs of one request: at most `longest_s` seconds for the request to come, and for the answer to be taken.

    gRPC itself waits for both without a limit. Streams of answers (the health service's Watch) stay until there are too many unknown peers.
    `turned_away` receives the peers that are rejected, and why.
    """

    def __init__(self, peers: UnknownPeers, longest_s: float, turned_away: Callable[[str], None]) -> None:
        self._peers, self._longest_s, self._turned_away = peers, longest_s, turned_away

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """The rpc's handler within the limits; that of a stream of requests has its own."""
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
        peer = self._peers.add(give_up)
        try:
            async with limit:
                await self._served(handler, context, limit)
        except TimeoutError:
            self._peers.remove(peer)
            code = grpc.StatusCode.UNAVAILABLE if reasons else grpc.StatusCode.DEADLINE_EXCEEDED
            reason = (reasons or [f"its request did not come, or its answer was not taken, within {self._longest_s:g} s"])[0]
            if not self._peers.is_closed:
                self._turned_away(f"an unknown peer at {context.peer()} is given up in the middle of {rpc}: {reason}")
            await ended(context, code, reason)
        finally:
            self._peers.remove(peer)

    async def _served(self, handler: Any, context: Any, limit: asyncio.Timeout) -> None:
        data = await context.read()
        if not isinstance(data, bytes):
            return
        try:
            request = handler.request_deserializer(data)
        except Exception as error:  # protobuf's DecodeError type is not part of its typed interface
            self._turned_away(f"an unknown peer at {context.peer()} sent {len(data)} bytes that are no request: {error}")
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"{len(data)} bytes are no request: {error}")
        if not handler.response_streaming:
            await context.write(await handler.unary_unary(request, context))
            return
        limit.reschedule(None)
        answers = handler.unary_stream(request, context)
        if inspect.isawaitable(answers):
            await answers


async def ended(context: Any, code: grpc.StatusCode, reason: str) -> None:
    """Ends the rpc with a status. CancelledError where an unfinished write makes that impossible."""
    try:
        await context.abort(code, reason)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        raise asyncio.CancelledError(reason) from error
