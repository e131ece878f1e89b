"""The hub where aggregators join it, and where it is an aggregator's: whole books, long waits, names with slashes, and a restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import grpc
import numpy as np
import pytest

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.findings import Finding
from coterie.record.ledger import DOWN, Own, Row, link_below, pack, pack_own
from coterie.session import member_session
from coterie.session.member import Member
from coterie.session.member_session import MemberSession
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION, Encoded
from coterie.wire.messages import Broadcast, Vectors, declare
from coterie_deploy.roles.joining import state_name
from coterie_server.record import summary
from coterie_server.record.rundb import BETWEEN, RunDatabase
from coterie_server.run.aggregator import cluster_experiment
from coterie_server.run.engine import Engine
from coterie_server.session.hub import Hub
from tests.tries import soon_enough

QUERY, CONSTANTS = "consensus.GroupModel", "prepare.AgreedScale"


@declare(method="tierstest", step="T1")
@dataclass(frozen=True)
class Say(Broadcast):
    y: Annotated[Array, Vectors("d")]


@dataclass
class Clock:
    now: float = 1000.0
    drift: float = 0.0  # whenever it is read

    def __call__(self) -> float:
        self.now += self.drift
        return self.now


@dataclass
class FakeLink:
    tasks: list[session_pb2.Task] = field(default_factory=list)
    frames: list[session_pb2.JoinResponse] = field(default_factory=list)

    def send(self, encoded: Encoded) -> None:
        self.tasks.append(session_pb2.JoinResponse.FromString(encoded.head).task)

    async def flush(self) -> None: ...

    def send_frame(self, frame: session_pb2.JoinResponse) -> None:
        self.frames.append(frame)

    def close(self, code: str, reason: str) -> None: ...


@pytest.fixture
def database() -> Iterator[RunDatabase]:
    with contextlib.closing(RunDatabase(None, scope=BETWEEN)) as opened:
        opened.put("attempt", "1")
        yield opened


def make_hub(database: RunDatabase, clock: Clock, cluster: str | None = None, **rules: Any) -> Hub:
    return Hub(experiment_of(rules), "run-1", database, clock, cluster=cluster)


def experiment_of(rules: dict[str, Any]) -> Experiment:
    content = {
        "name": "hub",
        "data": {"source": "ellipses"},
        "problem": {"loss": "least_squares"},
        "method": {"name": "async_l2gd", "gamma": 1.0, "alpha": 0.5},
        "federation": rules,
    }
    return experiment_from(content)


def join(hub: Hub, name: str, cluster: str) -> FakeLink:
    link = FakeLink()
    users = [session_pb2.User(name=f"user of {name}", cluster=cluster)]
    hub.hello(
        session_pb2.Hello(protocol=PROTOCOL_VERSION, host=name, users=users, instance="1", aggregator=hub.rules.is_two_tier),
        link,
    )
    return link


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(limited())


def row(seq: int, kind: str = QUERY, attempt: int = 1) -> Row:
    return Row(seq, attempt, 0, DOWN, kind, 1, 3, 24, 60, 1)


def reconciled(database: RunDatabase) -> summary.Books:
    database.flush()
    return summary.reconcile(database.connection)


# ---- whole books


def test_the_last_book_of_a_member_is_empty() -> None:
    content = {"name": "n", "data": {"source": "ellipses"}, "problem": {"loss": "least_squares"}, "method": {"name": "local"}}
    member = Member("m", experiment_from(content), "run-1", (), None)
    assert [frame.book.ByteSize() for frame in member.books()] == [0]


def test_who_is_killed_while_it_brings_its_book_has_lost_the_rest_and_is_no_difference(database: RunDatabase) -> None:
    async def test() -> None:
        hub = make_hub(database, Clock(drift=1.0), topology="clusters", hosts=2)
        links = {name: join(hub, name, name) for name in ("x", "y/1")}
        await hub.gather()
        for name in links:
            database.book(name, (0, 1), [(row(1), None), (row(2), None)], True)
        ending = asyncio.create_task(hub.finish("over", failed=False))
        await asyncio.sleep(0)
        database.book_host("x", [row(1), row(2)])
        hub.book_of("x", session_pb2.Book())
        # Of the books of y/1, and of those it has of its host, one half has come.
        database.book_host("y/1", [row(1)])
        below = link_below("y/1", "h")
        database.book_within(below, [(row(1), Own(1, 0, 1, 0)), (row(2), Own(1, 0, 1, 0))], [""])
        database.book_host(below, [row(1)])
        for name, link in links.items():
            hub.lost(name, link, "it closed its stream")
        await ending

    run(test())
    books = reconciled(database)
    assert books.agree, books
    assert books.lost_by_host == {"y/1": 1, link_below("y/1", "h"): 1}
    lost = database.connection.execute("SELECT text FROM events WHERE kind = 'lost'").fetchall()
    assert lost == [("host 'y/1' has not brought its whole book",)]


@pytest.mark.parametrize(("n_heartbeats", "seconds"), [(0, 0.2), (4, 0.4)])
def test_a_member_leaves_its_books_to_a_slow_parent_as_long_as_that_is_heard(
    monkeypatch: pytest.MonkeyPatch, n_heartbeats: int, seconds: float
) -> None:
    """The parent may read many books before it closes; one that says nothing for CLOSE_S is given up."""
    monkeypatch.setattr(member_session, "CLOSE_S", 0.2)

    class SlowParent:
        n_read = 0

        async def read(self) -> Any:
            self.n_read += 1
            await asyncio.sleep(0.1 if self.n_read <= n_heartbeats else 30.0 if not n_heartbeats else 0.0)
            return b"" if self.n_read <= n_heartbeats else grpc.aio.EOF

    async def test() -> float:
        session = MemberSession.__new__(MemberSession)
        session._call = SlowParent()  # type: ignore[assignment]
        start = time.monotonic()
        with contextlib.suppress(TimeoutError):
            await session._drain()
        return time.monotonic() - start

    def drained(_: int) -> tuple[float, float]:
        took = asyncio.run(test())
        assert took >= seconds - 0.05
        return took, seconds + 0.5

    soon_enough(drained)


def test_a_book_after_the_end_is_as_if_lost(database: RunDatabase) -> None:
    """A host that was stopped for longer than the end waits goes on while the server closes: the run's status is written by then."""

    async def test() -> None:
        hub = make_hub(database, Clock(), topology="flat", hosts=1)
        join(hub, "x", "x")
        await hub.gather()
        database.book("x", (0, 1), [(row(1), None), (row(2), None)], True)
        ending = asyncio.create_task(hub.finish("over", failed=False, timeout_s=0.0))
        await asyncio.sleep(0)
        hub.book_of("x", next(pack([row(1)])))
        await ending
        hub.book_of("x", next(pack([row(2)])))
        hub.book_of("x", session_pb2.Book())

    run(test())
    books = reconciled(database)
    assert books.agree, books
    assert books.lost_by_host == {"x": 1}
    lost = database.connection.execute("SELECT text FROM events WHERE kind = 'lost'").fetchall()
    assert lost == [("host 'x' has not brought its whole book",)]


