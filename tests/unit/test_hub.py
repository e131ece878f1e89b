"""The parent's book-keeping, driven event by event: no network, and a clock that the test moves."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import pytest

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, CoterieError, RunError, StoppedError
from coterie.experiment.config import experiment_from
from coterie.experiment.features import Feature
from coterie.experiment.model import TensorInfo, to_json
from coterie.findings import Finding
from coterie.record.ledger import Row
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import PROTOCOL_VERSION, Encoded, Received, encode
from coterie.wire.messages import Broadcast, Message, Rows, Scalars, Vectors, declare
from coterie.wire.precision import Precision
from coterie_server.interface.merge import check_finite
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import Refusal

DOUBLE = Precision.of("float64")


@declare(method="hubtest", step="H1")
@dataclass(frozen=True)
class Ask(Rows):
    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="hubtest", step="H1")
@dataclass(frozen=True)
class All(Broadcast):
    y: Annotated[Array, Vectors("d")]


@declare(method="hubtest", step="H2")
@dataclass(frozen=True)
class Answer(Rows):
    x: Annotated[Array, Vectors("rows", "d")]
    f: Annotated[Array, Scalars("rows")]


@dataclass
class Clock:
    """Seconds; moves on by `drift` whenever it is read."""

    now: float = 1000.0
    drift: float = 0.0

    def __call__(self) -> float:
        self.now += self.drift
        return self.now


@dataclass
class Notes:
    """What the hub writes down."""

    events: list[tuple[str, str]] = field(default_factory=list)
    decisions: list[tuple[int, str, Any]] = field(default_factory=list)
    booked: list[tuple[str, str, Row, bool]] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None:
        self.booked += [(link, row.direction, row, useful) for row, _ in rows]

    def book_host(self, link: str, rows: Iterable[Row]) -> None: ...

    def event(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text))

    def decide(self, seq: int, kind: str, value: Any) -> None:
        self.decisions.append((seq, kind, value))

    def reserve(self, seq: int) -> None:
        self.reserved.append(seq)

    def flush(self) -> None: ...

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.events]


@dataclass
class FakeLink:
    """Keeps what it is told to send."""

    tasks: list[session_pb2.Task] = field(default_factory=list)
    frames: list[session_pb2.JoinResponse] = field(default_factory=list)
    closed: tuple[str, str] | None = None

    def send(self, encoded: Encoded) -> None:
        self.tasks.append(session_pb2.JoinResponse.FromString(encoded.head).task)

    async def flush(self) -> None:
        pass

    def send_frame(self, frame: session_pb2.JoinResponse) -> None:
        self.frames.append(frame)

    def close(self, code: str, reason: str) -> None:
        self.closed = (code, reason)

    def sent(self, which: str) -> list[session_pb2.JoinResponse]:
        return [frame for frame in self.frames if frame.WhichOneof("frame") == which]


def hello(**changes: Any) -> session_pb2.Hello:
    fields: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "numerics": "n", "instance": "1"}
    return session_pb2.Hello(**{**fields, **changes})


@dataclass
class World:
    """A hub with its clock, its notes and the links of its hosts."""

    hub: Hub
    clock: Clock
    notes: Notes
    links: dict[str, FakeLink] = field(default_factory=dict)

    def join(self, host: str, users: Sequence[str], **changes: Any) -> FakeLink:
        link = FakeLink()
        self.hub.hello(hello(host=host, users=[session_pb2.User(name=user) for user in users], **changes), link)
        self.links[host] = link
        return link

    def cut(self, host: str) -> None:
        self.hub.lost(host, self.links[host], "cut")

    def answer(self, host: str, seq: int, *messages: Message, **changes: Any) -> None:
        assembler = Assembler(session_pb2.JoinRequest)
        reply = session_pb2.Reply(seq=seq, attempt=self.hub.state.attempt, **changes)
        for frame in encode(reply, messages, DOUBLE).frames():
            received = assembler.feed(frame)
        assert isinstance(received, Received)
        self.hub.received(host, received)


def world(**rules: Any) -> World:
    content = {
        "name": "hub",
        "data": {"source": "ellipses"},
        "problem": {"loss": "least_squares"},
        "method": {"name": "pdmm", "penalty": 1.0},
        "federation": {"hosts": 2, **rules},
    }
    clock, notes = Clock(), Notes()
    return World(Hub(experiment_from(content), "run-1", notes, clock), clock, notes)


async def two_hosts(**rules: Any) -> World:
    w = world(**rules)
    w.join("b", ["u10", "u2"])
    w.join("a", ["u1", "u3"])
    await w.hub.gather()
    w.hub.begin_stage(1, '{"stage": "s", "options": {}}')
    return w


async def asked(w: World, *messages: Message, to: Indices | None = None) -> asyncio.Task[Any]:
    """An exchange under way."""
    task = asyncio.create_task(w.hub.exchange(*messages, to=to))
    await asyncio.sleep(0)
    return task


def rows(n: int, scale: float = 1.0) -> Answer:
    return Answer(scale * np.arange(2.0 * n).reshape(n, 2), np.arange(float(n)))


async def answered(w: World, *seqs: int, **fences: Any) -> None:
    """Exchanges with these numbers, which both hosts answer."""
    for seq in seqs:
        exchange = await asked(w, All(np.ones(2)))
        for name in "ab":
            w.answer(name, seq, rows(2), **fences)
        await exchange


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(10):
            await test

    asyncio.run(limited())


# ---- the barrier


def test_the_barrier_says_how_many_hosts_are_missing() -> None:
    async def test() -> None:
        w = world(hosts=6, min_hosts=4, join_timeout_s=60)
        for i in range(3):
            w.join(f"h{i}", [f"u{i}"])
        w.clock.drift = 100.0
        with pytest.raises(
            RunError, match=r"need 4 of 6 hosts, have 3 after 60 s without another \(federation\.join_timeout_s\): h0, h1, h2"
        ):
            await w.hub.gather()

    run(test())


def test_the_barrier_says_why_who_is_missing_could_not_join() -> None:
    async def test() -> None:
        w = world(hosts=3, join_timeout_s=60)
        w.hub.turned_away("x", "host 'x' cannot join: stopped by SIGTERM while waiting for hosts")
        w.clock.drift = 100.0
        why = r"\(federation\.join_timeout_s\): none; host 'x' cannot join: stopped by SIGTERM"
        with pytest.raises(RunError, match=f"need 3 of 3 hosts, have 0 after 60 s {why}"):
            await w.hub.gather()

    run(test())


def test_a_reason_that_hosts_share_is_said_once_with_their_number() -> None:
    async def test() -> None:
        w = world(hosts=6, join_timeout_s=60)
        for i in range(5):
            w.hub.turned_away(f"h{i}", f"host 'h{i}' cannot join: its policy does not allow method 'pdmm'")
        w.hub.turned_away("x", "host 'x' cannot join: stopped by SIGTERM")
        w.clock.drift = 100.0
        why = r"; host 'h4' cannot join: its policy does not allow method 'pdmm' \(5 hosts\); host 'x' cannot join: stopped by SIGTERM$"
        with pytest.raises(RunError, match=why):
            await w.hub.gather()

    run(test())


def test_the_joining_time_counts_from_the_last_host_that_joined() -> None:
    async def test() -> None:
        w = world(hosts=3, join_timeout_s=60)
        gathering = asyncio.create_task(w.hub.gather())
        for i in range(3):
            await asyncio.sleep(0)
            w.clock.now += 50.0
            w.join(f"h{i}", [f"u{i}"])
            await asyncio.sleep(0.01)
        assert (await gathering).names == ("u0", "u1", "u2")

    run(test())


def test_without_a_joining_time_the_barrier_waits_for_days_and_says_for_whom() -> None:
    async def test() -> None:
        w = world(hosts=2, min_hosts=1, join_timeout_s="none")
        w.join("a", ["u1"])
        w.hub.turned_away("b", "host 'b' cannot join: its policy does not allow method 'pdmm'")
        gathering = asyncio.create_task(w.hub.gather())
        await asyncio.sleep(0.01)
        for _ in range(3):
            w.clock.now += 100_000.0
            w.hub.state.changed()
            await asyncio.sleep(0.01)
        assert not gathering.done()
        said = [text for kind, text in w.notes.events if kind == "wait"]
        assert said[0] == ("waiting for 1 of 2 hosts for 100000 s, have a; host 'b' cannot join: its policy does not allow method 'pdmm'")
        assert len(said) == 3
        w.join("b", ["u2"])
        assert (await gathering).names == ("u1", "u2")

    run(test())


def test_a_run_that_goes_on_without_a_joining_time_does_not_wait_for_ever_for_a_host_that_it_can_leave_out() -> None:
    async def resumed(on_loss: str) -> World:
        w = await two_hosts(join_timeout_s="none", on_loss=on_loss, absence_timeout_s=30)
        again = world(join_timeout_s="none", on_loss=on_loss, absence_timeout_s=30)
        again.hub.restore(w.hub.memory())
        again.join("a", ["u1", "u3"])
        return again

    async def skips() -> None:
        again = await resumed("skip")
        again.clock.drift = 10.0
        assert (await again.hub.gather()).names == ("u1", "u2", "u3", "u10")

    async def waits() -> None:
        again = await resumed("stop")
        gathering = asyncio.create_task(again.hub.gather())
        await asyncio.sleep(0)
        again.clock.now += 100_000.0
        await asyncio.sleep(0.01)
        assert not gathering.done()
        again.join("b", ["u10", "u2"])
        assert len((await gathering).names) == 4

    run(skips())
    run(waits())


def test_a_failed_barrier_sends_hosts_away_who_may_come_back_and_a_mistake_ends_them() -> None:
    async def test() -> None:
        for error, is_end in ((RunError("few", Finding("R2")), False), (ConfigError("wrong"), True)):
            w = world(hosts=2)
            link = w.join("a", ["u1"])
            ending = asyncio.create_task(w.hub.end(error))
            await asyncio.sleep(0)
            assert bool(link.sent("finish")) == is_end
            assert link.closed == (None if is_end else ("UNAVAILABLE", "host 'a' must wait: too few members joined in time (rule R2)"))
            w.clock.drift = 100.0
            await ending

    run(test())


def test_a_memory_as_of_an_earlier_exchange_asks_for_later_ones_again() -> None:
    async def test() -> None:
        w = await two_hosts()
        await answered(w, 1, 2)
        found = w.hub.memory(1)
        assert (found["seq"], w.hub.memory()["seq"]) == (1, 2)
        for host in found["hosts"]:
            assert (host["acked"], host["log"]["seqs"].tolist(), host["told"]) == (1, [1], True)
        assert not any(host["told"] for host in w.hub.memory(0)["hosts"])
        again = world()
        again.hub.restore(found)
        assert again.hub.seq == 1
        for name, users in (("a", ["u1", "u3"]), ("b", ["u10", "u2"])):  # they have handled exchange 2, which has never been asked now
            again.hub.state.earlier = 1000
            again.join(name, users, run_id="run-1", last_seq=2)
        exchange = await asked(again, All(np.ones(2)))
        assert [again.links[name].tasks[-1].seq for name in "ab"] == [2, 2]
        exchange.cancel()

    run(test())


def test_enough_hosts_start_when_the_joining_time_is_over() -> None:
    async def test() -> None:
        w = world(hosts=6, min_hosts=3, join_timeout_s=60)
        for i in range(3):
            w.join(f"h{i}", [f"u{i}"])
        w.clock.drift = 100.0
        members = await w.hub.gather()
        assert members.names == ("u0", "u1", "u2")

    run(test())


def test_members_are_in_natural_order_whatever_host_they_come_with() -> None:
    async def test() -> None:
        w = await two_hosts()
        assert w.hub.roster.members is not None
        assert w.hub.roster.members.names == ("u1", "u2", "u3", "u10")
        (welcome,) = w.links["b"].sent("welcome")
        assert list(welcome.welcome.member_indices) == [3, 1]  # in the order of the hello

    run(test())


def test_a_host_lost_before_the_barrier_leaves_its_place_and_its_users() -> None:
    async def test() -> None:
        w = world()
        w.join("a", ["u1"])
        w.cut("a")
        w.join("other", ["u1"])
        w.join("b", ["u2"])
        assert (await w.hub.gather()).names == ("u1", "u2")
        assert list(w.hub.roster.hosts) == ["b", "other"]

    run(test())


def test_the_number_of_users_can_be_required() -> None:
    async def test() -> None:
        w = world(users=5)
        w.join("a", ["u1", "u2"])
        w.join("b", ["u3", "u4"])
        with pytest.raises(RunError, match="the hosts bring 4 users together, wanted 5"):
            await w.hub.gather()

    run(test())


@pytest.mark.parametrize(
    ("change", "code", "sentence"),
    [
        ({"protocol": 9}, "FAILED_PRECONDITION", "host 'c' speaks protocol 9, wanted 1"),
        ({"run_id": "run-0"}, "FAILED_PRECONDITION", "holds the state of run run-0, this is run run-1"),
        ({"host": ""}, "INVALID_ARGUMENT", "wanted a name and at least one user"),
        ({"users": []}, "INVALID_ARGUMENT", "brings 0 users"),
        ({"users": [session_pb2.User(name="x")] * 2}, "INVALID_ARGUMENT", "names user 'x' more than once"),
        ({"users": [session_pb2.User(name="")]}, "INVALID_ARGUMENT", "without a name"),
        ({"users": [session_pb2.User(name="u1")]}, "ALREADY_EXISTS", "user 'u1' is claimed by host 'c', but another host speaks for it"),
        ({"host": "a", "instance": "2"}, "UNAVAILABLE", "host 'a' is still connected from another process"),
        ({"host": "a"}, "INVALID_ARGUMENT", "host 'a' came back with other users"),
    ],
)
def test_a_hello_that_does_not_fit_is_refused(change: dict[str, Any], code: str, sentence: str) -> None:
    w = world()
    w.join("a", ["u1"])
    with pytest.raises(Refusal, match=sentence) as refusal:
        w.hub.hello(hello(**{"host": "c", "users": [session_pb2.User(name="u9")], **change}), FakeLink())
    assert refusal.value.code == code


def test_a_host_too_many_is_refused() -> None:
    w = world()
    w.join("a", ["u1"])
    w.join("b", ["u2"])
    with pytest.raises(Refusal, match="host 'c' would be host 3 of 2"):
        w.join("c", ["u3"])


def test_a_user_unknown_to_the_started_run_is_refused() -> None:
    async def test() -> None:
        w = await two_hosts()
        with pytest.raises(Refusal, match="brings user 'u77', whom the run, already started, does not know") as refusal:
            w.join("c", ["u77"])
        assert refusal.value.code == "INVALID_ARGUMENT"

    run(test())


def test_a_hello_with_ten_thousand_users_is_a_matter_of_moments() -> None:
    async def test() -> None:
        w = world(hosts=1)
        w.join("a", [f"u{i}" for i in range(10_000)])
        members = await w.hub.gather()
        assert len(members) == 10_000
        assert len(w.links["a"].sent("welcome")[0].welcome.member_indices) == 10_000

    run(test())


def test_different_libraries_are_an_event() -> None:
    w = world()
    w.join("a", ["u1"])
    w.join("b", ["u2"], numerics="another")
    assert "numerics" in w.notes.kinds()


# ---- exchange


def test_rows_go_to_their_owners_and_come_back_in_member_order() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, Ask(np.arange(8.0).reshape(4, 2)), All(np.ones(2)))
        (task,) = w.links["b"].tasks  # owns members 1 and 3
        sent, _ = Received(task, (), 0).decode(2)
        assert isinstance(sent[0], Ask)
        np.testing.assert_array_equal(sent[0].x, [[2, 3], [6, 7]])
        assert task.stage_json
        w.answer("b", 1, rows(2, 10))
        assert not exchange.done()
        w.answer("a", 1, rows(2))
        replies = await exchange
        assert replies.answered is None
        np.testing.assert_array_equal(replies[Answer].x, [[0, 1], [0, 10], [2, 3], [20, 30]])

    run(test())


def test_only_the_hosts_of_the_members_asked_are_asked() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)), to=np.array([0]))
        assert not w.links["b"].tasks
        w.answer("a", 1, rows(2))
        replies = await exchange
        assert replies.answered is None  # everyone who was asked
        np.testing.assert_array_equal(replies[Answer].users, [0, 2])

    run(test())


@pytest.mark.parametrize("d", [2, 20_000])  # a message of few numbers is looked at in another way than one of many
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e200])
def test_numbers_that_are_not_finite_are_found_among_few_and_many(d: int, value: float) -> None:
    answer = Answer(np.ones((2, d)), np.ones(2), users=np.array([0, 1]))
    answer.x[1, d - 1], answer.x[0, 0] = value, -value
    with contextlib.nullcontext() if np.isfinite(value) else pytest.raises(RunError, match=f"{-value} for user 'u0' in hubtest.Answer.x"):
        check_finite("h", answer, np.array([0, 1]), ("u0", "u1"), 3)


def test_nan_names_host_user_field_and_round() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.state.round = 12
        exchange = await asked(w, All(np.ones(2)))
        bad = rows(2)
        bad.x[1, 0] = np.nan
        w.answer("b", 1, bad)
        with pytest.raises(RunError, match=r"host 'b' returned nan for user 'u10' in hubtest.Answer.x in round 12, wanted finite numbers"):
            await exchange

    run(test())


@pytest.mark.parametrize(
    ("messages", "sentence"),
    [
        ([Answer(np.zeros((1, 2)), np.zeros(1), users=np.array([0]))], "host 'b' sent hubtest.Answer for member 0, which is not one of"),
        ([rows(3)], "axis 'rows' is 3, wanted 2"),
        ([rows(2), rows(2)], "host 'b' sent hubtest.Answer twice in one reply"),
        ([All(np.ones(2))], "a host's messages must have owners"),
        ([Answer(np.zeros((2, 5)), np.zeros(2))], "with rows of shape"),
        ([Answer(np.zeros((1, 5)), np.zeros(1), users=np.array([1]))], "with rows of shape"),
    ],
)
def test_a_reply_that_breaks_the_contract_fails_the_run(messages: list[Message], sentence: str) -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, *messages)
        w.answer("a", 1, rows(2))
        with pytest.raises(Exception, match=sentence) as error:
            await exchange
        assert getattr(error.value, "exit_code", None) == 3

    run(test())


def test_a_reply_before_the_barrier_ends_that_stream_and_not_the_run() -> None:
    async def test() -> None:
        w = world()
        w.join("a", ["u1"])
        w.answer("a", 1, rows(1))
        assert w.links["a"].closed == ("INVALID_ARGUMENT", "host 'a' broke the protocol: it sent a reply before it was welcomed")
        assert w.hub.state.failure is None

    run(test())


@pytest.mark.parametrize(("config", "family"), [(True, ConfigError), (False, RunError)])
def test_a_host_that_cannot_go_on_ends_the_run_with_its_finding(config: bool, family: type[CoterieError]) -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        finding = session_pb2.Finding(rule="T3", count=2, role="feature")
        w.hub.failed("b", session_pb2.Failure(finding=finding, config=config), w.links["b"])
        sentence = r"^host 'b': 2 cells of a feature are not numbers \(rule T3\); its own log names it$"
        with pytest.raises(family, match=sentence) as caught:
            await exchange
        assert (caught.value.finding, caught.value.below) == (Finding("T3", 2, "feature"), Finding("R1"))

    run(test())


@pytest.mark.parametrize("name", ["", "b", "oops"])
def test_a_stranger_that_cannot_go_on_does_not_end_the_run(name: str) -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.hub.failed(name, session_pb2.Failure(config=True), FakeLink())
        w.answer("a", 1, rows(2))
        w.answer("b", 1, rows(2, 10))
        replies = await exchange
        assert replies.answered is None
        np.testing.assert_array_equal(replies[Answer].x, [[0, 1], [0, 10], [2, 3], [20, 30]])
        assert {host: link.closed for host, link in w.links.items()} == {"a": None, "b": None}
        (refused,) = [text for kind, text in w.notes.events if kind == "refused"]
        assert refused.startswith(f"host {name!r} cannot join: ")
        assert list(w.hub.journal.refused) == [name] * bool(name)

    run(test())


@pytest.mark.parametrize("fences", [{"seq": 2**63}, {"seq": 2}, {"seq": 1, "attempt": 9}, {"seq": 1, "durable_seq": 2}])
def test_a_reply_to_what_was_never_asked_names_its_host(fences: dict[str, int]) -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        frame = session_pb2.Reply(**{"attempt": 1, **fences})
        received = Assembler(session_pb2.JoinRequest).feed(encode(frame, [rows(2)], DOUBLE).head)
        w.hub.received("b", received)
        with pytest.raises(RunError, match="host 'b' broke the protocol: a reply to task"):
            await exchange

    run(test())


def test_models_of_another_dimension_name_the_host_that_sent_them() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.answers.dims = {"d": 2}
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, Answer(np.ones((2, 7)), np.ones(2)))
        with pytest.raises(RunError, match=r"host 'a' broke the protocol: .*axis 'd' is 7, wanted 2"):
            await exchange

    run(test())


def test_a_host_that_comes_and_goes_without_answering_is_absent_for_as_long_as_it_was_gone() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        for _ in range(200):
            w.cut("b")
            w.clock.now += 1.0
            w.hub.tick()
            if exchange.done():
                break
            w.join("b", ["u10", "u2"])
            w.clock.now += 0.1
            w.hub.heard("a")
            w.hub.tick()
        with pytest.raises(RunError, match=r"host 'b' .* absent since round"):
            await exchange

    run(test())


def test_a_book_before_the_end_of_the_run_is_refused() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.book_of("b", session_pb2.Book())
        with pytest.raises(RunError, match="host 'b' broke the protocol: its book came before the end"):
            await w.hub.exchange(All(np.ones(2)))

    run(test())


# ---- time


def test_a_silent_host_is_given_up() -> None:
    async def test() -> None:
        w = await two_hosts(silence_s=20)
        w.clock.now += 15
        w.hub.heard("a")
        w.hub.tick()
        assert w.links["b"].closed is None
        w.clock.now += 6
        w.hub.tick()
        assert w.links["b"].closed == ("DEADLINE_EXCEEDED", "nothing heard from host 'b' for 20 s")
        assert w.links["a"].closed is None
        assert w.hub.roster.hosts["b"].link is None

    run(test())


def test_everyone_gets_heartbeats() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.tick()
        assert all(link.sent("heartbeat") for link in w.links.values())

    run(test())


def test_an_absent_host_ends_the_run_with_a_sentence() -> None:
    async def test() -> None:
        w = await two_hosts(absence_timeout_s=30)
        w.hub.state.round = 12
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(2))
        w.cut("b")
        w.clock.now += 29
        w.hub.heard("a")
        w.hub.tick()
        assert not exchange.done()
        w.clock.now += 2
        w.hub.tick()
        sentence = r"need 2 hosts, have 1: host 'b' \(users u10 to u2\) absent since round 12 for 30 s"
        with pytest.raises(RunError, match=sentence):
            await exchange

    run(test())


def test_a_host_that_never_answers_ends_the_run() -> None:
    async def test() -> None:
        w = await two_hosts(task_timeout_s=600)
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(2))
        w.clock.now += 601
        for host in w.links:
            w.hub.heard(host)
        w.hub.tick()
        with pytest.raises(RunError, match="host 'b' has not answered task 1 for 600 s"):
            await exchange

    run(test())


# ---- coming back


def test_a_host_that_comes_back_is_asked_again_for_what_it_has_not_answered() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(2))
        w.cut("b")
        link = w.join("b", ["u10", "u2"])
        assert [(task.seq, task.replay, task.resent, bool(task.stage_json)) for task in link.tasks] == [(1, 0, 1, True)]
        w.answer("b", 1, rows(2))
        await exchange
        downs = [(row.kind, row.resent, useful) for host, way, row, useful in w.notes.booked if (host, way) == ("b", "down")]
        assert ("hubtest.All", 0, True) in downs
        assert ("hubtest.All", 1, False) in downs  # a repeat is booked as a repeat

    run(test())


def test_a_host_that_comes_back_without_its_state_is_brought_up_to_date() -> None:
    async def test() -> None:
        w = await two_hosts()
        await answered(w, 1, 2)
        w.cut("b")
        link = w.join("b", ["u10", "u2"], instance="2")
        assert [(task.seq, task.replay) for task in link.tasks] == [(1, 1), (2, 1)]
        assert "replay" in w.notes.kinds()

    run(test())


def test_a_host_in_this_process_may_answer_a_missed_task_while_it_is_sent() -> None:
    """With the answer comes a snapshot, so tasks are forgotten while the host is brought up to date."""

    class Prompt(FakeLink):
        def __init__(self, w: World) -> None:
            super().__init__()
            self.w = w

        def send(self, encoded: Encoded) -> None:
            super().send(encoded)
            self.w.answer("b", self.tasks[-1].seq, rows(2), durable_seq=self.tasks[-1].seq)

    async def test() -> None:
        w = await two_hosts()
        await answered(w, 1)
        w.cut("b")
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 2, rows(2))
        link = Prompt(w)
        w.hub.hello(hello(host="b", users=[session_pb2.User(name=user) for user in ("u10", "u2")], last_seq=1), link)
        await exchange
        assert [task.seq for task in link.tasks] == [2]
        assert not w.hub.roster.hosts["b"].log

    run(test())


def test_a_host_whose_missed_tasks_are_forgotten_is_turned_away() -> None:
    async def test() -> None:
        w = await two_hosts()
        await answered(w, 1, durable_seq=1)
        w.cut("b")
        with pytest.raises(Refusal, match="host 'b' came back without its state: it is at task 0, wanted at least 1") as refusal:
            w.join("b", ["u10", "u2"])
        assert refusal.value.code == "FAILED_PRECONDITION"
        assert w.hub.journal.refused["b"] == str(refusal.value)

    run(test())


def test_a_new_stream_of_the_same_process_takes_the_place_of_the_old_one() -> None:
    async def test() -> None:
        w = await two_hosts()
        old = w.links["b"]
        w.join("b", ["u10", "u2"])
        assert old.closed == ("UNAVAILABLE", "host 'b' has opened a new stream")
        w.hub.lost("b", old, "closed")  # the old stream's end says nothing about the new one
        assert w.hub.roster.hosts["b"].link is w.links["b"]

    run(test())


@pytest.mark.parametrize("keep_log", [True, False])
def test_the_memory_for_replay_is_given_back(keep_log: bool) -> None:
    async def test() -> None:
        w = await two_hosts()
        w.hub.outbox._keeps_log = keep_log
        for seq in (1, 2, 3):
            exchange = await asked(w, All(np.ones(1000)))
            w.answer("a", seq, rows(2), durable_seq=seq - 1)
            w.answer("b", seq, rows(2), durable_seq=seq - 1)
            await exchange
        assert [len(host.log) for host in w.hub.roster.hosts.values()] == [1, 1]
        assert (w.hub.outbox.log_bytes > 16_000) == keep_log
        assert 0 <= w.hub.outbox.log_bytes < 17_000

    run(test())


# ---- late


def test_late_and_repeated_replies_are_dropped_and_booked_as_such() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, rows(2))
        w.answer("b", 1, rows(2, 5.0), resent=1)
        w.answer("a", 1, rows(2))
        replies = await exchange
        np.testing.assert_array_equal(replies[Answer].x[1], [0, 1])
        w.answer("a", 1, rows(2), resent=1)
        assert w.notes.kinds().count("late") == 2
        ups = [useful for host, way, row, useful in w.notes.booked if way == "up" and row.kind == "hubtest.Answer"]
        assert ups == [True, False, True, False]

    run(test())


def test_what_was_put_off_is_done_in_order_once_the_next_tasks_are_sent() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(2)))
        for _ in range(3):  # the links have their turn first
            await asyncio.sleep(0)
        w.answer("b", 1, rows(2))
        w.answer("a", 1, rows(2))
        await exchange
        n_sent: list[int] = []
        w.hub.meanwhile(lambda: n_sent.append(len(w.links["a"].tasks)))
        assert {way for _, way, _, _ in w.notes.booked} == {"down"}
        exchange = await asked(w, All(np.zeros(2)))
        w.answer("a", 2, rows(2))
        w.answer("b", 2, rows(2))
        await exchange
        assert n_sent == [2]
        w.hub.settle()
        ways = [(row.seq, way, host) for host, way, row, _ in w.notes.booked if row.kind != "envelope"]
        first = [(1, "down", "a"), (1, "down", "b"), (1, "up", "b"), (1, "up", "a")]
        assert ways == [*first, (2, "down", "a"), (2, "down", "b"), (2, "up", "a"), (2, "up", "b")]

    run(test())


def test_what_was_put_off_is_done_before_more_is_put_off_and_at_the_end() -> None:
    async def test() -> None:
        w = await two_hosts()
        done: list[str] = []
        w.hub.meanwhile(lambda: done.append("first"))
        w.hub.meanwhile(lambda: done.append("second"))
        assert done == ["first"]
        for name in ("a", "b"):
            w.cut(name)
        await w.hub.finish("over", failed=True)
        assert done == ["first", "second"]

    run(test())


def test_what_was_put_off_until_the_end_and_cannot_be_written_fails_the_run() -> None:
    async def test() -> None:
        def full() -> None:
            raise RunError("cannot write the run database run.db: No space left on device")

        w = await two_hosts()
        w.hub.meanwhile(full)
        for name in ("a", "b"):
            w.cut(name)
        w.clock.drift = 10.0  # nobody comes back with a book
        with pytest.raises(RunError, match=r"cannot write the run database run\.db"):
            await w.hub.finish("over", failed=False)

    run(test())


async def skipping() -> World:
    w = await two_hosts(late="skip", late_after_s=5)
    w.hub.participation.may_skip = True
    exchange = await asked(w, All(np.ones(2)))
    w.answer("a", 1, rows(2))
    w.clock.now += 4
    w.hub.tick()
    assert not exchange.done()
    w.clock.now += 2
    w.hub.tick()
    replies = await exchange
    assert replies.answered is not None
    np.testing.assert_array_equal(replies.answered, [0, 2])
    np.testing.assert_array_equal(replies[Answer].users, [0, 2])
    return w


def test_the_others_go_on_without_a_late_host_and_the_decision_is_written_down() -> None:
    async def test() -> None:
        w = await skipping()
        assert w.notes.decisions == [(1, "skip", ["b"])]
        w.answer("b", 1, rows(2))
        assert w.notes.kinds().count("late") == 1

    run(test())


def test_a_repeated_decision_leaves_out_the_same_host_without_waiting() -> None:
    async def test() -> None:
        w = await two_hosts(late="skip", late_after_s=5)
        w.hub.participation.may_skip, w.hub.participation.skips = True, {1: frozenset({"b"})}
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, rows(2))  # this time it is quick, and left out all the same
        assert not exchange.done()
        w.answer("a", 1, rows(2))
        replies = await exchange
        np.testing.assert_array_equal(replies[Answer].users, [0, 2])
        assert w.notes.decisions == []

    run(test())


def test_nobody_is_skipped_where_skipping_is_not_allowed() -> None:
    async def test() -> None:
        w = await two_hosts(late="wait")
        w.hub.participation.may_skip = True
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(2))
        w.clock.now += 100
        for host in w.links:
            w.hub.heard(host)
        w.hub.tick()
        assert not exchange.done()
        w.answer("b", 1, rows(2))
        await exchange

    run(test())


# ---- lost


def pass_time(w: World, seconds: float) -> None:
    """Heartbeats come, the clock moves, and the hub looks at it."""
    w.clock.now += seconds
    for name, host in w.hub.roster.hosts.items():
        if host.link is not None:
            w.hub.heard(name)
    w.hub.tick()


async def losing(**rules: Any) -> tuple[World, asyncio.Task[Any]]:
    """Host b is lost in exchange 1, which a has answered."""
    w = await two_hosts(absence_timeout_s=30, **rules)
    w.hub.participation.may_skip, w.hub.participation.needs_everyone = True, ""
    exchange = await asked(w, All(np.ones(2)))
    w.answer("a", 1, rows(2))
    w.cut("b")
    return w, exchange


def test_a_lost_host_is_waited_for_as_long_as_it_takes_and_that_is_said_now_and_then() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="wait")
        for _ in range(1000):
            pass_time(w, 1.0)
        assert not exchange.done()
        said = [text for kind, text in w.notes.events if kind == "wait"]
        assert 30 <= len(said) <= 34
        assert said[0] == "waiting in round 0 for host 'b' (users u10 to u2), absent for 31 s (federation.on_loss is 'wait')"
        w.join("b", ["u10", "u2"])
        pass_time(w, 599.0)  # from now on it has its time for the task
        w.answer("b", 1, rows(2))
        await exchange
        assert w.notes.decisions == []

    run(test())


def test_a_host_that_came_back_must_answer_in_its_time() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="wait", task_timeout_s=600)
        pass_time(w, 5000.0)
        w.join("b", ["u10", "u2"])
        pass_time(w, 601.0)
        with pytest.raises(RunError, match="host 'b' has not answered task 1 for 600 s"):
            await exchange

    run(test())


def test_a_run_that_is_to_stop_does_not_wait_for_a_lost_host() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="wait")
        w.hub.stop("a signal")
        with pytest.raises(RunError, match="stopped by a signal while waiting for hosts"):
            await exchange

    run(test())


def test_a_host_that_is_lost_after_the_run_was_asked_to_stop_is_not_waited_for() -> None:
    async def test() -> None:
        w = await two_hosts(on_loss="wait")
        exchange = await asked(w, All(np.ones(2)))
        w.hub.stop("a signal")
        pass_time(w, 1.0)
        assert not exchange.done()
        w.cut("b")
        pass_time(w, 1.0)
        with pytest.raises(RunError, match="stopped by a signal while waiting for hosts"):
            await exchange

    run(test())


def test_a_coordinator_trusts_an_aggregator_that_may_wait_for_its_own_hosts_until_it_has_had_ten_seconds_to_stop() -> None:
    async def test() -> None:
        w = world(topology="clusters", on_loss="wait", task_timeout_s=600)
        for name in "ab":
            w.links[name] = FakeLink()
            w.hub.hello(hello(host=name, users=[session_pb2.User(name=f"u{name}", cluster=name)], aggregator=True), w.links[name])
        await w.hub.gather()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, Answer(np.ones((1, 2)), np.ones(1)))
        pass_time(w, 5000.0)
        assert not exchange.done()
        w.hub.stop("a signal")
        pass_time(w, 9.0)
        assert not exchange.done()
        pass_time(w, 2.0)
        with pytest.raises(StoppedError, match="stopped by a signal in round 0, which would have taken longer than 10 s more"):
            await exchange

    run(test())


def test_a_lost_host_is_left_out_until_it_has_caught_up_and_nothing_piles_up_for_it() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="skip")
        pass_time(w, 29.0)
        assert not exchange.done()
        pass_time(w, 2.0)
        np.testing.assert_array_equal((await exchange).answered, [0, 2])
        for seq in range(2, 50):
            exchange = await asked(w, All(np.ones(2)))
            w.answer("a", seq, rows(2), durable_seq=seq - 1)
            replies = await exchange
            np.testing.assert_array_equal(replies.answered, [0, 2])
            assert replies.n_unasked(np.arange(4)) == 2
        assert len(w.hub.roster.hosts["b"].log) == 1
        link = w.join("b", ["u10", "u2"])
        assert [task.seq for task in link.tasks] == [1]
        exchange = await asked(w, All(np.ones(2)))  # it still works on what it missed
        w.answer("a", 50, rows(2))
        await exchange
        w.answer("b", 1, rows(2))
        exchange = await asked(w, All(np.ones(2)))
        assert [task.seq for task in link.tasks] == [1, 51]
        w.answer("a", 51, rows(2))
        w.answer("b", 51, rows(2))
        assert (await exchange).answered is None
        assert w.notes.decisions == [(1, "skip", ["b"]), *((seq, "pass", ["b"]) for seq in range(2, 51))]
        assert [text for kind, text in w.notes.events if kind in ("skip", "back")] == [
            "going on without b from exchange 1 on",
            "host 'b' takes part again from exchange 51 on",
        ]

    run(test())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"needs_everyone": "stage 'global' needs every user: a sum"}, "on_loss is skip, but stage 'global' needs every user: a sum"),
        ({"furthest": 2}, "on_loss is skip, but exchange 1 is repeated from an attempt or a run in which it answered"),
    ],
)
def test_where_nobody_can_be_left_out_a_lost_host_ends_the_run_with_the_reason(change: dict[str, Any], why: str) -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="skip")
        for name, value in change.items():
            setattr(w.hub.participation, name, value)
        pass_time(w, 31.0)
        sentence = r"need 2 hosts, have 1: host 'b' \(users u10 to u2\) absent since round 0 for 30 s; "
        with pytest.raises(RunError, match=f"^{sentence}{why}$"):
            await exchange
        assert w.notes.decisions == []

    run(test())


def test_no_more_hosts_are_left_out_than_the_run_may_start_without() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="skip", min_hosts=2)
        pass_time(w, 31.0)
        with pytest.raises(RunError, match="but 1 of the at least 2 hosts wanted are left"):
            await exchange

    run(test())


def test_two_hosts_lost_one_after_the_other_in_one_exchange_are_both_left_out_when_it_is_repeated() -> None:
    async def test() -> None:
        w = world(hosts=3, absence_timeout_s=30, on_loss="skip")
        for name in "abc":
            w.join(name, [f"u{name}"])
        await w.hub.gather()
        w.hub.participation.may_skip, w.hub.participation.needs_everyone = True, ""
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, Answer(np.ones((1, 2)), np.ones(1)))
        w.cut("b")
        pass_time(w, 20.0)
        w.cut("c")
        pass_time(w, 20.0)
        pass_time(w, 20.0)
        np.testing.assert_array_equal((await exchange).answered, [0])
        assert w.notes.decisions == [(1, "skip", ["b"]), (1, "skip", ["c"])]

    run(test())


def test_a_decision_that_cannot_be_written_down_ends_the_run_and_not_the_clock() -> None:
    async def test() -> None:
        w, exchange = await losing(on_loss="skip")

        def full(*_: object) -> None:
            raise RunError("cannot write the run database run.db: No space left on device")

        w.notes.decide = full  # type: ignore[method-assign]
        pass_time(w, 31.0)
        with pytest.raises(RunError, match=r"cannot write the run database run\.db"):
            await exchange

    run(test())


def test_a_book_that_cannot_be_written_down_ends_the_run_and_not_the_session() -> None:
    async def test() -> None:
        w = await two_hosts()

        def full(*_: object) -> None:
            raise RunError("cannot write the run database run.db: No space left on device")

        w.notes.book = full  # type: ignore[method-assign]
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(2))
        with pytest.raises(RunError, match=r"cannot write the run database run\.db"):
            await exchange

    run(test())


def test_a_repeated_decision_asks_nobody_that_was_not_asked() -> None:
    async def test() -> None:
        w = await two_hosts(on_loss="skip")
        w.hub.participation.may_skip, w.hub.participation.repeats_all, w.hub.participation.passes = True, True, {1: frozenset({"b"})}
        exchange = await asked(w, All(np.ones(2)))
        assert not w.links["b"].tasks
        w.answer("a", 1, rows(2))
        replies = await exchange
        np.testing.assert_array_equal(replies.answered, [0, 2])
        assert w.notes.decisions == []

    run(test())


# ---- the end


def test_everyone_is_told_of_the_end_also_who_comes_back_late() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.cut("b")
        w.clock.drift = 2.0
        ending = asyncio.create_task(w.hub.finish("all done", failed=False))
        await asyncio.sleep(0)
        assert w.hub.is_over
        assert w.links["a"].sent("finish")[0].finish.outcome == "all done"
        w.cut("a")
        late = w.join("b", ["u10", "u2"])
        assert [frame.WhichOneof("frame") for frame in late.frames] == ["welcome", "finish"]
        w.cut("b")
        await ending

    run(test())


def test_a_host_that_does_not_leave_is_not_waited_for_for_ever() -> None:
    async def test() -> None:
        w = await two_hosts()
        w.clock.drift = 3.0
        await w.hub.finish("all done", failed=False)
        assert w.hub.roster.hosts["a"].link is not None

    run(test())


def again(w: World, **rules: Any) -> World:
    """The parent that a second attempt starts."""
    other = world(**rules)
    other.hub.state.attempt, other.hub.state.earlier = 2, w.hub.state.reserved
    other.hub.restore(w.hub.memory())
    return other


def test_exchanges_are_numbered_in_blocks_that_were_written_down_before() -> None:
    async def test() -> None:
        w = world(hosts=1)
        w.join("a", ["u1"])
        await w.hub.gather()
        w.hub.state.seq, w.hub.state.reserved = 999, 1000
        for seq in (1000, 1001):
            exchange = await asked(w, All(np.ones(2)))
            assert w.notes.reserved == ([2000] if seq > 1000 else [])
            w.answer("a", seq, rows(1))
            await exchange

    run(test())


@pytest.mark.parametrize("last_seq", [2, 10**9])
def test_a_host_that_has_seen_an_exchange_that_there_was_not_is_turned_away(last_seq: int) -> None:
    async def test() -> None:
        w = await two_hosts()
        with pytest.raises(Refusal, match=f"not of this run: it is at task {last_seq}, but none above 0 was ever sent"):
            w.join("b", ["u10", "u2"], run_id="run-1", last_seq=last_seq)
        exchange = await asked(w, All(np.ones(2)))
        for name in "ab":
            w.answer(name, 1, rows(2))
        await exchange
        other = again(w, late="skip", late_after_s=5.0)
        other.hub.participation.may_skip = True
        sentence = "host 'b' came with a state that is not of this run: it is at task 1001, but none above 1000 was ever sent"
        with pytest.raises(Refusal, match=sentence) as refusal:
            other.join("b", ["u10", "u2"], run_id="run-1", last_seq=1001)
        assert refusal.value.code == "FAILED_PRECONDITION"
        other.join("a", ["u1", "u3"], run_id="run-1", last_seq=1)
        other.join("b", ["u10", "u2"], run_id="run-1", last_seq=1)
        other.hub.state.has_started = True
        exchange = await asked(other, All(np.ones(2)))
        other.answer("a", 2, rows(2))
        other.clock.now += 6
        other.hub.tick()
        await exchange
        assert other.notes.decisions == [(2, "skip", ["b"])], "a claim that was refused decides nothing"

    run(test())


def test_a_restored_parent_goes_on_with_the_members_it_had() -> None:
    async def test() -> None:
        w = await two_hosts()
        await answered(w, 1)
        other = again(w)
        assert other.hub.roster.members == w.hub.roster.members
        link = other.join("b", ["u10", "u2"], run_id="run-1", last_seq=1)
        assert not link.tasks
        fresh = other.join("a", ["u1", "u3"])
        assert [(task.seq, task.replay, task.attempt) for task in fresh.tasks] == [(1, 1, 2)]

    run(test())


def test_hosts_with_another_model_are_turned_away_by_name() -> None:
    body, other = (TensorInfo("body", (size,), is_integer=False, part="representation") for size in (3, 4))
    head = TensorInfo("head", (2,), is_integer=False, part="head")
    w = world(hosts=3)
    w.join("a", ["u1"], model=to_json([body, head]))
    with pytest.raises(Refusal, match=r"host 'b' has a model with tensor 'body' of shape \[4\] in the representation, wanted shape \[3\]"):
        w.join("b", ["u2"], model=to_json([other, head]))
    with pytest.raises(Refusal, match="host 'c' has no model, unlike the hosts before"):
        w.join("c", ["u3"])
    w.join("b", ["u2"], model=to_json([body, head]))
    assert w.hub.roster.model == to_json([body, head])


@pytest.mark.parametrize("extra", [{"model": "m"}, {"schema": [session_pb2.Feature(name="ses", kind="number")]}], ids=["model", "schema"])
def test_a_host_cannot_come_back_with_a_model_that_would_keep_the_others_out(extra: dict[str, Any]) -> None:
    async def test() -> None:
        w = world(hosts=2)
        links = [w.join("a", ["u1"]), w.join("b", ["u2"])]
        await w.hub.gather()
        w.hub.lost("b", links[1], "gone")
        with pytest.raises(Refusal, match="host 'b' has a model or named features, unlike the hosts before"):
            w.join("b", ["u2"], **extra)
        w.join("b", ["u2"])

    run(test())


SCHEMA = [session_pb2.Feature(name="ses", kind="number"), session_pb2.Feature(name="sex=f", kind="category", column="sex")]


def test_features_of_the_first_host_are_kept_and_outlive_a_restart() -> None:
    async def test() -> None:
        w = world()
        w.join("b", ["u2"], schema=SCHEMA)
        w.join("a", ["u1"], schema=SCHEMA)
        await w.hub.gather()
        assert w.hub.roster.schema == (Feature("ses"), Feature("sex=f", "category", "sex"))
        assert w.hub.roster.features == ("ses", "sex=f")
        other = world()
        other.hub.restore(w.hub.memory())
        assert other.hub.roster.schema == w.hub.roster.schema
        with pytest.raises(Refusal, match="1 feature of the hosts before is missing"):
            other.join("a", ["u1"], schema=SCHEMA[:1])

    run(test())


def test_what_a_host_says_of_its_data_is_written_down_once_and_unknown_rules_are_counted() -> None:
    w = world()
    findings = [session_pb2.Finding(rule="T17", count=3, role="row"), session_pb2.Finding(rule="T9999", place="SECRET cell")]
    w.join("a", ["u1"], findings=findings)
    w.join("a", ["u1"], findings=findings)
    assert [text for kind, text in w.notes.events if kind == "data"] == [
        "host 'a': 3 rows with missing cells were dropped (rule T17)",
        "host 'a': a note on its data has a rule that this version does not know",
    ]
