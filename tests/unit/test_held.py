"""What a parent holds of a reply that was cut: for how long, for whom, and what it asks for then."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import numpy as np
import pytest

from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received, continued, encode
from coterie.wire.fields import CHUNK_BYTES
from tests.unit.test_hub import DOUBLE, All, Answer, World, asked, run, two_hosts

D = 187_500
USERS = ["u1", "u3"]


def answer(seq: int = 1) -> Encoded:
    """Of host a, 3 MB."""
    x = np.random.default_rng(0).standard_normal((2, D))
    return encode(session_pb2.Reply(seq=seq, attempt=1), [Answer(x, np.zeros(2))], DOUBLE)


def feed(w: World, frames: Iterable[bytes], host: str = "a") -> None:
    """What `serve` does with the frames of one stream."""
    assembler = Assembler(session_pb2.JoinRequest, lambda frame: w.hub.announced(host, frame), w.hub.held(host))
    for frame in frames:
        if isinstance(item := assembler.feed(frame), Received):
            w.hub.received(host, item)


async def cut_after(n_chunks: int) -> tuple[World, asyncio.Task[object]]:
    """The exchange under way, and host a is gone in the middle of its reply."""
    w = await two_hosts(absence_timeout_s=30, on_loss="skip", min_hosts=1)
    w.hub.participation.needs_everyone = ""
    exchange = await asked(w, All(np.ones(2)))
    feed(w, itertools.islice(answer().frames(), 1 + n_chunks))
    w.cut("a")
    return w, exchange


def test_the_same_process_is_asked_for_the_rest_and_both_sendings_are_booked() -> None:
    async def test() -> None:
        w, exchange = await cut_after(3)
        w.clock.now += 5.0
        task = w.join("a", USERS, last_seq=1).tasks[-1]
        assert task.reply_held == 3 * CHUNK_BYTES
        assert w.hub.roster.hosts["a"].absent_s == 0.0, "something got through"
        sent = answer()
        list(itertools.islice(sent.frames(), 5))  # the fourth chunk was cut
        rest = continued(session_pb2.Reply.FromString(reply_of(sent)), sent, task.reply_held)
        feed(w, rest.frames())
        w.answer("b", 1, Answer(np.zeros((2, D)), np.zeros(2)))
        await exchange
        w.hub.settle()
        up = [(row.resent, row.scalars, row.frames, useful) for link, way, row, useful in w.notes.booked if (link, way) == ("a", "up")]
        assert up == [(0, 2 * D + 2, 7, True), (0, 0, 1, True), (0, CHUNK_BYTES // 8, 1, False), (0, 0, 1, False)]
        assert w.hub.held("a").kept is None

    run(test())


def reply_of(sent: Encoded) -> bytes:
    return session_pb2.JoinRequest.FromString(sent.head).reply.SerializeToString()


@pytest.mark.parametrize("how", ["another process", "a breach", "another task"])
def test_nothing_is_held_for_others(how: str) -> None:
    async def test() -> None:
        w, exchange = await cut_after(3)
        if how == "a breach":
            w.hub.broke("a", w.join("a", USERS, last_seq=1), "it sent nonsense")
            assert w.hub.roster.hosts["a"].is_struck
            assert w.join("a", USERS, last_seq=1).tasks[-1].reply_held == 0
        elif how == "another process":
            assert w.join("a", USERS, last_seq=1, instance="2").tasks[-1].reply_held == 0
            assert w.hub.held("a").kept is None
        else:
            w.join("a", USERS, last_seq=1)
            assert w.hub.held("a").bytes_of(2, 1) == w.hub.held("a").bytes_of(1, 2) == 0
        exchange.cancel()

    run(test())


def test_a_host_that_comes_and_goes_without_progress_is_absent_for_the_sum_of_its_absences() -> None:
    async def test() -> None:
        w, exchange = await cut_after(3)
        for _ in range(4):
            w.clock.now += 5.0
            w.join("a", USERS, last_seq=1)
            w.cut("a")
        assert w.hub.roster.hosts["a"].absent_s == 15.0, "the first time three chunks had come, and never more"
        exchange.cancel()

    run(test())


def test_a_task_goes_on_behind_what_the_host_says_that_it_holds_and_whole_where_that_cannot_be() -> None:
    async def test() -> None:
        w = await two_hosts()
        exchange = await asked(w, All(np.ones(D)))
        whole = w.links["a"].tasks[-1]
        total = D * 8
        for held, goes_on in ((CHUNK_BYTES, True), (total, True), (total + CHUNK_BYTES, False), (7, False), (0, False)):
            w.cut("a")
            task = w.join("a", USERS, held=session_pb2.Held(seq=1, attempt=1, bytes=held)).tasks[-1]
            assert task.HasField("continued") == goes_on
            assert list(task.parts) == ([] if goes_on else list(whole.parts))
        for other in (session_pb2.Held(seq=2, attempt=1, bytes=total), session_pb2.Held(seq=1, attempt=2, bytes=total)):
            w.cut("a")
            assert not w.join("a", USERS, held=other).tasks[-1].HasField("continued")
        exchange.cancel()

    run(test())
