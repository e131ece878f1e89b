"""The end of a run: hosts are told, and bring their own side of the ledger."""

from __future__ import annotations

from collections.abc import Callable

from coterie.errors import ProtocolError, RunError
from coterie.findings import Finding
from coterie.record.ledger import DOWN, SESSION, UP, Row, check_ranges, link_below, unpack, unpack_own
from coterie.session.failures import finding_frame
from coterie.v1 import session_pb2
from coterie_server.session.bookings import Bookings
from coterie_server.session.hosts import Host
from coterie_server.session.outbox import Outbox
from coterie_server.session.ports import Recorder
from coterie_server.session.roster import Roster
from coterie_server.session.run_state import RunState
from coterie_server.session.strikes import Strikes

_MAX_ROWS_ALONE = 1_000_000  # of a host's book that the parent has no counterpart of
_LONGEST_S = 60.0  # for the books of hosts that are heard


class Closing:
    """Ends the run for the hosts, and takes their books."""

    def __init__(
        self,
        state: RunState,
        roster: Roster,
        recorder: Recorder,
        bookings: Bookings,
        outbox: Outbox,
        strikes: Strikes,
        clock: Callable[[], float],
    ) -> None:
        self._state, self._roster, self._recorder = state, roster, recorder
        self._bookings, self._outbox, self._strikes, self._clock = bookings, outbox, strikes, clock
        self._complete: set[str] = set()  # hosts that have brought their whole book
        self._takes_books = True  # until the end has been waited for

    async def finish(self, outcome: str, failed: Finding | None, timeout_s: float) -> None:
        """See `Hub.finish`; `failed` is the finding where the run has failed."""
        state, hosts = self._state, self._roster.hosts
        state.failure = None  # what kept the run from going on is in `failed`, or came when there was nothing left to do
        self._bookings.settle_or_fail()
        end = session_pb2.Finish(outcome=outcome) if failed is None else session_pb2.Finish(failed=True, finding=finding_frame(failed))
        state.finish = session_pb2.JoinResponse(finish=end)
        for host in self._roster.connected:
            self._outbox.send_frame(host, state.finish)
        await self._outbox.written()
        self._bookings.write_or_fail(self._recorder.flush)  # while the hosts fetch their books
        await self._books(timeout_s, timeout_s if failed or self._roster.rules.late == "skip" else max(timeout_s, _LONGEST_S))
        for name in sorted(hosts.keys() - self._complete) if failed is None else ():
            self._recorder.event("lost", f"host {name!r} has not brought its whole book", host=name, book=True)
        own = {} if self._roster.members is None else self._roster.layout.own
        for host in hosts.values():
            users = own.get(host.name)  # all behind the link: of the hosts of an aggregator, nothing else in the books says who they are
            rows = [(Row(0, state.attempt, 0, way, SESSION, 0, 0, 0, host.session_bytes[way], 0), users) for way in (UP, DOWN)]
            self._recorder.book(host.name, (0, 0), rows, True)
        if failed is None:
            state.raise_failure()

    async def _books(self, silence_s: float, limit_s: float) -> None:
        """Waits for the books, no longer than `limit_s`, of hosts that are silent no longer than `silence_s`."""
        # Who is waiting for its own hosts, or is one of very many on its machine, is slow but not silent. One that was skipped may compute.
        start = self._clock()
        while self._is_heard_since(start, silence_s) and self._clock() - start < limit_s:
            await self._state.change_within(min(0.5, silence_s))
        self._takes_books = False

    def book_of(self, host: Host, book: session_pb2.Book) -> None:
        """A piece of a host's own ledger has arrived."""
        if not self._takes_books:  # too late is as if lost: of a run that has ended nothing is still to be written
            return
        try:
            self._take(host, book)
        except ProtocolError as error:
            self._strikes.broke(host, error)
        except RunError as error:  # of ours: a full disk
            self._state.fail(error)

    def _take(self, host: Host, book: session_pb2.Book) -> None:
        if not self._state.is_over:
            raise ProtocolError("its book came before the end of the run")
        if host.name in self._complete:
            raise ProtocolError("it has brought its whole book already")
        if not book.ByteSize():
            self._complete.add(host.name)
        elif book.link or book.events:
            self._take_below(host.name, book)
        else:
            rows = unpack(book)
            host.n_booked -= len(rows)
            # Rows of an attempt that was killed may be the host's alone.
            if host.n_booked < -_MAX_ROWS_ALONE:
                raise ProtocolError("its book has many more rows than messages were exchanged")
            self._recorder.book_host(host.name, rows)

    def _take_below(self, name: str, book: session_pb2.Book) -> None:
        """An aggregator brings the books of one of its own links, or what has happened there."""
        if not self._roster.rules.is_two_tier:
            raise ProtocolError(f"its book is of a link to {book.link!r}, but it is a client host")
        link = link_below(name, book.link)
        if book.of_parent:
            sets = book.user_sets.split("\n")
            for users in sets:
                check_ranges(users, self._roster.layout.own[name])
            self._recorder.book_within(link, unpack_own(book), sets)
        elif book.link:
            self._recorder.book_host(link, unpack(book))
        self._recorder.events_of(name, book.events)

    def _is_heard_since(self, start: float, seconds: float) -> bool:
        """Whether a connected host has been heard in the last seconds, or `start` is no longer ago."""
        return any(self._clock() - max(host.heard_at, start) < seconds for host in self._roster.connected)
