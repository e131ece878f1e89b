"""on_loss: skip, seen from the hub. A host that breaks the protocol or cannot go on is struck out, and the exchange goes on at once."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError, RunError
from coterie.v1 import session_pb2
from coterie_deploy.engines.loopback import with_words
from coterie_server.interface.half import Replies
from coterie_server.session.refusal import Refusal
from tests.unit.test_hub import All, Answer, World, asked, rows, run, world

USERS = {"a": ["u1"], "b": ["u2", "u3"], "c": ["u4"]}


async def three_hosts(**rules: Any) -> World:
    w = world(**{"hosts": 3, "on_loss": "skip", **rules})
    for name, users in USERS.items():
        w.join(name, users)
    await w.hub.gather()
    w.hub.participation.needs_everyone = ""
    w.hub.begin_stage(1, '{"stage": "s", "options": {}}')
    return w


def nan(n: int) -> Answer:
    return Answer(np.full((n, 2), np.nan), np.zeros(n))


def fail(w: World, name: str, *, config: bool = False) -> None:
    w.hub.failed(name, session_pb2.Failure(config=config), w.links[name])


def breach(w: World, how: str) -> None:
    """Host b breaks in the exchange under way."""
    if how == "NaN":
        w.answer("b", w.hub.seq, nan(2))
    elif how == "shape":
        w.answer("b", w.hub.seq, rows(3))
    elif how == "fence":
        w.answer("b", w.hub.seq + 1, rows(2))
    elif how == "malformed":
        w.hub.broke("b", w.links["b"], "a frame of 7 bytes is no JoinRequest")
    else:
        fail(w, "b")


BREACHES = {
    "NaN": "host 'b' returned nan for user 'u2' in hubtest.Answer.x",
    "shape": "host 'b' broke the protocol: .*axis 'rows' is 3, wanted 2",
    "fence": "host 'b' broke the protocol: a reply to task 2",
    "malformed": "host 'b' broke the protocol: a frame of 7 bytes is no JoinRequest",
    "failure": "host 'b': it cannot go on",
}


@pytest.mark.parametrize("how", BREACHES)
def test_the_exchange_goes_on_at_once_and_the_event_names_the_host_and_the_breach(how: str) -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(1))
        breach(w, how)
        assert not exchange.done()
        w.answer("c", 1, rows(1, 3.0))
        replies = await exchange
        assert replies.answered is not None
        np.testing.assert_array_equal(replies[Answer].users, [0, 3])
        assert w.notes.decisions == [(1, "skip", ["b"])]
        (said,) = [text for kind, text in w.notes.events if kind == "skip"]
        assert said.startswith("going on without b from exchange 1 on: host 'b'")
        assert re.search(BREACHES[how], said)
        assert w.links["b"].closed is not None or how == "malformed"
        assert w.hub.roster.hosts["b"].link is None

    run(test())


@pytest.mark.parametrize("how", BREACHES)
def test_nothing_is_asked_of_it_until_it_is_back_and_has_answered(how: str) -> None:
    async def test() -> None:
        w = await three_hosts()
        for seq in (1, 2):
            exchange = await asked(w, All(np.ones(2)))
            if seq == 1:
                breach(w, how)
            w.answer("a", seq, rows(1))
            w.answer("c", seq, rows(1))
            await exchange
        assert w.notes.decisions == [(1, "skip", ["b"]), (2, "pass", ["b"])]
        link = w.join("b", USERS["b"])
        assert [task.seq for task in link.tasks] == [1]
        w.answer("b", 1, rows(2))
        exchange = await asked(w, All(np.ones(2)))
        assert [task.seq for task in link.tasks] == [1, 3]
        for name, users in USERS.items():
            w.answer(name, 3, rows(len(users)))
        assert (await exchange).answered is None
        assert "back" in w.notes.kinds()

    run(test())


def test_a_host_that_breaks_after_its_answer_has_answered_and_is_passed_over_from_the_next_exchange_on() -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, rows(2))
        fail(w, "b")
        w.answer("a", 1, rows(1))
        w.answer("c", 1, rows(1))
        assert (await exchange).answered is None
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 2, rows(1))
        w.answer("c", 2, rows(1))
        replies = await exchange
        np.testing.assert_array_equal(replies.awaited(np.arange(4)), [0, 3])
        assert w.notes.decisions == [(2, "pass", ["b"])]
        (said,) = [text for kind, text in w.notes.events if kind == "skip"]
        assert said.startswith("going on without b from exchange 2 on: host 'b': it cannot go on")
        w.join("b", USERS["b"], last_seq=1)
        exchange = await asked(w, All(np.ones(2)))
        for name, users in USERS.items():
            w.answer(name, 3, rows(len(users)))
        assert (await exchange).answered is None

    run(test())


def test_the_terminal_of_the_run_hears_the_hosts_own_words_and_why_it_could_not_go_on_without_it() -> None:
    error = RunError("host 'b': a file cannot be written (rule R5); on_loss is skip, but 2 of the at least 3 hosts wanted are left")
    heard = with_words(error, "host 'b': cannot write /data/state: No space left on device")
    assert str(heard) == (
        "host 'b': cannot write /data/state: No space left on device; on_loss is skip, but 2 of the at least 3 hosts wanted are left"
    )
    assert str(with_words(error, str(error))) == heard.public == str(error)


@pytest.mark.parametrize(("config", "family"), [(True, ConfigError), (False, RunError)])
def test_below_min_hosts_the_run_ends_and_says_why_it_could_not_go_on(config: bool, family: type[Exception]) -> None:
    async def test() -> None:
        w = await three_hosts(min_hosts=3)
        exchange = await asked(w, All(np.ones(2)))
        fail(w, "b", config=config)
        why = "host 'b': it cannot go on.*; on_loss is skip, but 2 of the at least 3 hosts wanted are left"
        with pytest.raises(family, match=why):
            await exchange
        assert w.notes.decisions == []

    run(test())


def test_the_last_host_is_never_left_out() -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = await asked(w, All(np.ones(2)))
        for name in USERS:
            fail(w, name)
        with pytest.raises(RunError, match=r"host 'c': it cannot go on.*; on_loss is skip, but 0 of the at least 1 hosts wanted are left"):
            await exchange

    run(test())


def test_a_stage_that_needs_everyone_ends_with_its_reason() -> None:
    async def test() -> None:
        w = await three_hosts()
        w.hub.participation.needs_everyone = "stage 'global' needs every user: without some it is another problem"
        exchange = await asked(w, All(np.ones(2)))
        w.answer("b", 1, nan(2))
        with pytest.raises(RunError, match=r"host 'b' returned nan .*; on_loss is skip, but stage 'global' needs every user"):
            await exchange

    run(test())


@pytest.mark.parametrize("on_loss", ["stop", "wait"])
@pytest.mark.parametrize("how", ["NaN", "shape", "fence", "failure"])
def test_with_another_rule_the_run_ends_as_ever(how: str, on_loss: str) -> None:
    async def test() -> None:
        w = await three_hosts(on_loss=on_loss)
        exchange = await asked(w, All(np.ones(2)))
        breach(w, how)
        with pytest.raises(RunError, match=BREACHES[how]) as error:
            await exchange
        assert "on_loss" not in str(error.value)

    run(test())


def test_who_breaks_the_protocol_for_the_third_time_stays_out() -> None:
    async def test() -> None:
        w = await three_hosts()
        for seq in (1, 2, 3):
            exchange = await asked(w, All(np.ones(2)))
            w.answer("b", seq, nan(2))
            w.answer("b", seq, rows(3))  # what is still under way of a stream that was ended counts for nothing
            w.answer("a", seq, rows(1))
            w.answer("c", seq, rows(1))
            await exchange
            if seq < 3:
                w.join("b", USERS["b"])
                w.answer("b", seq, rows(2))
        with pytest.raises(Refusal, match="host 'b' has broken the protocol 3 times, and the run goes on without it") as refusal:
            w.join("b", USERS["b"])
        assert refusal.value.code == "FAILED_PRECONDITION"
        restored = world(hosts=3, on_loss="skip")
        restored.hub.restore(w.hub.memory())
        with pytest.raises(Refusal, match="3 times"):
            restored.join("b", USERS["b"])

    run(test())


def test_who_cannot_go_on_may_come_back_as_often_as_its_owner_mends_it() -> None:
    async def test() -> None:
        w = await three_hosts()
        for seq in range(1, 8):
            exchange = await asked(w, All(np.ones(2)))
            fail(w, "b")
            w.answer("a", seq, rows(1))
            w.answer("c", seq, rows(1))
            await exchange
            w.join("b", USERS["b"])
            w.answer("b", seq, rows(2))

    run(test())


def test_a_host_that_is_here_and_never_answers_is_left_out_too() -> None:
    async def test() -> None:
        w = await three_hosts(task_timeout_s=600)
        exchange = await asked(w, All(np.ones(2)))
        w.answer("a", 1, rows(1))
        w.answer("c", 1, rows(1))
        w.clock.now += 601
        for name in USERS:
            w.hub.heard(name)
        w.hub.tick()
        await exchange
        assert w.notes.decisions == [(1, "skip", ["b"])]
        assert "host 'b' has not answered task 1 for 600 s" in w.hub.journal.notice

    run(test())


def test_repeated_decisions_do_without_the_host_and_its_breach_changes_nothing() -> None:
    async def test() -> None:
        w = await three_hosts()
        w.hub.participation.repeats_all = True
        w.hub.participation.skips, w.hub.participation.passes = {1: frozenset({"b"})}, {2: frozenset({"b"})}
        for seq in (1, 2):
            exchange = await asked(w, All(np.ones(2)))
            if seq == 1:
                fail(w, "b")
            w.answer("a", seq, rows(1))
            w.answer("c", seq, rows(1))
            await exchange
        assert w.notes.decisions == []

    run(test())


def test_an_exchange_that_is_repeated_with_the_hosts_answer_cannot_do_without() -> None:
    async def test() -> None:
        w = await three_hosts()
        w.hub.participation.repeats_all = True
        exchange = await asked(w, All(np.ones(2)))
        fail(w, "b")
        with pytest.raises(RunError, match="on_loss is skip, but exchange 1 is repeated from an attempt or a run in which it answered"):
            await exchange

    run(test())


def test_a_bad_book_or_a_failure_at_the_end_is_the_hosts_own() -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = await asked(w, All(np.ones(2)))
        for name, users in USERS.items():
            w.answer(name, 1, rows(len(users)))
        await exchange
        w.clock.drift = 0.1
        finishing = asyncio.create_task(w.hub.finish("done", failed=False))
        await asyncio.sleep(0)
        w.hub.book_of("b", session_pb2.Book(n_rows=3, rows=b"no rows"))
        fail(w, "c")
        w.hub.book_of("a", session_pb2.Book())
        w.cut("a")
        await finishing
        assert w.links["b"].closed is not None
        lost = [text for kind, text in w.notes.events if kind == "lost" and "book" in text]
        assert lost == [f"host {name!r} has not brought its whole book" for name in ("b", "c")]

    run(test())


def test_a_launcher_says_that_a_process_has_ended_and_the_run_goes_on() -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = await asked(w, All(np.ones(2)))
        w.hub.ended("b", RunError("host 'b' was killed by SIGKILL 4 times"))
        fail(w, "c")
        w.hub.ended("c", RunError("host 'c' has ended with exit code 3"))  # it has said why itself
        w.answer("a", 1, rows(1))
        np.testing.assert_array_equal((await exchange)[Answer].users, [0])
        w.hub.ended("a", RunError("host 'a' has ended"))
        with pytest.raises(RunError, match="host 'a' has ended"):
            await w.hub.exchange(All(np.ones(2)))

    run(test())


MEMBERS = ("u1", "u2", "u3", "u4")
DEEDS = ("answer", "NaN", "shape", "fence", "failure", "cut", "join")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(DEEDS), st.sampled_from("abc")), max_size=30))
def test_whatever_hosts_do_answers_are_whole_and_decisions_say_who_is_missing(story: list[tuple[str, str]]) -> None:
    """Who is merged has given a right answer to this exchange, and everybody else stands in a decision of it."""

    async def test() -> None:
        w = await three_hosts()
        deeds = list(reversed(story))
        for _ in range(4):
            exchange = await asked(w, All(np.ones(2)))
            right: set[str] = set()
            while not exchange.done() and (deed := deeds.pop() if deeds else last_deed(w)) is not None:
                right |= done(w, *deed)
                await asyncio.sleep(0)
            if not exchange.done() or exchange.exception() is not None:
                exchange.cancel()
                return  # somebody stays out for good, or nobody is left: other tests say what comes of that
            check_merged(w, exchange.result(), right)

    run(test())


def last_deed(w: World) -> tuple[str, str] | None:
    """Whoever is still waited for comes and answers; None when it may not."""
    if w.hub.state.pending is None or not w.hub.state.pending.waiting:
        return "join", "a"  # the exchange is about to end
    name = min(w.hub.state.pending.waiting)
    done(w, "join", name)
    return ("answer", name) if w.hub.roster.hosts[name].link is not None else None


def done(w: World, how: str, name: str) -> set[str]:
    """What a host does; its name, if that is a right answer to the exchange under way."""
    host, n = w.hub.roster.hosts[name], len(USERS[name])
    if how == "join" and host.link is None:
        with contextlib.suppress(Refusal):
            w.join(name, USERS[name], last_seq=host.acked)
    if how == "join" or host.link is None:
        return set()
    if how == "cut":
        w.cut(name)
    elif how == "failure":
        fail(w, name)
    elif how == "answer":
        w.answer(name, host.asked, rows(n, float(host.asked)))
        return {name} if host.asked == w.hub.seq else set()
    else:
        bad = nan(n) if how == "NaN" else rows(n + (how == "shape"))
        w.answer(name, host.asked + (how == "fence"), bad)
    return set()


def check_merged(w: World, replies: Replies, right: set[str]) -> None:
    left_out = {host for seq, _, hosts in w.notes.decisions if seq == w.hub.seq for host in hosts}
    merged = [name for name in USERS if name not in left_out]
    assert right.issuperset(merged)
    answer = replies.get(Answer)
    assert (answer is None) == (not merged)
    if answer is not None:
        members = [place for place, user in enumerate(MEMBERS) if any(user in USERS[name] for name in merged)]
        np.testing.assert_array_equal(replies.awaited(np.arange(4)), members)
        np.testing.assert_array_equal(answer.x, np.concatenate([rows(len(USERS[name]), float(w.hub.seq)).x for name in merged]))
