"""The end of a run: hosts receive it, and send their own side of the ledger."""

from __future__ import annotations

from coterie.errors import ProtocolError, RunError
from coterie.findings import Finding
from coterie.record.ledger import DOWN, SESSION, UP, Row, check_ranges, link_below, peer_link, unpack, unpack_own
from coterie.session.failures import finding_frame
from coterie.v1 import session_pb2
from coterie_server.session.duty import Duty, Shared
from coterie_server.session.run_state import Host
from coterie_server.session.strikes import Strikes

_MAX_ROWS_ALONE = 1_000_000  # of a host's book without a counterpart in the parent's
_LONGEST_S = 60.0  # for the books of hosts that are heard
_MAX_SHOWN = 100  # characters of a name
_REJOIN_S = 5.0  # a host that was cut in the middle of its books dials again


class Closing(Duty):
    """Ends the run for the hosts, and takes their books."""

    def __init__(self, shared: Shared, strikes: Strikes) -> None:
        super().__init__(shared)
        self._recorder, self._strikes = shared.recorder, strikes
        self._complete: set[str] = set()  # hosts that have brought their whole book
        self._has_failed = False  # the run, not its end
        self._takes_books = True  # until the end has been waited for

    async def finish(self, outcome: str, failed: Finding | None, timeout_s: float) -> None:
        """See `Hub.finish`; `failed` is the finding where the run has failed."""
        state, hosts = self._state, self._roster.hosts
        state.failure = None  # an earlier failure is in `failed`; one from now on concerns the books alone
        self._bookings.settle_or_fail()
        end = session_pb2.Finish(outcome=outcome) if failed is None else session_pb2.Finish(failed=True, finding=finding_frame(failed))
        state.finish, self._has_failed = session_pb2.JoinResponse(finish=end), failed is not None
        for host in self._roster.connected:
            self._outbox.send_frame(host, state.finish)
        await self._outbox.written()
        self._bookings.write_or_fail(self._recorder.flush)  # while the hosts fetch their books
        await self._books(timeout_s, timeout_s if failed or self._rules.late == "skip" else max(timeout_s, _LONGEST_S))
        for name in sorted(hosts.keys() - self._complete) if failed is None else ():
            self._recorder.event("lost", f"host {name!r} has not brought its whole book", host=name, book=True)
        own = {} if self._roster.members is None else self._roster.layout.own
        for host in hosts.values():
            users = own.get(host.name)  # all behind the link: for the hosts of an aggregator, no other row says who they are
            rows = [(Row(0, state.attempt, 0, way, SESSION, 0, 0, 0, host.session_bytes[way], 0), users) for way in (UP, DOWN)]
            self._recorder.book(host.name, (0, 0), rows, True)
        if failed is None:
            state.raise_failure()

    async def _books(self, silence_s: float, limit_s: float) -> None:
        """Waits for the books, no longer than `limit_s`, while some connected host has been heard in the last `silence_s` seconds.

        A host that waits for hosts of its own, or shares its machine with very many, is slow but not silent.
        """
        start = now = self._clock()
        while now - start < limit_s and any(self._is_awaited(host, start, now, silence_s) for host in self._roster.hosts.values()):
            await self._state.change_within(min(0.5, silence_s))
            now = self._clock()
        self._takes_books = False

    def _is_awaited(self, host: Host, start: float, now: float, silence_s: float) -> bool:
        """Whether a host may still bring books: it is heard, or its stream was lost a moment ago and the run has not failed."""
        if host.link is not None:
            return now - max(host.heard_at, start) < silence_s
        may_return = host.name not in self._complete and not host.is_struck and self._state.failure is None and not self._has_failed
        return may_return and now - (host.absent_since or start) < min(_REJOIN_S, silence_s)

    def book_of(self, host: Host, book: session_pb2.Book) -> None:
        """A piece of a host's own ledger has arrived. One that comes too late counts as lost: nothing more is written of the run."""
        if not self._takes_books:
            return
        try:
            self._take(host, book)
        except ProtocolError as error:
            self._strikes.broke(host, error)
        except RunError as error:  # the parent's own: a full disk
            self._state.fail(error)

    def _take(self, host: Host, book: session_pb2.Book) -> None:
        if not self._state.is_over:
            raise ProtocolError("its book came before the end of the run")
        if host.name in self._complete:
            raise ProtocolError("it has brought its whole book already")
        host.n_books += 1
        if not book.ByteSize():
            self._complete.add(host.name)
            if host.link is not None:
                host.link.close("OK", "it has brought its whole book")
        elif book.link or book.events or book.peer:
            self._take_below(host.name, book)
        else:
            rows = unpack(book)
            host.n_booked -= len(rows)
            if host.n_booked < -_MAX_ROWS_ALONE:  # some rows may be the host's alone: those of an attempt that was killed
                raise ProtocolError("its book has many more rows than messages were exchanged")
            self._recorder.book_host(host.name, rows)

    def _take_below(self, name: str, book: session_pb2.Book) -> None:
        """An aggregator brings the books of one of its own links, or what has happened there."""
        if not self._rules.is_two_tier:
            raise ProtocolError(f"its book is of a link to {book.link!r}, but it is a client host")
        if book.peer:
            self._take_between(name, book)
            return
        link = link_below(name, book.link)
        if book.of_parent:
            sets = book.user_sets.split("\n")
            for users in sets:
                check_ranges(users, self._roster.layout.own[name])
            self._recorder.book_within(link, unpack_own(book), sets)
        elif book.link:
            self._recorder.book_host(link, unpack(book))
        self._recorder.events_of(name, book.events)

    def _take_between(self, name: str, book: session_pb2.Book) -> None:
        """An aggregator brings its side of a link to another one. The one of the cluster with the smaller number is the link's parent."""
        names = [peer.name for peer in self._roster.peers().peers.peers] if self._rules.has_peers else []
        if book.peer not in names or book.peer == name:
            raise ProtocolError(f"its book is of a link to aggregator {book.peer[:_MAX_SHOWN]!r}, which the run does not have")
        is_parent = names.index(name) < names.index(book.peer)
        if book.of_parent != is_parent:
            raise ProtocolError(f"its book is of the wrong side of its link to aggregator {book.peer!r}")
        link = peer_link(*((name, book.peer) if is_parent else (book.peer, name)))
        if is_parent:
            self._recorder.book_peers(link, unpack_own(book))
        else:
            self._recorder.book_host(link, unpack(book))
