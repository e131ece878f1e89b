"""The in-process transport: hosts of this process, joined to a hub by the same frames that gRPC would carry.

Everything is encoded and decoded as on the network, so bytes and bits are those of a distributed run; only the stream is missing.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator, Sequence

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.record.ledger import UP
from coterie.session.failures import failure_of, sentence_of
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received
from coterie_client.hosting.host import Host
from coterie_server.session.hub import Hub
from coterie_server.session.strikes import NOT_SPARED


class LoopbackLink:
    """One host in this process."""

    def __init__(self, hub: Hub, host: Host) -> None:
        self._hub, self._host = hub, host
        self._down = Assembler(session_pb2.JoinResponse)
        self._up = Assembler(session_pb2.JoinRequest)
        self.error: Exception | None = None  # why the host cannot go on

    @property
    def name(self) -> str:
        return self._host.name

    def join(self) -> None:
        """Introduces the host. Raises Refusal."""
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
            if not isinstance(error, CoterieError):  # a bug: the traceback goes where that of a host's own process would go
                traceback.print_exception(error)
            self.error = error
            self._hub.failed(self._host.name, failure_of(error), self)
            host = self._hub.roster.hosts.get(self._host.name)
            if isinstance(error, CoterieError) and host is not None and host.is_struck:
                print(f"host {self._host.name!r}: {error}", file=sys.stderr)  # noqa: T201 - the run goes on; it has no other log here
            return
        if reply is not None:
            self.deliver(reply)

    def deliver(self, reply: Encoded) -> None:
        """Hands the host's reply to the hub."""
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


def join_all(hub: Hub, hosts: Sequence[Host]) -> list[LoopbackLink]:
    """Joins the hosts in the order given."""
    links = [LoopbackLink(hub, host) for host in hosts]
    for link in links:
        link.join()
    return links


@contextlib.contextmanager
def explained(links: Sequence[LoopbackLink]) -> Iterator[None]:
    """An error that ends the block is raised with the full sentence of the host that it names, if that host is one of these."""
    try:
        yield
    except CoterieError as error:
        for link in links:
            if (why := link.error) is not None and repr(link.name) in error.public:
                said = str(why) if isinstance(why, CoterieError) else f"{type(why).__name__}: {why}"
                raise with_words(error, f"host {link.name!r}: {said}") from why
        raise


@contextlib.contextmanager
def public_alone(hub: Hub, name: str) -> Iterator[None]:
    """The run's books have an error of the construction of a host without its values."""
    try:
        yield
    except CoterieError as error:
        why = f"host {name!r} cannot join: {sentence_of(error.finding, hub.experiment)}; the terminal of the run names it"
        raise with_words(error, str(error), public=why) from error


def with_words(error: CoterieError, sentence: str, *, public: str | None = None) -> CoterieError:
    """The error with a sentence for the owner of the data. Others read the same as before, or `public`."""
    family = next(family for family in (ConfigError, ProtocolError, RunError, CoterieError) if isinstance(error, family))
    _, spared, why = str(error).partition(NOT_SPARED) if NOT_SPARED not in sentence else ("", "", "")
    return family(f"{sentence}{spared}{why}", error.finding, public=public or error.public, below=error.below)