def test_a_whole_book_that_lacks_a_row_is_a_difference(database: RunDatabase) -> None:
    async def test() -> None:
        hub = make_hub(database, Clock(), topology="clusters", hosts=1)
        link = join(hub, "x", "x")
        await hub.gather()
        database.book("x", (0, 1), [(row(1), None), (row(2), None)], True)
        ending = asyncio.create_task(hub.finish("over", failed=False))
        await asyncio.sleep(0)
        database.book_host("x", [row(1)])
        hub.book_of("x", session_pb2.Book())
        hub.lost("x", link, "it closed its stream")
        await ending

    run(test())
    assert reconciled(database).n_differences == 1


@pytest.mark.parametrize(
    ("is_heard", "failed", "seconds"), [(False, False, 10.0), (True, False, 60.0), (False, True, 10.0), (True, True, 10.0)]
)
def test_books_are_waited_for_longer_where_their_aggregator_is_heard_and_the_run_is_well(
    database: RunDatabase, monkeypatch: pytest.MonkeyPatch, *, is_heard: bool, failed: bool, seconds: float
) -> None:
    """An aggregator that waits for the books of its own hosts sends heartbeats; one that is stopped does not."""

    async def test() -> float:
        clock = Clock()
        hub = make_hub(database, clock, topology="clusters", hosts=1)
        join(hub, "x", "x")
        await hub.gather()
        start = clock.now

        async def pass_time(_: float) -> None:
            clock.now += 0.5
            if is_heard:
                hub.heard("x")

        monkeypatch.setattr(hub.state, "change_within", pass_time)
        await hub.finish("over", failed=failed)
        return clock.now - start

    assert asyncio.run(test()) == seconds


