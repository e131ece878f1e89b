"""One host's stream at the parent: its hello, then its frames, each handed to the hub."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from coterie.errors import ProtocolError, RunError
from coterie.experiment.links import LinkRule
from coterie.record.ledger import UP
from coterie.session.failures import MISTAKE
from coterie.session.tls import Identity, identity_of
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import MAX_FRAME_BYTES, Received
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import MAX_REASON_CHARS, Refusal, short_name, shortened
from coterie_server.transport.grpc_link import SMALL_BYTES, Context, GrpcLink
from coterie_server.transport.links import Inlet, LoopClock, Outlet
from coterie_server.transport.unknown_peers import UnknownPeers, ended

MAX_HELLO_BYTES = 64 << 20
MAX_HELLO_USERS = 1_000_000
_USER_BYTES = 100  # about the memory of a user of an unfinished hello, without its name
_BURST, _FRAMES_PER_BEAT = 200, 20  # the most frames without content at once, and in the time of a heartbeat; a host sends a few


class HostSession:
    """One host's stream: the tasks that read and write it. `rule` shapes it."""

    def __init__(self, hub: Hub, context: Context, rule: LinkRule | None, unknown: UnknownPeers, *, wants_identity: bool) -> None:
        clock = LoopClock()
        self.link = GrpcLink(context, hub.rules.silence_s, None if rule is None else Outlet(rule, clock))
        self._inlet = None if rule is None else Inlet(context.read, rule, clock)
        self._receive = context.read if self._inlet is None else self._inlet.read
        # A slow link may need longer for the longest hello than `silence_s`.
        self._hello_s = hub.rules.silence_s + (0.0 if rule is None else rule.transmission_s(MAX_HELLO_BYTES) + rule.delay_s)
        self._hub, self._context, self._unknown, self._wants_identity, self._name = hub, context, unknown, wants_identity, ""
        self._assembler = Assembler(session_pb2.JoinRequest, lambda frame: hub.announced(self._name, frame))
        self._peer = unknown.add(self._give_up)
        self._start = asyncio.get_running_loop().time()
        self._n_empty = 0  # frames without content
        self._hello = session_pb2.Hello()  # the part that has come

    def _give_up(self, reason: str) -> None:
        self._turned_away(reason)
        self.link.close("UNAVAILABLE", reason)

    def _turned_away(self, reason: str) -> None:
        self._hub.turned_away("", f"an unknown peer at {self._context.peer()} is turned away: {reason}")

    async def run(self) -> None:
        """Serves the stream until it ends, then gives it its status."""
        tasks = [asyncio.create_task(work) for work in (self._read_all(), self.link.write_all())]
        if self._inlet is not None:
            tasks.append(asyncio.create_task(self._inlet.pump()))
        code, reason = "CANCELLED", "the connection broke"
        try:
            code, reason = await self.link.closed
        finally:
            self.link.close(code, reason)  # frames still under way are ignored from here on
            self._unknown.remove(self._peer)
            self._hello = session_pb2.Hello()  # it may be large, and the session may still be referenced
            if self._name:
                self._hub.lost(self._name, self.link, reason)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if code != "OK":
            await ended(self._context, grpc.StatusCode[code], reason[:MAX_REASON_CHARS])

    def note_held(self) -> None:
        """Counts the host as heard while a shaped link holds a frame of it back."""
        if self._inlet is not None and self._inlet.is_holding and self._name and not self.link.closed.done():
            self._hub.heard(self._name)

    async def _read_all(self) -> None:
        link = self.link
        try:
            async with asyncio.timeout(self._hello_s):
                name = await self._read_hello()
            if name is not None:
                self._name, self._assembler.held = name, self._hub.held(name)
                self._unknown.remove(self._peer)
                await self._read_frames()
            link.close("OK", "it closed its stream")
        except Refusal as refusal:
            self._name = ""
            link.close(refusal.code, str(refusal))
        except ProtocolError as error:
            if self._name:
                self._hub.broke(self._name, link, str(error))
            else:
                self._turned_away(str(error))
            link.close("INVALID_ARGUMENT", str(error))
        except TimeoutError:
            self._turned_away(reason := f"no hello came within {self._hello_s:g} s")
            link.close("DEADLINE_EXCEEDED", reason)
        except Exception as error:
            # A bug: the run must not wait for this host any longer, and the traceback goes to the log.
            self._hub.fail(RunError(f"the session of host {self._name!r} broke with {type(error).__name__}", MISTAKE))
            link.close("ABORTED", "the parent has made a mistake; its log says which")
            raise

    async def _read(self) -> tuple[Any, int]:
        """The next whole item and the size of its last frame; (None, 0) at the end of the stream."""
        while True:
            data: Any = await self._receive()
            if not isinstance(data, bytes):
                return None, 0
            if self._name:
                self._hub.heard(self._name)
                item = self._assembler.feed(data)
            else:
                item = await self._fed_by_unknown(data)
            if item is not None:
                return item, len(data)

    async def _fed_by_unknown(self, data: bytes) -> Any:
        """What a frame of a peer without a name completes; large ones are read one at a time."""
        if data[:1] not in _BEFORE_HELLO:
            raise ProtocolError(f"a frame of {len(data)} bytes came before the hello was complete, wanted a hello")
        async with self._unknown.turn() if len(data) > SMALL_BYTES else contextlib.nullcontext():
            return self._assembler.feed(data)

    def _count_empty(self) -> None:
        """Counts a frame without content. ProtocolError when there are too many: a flood of them would slow down the other hosts."""
        self._n_empty += 1
        n_beats = (asyncio.get_running_loop().time() - self._start) / self._hub.rules.heartbeat_s
        if self._n_empty > _BURST + _FRAMES_PER_BEAT * n_beats:
            seconds = f"{self._hub.rules.heartbeat_s:g} s"
            raise ProtocolError(f"{self._n_empty} heartbeats came, wanted at most {_FRAMES_PER_BEAT} in {seconds} on average")

    async def _read_hello(self) -> str | None:
        """Reads the hello, in one or more frames, and passes it to the hub: the host's name. None if the host cannot join."""
        n_bytes = 0
        while True:
            item, size = await self._read()
            n_bytes += size
            if n_bytes > MAX_HELLO_BYTES:
                name = short_name(self._hello.host)
                raise ProtocolError(f"the hello of host {name!r} has more than {MAX_HELLO_BYTES} bytes, which is the most")
            if isinstance(item, session_pb2.Failure):
                self._check_name(self._hello.host)
                self._hub.failed(self._hello.host, item)
                return None
            if isinstance(item, session_pb2.Hello):
                self._add_to_hello(item, size)
                if not item.more:
                    break
            elif item is None:  # gRPC refuses frames that are too large, and does not report it
                self._turned_away(f"it left before its hello was complete, or sent a frame of more than {MAX_FRAME_BYTES} bytes")
                return None
            elif isinstance(item, session_pb2.Heartbeat):
                self._count_empty()
            else:
                raise ProtocolError(f"the first frame is a {_kind(item)}, wanted a hello")
        whole, self._hello = self._hello, session_pb2.Hello()
        if self._wants_identity:
            self._check_identity(whole)
        self._hub.hello(whole, self.link)
        self._hub.tally(whole.host, UP, n_bytes)
        return whole.host

    def _check_name(self, name: str) -> None:
        """Refusal of a peer that uses another host's name before its hello is complete."""
        if self._wants_identity and (why := not_named(self._context, name)) is not None:
            self._hub.turned_away(name, why)
            raise Refusal("PERMISSION_DENIED", why)

    def _check_identity(self, hello: session_pb2.Hello) -> None:
        """Refusal of a host whose certificate is not for its name, its role or its users."""
        identity = identity_in(self._context)
        reason: str | None = _nobody(hello.host)
        if identity is not None:
            users = ((user.name, user.cluster) for user in hello.users)
            found = identity.why_not(hello.host, is_aggregator=hello.aggregator, users=users)
            reason = None if found is None else f"host {hello.host!r} is refused: {found}"
        if reason is not None:
            self._hub.turned_away(hello.host, reason)
            raise Refusal("PERMISSION_DENIED", reason)

    def _add_to_hello(self, piece: session_pb2.Hello, size: int) -> None:
        """Adds a piece of the hello. ProtocolError when it is another host's, or the host has too many users."""
        whole, name = self._hello, short_name(piece.host)
        if whole.host and (piece.host, piece.instance) != (whole.host, whole.instance):
            raise ProtocolError(f"a hello of host {name!r} came in the middle of that of host {short_name(whole.host)!r}")
        if whole.host and not piece.users:
            self._count_empty()
        if len(whole.users) + len(piece.users) > MAX_HELLO_USERS:
            raise ProtocolError(f"host {name!r} brings more than {MAX_HELLO_USERS} users, which is the most")
        self._unknown.charge(self._peer, size + _USER_BYTES * (len(piece.users) + len(piece.schema) + len(piece.findings)))
        whole.MergeFrom(piece)

    async def _read_frames(self) -> None:
        hub, name, closed = self._hub, self._name, self.link.closed
        while True:
            item, size = await self._read()
            if item is None or closed.done():
                return
            if isinstance(item, Received):
                hub.received(name, item)
                await asyncio.sleep(0)  # the run goes on with the answer before the next frame is read
                continue
            hub.tally(name, UP, size)
            if isinstance(item, session_pb2.Failure):
                self._count_empty()
                hub.failed(name, item, self.link)
            elif isinstance(item, session_pb2.Book):
                hub.book_of(name, item)
            elif isinstance(item, session_pb2.Heartbeat):
                self._count_empty()
            else:
                raise ProtocolError(f"it sent a {_kind(item)} in the middle of its session")


def identity_in(context: Any) -> Identity | None:
    """The identity in the peer's certificate."""
    uris = context.auth_context().get("x509_subject_alternative_name", ())
    return identity_of(uri.decode("utf-8", "replace") for uri in uris)


def not_named(context: Any, name: str) -> str | None:
    """Why the peer may not use this name; None when it may."""
    identity = identity_in(context)
    if identity is None:
        return _nobody(short_name(name))
    found = identity.why_not_named(name)
    return None if found is None else f"host {short_name(name)!r} is refused: {shortened(found)}"


def _nobody(host: str) -> str:
    return f"the certificate of host {host!r} names no member of a federation: issue one with `coterie certs issue`"


# The first byte of frames that may come before a hello is complete. No tensor is assembled for an unknown peer.
_JOIN_FIELDS = session_pb2.JoinRequest.DESCRIPTOR.fields_by_name
_BEFORE_HELLO = tuple(bytes((_JOIN_FIELDS[name].number << 3 | 2,)) for name in ("hello", "heartbeat", "failure"))


def _kind(item: Any) -> str:
    return type(item.frame if isinstance(item, Received) else item).__name__.lower()
