"""The hub against a hostile member and unknown peers: whatever they say, in whatever order, exchanges of others end with right numbers.

Two honest hosts, `a` and `b`, answer, repeat themselves, and lose their streams and come back. Host `z` and unknown peers say anything.
The run may go on without `z` (late: skip), so nothing that is said may end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from coterie.errors import ProtocolError
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import PROTOCOL_VERSION, Received, encode
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.session.refusal import MAX_REASON_CHARS, Refusal
from tests.fuzz.mutations import EDGES, KINDS, Base, drawn, mutilated
from tests.unit.test_hub import All, Answer, FakeLink, World, world

DOUBLE = Precision.of("float64")
HONEST = {"a": ("u1", "u3"), "b": ("u2",)}
WORDS = st.sampled_from(["f", "g" * 2000])
EVIL = ("e1", "e2")
N_EVIL = len(EVIL)
MEMBERS = ("e1", "e2", "u1", "u2", "u3")  # in member order
_BATCH = 20  # replies of one rule: hypothesis itself takes longer than a case
_STEPS = 40
_LATE_S = 5.0
_MOST_EVENTS = 200  # of a machine's life: kinds times hosts times what is written down of each

N_CASES = {"all": 0}


def right(seq: int, users: tuple[str, ...]) -> Answer:
    """What these users answer to an exchange."""
    numbers = np.array([MEMBERS.index(user) for user in users], dtype=float)
    return Answer(np.stack([numbers + seq, numbers * seq], axis=1), numbers)


def nonsense(seq: int) -> list[list[Message]]:
    """Replies of `z`, the first of which is as it should be."""
    good = right(seq, EVIL)
    nan = Answer(np.full((2, 2), np.nan), np.zeros(2))
    return [
        [good],
        [],
        [nan],
        [Answer(np.zeros((2, 2)), np.array([np.inf, 0.0]))],
        [good, good],
        [All(np.zeros(2))],
        [good, All(np.zeros(2))],
        [Answer(np.zeros((3, 2)), np.zeros(3))],
        [Answer(np.zeros((2, 7)), np.zeros(2))],
        [Answer(np.zeros((1, 2)), np.zeros(1), users=np.array([2]))],
        [Answer(np.zeros((2, 2)), np.zeros(2), users=np.array([0, 99]))],
        [Answer(np.zeros((0, 2)), np.zeros(0), users=np.zeros(0, dtype=np.int64))],
        [Answer(np.zeros((2, 2)), np.zeros(2), users=np.array([-1, 0]))],
    ]


def chunk(n_bytes: int) -> bytes:
    return session_pb2.JoinRequest(chunk=session_pb2.Chunk(data=bytes(n_bytes))).SerializeToString()


NAMES = st.sampled_from(["a", "b", "z", "c", "", "x" * 300, "\x1b[2J", "a/b"])
ANY_USERS = st.lists(st.sampled_from([*MEMBERS, "u9", "", "y" * 300]), max_size=3)
USERS = st.one_of(st.sampled_from([list(users) for users in (*HONEST.values(), EVIL)]), ANY_USERS)
NUMBERS = st.sampled_from(EDGES)


class Sessions(RuleBasedStateMachine):
    """A run under way, and those who disturb it."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world: World = world(hosts=3, late="skip", late_after_s=_LATE_S, min_hosts=2, absence_timeout_s=1e6, task_timeout_s=1e6)
        self.hub = self.world.hub
        for name, users in {**HONEST, "z": EVIL}.items():
            self.world.join(name, users, instance=name)
        self.loop.run_until_complete(self.hub.gather())
        self.hub.begin_stage(1, '{"stage": "s", "options": {}}')
        self.hub.participation.may_skip, self.hub.answers.dims = True, {"d": 2}
        self.exchange: asyncio.Task[Any] | None = None
        self.unanswered: set[str] = set()
        self.asked_at = 0.0
        self.n_repeats = 0

    def turn(self) -> None:
        """Lets what waits for a turn of the loop go on."""
        N_CASES["all"] += 1
        for _ in range(3):
            self.loop.run_until_complete(asyncio.sleep(0))

    # ---- the honest

    @precondition(lambda self: self.exchange is None)
    @rule()
    def ask(self) -> None:
        self.exchange = self.loop.create_task(self.hub.exchange(All(np.ones(2))))
        self.unanswered, self.asked_at = set(HONEST), self.world.clock.now
        self.turn()

    @precondition(lambda self: self.unanswered)
    @rule(first=st.booleans())
    def honest_answer(self, first: bool) -> None:
        name = sorted(self.unanswered)[0 if first else -1]
        self.unanswered.discard(name)
        self.world.answer(name, self.hub.seq, right(self.hub.seq, HONEST[name]))
        self.turn()
        self.check_exchange()

    @precondition(lambda self: self.hub.seq and self.n_repeats < 50)
    @rule(name=st.sampled_from(sorted(HONEST)))
    def honest_repeat(self, name: str) -> None:
        if name not in self.unanswered:
            self.n_repeats += 1
            self.world.answer(name, self.hub.seq, right(self.hub.seq, HONEST[name]), resent=1)
            self.turn()

    @rule(name=st.sampled_from(sorted(HONEST)), is_cut=st.booleans())
    def honest_host_comes_back(self, name: str, is_cut: bool) -> None:
        reached = self.hub.roster.hosts[name].reached
        if is_cut:
            self.world.cut(name)
        self.world.join(name, HONEST[name], instance=name, last_seq=reached, run_id="run-1")
        self.turn()

    @rule(seconds=st.floats(0.0, 2.0))
    def time_passes(self, seconds: float) -> None:
        self.world.clock.now += seconds
        if self.exchange is not None and self.world.clock.now - self.asked_at >= _LATE_S:
            self.honest_answers()  # or they would be skipped themselves, where z has answered in time
        for name in HONEST:
            self.hub.heard(name)
        self.hub.tick()
        self.turn()
        self.check_exchange()

    @precondition(lambda self: self.exchange is not None)
    @rule()
    def the_exchange_ends(self) -> None:
        self.honest_answers()
        if self.exchange is not None and not self.exchange.done():
            self.time_passes(_LATE_S + 1.0)
        self.check_exchange()
        assert self.exchange is None, "all honest hosts have answered, and z has had its time"

    def honest_answers(self) -> None:
        for name in sorted(self.unanswered):
            self.world.answer(name, self.hub.seq, right(self.hub.seq, HONEST[name]))
        self.unanswered.clear()
        self.turn()

    def check_exchange(self) -> None:
        """What has ended has ended well."""
        if self.exchange is None or not self.exchange.done():
            return
        replies = self.exchange.result()
        found = replies[Answer]
        wanted = right(self.hub.seq, HONEST["a"] + HONEST["b"])
        order = np.argsort(wanted.f)
        np.testing.assert_array_equal(found.x[-3:], wanted.x[order])
        np.testing.assert_array_equal(found.f[-3:], wanted.f[order])
        assert len(found.x) in (3, 3 + N_EVIL)
        assert np.isfinite(found.x).all()
        self.exchange = None

    # ---- the others

    @rule(
        name=NAMES,
        users=USERS,
        fields=st.fixed_dictionaries(
            {},
            optional={
                "protocol": st.integers(0, 2),
                "last_seq": NUMBERS,
                "run_id": st.sampled_from(["", "run-1", "run-2"]),
                "schema": st.lists(st.builds(session_pb2.Feature, name=WORDS, kind=st.sampled_from(["number", "x", ""])), max_size=2),
                "findings": st.lists(st.builds(session_pb2.Finding, rule=st.sampled_from(["T3", "?", ""]), place=WORDS), max_size=2),
                "model": st.sampled_from(["", "m", "[1]"]),
                "numerics": st.sampled_from(["", "n", "n" * 5000]),
                "aggregator": st.booleans(),
            },
        ),
    )
    def evil_hello(self, name: str, users: list[str], fields: dict[str, Any]) -> None:
        listed = [session_pb2.User(name=user) for user in users]
        hello = session_pb2.Hello(**{"protocol": PROTOCOL_VERSION, "host": name, "users": listed, "instance": "?", **fields})
        link = FakeLink()
        with contextlib.suppress(Refusal):
            self.hub.hello(hello, link)
            assert (name, set(users)) == ("z", set(EVIL)), "nobody else is let in"
            self.world.links["z"] = link
        self.turn()

    @rule(last_seq=st.sampled_from([0, 1, 2, 3]), instance=st.sampled_from(["z", "z", "y"]), n_bytes=NUMBERS)
    def z_comes_back(self, last_seq: int, instance: str, n_bytes: int) -> None:
        held = session_pb2.Held(seq=self.hub.seq, attempt=1, bytes=n_bytes % 2**64)
        with contextlib.suppress(Refusal):
            self.world.join("z", EVIL, instance=instance, last_seq=min(last_seq, self.hub.seq), run_id="run-1", held=held)
        self.turn()

    @rule(
        back=st.sampled_from([0] * 10 + [1, 5, -1]),
        what=st.integers(0, len(nonsense(0)) - 1),
        attempt=st.sampled_from([1] * 10 + [0, 2, 2**32 - 1]),
        resent=st.sampled_from([0, 1, 2**32 - 1]),
        durable=st.sampled_from([0] * 10 + [1, 2**63]),
    )
    def evil_reply(self, back: int, what: int, attempt: int, resent: int, durable: int) -> None:
        seq = max(self.hub.seq - back, 0)
        frame = session_pb2.Reply(seq=seq, attempt=attempt, resent=resent, durable_seq=durable)
        self.say(*encode(frame, nonsense(seq)[what], DOUBLE).frames())

    @rule(n=st.sampled_from([0, 8, 16, 32, 40]))
    def evil_piece(self, n: int) -> None:
        """The beginning of a reply in chunks."""
        x = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, shape=[2, 2], chunked_bytes=32)
        f = tensor_pb2.Tensor(name="f", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, shape=[2], data=bytes(16))
        reply = session_pb2.Reply(seq=self.hub.seq, attempt=1, parts=[tensor_pb2.Part(kind="hubtest.Answer", tensors=[x, f])])
        self.say(session_pb2.JoinRequest(reply=reply).SerializeToString(), *([chunk(n)] if n else []))

    @rule(back=st.sampled_from([0, 0, 1]), held=st.sampled_from([0, 8, 16, 31, 2**63]), again=NUMBERS, n=st.sampled_from([0, 8, 16]))
    def evil_rest(self, back: int, held: int, again: int, n: int) -> None:
        """A reply that goes on, perhaps behind what is held."""
        rest = session_pb2.Continued(held=held, again=again % 2**64)
        reply = session_pb2.Reply(seq=max(self.hub.seq - back, 0), attempt=1, resent=1, continued=rest)
        self.say(session_pb2.JoinRequest(reply=reply).SerializeToString(), *([chunk(n)] if n else []))

    @precondition(lambda self: self.exchange is None)
    @rule(what=st.integers(0, len(nonsense(0)) - 1))
    def evil_answer(self, what: int) -> None:
        """What it says while it is waited for: it has caught up before."""
        self.say(*encode(session_pb2.Reply(seq=self.hub.seq, attempt=1), nonsense(self.hub.seq)[0], DOUBLE).frames())
        self.ask()
        self.evil_reply(0, what, 1, 0, 0)

    @rule(seed=st.integers(0, 2**64 - 1), what=st.integers(0, len(nonsense(0)) - 1))
    def evil_frames(self, seed: int, what: int) -> None:
        for number in range(_BATCH):
            whole = encode(session_pb2.Reply(seq=self.hub.seq, attempt=1), nonsense(self.hub.seq)[what], DOUBLE)
            self.say(*mutilated(Base("", session_pb2.JoinRequest, tuple(whole.frames())), drawn(seed, number)))

    def say(self, *frames: bytes) -> None:
        """What `serve` does with the frames of the stream of `z`."""
        assembler = Assembler(session_pb2.JoinRequest, functools.partial(self.hub.announced, "z"), self.hub.held("z"))
        link = self.world.links["z"]
        self.hub.heard("z")
        try:
            for frame in frames:
                item = assembler.feed(frame)
                if isinstance(item, Received):
                    self.hub.received("z", item)
                elif isinstance(item, session_pb2.Book):
                    self.hub.book_of("z", item)
                elif item is not None and not isinstance(item, session_pb2.Failure):  # a member may end a run by saying that it must
                    self.hub.tally("z", "up", len(frame))
        except ProtocolError as error:
            self.hub.broke("z", link, str(error))
            link.close("INVALID_ARGUMENT", str(error))
            self.hub.lost("z", link, str(error))
        self.turn()
        self.check_exchange()

    @rule(fields=st.fixed_dictionaries({}, optional={"n_rows": NUMBERS, "rows": st.binary(max_size=20), "link": NAMES, "events": NAMES}))
    def evil_book(self, fields: dict[str, Any]) -> None:
        self.hub.book_of("z", session_pb2.Book(**fields))
        self.turn()

    @rule(name=NAMES, reason=st.sampled_from(["", "no", "\n" * 5000]), n=st.integers(1, 100))
    def stranger_fails(self, name: str, reason: str, n: int) -> None:
        for number in range(n):
            self.hub.failed(name, session_pb2.Failure(finding=session_pb2.Finding(rule=reason)), FakeLink())
            self.hub.turned_away(f"{name}{number}", f"it said {reason}")
        self.turn()

    @rule(name=NAMES, number=NUMBERS)
    def stranger_disturbs(self, name: str, number: int) -> None:
        """Frames of streams that were given up a moment ago, and of hosts that nobody knows."""
        self.hub.lost(name, FakeLink(), "gone")
        self.hub.broke(name, FakeLink(), "broken")
        self.hub.tally(f"not {name}", "up", number % 1000)
        self.hub.heard(f"not {name}")
        self.hub.book_of(f"not {name}", session_pb2.Book(n_rows=number))
        self.hub.received(f"not {name}", Received(session_pb2.Reply(seq=number), (), 10))
        with pytest.raises(ProtocolError):
            self.hub.announced(f"not {name}", session_pb2.Reply(seq=number, parts=[{"kind": kind} for kind in KINDS]))  # type: ignore[list-item]
        self.turn()

    @rule()
    def z_is_cut(self) -> None:
        self.world.cut("z")
        self.turn()

    # ---- what holds at any time

    @invariant()
    def the_run_goes_on(self) -> None:
        assert self.hub.state.failure is None
        for name in HONEST:
            assert self.world.links[name].closed is None
            assert self.hub.roster.hosts[name].link is self.world.links[name]

    @invariant()
    def memory_is_bounded(self) -> None:
        hub, notes = self.hub, self.world.notes
        assert len(hub.roster.hosts) == 3
        assert len(hub.journal.refused) <= 100
        assert len(hub.bookings._waiting) <= len(hub.roster.hosts)  # answers of the exchange that is over
        z = hub.roster.hosts["z"]
        assert z.n_replies <= z.n_sent + 100
        assert len(notes.events) < _MOST_EVENTS
        assert all(len(text) <= MAX_REASON_CHARS + 200 for _, text in notes.events[-3:])

    def teardown(self) -> None:
        if self.exchange is not None:
            self.the_exchange_ends()
        self.world.clock.drift = 1.0  # who is gone may come back for a while, to bring its book
        finishing = self.loop.create_task(self.hub.finish("all done", failed=False))
        self.turn()
        for name in HONEST:
            self.hub.book_of(name, session_pb2.Book())
        for name in self.world.links:
            self.world.cut(name)
        self.loop.run_until_complete(finishing)
        self.loop.close()


@pytest.mark.parametrize(("n", "is_fixed"), [(800, True), pytest.param(20_000, False, marks=pytest.mark.slow)])
def test_whatever_is_said_in_whatever_order_the_others_exchanges_end_well(n: int, is_fixed: bool) -> None:
    N_CASES["all"] = 0
    rules = settings(
        max_examples=-(-n // _STEPS),
        stateful_step_count=_STEPS,
        phases=(Phase.generate,) if is_fixed else (Phase.generate, Phase.shrink),
        derandomize=is_fixed,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(Sessions, settings=rules)  # type: ignore[no-untyped-call]
    print(f"{N_CASES['all']} events at the hub")
    assert N_CASES["all"] >= n
