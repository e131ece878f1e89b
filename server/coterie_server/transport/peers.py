"""How aggregators reach each other: the rpc that serves a peer, and the one that fetches from it, again and again until it is there."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc

from coterie.errors import ProtocolError, RunError
from coterie.findings import Finding
from coterie.session.dial import OPTIONS, to_the_end
from coterie.session.probe import unreachable
from coterie.session.tls import Tls, peer_name
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import PROTOCOL_VERSION, Received, check_announced
from coterie_server.session.journal import Sparse
from coterie_server.session.peering import Peering
from coterie_server.session.refusal import MAX_REASON_CHARS, short_name, shortened
from coterie_server.transport.grpc_link import Context
from coterie_server.transport.host_session import identity_in
from coterie_server.transport.links import LoopClock, Outlet, rule_of, told_of
from coterie_server.transport.unknown_peers import UnknownPeers, ended

SERVICE = "coterie.v1.PeerService"
_PAUSE_S = 0.2  # between two questions to a peer that is not there
_MOST_UNKNOWN = 64  # streams of those who have not said who they are; they leave soon
_HEARTBEAT = session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat()).SerializeToString()
# Statuses after which an aggregator asks again. gRPC itself sets INTERNAL and UNKNOWN, when a stream is cut.
_TRY_AGAIN = frozenset({"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "UNKNOWN"})


class _RefusedError(Exception):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class PeerDoor:
    """Serves the other aggregators. With `wants_identity` their certificates say who they are."""

    def __init__(self, peering: Peering, *, wants_identity: bool) -> None:
        self._peering, self._wants_identity = peering, wants_identity
        self._unknown, self._sparse = UnknownPeers(_MOST_UNKNOWN), Sparse()
        self._rule = rule_of(peering.rules.links, "peers")
        self._outlets: dict[int, Outlet] = {}  # by place, where links are shaped
        if self._rule is not None:
            text, data = told_of("peers", self._rule)
            peering.note("links", text, **data)

    def handler(self) -> grpc.GenericRpcHandler:
        """The rpc. Its question is read here, so that it has a deadline; for who asks, it is one question with a stream of answers."""
        return grpc.method_handlers_generic_handler(SERVICE, {"Fetch": grpc.stream_stream_rpc_method_handler(self._fetch)})

    async def _fetch(self, _: Any, context: Context) -> None:
        try:
            await self._answer(context)
        except TimeoutError:
            await ended(context, grpc.StatusCode.DEADLINE_EXCEEDED, f"its answer was not taken within {self._peering.rules.silence_s:g} s")
        except _RefusedError as error:
            if times := self._sparse.due("refused", ""):
                self._peering.note("refused", f"a peer at {context.peer()} is turned away: {error.reason}", times=times)
            await ended(context, error.code, error.reason[:MAX_REASON_CHARS])

    async def _answer(self, context: Context) -> None:
        peering, rules, task = self._peering, self._peering.rules, asyncio.current_task()
        assert task is not None  # noqa: S101 - gRPC runs every rpc in a task
        unknown = self._unknown.add(lambda _: _end(task))
        try:
            asked = await self._question(context)
            while (place := self._place_of(asked, context)) is None:
                await self._wait(context)
        finally:
            self._unknown.remove(unknown)
        peering.n_received[place] += asked.ByteSize()
        peering.said_durable(place, asked.durable_seq)
        if self._rule is not None:
            await asyncio.sleep(self._rule.transmission_s(asked.ByteSize()) + self._rule.delay_s)
        while not peering.has(place, asked.seq):
            if peering.is_forgotten(asked.seq):
                raise _RefusedError(grpc.StatusCode.NOT_FOUND, f"the message of exchange {asked.seq} has been forgotten")
            await self._wait(context)
            peering.n_sent[place] += len(_HEARTBEAT)
        frames = peering.sending(place, asked.seq).frames()
        if self._rule is not None and place not in self._outlets:
            self._outlets[place] = Outlet(self._rule, LoopClock())
        if (outlet := self._outlets.get(place)) is not None:
            outlet.put()
            outlet.take()
        for frame in frames:
            if outlet is not None:
                await outlet.passed(len(frame))
            async with asyncio.timeout(rules.silence_s):
                await context.write(frame)

    async def _question(self, context: Context) -> session_pb2.FetchRequest:
        try:
            async with asyncio.timeout(self._peering.rules.silence_s):
                data: Any = await context.read()
        except TimeoutError:
            raise _RefusedError(grpc.StatusCode.DEADLINE_EXCEEDED, "its question did not come in time") from None
        try:
            asked = session_pb2.FetchRequest.FromString(data if isinstance(data, bytes) else b"")
        except Exception as error:  # DecodeError is not typed
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"{len(data)} bytes are no question: {error}") from None
        if asked.protocol != PROTOCOL_VERSION:
            text = f"it speaks protocol {asked.protocol}, wanted {PROTOCOL_VERSION}"
            raise _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, text)
        if asked.run_id != self._peering.run_id:
            raise _RefusedError(grpc.StatusCode.FAILED_PRECONDITION, f"it is of another run, wanted run {self._peering.run_id}")
        if asked.durable_seq >= asked.seq:
            text = f"it asks for exchange {asked.seq}, which its snapshots up to {asked.durable_seq} contain"
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, text)
        return asked

    def _place_of(self, asked: session_pb2.FetchRequest, context: Context) -> int | None:
        name = asked.aggregator
        if self._wants_identity:
            identity = identity_in(context)
            if identity is None or (identity.role, identity.name) != ("aggregator", name):
                found = "names no member" if identity is None else f"is that of {identity.role} {short_name(identity.name)!r}"
                text = f"its certificate {found}, wanted one of aggregator {short_name(name)!r}"
                raise _RefusedError(grpc.StatusCode.PERMISSION_DENIED, text)
        try:
            return self._peering.place_of(name)
        except ProtocolError as error:
            raise _RefusedError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _wait(self, context: Context) -> None:
        """Waits for a change, no longer than to the next heartbeat, and says that this side is alive."""
        rules = self._peering.rules
        if not await self._peering.change_within(rules.heartbeat_s):
            async with asyncio.timeout(rules.silence_s):
                await context.write(_HEARTBEAT)


def _end(task: asyncio.Task[Any]) -> None:
    task.cancel()


class PeerDialler:
    """Fetches from the other aggregators, over one channel to each."""

    def __init__(self, peering: Peering, tls: Tls | None) -> None:
        self._peering, self._tls = peering, tls
        self._channels: dict[int, tuple[str, Any]] = {}  # by place: the address, and the channel to it

    async def fetch(self, place: int, seq: int, durable_seq: int, d: int) -> Received:
        """See `coterie_server.session.peering.Fetch`."""
        peering, rules = self._peering, self._peering.rules
        asked = session_pb2.FetchRequest(
            protocol=PROTOCOL_VERSION, run_id=peering.run_id, aggregator=peering.name, seq=seq, durable_seq=durable_seq
        )
        heard, said = _Heard(), 0.0  # when it was heard last, and after how many seconds its absence was noted
        while True:
            try:
                received = await self._once(place, asked, heard, d)
                if said:
                    self._note("back", place, "is back")
                return received
            except grpc.aio.AioRpcError as error:
                code, reason = error.code().name, error.details() or error.code().name
            except TimeoutError:
                code, reason = "UNAVAILABLE", f"nothing came from it for {rules.silence_s:g} s"
            peer = peering.peer(place)
            if code not in _TRY_AGAIN:
                said_by = f"aggregator {peer.name!r} at {peer.address} refuses aggregator {peering.name!r}: {shortened(reason)}"
                raise RunError(said_by, Finding("R8"))
            await self._close(place)
            absent_s = time.monotonic() - heard.at
            if not said:
                self._note("lost", place, f"cannot be reached by aggregator {peering.name!r}: {shortened(reason)}")
                said = rules.absence_timeout_s
            if absent_s > said:
                why = await unreachable(peer.address) if peer.address else "the coordinator does not know where it is"
                text = f"at {peer.address or 'no address'} has not been reached for {absent_s:.0f} s: {why or shortened(reason)}"
                if rules.on_loss != "wait":
                    raise RunError(f"aggregator {peer.name!r} {text}", Finding("R8"))
                said += rules.absence_timeout_s
                self._note("wait", place, f"{text} (federation.on_loss is 'wait')")
            await peering.change_within(_PAUSE_S)  # perhaps it is elsewhere now

    async def _once(self, place: int, asked: session_pb2.FetchRequest, heard: _Heard, d: int) -> Received:
        """One question. AioRpcError, or TimeoutError where the other side is silent."""
        address = self._peering.peer(place).address
        fetch = (await self._channel(place, address)).unary_stream(
            f"/{SERVICE}/Fetch", request_serializer=session_pb2.FetchRequest.SerializeToString
        )
        assembler = Assembler(session_pb2.JoinRequest, lambda frame: check_announced(frame, 1, {"d": d}))
        call = fetch(asked)
        self._peering.n_sent[place] += asked.ByteSize()
        try:
            while True:
                async with asyncio.timeout(self._peering.rules.silence_s):
                    data = await call.read()
                if data is grpc.aio.EOF:
                    raise ProtocolError("it ended its answer before the message was whole")
                heard.at = time.monotonic()
                item = assembler.feed(data)
                if isinstance(item, Received):
                    return item
                if isinstance(item, session_pb2.Heartbeat):
                    self._peering.n_received[place] += len(data)
                elif item is not None:
                    raise ProtocolError(f"it sent a {type(item).__name__.lower()}, wanted a reply")
        finally:
            call.cancel()

    async def _channel(self, place: int, address: str) -> Any:
        known = self._channels.get(place)
        if known is not None and known[0] == address:
            return known[1]
        await self._close(place)
        if self._tls is None:
            channel = grpc.aio.insecure_channel(address, options=OPTIONS)
        else:
            self._tls = await asyncio.to_thread(self._tls.renewed, is_server=False)
            whose = ("grpc.ssl_target_name_override", peer_name(self._peering.peer(place).name))  # whoever is at the address
            channel = grpc.aio.secure_channel(address, self._tls.channel_credentials(), options=(*OPTIONS, whose))
        self._channels[place] = (address, channel)
        return channel

    async def _close(self, place: int) -> None:
        """Closes the channel to a peer: the next one looks up its name and reads the certificate again."""
        if (known := self._channels.pop(place, None)) is not None:
            await known[1].close()

    def _note(self, kind: str, place: int, text: str) -> None:
        name = self._peering.peer(place).name
        self._peering.note(kind, f"aggregator {name!r} {text}", peer=name)

    async def close(self) -> None:
        """Closes all channels."""
        for place in tuple(self._channels):
            await self._close(place)


class _Heard:
    def __init__(self) -> None:
        self.at = time.monotonic()


@contextlib.asynccontextmanager
async def dialling(peering: Peering, tls: Tls | None) -> AsyncIterator[None]:
    """Lets an aggregator fetch from its peers while the block runs."""
    dialler = PeerDialler(peering, tls)
    peering.fetch_from = dialler.fetch
    try:
        yield
    finally:
        peering.fetch_from = None
        await to_the_end(dialler.close())
