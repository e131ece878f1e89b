"""A run in one process whose host is listened to, shared by tests; nothing here is tested itself."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from coterie.experiment.config import Experiment
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received
from coterie_client.hosting.build import build_host
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub


class Tap:
    """Keeps every byte that leaves a host."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []

    async def run(self, experiment: Experiment) -> Finished:
        hosts = []

        class Link:
            def __init__(self, hub: Hub, host: Any, tap: Tap) -> None:
                self.hub, self.host, self.tap = hub, host, tap
                self.down, self.up = Assembler(session_pb2.JoinResponse), Assembler(session_pb2.JoinRequest)

            def send(self, encoded: Encoded) -> None:
                for frame in encoded.frames():
                    received = self.down.feed(frame)
                    if isinstance(received, Received):
                        reply = self.host.handle(received)
                        for out in reply.frames():
                            self.tap.replies.append(bytes(out))
                            if isinstance(answer := self.up.feed(out), Received):
                                self.hub.received(self.host.name, answer)

            async def flush(self) -> None: ...

            def send_frame(self, frame: session_pb2.JoinResponse) -> None:
                if frame.WhichOneof("frame") == "welcome":
                    self.host.welcome(frame.welcome)
                elif frame.WhichOneof("frame") == "finish":
                    for book in self.host.books():
                        self.tap.replies.append(book.SerializeToString())
                        self.hub.book_of(self.host.name, book.book)
                    self.hub.lost(self.host.name, self, "finished")

            def close(self, code: str, reason: str) -> None:
                assert code == "OK", reason

        @contextlib.asynccontextmanager
        async def connect(hub: Hub) -> AsyncIterator[None]:
            host = build_host("h", experiment, hub.run_id, None)
            hosts.append(host)
            hello = session_pb2.Hello()
            for frame in host.hello():
                self.replies.append(frame.SerializeToString())
                hello.MergeFrom(frame.hello)
            hub.hello(hello, Link(hub, host, self))
            yield

        finished = await coordinate(experiment, connect, Options())
        self.host = hosts[0]
        return finished