@pytest.mark.parametrize(
    ("book", "reason"),
    [
        (session_pb2.Book(rows=b"no rows", n_rows=1), "a ledger book cannot be decompressed"),
        (next(pack_own([(row(1), Own(1, 0, 1, 1))], "h", ["1"])), "a set of users has 1, not all of whom are among its users"),
        (session_pb2.Book(events="no event"), "an event of its book is 'no event'"),
    ],
)
def test_a_book_that_is_wrong_fails_a_run_that_went_well(database: RunDatabase, book: session_pb2.Book, reason: str) -> None:
    """Also where what is wrong is of another cluster: the users of y are none of x."""

    async def test() -> None:
        hub = make_hub(database, Clock(), topology="clusters", hosts=2)
        links = {name: join(hub, name, name) for name in ("x", "y")}
        await hub.gather()
        ending = asyncio.create_task(hub.finish("over", failed=False))
        await asyncio.sleep(0)
        hub.book_of("x", book)
        for name, link in links.items():
            hub.book_of(name, session_pb2.Book())
            hub.lost(name, link, "it closed its stream")
        with pytest.raises(RunError, match=f"host 'x' broke the protocol: {reason}"):
            await ending

    run(test())


def test_an_aggregator_that_cannot_bring_its_books_fails_a_run_that_went_well(database: RunDatabase) -> None:
    async def test() -> None:
        hub = make_hub(database, Clock(), topology="clusters", hosts=1)
        link = join(hub, "x", "x")
        await hub.gather()
        ending = asyncio.create_task(hub.finish("over", failed=False))
        await asyncio.sleep(0)
        hub.failed("x", session_pb2.Failure(finding=session_pb2.Finding(rule="R7", count=1)), link)
        hub.lost("x", link, "it closed its stream")
        with pytest.raises(RunError, match=r"^aggregator 'x': a member broke the protocol"):
            await ending

    run(test())


@pytest.mark.parametrize("failed", [True, False])
def test_what_went_wrong_before_the_end_is_not_told_twice(database: RunDatabase, *, failed: bool) -> None:
    """The one who ends the run has decided how; a failure that came after the last exchange has kept nobody from anything."""

    async def test() -> None:
        hub = make_hub(database, Clock(), topology="clusters", hosts=1)
        link = join(hub, "x", "x")
        await hub.gather()
        hub.fail(RunError("the disk is full"))
        ending = asyncio.create_task(hub.finish("over", failed=failed, finding=Finding("R7", 1)))
        await asyncio.sleep(0)
        hub.book_of("x", session_pb2.Book())
        hub.lost("x", link, "it closed its stream")
        await ending
        why = session_pb2.Finding(rule="R7", count=1)
        told = session_pb2.Finish(failed=True, finding=why) if failed else session_pb2.Finish(outcome="over")
        assert [frame.finish for frame in link.frames if frame.WhichOneof("frame") == "finish"] == [told]

    run(test())
    database.flush()
    assert database.connection.execute("SELECT text FROM events").fetchall() == [("host 'x' joined with 1 users",)]


