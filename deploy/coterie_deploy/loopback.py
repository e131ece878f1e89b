"""The in-process transport: hosts of this process, joined to a hub by the same frames that gRPC would carry.

Everything is encoded and decoded as on the network, so bytes and bits are those of a distributed run; only the stream is missing.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from coterie.dial import reason_of
from coterie.errors import ConfigError, CoterieError
from coterie.ledger import UP
from coterie.v1 import session_pb2
from coterie.wire import Assembler, Encoded, Received
from coterie_client.host import Host
from coterie_server.hub import Hub


class LoopbackLink:
    """One host in this process."""

    def __init__(self, hub: Hub, host: Host) -> None:
        self._hub = hub
        self._host = host
        self._down = Assembler(session_pb2.JoinResponse)
        self._up = Assembler(session_pb2.JoinRequest)

    def join(self) -> None:
        """Introduces the host; raises Refusal."""
        hello = session_pb2.Hello()
        for frame in self._host.hello():
            hello.MergeFrom(frame.hello)
        self._hub.hello(hello, self)

    def send(self, encoded: Encoded) -> None:
        """Hands a task to the host, and its reply to the hub."""
        for frame in encoded.frames():
            received = self._down.feed(frame)
            if isinstance(received, Received):
                self._handle(received)

    async def flush(self) -> None:
        """Nothing waits."""

    def _handle(self, received: Received) -> None:
        try:
            reply = self._host.handle(received)
            self._host.settle()
        except Exception as error:
            if not isinstance(error, CoterieError):  # a mistake of ours: its traceback goes where that of a host's own process would
                traceback.print_exception(error)
            failure = session_pb2.Failure(reason=reason_of(error), config=isinstance(error, ConfigError))
            self._hub.failed(self._host.name, failure, self)
            return
        if reply is not None:
            for frame in reply.frames():
                answer = self._up.feed(frame)
                if isinstance(answer, Received):
                    self._hub.received(self._host.name, answer)

    def send_frame(self, frame: session_pb2.JoinResponse) -> None:
        """Welcome, heartbeat, finish."""
        which = frame.WhichOneof("frame")
        if which == "welcome":
            self._host.welcome(frame.welcome)
        elif which == "finish":
            self._host.ending(frame.finish)
            for book in self._host.books():
                self._hub.tally(self._host.name, UP, book.ByteSize())
                self._hub.book_of(self._host.name, book.book)
            self._hub.lost(self._host.name, self, "finished")

    def close(self, code: str, reason: str) -> None:
        """Nothing to close."""


def join_all(hub: Hub, hosts: Sequence[Host]) -> None:
    """Joins the hosts in the order given."""
    for host in hosts:
        LoopbackLink(hub, host).join()
