"""Shaped links: exact times on a clock that the test moves, and what an experiment may say about them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from coterie.errors import ConfigError
from coterie.experiment import federation
from coterie.experiment.config import experiment_from, experiment_to_json
from coterie.experiment.links import LinkRule, link_rule
from coterie.experiment.overrides import apply_overrides
from coterie.session import member_session
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded
from coterie_server.session.hub import Hub
from coterie_server.transport import links
from coterie_server.transport.grpc_link import GrpcLink
from coterie_server.transport.host_session import HostSession
from coterie_server.transport.links import READ_AHEAD_S, Inlet, Outlet
from coterie_server.transport.unknown_peers import UnknownPeers
from tests.unit.test_config import CONTENT

RULE = LinkRule(bits_per_s=8000.0, delay_s=3.0)  # 1000 bytes a second
SECOND = b"x" * 995  # a frame whose transmission takes a second, with its gRPC header


class Clock:
    """A clock that goes on when everybody waits for it."""

    def __init__(self) -> None:
        self.now = 0.0
        self._count = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self.now

    async def sleep_until(self, at: float) -> None:
        if at > self.now:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._sleepers, (at, next(self._count), woken))
            await woken

    async def run(self) -> None:
        """Until nobody waits for a time any more."""
        while True:
            for _ in range(20):
                await asyncio.sleep(0)
            if not self._sleepers:
                return
            self.now, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)


class Wire:
    """A stream that notes when what was written to it, and gives what comes at given times."""

    def __init__(self, clock: Clock, *coming: tuple[float, Any]) -> None:
        self._clock, self._coming = clock, iter(coming)
        self.written: list[tuple[float, int]] = []
        self.read_at: list[float] = []

    async def write(self, frame: bytes) -> None:
        self.written.append((self._clock.now, len(frame)))

    async def read(self) -> Any:
        self.read_at.append(self._clock.now)
        at, data = next(self._coming)
        await self._clock.sleep_until(at)
        if isinstance(data, Exception):
            raise data
        return data


def link_on(clock: Clock, wire: Wire, silence_s: float = 1e6) -> GrpcLink:
    return GrpcLink(cast(Any, wire), silence_s, Outlet(RULE, clock))


def task(*sizes: int) -> Encoded:
    """A message of a head and tensors of so many bytes."""
    return Encoded(b"h" * sizes[0], tuple(memoryview(b"t" * size) for size in sizes[1:]), (), is_task=True)


def run(test: Callable[[Clock], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(20):
            await test(Clock())

    asyncio.run(whole())


async def written(clock: Clock, link: GrpcLink) -> None:
    """Runs the writer until the clock stands still."""
    writing = asyncio.create_task(link.write_all())
    await clock.run()
    writing.cancel()
    await asyncio.gather(writing, return_exceptions=True)


def test_frames_follow_each_other_at_the_rate_and_arrive_a_delay_later() -> None:
    async def test(clock: Clock) -> None:
        wire = Wire(clock)
        link = link_on(clock, wire)

        async def later() -> None:
            await clock.sleep_until(1.5)  # in the middle of the second transmission, before the first frame has arrived
            link.send(task(1995))
            await clock.sleep_until(9.0)  # when the link has been idle since 4 s
            link.send(task(995))

        link.send(task(995))
        link.send(task(995))
        sending = asyncio.create_task(later())
        await written(clock, link)
        await sending
        assert wire.written == [(4.0, 995), (5.0, 995), (7.0, 1995), (13.0, 995)]

    run(test)


def test_chunks_and_heartbeats_go_in_their_turn() -> None:
    async def test(clock: Clock) -> None:
        wire = Wire(clock)
        link = link_on(clock, wire)
        link.send(task(995, 1000))
        link.send_frame(session_pb2.JoinResponse(heartbeat=session_pb2.Heartbeat(seq=1)))
        link.send(task(995))
        await written(clock, link)
        (head, chunk, beat, last) = wire.written
        assert head == (4.0, 995)
        assert chunk[0] == pytest.approx(4.0 + (chunk[1] + 5) / 1000)
        assert beat[0] == pytest.approx(chunk[0] + (beat[1] + 5) / 1000)
        assert last[0] == pytest.approx(beat[0] + 1.0)

    run(test)


def test_the_run_does_not_wait_for_the_link_in_its_own_turn() -> None:
    async def test(clock: Clock) -> None:
        link = link_on(clock, Wire(clock))
        link.send(task(995))
        await asyncio.wait_for(link.flush(), 1.0)

    run(test)


def test_a_frame_that_is_held_back_is_not_one_that_the_host_does_not_take() -> None:
    async def test(clock: Clock) -> None:
        link = link_on(clock, Wire(clock), silence_s=1e-9)
        link.send(task(995))
        writing = asyncio.create_task(link.write_all())
        for _ in range(20):
            await asyncio.sleep(0)
            link.check()
        assert not link.closed.done()
        await clock.run()
        writing.cancel()

    run(test)


async def seen(clock: Clock, wire: Wire) -> list[tuple[float, Any]]:
    inlet = Inlet(wire.read, RULE, clock)
    found = []

    async def read() -> None:
        while True:
            data = await inlet.read()
            found.append((clock.now, data))
            if data is None:
                return

    pumping, reading = asyncio.create_task(inlet.pump()), asyncio.create_task(read())
    await clock.run()
    await asyncio.gather(pumping, reading)
    assert not inlet.is_holding
    return found


def test_what_comes_is_read_at_the_rate_and_seen_a_delay_later() -> None:
    async def test(clock: Clock) -> None:
        wire = Wire(clock, (0, SECOND), (0, SECOND + b"x" * 1000), (0, b"y" * 995), (10, b"z" * 995), (10, None))
        assert [(at, data and data[:1]) for at, data in await seen(clock, wire)] == [
            (4.0, b"x"),
            (pytest.approx(6.0), b"x"),
            (pytest.approx(7.0), b"y"),
            (14.0, b"z"),
            (14.0, None),
        ]
        assert wire.read_at == pytest.approx([0.0, 1 - READ_AHEAD_S, 3 - READ_AHEAD_S, 4 - READ_AHEAD_S, 11 - READ_AHEAD_S])

    run(test)


def test_a_broken_stream_is_seen_after_what_came_before() -> None:
    async def test(clock: Clock) -> None:
        inlet = Inlet(Wire(clock, (0, SECOND), (2, OSError("broken"))).read, RULE, clock)
        pumping = asyncio.create_task(inlet.pump())
        first = asyncio.create_task(inlet.read())
        await clock.run()
        assert await first == SECOND
        then = asyncio.create_task(inlet.read())
        await clock.run()
        with pytest.raises(OSError, match="broken"):
            await then
        assert clock.now == 5.0
        await pumping

    run(test)


def test_what_is_held_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_HELD_BYTES", 2000)

    async def test(clock: Clock) -> None:
        wire = Wire(clock, *[(0, SECOND)] * 6, (0, None))
        inlet = Inlet(wire.read, LinkRule(1e12, 3.0), clock)
        pumping = asyncio.create_task(inlet.pump())
        await clock.run()
        assert len(wire.read_at) == 3, "the third frame is more than may be held"
        for place in range(6):
            reading = asyncio.create_task(inlet.read())
            await clock.run()
            assert await reading == SECOND, place
        await pumping

    run(test)


def test_a_session_that_is_closed_leaves_no_task() -> None:
    class Rules:
        rules = experiment_from(CONTENT).federation

    async def test(clock: Clock) -> None:
        wire = Wire(clock, (0, SECOND), (1e9, None))
        session = HostSession(cast(Hub, Rules()), cast(Any, wire), LinkRule(1e6, 60.0), UnknownPeers(10), wants_identity=False)
        before = asyncio.all_tasks()
        running = asyncio.create_task(session.run())
        session.link.send(task(995))
        await asyncio.sleep(0.02)
        assert len(wire.read_at) == 2
        session.link.close("OK", "it is over")
        await asyncio.wait_for(running, 1.0)
        assert asyncio.all_tasks() == before
        assert not wire.written

    run(test)


def test_a_host_is_heard_while_its_frame_is_held_back() -> None:
    class Heard:
        rules = experiment_from(CONTENT).federation
        names: tuple[str, ...] = ()

        def heard(self, name: str) -> None:
            self.names += (name,)

    async def test(clock: Clock) -> None:
        hub, wire = Heard(), Wire(clock, (0, SECOND), (1e9, None))
        session = HostSession(cast(Hub, hub), cast(Any, wire), LinkRule(1e6, 60.0), UnknownPeers(10), wants_identity=False)
        assert session._inlet is not None
        pumping = asyncio.create_task(session._inlet.pump())
        await asyncio.sleep(0.001)
        session.note_held()
        assert not hub.names, "an unknown peer is not heard"
        session._name = "a"
        session.note_held()
        assert hub.names == ("a",)
        session.link.close("UNAVAILABLE", "it is over")
        session.note_held()
        assert hub.names == ("a",)
        pumping.cancel()

    run(test)


# ---- what an experiment says


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("20Mbit/40ms", LinkRule(20e6, 0.04)),
        ("1Gbit/500us", LinkRule(1e9, 0.0005)),
        ("1.5kbit/0s", LinkRule(1500.0, 0.0)),
        ("2000bit/2s", LinkRule(2000.0, 2.0)),
    ],
)
def test_a_link_is_a_rate_and_a_delay(text: str, rule: LinkRule) -> None:
    assert link_rule(text) == rule
    assert link_rule(rule.text) == rule


@pytest.mark.parametrize(
    "text", ["20Mbit", "20/40", "20MB/40ms", "20Mbit/40", "-1Mbit/1ms", "nanMbit/1ms", "1e3Mbit/1ms", "٣Mbit/1ms", "1" * 999]
)
def test_what_is_no_link_is_refused_with_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [f"federation.links.within='{text}'"]), "here")
    start, _, end = str(error.value).partition(", want ")
    assert start.startswith("here: federation.links.within: is '")
    assert end == "RATE/DELAY such as 20Mbit/40ms, in bit, kbit, Mbit or Gbit a second and us, ms or s each way"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("federation.links.between=1bit/1s", "between: is '1bit/1s', want a rate of at least 1kbit and at most 1000Gbit"),
        ("federation.links.between=2000Gbit/1s", "between: is '2000Gbit/1s', want a rate of at least 1kbit and at most 1000Gbit"),
        ("federation.links.between=1Gbit/61s", "between: is '1Gbit/61s', want a delay of at most 60s"),
        ("federation.links.between=3", "between: is 3, want text"),
        ("federation.links.up=1Gbit/1s", "up: unknown key, want one of direct, between, within, peers"),
    ],
)
def test_a_link_that_cannot_be_is_refused(override: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiment_from(apply_overrides(CONTENT, [override]), "here")
    assert str(error.value) == f"here: federation.links.{sentence}"


def test_links_are_part_of_the_frozen_experiment() -> None:
    links = {"between": "20Mbit/40ms", "within": "1Gbit/1ms"}
    found = experiment_from({**CONTENT, "federation": {"links": links}})
    assert found == experiment_from(apply_overrides(CONTENT, [f"federation.links.{scope}={text}" for scope, text in links.items()]))
    assert experiment_from(json.loads(experiment_to_json(found))) == found
    assert found != experiment_from(CONTENT)


@pytest.mark.parametrize(
    ("rules", "needed", "limit"),
    [({}, "492", "10"), ({"silence_s": 300.0}, "492", "10"), ({"silence_s": 200.0, "heartbeat_s": 50.0}, "492", "100")],
)
def test_a_link_on_which_one_end_would_give_the_other_up_is_refused(rules: dict[str, float], needed: str, limit: str) -> None:
    content = {**CONTENT, "federation": {"links": {"direct": "8kbit/20ms"}, **rules}}
    with pytest.raises(ConfigError, match=f"take {needed} s, want at most {limit} s: half of the smaller of silence_s and 10 heartbeat_s"):
        experiment_from(content)
    experiment_from({**content, "federation": {**content["federation"], "silence_s": 1000.0, "heartbeat_s": 100.0}})  # type: ignore[dict-item]
    assert federation._SILENT_HEARTBEATS == member_session.SILENT_HEARTBEATS