def test_a_signal_while_books_are_brought_does_not_fail_the_run(database: RunDatabase) -> None:
    """Nor does it keep the other books from coming, though the host that is gone was still to answer."""

    async def test() -> None:
        hub = make_hub(database, Clock(drift=1.0), topology="clusters", hosts=2)
        links = {name: join(hub, name, name) for name in ("x", "y")}
        await hub.gather()
        engine = Engine(experiment_of({"topology": "clusters", "hosts": 2}), hub, database, None)
        hub.begin_stage(0, '{"stage": "s", "options": {}}')
        asking = asyncio.create_task(hub.exchange(Say(np.ones(2))))
        await asyncio.sleep(0)
        database.book("y", (0, 1), [(row(2), None)], True)
        ending = asyncio.create_task(hub.finish("over", failed=False))
        await asyncio.sleep(0)
        hub.lost("x", links["x"], "it closed its stream")
        engine.request_stop("a signal")
        hub.tick()
        await asyncio.sleep(0)
        for book in (next(pack([row(2)])), session_pb2.Book()):
            hub.book_of("y", book)
        hub.lost("y", links["y"], "it closed its stream")
        await ending
        asking.cancel()

    run(test())
    assert reconciled(database).n_agreed == 1
    lost = database.connection.execute("SELECT text FROM events WHERE kind = 'lost'").fetchall()
    assert lost == [("host 'x' has not brought its whole book",)]


def test_an_aggregator_gives_its_hosts_up_while_the_coordinator_still_waits_for_it() -> None:
    """So the coordinator can say which hosts of which cluster were missing."""
    experiment = experiment_of({"topology": "clusters", "hosts": 2, "join_timeout_s": 50})
    below = cluster_experiment(experiment, 4).federation
    assert (below.topology, below.hosts, below.join_timeout_s) == ("flat", 4, 45)


# ---- names with slashes


def test_the_broadcasts_of_two_clusters_whose_names_begin_alike_count_twice(database: RunDatabase) -> None:
    for name in ("north/1", "north/2"):
        database.book_within(link_below(name, "h/1"), [(row(1, CONSTANTS), Own(1, 0, 1, 0))], [""])
    database.flush()
    assert [one.vectors for one in summary.traffic(database.connection)] == [2]


def test_attempts_are_those_of_the_aggregator_also_where_names_have_slashes(database: RunDatabase) -> None:
    link = link_below("north/1", "h/1")
    database.book_within(link, [(row(1, attempt=1), Own(1, 0, 1, 0)), (row(3, attempt=2), Own(1, 0, 3, 0))], [""])
    database.book_host(link, [row(1, attempt=1), row(2, attempt=1), row(3, attempt=2)])
    books = reconciled(database)
    assert books.lost_by_parent == {link: 1}, "the aggregator was killed before it wrote row 2"
    assert books.agree


def test_a_host_lost_below_an_aggregator_is_found_by_the_name_of_its_link(database: RunDatabase) -> None:
    link = link_below("50%/a", "h")
    database.book_within(link, [(row(1), Own(1, 0, 1, 0)), (row(2), Own(1, 0, 1, 0))], [""])
    database.book_host(link, [row(1)])
    database.events_of("50%/a", '[1.0, "lost", "host h is gone", {"host": "h"}]')
    assert reconciled(database).agree


@pytest.mark.parametrize("pair", [("Süd", "Söd"), ("a/b", "a b"), ("m:1-2", "m:1,2")])
def test_members_whose_names_differ_have_states_of_different_names(pair: Iterable[str]) -> None:
    names = {state_name(name, "run-1") for name in pair}
    assert len(names) == 2
    assert all("/" not in name and Path(name).name == name for name in names)
    assert state_name("host-1", "run-1") == "host-1.run-1"


# ---- a restart


def test_an_aggregator_that_was_killed_asks_before_its_hosts_are_back_and_says_who_is_missing(database: RunDatabase) -> None:
    async def test() -> None:
        before = make_hub(database, Clock(), cluster="x", hosts=1)
        join(before, "h", "x")
        await before.gather()
        before.number(np.array([3]), np.array([1]))
        clock = Clock()
        hub = make_hub(database, clock, cluster="x", hosts=1, absence_timeout_s=30)
        hub.state.attempt = 2
        hub.restore(before.memory())
        hub.state.has_started = True
        asking = asyncio.create_task(hub.exchange(Say(np.ones(2))))
        await asyncio.sleep(0)
        link = join(hub, "h", "x")
        assert [task.seq for task in link.tasks] == [1], "what was asked has waited for the host"
        hub.lost("h", link, "killed")
        clock.now += 31
        hub.tick()
        with pytest.raises(RunError, match=r"need 1 host, have 0: host 'h' .* absent since round 0 for 30 s"):
            await asking

    run(test())
