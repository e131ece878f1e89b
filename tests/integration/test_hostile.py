"""Whoever misbehaves is told why, leaves an event, and changes neither the bits of the others nor, for long, the memory of the parent.

In every test a run of honest hosts goes on over gRPC on loopback while somebody attacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coterie.arrays import Array
from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.experiment.config import experiment_to_json
from coterie.findings import Finding
from coterie.session.dial import serve_member
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.codec import MAX_FRAME_BYTES, PROTOCOL_VERSION, encode
from coterie.wire.fields import CHUNK_BYTES
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.session.hub import Hub
from coterie_server.session.refusal import MAX_REASON_CHARS
from coterie_server.transport import serve, unknown_peers
from coterie_server.transport.grpc_link import GrpcLink
from coterie_server.transport.serve import SERVICE
from tests import raw_http2
from tests.integration.test_session import Block, Order, expected, experiment, hosts, maker, new_hub, notes, ready, run, served
from tests.tries import soon_enough

DOUBLE = Precision.of("float64")
HONEST = {"a": ["u0", "u1"], "b": ["u2"]}
N_HONEST = 3
MANY = 1000
MOST_MB = 150.0  # for the attacker and its victim together, in one process
Request, Hello, User = session_pb2.JoinRequest, session_pb2.Hello, session_pb2.User


# ---- the run that goes on


@dataclass
class Run:
    """An honest run under way, and its parent."""

    hub: Hub
    address: str
    n_rounds: int = 0

    def reasons(self, kind: str = "refused") -> list[str]:
        return [text for found, text in notes(self.hub).events if found == kind]


def block_of(number: int, n: int) -> Array:
    return np.random.default_rng(number).standard_normal((n, 4))


@contextlib.asynccontextmanager
async def honest_run(*, n_users: int = N_HONEST, with_hosts: Sequence[Any] = (), **rules: Any) -> AsyncIterator[Run]:
    """Rounds go on while the block runs; the honest users' answers must be what they are without the attack, and their hosts end well."""
    federation: dict[str, Any] = {"heartbeat_s": 0.2, "silence_s": 5.0, **rules}
    hub = new_hub(hosts=len(HONEST) + len(with_hosts), **federation)
    hub.participation.may_skip = True
    answers: list[Array] = []
    is_over = asyncio.Event()

    async def go_on(under_way: Run) -> None:
        while not is_over.is_set() or len(answers) < 3:
            replies = await hub.exchange(Block(block_of(len(answers), n_users)))
            answers.append(replies[Block].x[:N_HONEST])
            under_way.n_rounds = len(answers)
            await asyncio.sleep(0.002)

    async with served(hub) as (_, address):
        own = [serve_member(maker(name, users), address, name=name) for name, users in HONEST.items()]
        async with hosts(*own) as running:
            for attend in with_hosts:
                await attend(address)
            await ready(hub)
            under_way = Run(hub, address)
            rounds = asyncio.create_task(go_on(under_way))
            try:
                yield under_way
                is_over.set()
                await rounds
                await hub.finish("all done", failed=False)
                assert await asyncio.gather(*running) == ["all done"] * len(running)
            finally:
                rounds.cancel()
                await asyncio.gather(rounds, return_exceptions=True)
    wanted = expected(block_of(i, n_users)[:N_HONEST] for i in range(len(answers)))
    for answer, right in zip(answers, wanted, strict=True):
        np.testing.assert_array_equal(answer, right)


@contextlib.contextmanager
def memory_within(most_mb: float) -> Iterator[None]:
    """The process must not have grown by more than this at any time; where its peak cannot be reset, by the end."""
    status = Path("/proc/self/status")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    before = _mb(status, "VmRSS")
    yield
    assert max(_mb(status, "VmHWM"), _mb(status, "VmRSS")) - before < most_mb


def _mb(status: Path, key: str) -> float:
    return next(int(line.split()[1]) / 1024 for line in status.read_text().splitlines() if line.startswith(key))


async def until(condition: Callable[[], Any], seconds: float = 10.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


# ---- unknown peers


def hello(host: str = "c", users: Sequence[str] = ("u9",), **changes: Any) -> bytes:
    fields: dict[str, Any] = {"protocol": PROTOCOL_VERSION, "instance": "x", "users": [User(name=user) for user in users], **changes}
    return Request(hello=Hello(host=host, **fields)).SerializeToString()


def wrapped(number: int, contents: bytes) -> bytes:
    """A length-delimited field."""
    header, size = bytearray((number << 3 | 2,)), len(contents)
    while size > 0x7F:
        header.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes((*header, size)) + contents


def large_reply(n_bytes: int, shape: Sequence[int], seq: int = 1) -> bytes:
    """A reply whose tensor is to follow in chunks."""
    tensor = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, shape=shape, chunked_bytes=n_bytes)
    part = tensor_pb2.Part(kind="echo.Block", tensors=[tensor])
    return Request(reply=session_pb2.Reply(seq=seq, attempt=1, parts=[part])).SerializeToString()


def heartbeat() -> bytes:
    return Request(heartbeat=session_pb2.Heartbeat(seq=1)).SerializeToString()


def book(**fields: Any) -> bytes:
    return Request(book=session_pb2.Book(**fields)).SerializeToString()


async def status_of(address: str, frames: Sequence[bytes], *, closes: bool = False) -> tuple[str, str]:
    """What a stream of these frames is told in the end."""
    async with grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),)) as channel:
        call: Any = channel.stream_stream(f"/{SERVICE}/Join")()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await call.write(frame)
            if closes:
                await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        return (await call.code()).name, await call.details() or ""


FEW = MAX_FRAME_BYTES - 64
FLOOD = 4000  # frames: too many also where a loaded machine takes half a minute to send them
STRANGERS: dict[str, tuple[list[bytes], str, str]] = {
    "random bytes": ([np.random.default_rng(1).bytes(5000)], "INVALID_ARGUMENT", "before the hello was complete"),
    "random bytes that begin well": ([b"\x0a" + np.random.default_rng(2).bytes(5000)], "INVALID_ARGUMENT", "is not a JoinRequest"),
    "a large frame of random bytes": ([b"\x0a" + np.random.default_rng(3).bytes(1 << 20)], "INVALID_ARGUMENT", "a frame"),
    "a hello cut short": ([hello()[:-3]], "INVALID_ARGUMENT", "is not a JoinRequest"),
    "a number without an end": ([b"\x0a" + b"\xff" * 20], "INVALID_ARGUMENT", "is not a JoinRequest"),
    "a hello that declares 4 GiB": ([b"\x0a\xff\xff\xff\xff\x0f" + hello()[2:]], "INVALID_ARGUMENT", "is not a JoinRequest"),
    "a large hello that declares 4 GiB": (
        [b"\x0a\xff\xff\xff\xff\x0f" + bytes(20_000)],
        "INVALID_ARGUMENT",
        "a field ends after its message",
    ),
    "a reply before the hello": ([large_reply(800, [10, 10])], "INVALID_ARGUMENT", "wanted a hello"),
    "a book before the hello": ([book(n_rows=1)], "INVALID_ARGUMENT", "wanted a hello"),
    "a tail without a head": ([Request(chunk=session_pb2.Chunk(data=b"abc")).SerializeToString()], "INVALID_ARGUMENT", "wanted a hello"),
    "a reply behind a hello": ([b"\x0a\x00" + large_reply(8 << 30, [1, 1 << 30])], "INVALID_ARGUMENT", "is not a host of this run"),
    "a book behind a hello": ([b"\x0a\x00" + book(n_rows=1)], "INVALID_ARGUMENT", "the first frame is a book, wanted a hello"),
    "millions of empty users": ([wrapped(1, b"\x1a\x00" * (FEW // 2))], "INVALID_ARGUMENT", "more than 100000 parts, users"),
    "millions of empty parts": (
        [hello(more=True) + wrapped(2, b"\x2a\x00" * (FEW // 2 - 50))],
        "INVALID_ARGUMENT",
        "more than 100000 parts, users",
    ),
    "a frame of 9 MiB": ([bytes(9 << 20)], "RESOURCE_EXHAUSTED", "larger than max"),
    "a host name of 5 MiB": ([hello("c" * (5 << 20))], "INVALID_ARGUMENT", "wanted at most 255, all printable"),
    "a user name of 300 characters": ([hello(users=["u" * 300])], "INVALID_ARGUMENT", "of 300 characters, wanted at most 255"),
    "a name that moves the cursor": ([hello("\x1b[2J")], "INVALID_ARGUMENT", "'?[2J' of 4 characters, wanted at most 255, all printable"),
    "a word of 2 MiB": ([hello(numerics="n" * (2 << 20))], "INVALID_ARGUMENT", "the numerics of host 'c' has 2097152 characters"),
    "a model of 5 MiB": ([hello(model="m" * (5 << 20))], "INVALID_ARGUMENT", "the model of host 'c' has 5242880 characters"),
    "no users": ([hello(users=[])], "INVALID_ARGUMENT", "brings 0 users, wanted a name and at least one user"),
    "a user twice": ([hello(users=["u9", "u9"])], "INVALID_ARGUMENT", "more than once or without a name"),
    "another protocol": ([hello(protocol=7)], "FAILED_PRECONDITION", "speaks protocol 7, wanted 1"),
    "another host's user": ([hello(users=["u1"])], "ALREADY_EXISTS", "user 'u1' is claimed by host 'c', but "),
    "another host's name": ([hello("a", HONEST["a"])], "UNAVAILABLE", "host 'a' is still connected from another process"),
    "a user that nobody knows": ([hello()], "INVALID_ARGUMENT", "brings user 'u9', whom the run, already started, does not know"),
    "the state of another run": ([hello(run_id="other", last_seq=1)], "FAILED_PRECONDITION", "holds the state of run other"),
    "a state of the future": ([hello(run_id="run-1", last_seq=2**60)], "FAILED_PRECONDITION", "a state that is not of this run"),
    "an aggregator": ([hello(aggregator=True)], "INVALID_ARGUMENT", "'c' is an aggregator, but this parent waits for client hosts"),
    "two hellos of two hosts": ([hello("c", more=True), hello("d")], "INVALID_ARGUMENT", "in the middle of that of host 'c'"),
    "a flood of heartbeats": ([heartbeat()] * FLOOD, "INVALID_ARGUMENT", "heartbeats came, wanted at most 20 in 0.2 s on average"),
    "a flood of empty hellos": ([hello("c", [], more=True)] * FLOOD, "INVALID_ARGUMENT", "heartbeats came, wanted at most"),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_refused_with_a_reason_and_nobody_notices(name: str) -> None:
    frames, code, sentence = STRANGERS[name]

    async def test() -> None:
        async with honest_run() as under_way:
            with memory_within(MOST_MB):
                found, reason = await status_of(under_way.address, frames)
            # Who goes on writing to a stream that has been ended may get gRPC's own INTERNAL instead.
            assert (found == code and sentence in reason) or (found == "INTERNAL" and len(frames) > 1)
            booked = "a frame of more than 8388608 bytes" if code == "RESOURCE_EXHAUSTED" else sentence
            await until(lambda: [text for text in under_way.reasons() if booked in text])
            assert max(map(len, under_way.reasons())) <= MAX_REASON_CHARS

    run(test())


def test_a_host_that_says_why_it_cannot_join_is_heard_once_and_briefly() -> None:
    finding = session_pb2.Finding(rule="no\nsuch rule " + "x" * (1 << 20), role="SECRET", place="../SECRET")
    failure = Request(failure=session_pb2.Failure(finding=finding)).SerializeToString()

    async def test() -> None:
        async with honest_run() as under_way:
            assert (await status_of(under_way.address, [hello(more=True), *[failure] * 50]))[0] in ("OK", "INTERNAL")  # it went on writing
            assert under_way.reasons() == ["host 'c' cannot join: it cannot go on (rule X1); its own log names it"]

    run(test())


def test_a_hello_that_is_never_complete_has_a_deadline_whatever_comes_in_between() -> None:
    took: list[float] = []

    async def test() -> None:
        async with honest_run(silence_s=0.6) as under_way, grpc.aio.insecure_channel(under_way.address) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Join")()

            async def trickle() -> None:
                for number in range(1000):
                    await call.write(hello("c", [f"v{number}"], more=True))
                    await call.write(heartbeat())
                    await asyncio.sleep(0.05)

            start = time.monotonic()
            with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                await trickle()
            code, reason = await call.code(), await call.details()
            if code is not grpc.StatusCode.INTERNAL:  # as above: it was writing when it was told
                assert (code, reason) == (grpc.StatusCode.DEADLINE_EXCEEDED, "no hello came within 0.6 s")
            took.append(time.monotonic() - start)
            assert "no hello came within 0.6 s" in under_way.reasons()[0]

    def refused(_: int) -> tuple[float, float]:
        run(test())
        return took[-1], 3.0

    soon_enough(refused)


def test_a_frame_that_trickles_has_a_deadline() -> None:
    async def test() -> None:
        async with honest_run(silence_s=0.6) as under_way:
            begun = raw_http2.message(b"\x0a", announced=MAX_FRAME_BYTES)
            reader, writer = await raw_http2.connect(under_way.address, raw_http2.connected(), raw_http2.opened(raw_http2.JOIN), begun)
            while not under_way.reasons():
                writer.write(raw_http2.data(b"x" * 50))
                await asyncio.sleep(0.02)
            assert "no hello came within 0.6 s" in under_way.reasons()[0]
            told = b""
            async with asyncio.timeout(3):
                while b"no hello came within 0.6 s" not in told:
                    told += await reader.read(4000)
            writer.close()

    run(test())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (raw_http2.GET_EXPERIMENT, b""),  # the request never comes
        (
            raw_http2.GET_EXPERIMENT,
            session_pb2.GetExperimentRequest(protocol=PROTOCOL_VERSION).SerializeToString(),
        ),  # nor is the answer taken
        (raw_http2.WATCH, b""),
    ],
)
def test_who_asks_for_one_answer_and_then_stands_still_has_a_deadline(path: str, body: bytes) -> None:
    async def test() -> None:
        async with honest_run(silence_s=0.6) as under_way:
            pieces = [raw_http2.message(body)] if body else []
            _, writer = await raw_http2.connect(under_way.address, raw_http2.connected(0), raw_http2.opened(path), *pieces)
            await until(under_way.reasons, 5)
            assert f"in the middle of {path}" in under_way.reasons()[0]
            writer.close()

    run(test())


def test_an_answer_that_nobody_takes_does_not_keep_a_server_from_stopping(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "STOP_GRACE_S", 0.3)

    async def test() -> None:
        async with honest_run() as under_way:
            pieces = (raw_http2.connected(0), raw_http2.opened(raw_http2.WATCH), raw_http2.message(b""))
            _, writer = await raw_http2.connect(under_way.address, *pieces)
            await asyncio.sleep(0.1)
        assert not under_way.reasons(), "to end with the run is no offence"
        writer.close()

    run(test(), 10.0)


def test_requests_that_are_none_are_refused_and_few_of_many_are_written_down() -> None:
    async def test() -> None:
        async with honest_run() as under_way, grpc.aio.insecure_channel(under_way.address) as channel:
            raw: Any = channel.unary_unary(f"/{SERVICE}/GetExperiment")
            with pytest.raises(grpc.aio.AioRpcError, match="bytes are no request"):
                await raw(b"\xff" * 50)
            request = session_pb2.GetExperimentRequest(protocol=3, host="\x1b[2J" + "y" * 100_000).SerializeToString()
            for _ in range(300):
                with pytest.raises(grpc.aio.AioRpcError, match="speaks protocol 3, wanted 1") as error:
                    await raw(request)
                assert error.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            assert 20 <= len(under_way.reasons()) < 30
            assert "\x1b" not in "".join(under_way.reasons())

    run(test())


def test_a_flood_of_refusals_does_not_fill_the_disk_and_members_are_still_told_of() -> None:
    async def test() -> None:
        async with honest_run() as under_way, grpc.aio.insecure_channel(under_way.address) as channel:
            for number in range(200):
                call: Any = channel.stream_stream(f"/{SERVICE}/Join")()
                await call.write(hello(f"stranger {number}"))
                assert await call.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert 20 <= len(under_way.reasons()) < 30
            assert len(under_way.hub.journal.refused) <= 100
            await status_of(under_way.address, [hello("a", HONEST["a"])])
            assert "host 'a' is still connected" in under_way.reasons()[-1]

    run(test())


# ---- half-open connections


@contextlib.contextmanager
def file_descriptors(n: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < n:
        pytest.skip(f"needs {n} file descriptors, has {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, n), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


HALF_OPEN: dict[str, list[bytes]] = {
    "nothing": [],
    "half a preface": [raw_http2.PREFACE[:10]],
    "no stream": [raw_http2.connected()],
    "no hello": [raw_http2.connected(), raw_http2.opened(raw_http2.JOIN)],
    "half a hello": [raw_http2.connected(), raw_http2.opened(raw_http2.JOIN), raw_http2.message(hello(more=True))],
    "a frame of 8 MiB that has begun": [
        raw_http2.connected(),
        raw_http2.opened(raw_http2.JOIN),
        raw_http2.message(b"\x0a" + bytes(50_000), announced=MAX_FRAME_BYTES),
    ],
    "half a request": [raw_http2.connected(), raw_http2.opened(raw_http2.GET_EXPERIMENT)],
    "a watch": [raw_http2.connected(), raw_http2.opened(raw_http2.WATCH), raw_http2.message(b"")],
}
FAST = ("nothing", "no hello")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in HALF_OPEN])
def test_a_thousand_half_open_connections_are_bounded_and_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = {"grpc.server_handshake_timeout_ms": 500, "grpc.max_connection_idle_ms": 500}
    options = {option for option, _ in serve.OPTIONS}
    assert quick.keys() <= options
    monkeypatch.setattr(serve, "OPTIONS", tuple((option, quick.get(option, value)) for option, value in serve.OPTIONS))
    monkeypatch.setattr(serve, "_SPARE_CONNECTIONS", 100)

    async def test() -> None:
        async with honest_run(silence_s=0.8) as under_way:
            n_before = n_descriptors()
            with memory_within(MOST_MB):
                writers = []
                for _ in range(MANY):
                    with contextlib.suppress(ConnectionError):
                        writers.append((await raw_http2.connect(under_way.address, *HALF_OPEN[name]))[1])
                n_mine = len(writers)
                most = 0
                n_rounds = under_way.n_rounds
                deadline = time.monotonic() + 12
                # A watch may stay, as long as it is not one of too many.
                n_left = 10 if name != "a watch" else 10 + unknown_peers.MOST_UNKNOWN + len(HONEST)
                # The first second is for connections that are not accepted yet.
                n_theirs, begun = MANY, time.monotonic()
                while (n_theirs > n_left or under_way.n_rounds == n_rounds or time.monotonic() < begun + 1) and time.monotonic() < deadline:
                    await asyncio.sleep(0.1)
                    n_theirs = n_descriptors() - n_before - n_open(writers)
                    most = max(most, n_theirs)
            assert n_mine > MANY // 2
            assert most <= 2 * len(HONEST) + 100 + 10
            assert n_theirs <= n_left, "all others are disconnected in the end"
            assert under_way.n_rounds > n_rounds
            assert len(under_way.reasons()) < 40
            if len(HALF_OPEN[name]) > 1:
                assert under_way.reasons()
            assert (await status_of(under_way.address, [hello()]))[0] == "INVALID_ARGUMENT", "a newcomer is heard"
            for writer in writers:
                writer.close()

    with file_descriptors(2 * MANY + 500):
        run(test(), 40.0)


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def n_open(writers: Sequence[asyncio.StreamWriter]) -> int:
    """Of our own ends, those that are not closed."""
    return sum(1 for writer in writers if writer.get_extra_info("socket").fileno() >= 0)


@pytest.mark.parametrize("n", [40, pytest.param(MANY, marks=pytest.mark.slow)])
def test_streams_without_a_hello_make_place_for_a_host(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All on a few connections, as many streams as there may be."""
    monkeypatch.setattr(serve, "_SPARE_STREAMS", n)

    async def test() -> None:
        async with honest_run() as under_way, grpc.aio.insecure_channel(under_way.address) as channel:
            with memory_within(MOST_MB):
                calls = [channel.stream_stream(f"/{SERVICE}/Join")() for _ in range(n)]
                await asyncio.gather(*(call.write(hello(f"h{number}", more=True)) for number, call in enumerate(calls)))
                n_away = n - unknown_peers.MOST_UNKNOWN - len(HONEST) - 1
                await until(lambda: sum(call.done() for call in calls) >= n_away)
                assert {await call.code() for call in calls if call.done()} == {grpc.StatusCode.UNAVAILABLE}
            assert "streams are without a hello, and this one is the oldest" in under_way.reasons()[0]
            assert (await status_of(under_way.address, [hello()]))[0] == "INVALID_ARGUMENT"
            for call in calls:
                call.cancel()

    run(test())


@pytest.mark.slow
def test_unfinished_hellos_take_bounded_memory_and_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    users = [User(name=f"u{number}") for number in range(90_000)]
    turn, n_looks = unknown_peers.UnknownPeers.turn, 0

    def counted(self: unknown_peers.UnknownPeers) -> Any:
        nonlocal n_looks
        n_looks += 1
        return turn(self)

    monkeypatch.setattr(unknown_peers.UnknownPeers, "turn", counted)

    async def test() -> None:
        async with honest_run(silence_s=30.0) as under_way:  # a slow machine takes long to look at as much as is too much
            frames = [Request(hello=Hello(protocol=PROTOCOL_VERSION, host="c", users=users, more=True)).SerializeToString()] * 11
            n_rounds = under_way.n_rounds
            with memory_within(450):  # 20 times 11 x 90,000 users would be 1.2 GB
                found = await asyncio.gather(*(status_of(under_way.address, frames, closes=True) for _ in range(20)))
            assert {code for code, _ in found} <= {"OK", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL"}
            assert any("unfinished hellos take more than" in reason for _, reason in found)
            assert n_looks >= 4
            assert under_way.n_rounds - n_rounds > 3 * n_looks, "the others have most of the time"

    run(test(), 120.0)


# ---- members


class Stream:
    """A member that says what the test wants."""

    def __init__(self, name: str = "z", users: Sequence[str] = ("u8", "u9")) -> None:
        self.name, self.users = name, users
        self.seq = 0
        self.welcomes = 0

    async def join(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=(("grpc.use_local_subchannel_pool", 1),))
        self.call: Any = self._channel.stream_stream(f"/{SERVICE}/Join")()
        await self.call.write(hello(self.name, self.users))
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (data := await self.call.read()) is not grpc.aio.EOF:
                frame = session_pb2.JoinResponse.FromString(data)
                self.welcomes += frame.HasField("welcome")
                self.seq = max(self.seq, frame.task.seq)

    async def asked(self) -> int:
        """The number of the first task that it gets from now on."""
        before = self.seq
        await until(lambda: self.seq > before)
        return self.seq

    async def say(self, *frames: bytes) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            for frame in frames:
                await self.call.write(frame)

    async def end(self) -> tuple[str, str]:
        async with asyncio.timeout(10):
            code, details = (await self.call.code()).name, await self.call.details()
        await self.leave()
        return code, details or ""

    async def leave(self) -> None:
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)
        await self._channel.close()


def reply(seq: int, *messages: Message, **fences: Any) -> list[bytes]:
    return list(encode(session_pb2.Reply(**{"seq": seq, "attempt": 1, **fences}), messages, DOUBLE).frames())


def rest_of_reply(seq: int, held: int, again: int, **fields: Any) -> bytes:
    """The header of a reply that goes on where it was cut."""
    rest = session_pb2.Continued(held=held, again=again)
    return Request(reply=session_pb2.Reply(seq=seq, attempt=1, continued=rest, **fields)).SerializeToString()


def bad(*values: float) -> Block:
    return Block(np.array([values, values]))


OK2 = Block(np.ones((2, 4)))
MEMBERS: dict[str, tuple[Callable[[int], list[bytes]], str]] = {
    "NaN": (lambda seq: reply(seq, bad(1, 2, np.nan, 4)), "returned nan for user 'u8' in echo.Block.x"),
    "infinity": (lambda seq: reply(seq, bad(1, 2, -np.inf, 4)), "returned -inf for user 'u8' in echo.Block.x"),
    "a row too few": (lambda seq: reply(seq, Block(np.ones((1, 4)))), "axis 'rows' is 1, wanted 2"),
    "another's user": (lambda seq: reply(seq, Block(np.ones((1, 4)), users=np.array([0]))), "for member 0, which is not one of its users"),
    "nobody's user": (lambda seq: reply(seq, Block(np.ones((1, 4)), users=np.array([-7]))), "for member -7, which is not one of its users"),
    "a message twice": (lambda seq: reply(seq, OK2, OK2), "sent echo.Block twice in one reply"),
    "a broadcast": (lambda seq: reply(seq, Order(np.ones(4))), "a host's messages must have owners"),
    "an undeclared kind": (
        lambda seq: [Request(reply=session_pb2.Reply(seq=seq, attempt=1, parts=[{"kind": "k" * 50_000}])).SerializeToString()],  # type: ignore[list-item]
        "is not declared",
    ),
    "a task of the future": (lambda seq: reply(seq + 1_000_000, OK2), "a reply to task"),
    "an attempt of the future": (lambda seq: reply(seq, OK2, attempt=9), "attempt 9"),
    "a snapshot of the future": (lambda seq: reply(seq, OK2, durable_seq=seq + 1), "a snapshot before it"),
    "a flood of replies": (lambda seq: [reply(seq, OK2)[0]] * 250, "replies, but was asked for"),
    "a tensor of 8 GiB": (lambda seq: [large_reply(8 << 30, [2, 1 << 29], seq)], "axis 'd' is"),
    "a tensor of 8 GiB for 10 bytes": (lambda seq: [large_reply(8 << 30, [2, 5], seq)], "brings 8589934592 bytes, wanted 80"),
    "a tensor of 2^63 rows": (lambda seq: [large_reply(1 << 62, [1 << 62, 1], seq)], "wanted at most"),
    "a large tensor for nobody": (lambda seq: [large_reply(160, [2, 10], seq + 99)], "a reply to task"),
    "rows of nobody": (lambda seq: [large_reply(800_000_000, [10_000_000, 10], seq)], "axis 'rows' is 10000000, wanted 2"),
    "chunk after chunk": (
        lambda _: [Request(chunk=session_pb2.Chunk(data=bytes(CHUNK_BYTES))).SerializeToString()] * 3,
        f"a chunk of {CHUNK_BYTES} bytes came, but no tensor is incomplete",
    ),
    "a rest of nothing": (lambda seq: [rest_of_reply(seq, held=8, again=0)], "goes on, but nothing of it is held"),
    "a rest in the middle of its message": (
        lambda seq: [large_reply(64, [2, 4], seq), rest_of_reply(seq, held=0, again=0)],
        "a reply came while 64 bytes of the one before were missing",
    ),
    "a chunk number too many": (
        lambda seq: [large_reply(64, [2, 4], seq), *[Request(chunk=session_pb2.Chunk(data=bytes(40))).SerializeToString()] * 2],
        "a chunk ends at byte 80 of a tensor of 64 bytes",
    ),
    "millions of empty parts": (lambda _: [wrapped(2, b"\x2a\x00" * (FEW // 2))], "more than 100000 parts, users"),
    "millions of empty tensors": (lambda _: [wrapped(2, wrapped(5, b"\x1a\x00" * (FEW // 2 - 50)))], "more than 100000 parts, users"),
    "a second hello": (lambda _: [hello("z", ["u8", "u9"])], "sent a hello in the middle of its session"),
    "a book before the end": (lambda _: [book(n_rows=1)], "its book came before the end of the run"),
    "random bytes": (lambda _: [np.random.default_rng(4).bytes(3000)], "is not a JoinRequest"),
    "a frame cut short": (lambda seq: [reply(seq, OK2)[0][:-9]], "is not a JoinRequest"),
    "a flood of heartbeats": (lambda _: [heartbeat()] * FLOOD, "heartbeats came, wanted at most"),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_that_breaks_the_protocol_loses_its_stream_and_the_others_go_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TICK_S", 0.05)  # it is the hub's clock that skips
    frames, sentence = MEMBERS[name]
    evil = Stream()

    async def test() -> None:
        skips = {"late": "skip", "late_after_s": 0.05, "min_hosts": 2}
        async with honest_run(n_users=5, with_hosts=[evil.join], **skips) as under_way:
            under_way.hub.answers.dims = {"d": 4}
            with memory_within(MOST_MB):
                said = frames(await evil.asked())
                await evil.say(*said)
                code, reason = await evil.end()
            # As above: it may have been told while it was still writing.
            assert (code == "INVALID_ARGUMENT" and sentence in reason) or (code == "INTERNAL" and len(said) > 1)
            assert [text for text in under_way.reasons() if sentence in text and "host 'z'" in text]
            assert max(len(text) for _, text in notes(under_way.hub).events) <= MAX_REASON_CHARS + 100
            assert len(notes(under_way.hub).events) < 200
            n_rounds = under_way.n_rounds
            await until(lambda: under_way.n_rounds > n_rounds + 2)

    run(test())


@pytest.mark.parametrize("name", ["NaN", "a second hello", "a book before the end"])
def test_where_nobody_can_be_spared_the_run_ends_with_the_name_of_who_broke_it(name: str) -> None:
    frames, sentence = MEMBERS[name]
    evil = Stream("z", ["u8", "u9"])

    async def test() -> None:
        hub = new_hub(hosts=2, silence_s=5.0, heartbeat_s=0.2, absence_timeout_s=0.3)
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (honest,):
            await evil.join(address)
            await ready(hub)
            exchange = asyncio.create_task(hub.exchange(Block(np.ones((3, 4)))))
            await evil.say(*frames(await evil.asked()))
            with pytest.raises(RunError, match=f"host 'z'.*{sentence}"):
                await exchange
            await hub.finish("", failed=True, finding=Finding("R7"), timeout_s=0.5)
            with pytest.raises(RunError, match=r"^the run has failed: a member broke the protocol \(rule R7\)$"):
                await honest
            await evil.leave()

    run(test())


@pytest.mark.parametrize("name", ["a book before the end", "a flood of replies", "a second hello"])
def test_before_the_run_a_breach_costs_a_host_its_place_and_no_more(name: str) -> None:
    frames, sentence = MEMBERS[name]
    wanted = "a reply before it was welcomed" if "replies" in name else sentence

    async def test() -> None:
        hub = new_hub(hosts=1)
        async with served(hub) as (_, address):
            code, reason = await status_of(address, [hello("z", ["u8", "u9"]), *frames(1)])
            assert (code == "INVALID_ARGUMENT" and wanted in reason) or (code == "INTERNAL" and len(frames(1)) > 1)
            async with hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (honest,):
                await ready(hub)
                await hub.exchange(Block(np.ones((1, 4))))
                await hub.finish("all done", failed=False)
                assert await honest == "all done"
        assert [text for kind, text in notes(hub).events if kind == "refused" and wanted in text]

    run(test())


def test_stale_and_repeated_replies_change_nothing_and_few_are_written_down() -> None:
    evil = Stream()

    async def test() -> None:
        async with honest_run(n_users=5, with_hosts=[evil.join], late="skip", late_after_s=0.05, min_hosts=2) as under_way:
            seq = await evil.asked()
            await evil.say(*reply(seq, OK2))
            for resent in range(90):
                await evil.say(*reply(seq, Block(np.full((2, 4), 7.0)), resent=resent + 1))
            await evil.say(*reply(seq, Block(np.full((2, 4), 7.0)), attempt=0))
            await until(lambda: under_way.hub.roster.hosts["z"].n_replies == 92)
            assert 20 <= len([text for text in under_way.reasons("late") if "'z'" in text]) <= 25
            await evil.leave()

    run(test())


def test_a_member_that_reads_slowly_is_not_sent_heartbeats_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "TICK_S", 0.005)

    async def test() -> None:
        hub = new_hub(hosts=1, silence_s=60.0)
        links: list[GrpcLink] = []
        hello_of = hub.hello

        def remember(found: session_pb2.Hello, link: Any) -> None:
            links.append(link)
            hello_of(found, link)

        monkeypatch.setattr(hub, "hello", remember)
        async with served(hub) as (_, address):
            pieces = (raw_http2.connected(0), raw_http2.opened(raw_http2.JOIN), raw_http2.message(hello("a", ["u0"])))
            _, writer = await raw_http2.connect(address, *pieces)
            await until(lambda: links)
            await asyncio.sleep(0.5)  # a hundred ticks
            assert len(links[0]._beats) <= 1
            writer.close()

    run(test())


def test_the_numbers_of_a_book_are_possible() -> None:
    rows = np.zeros((10, 1), dtype="<i8")
    rows[[3, 4]] = 1

    def packed(**changes: int) -> bytes:
        table = rows.copy()
        for place, value in changes.items():
            table[int(place[1:])] = value
        return book(names="echo.Block\necho.Order", rows=zlib.compress(table.tobytes()), n_rows=1)

    async def told(frames: Sequence[bytes]) -> str:
        hub = new_hub(hosts=1)
        evil = Stream("z", ["u8", "u9"])
        async with served(hub) as (_, address):
            await evil.join(address)
            await ready(hub)
            finishing = asyncio.create_task(hub.finish("all done", failed=False))
            await until(lambda: hub.is_over)
            await evil.say(*frames)
            await until(lambda: hub.state.failure)
            await evil.leave()
            with pytest.raises(RunError) as error:
                await finishing
        return str(error.value)

    async def test() -> None:
        assert "counts -5 vectors" in await told([packed(c5=-5)])
        assert f"counts {2**62} vectors" in await told([packed(c7=2**62)])
        assert "a direction or a kind that it does not list" in await told([packed(c4=-1)])
        assert "counts -5 vectors" in await told([packed(), packed(c5=-5), book()])

    run(test())


def test_what_a_host_says_after_its_whole_book_is_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        hub, brought = new_hub(hosts=1), list[str]()
        monkeypatch.setattr(notes(hub), "book_host", lambda link, _: brought.append(link))
        evil, row = Stream("z", ["u8", "u9"]), zlib.compress(np.zeros((10, 1), dtype="<i8").tobytes())
        async with served(hub) as (_, address):
            await evil.join(address)
            await ready(hub)
            finishing = asyncio.create_task(hub.finish("all done", failed=False))
            await until(lambda: hub.is_over)
            packed = book(names="echo.Block\necho.Order", rows=row, n_rows=1)
            await evil.say(packed, book(), *([packed] * 50))
            await finishing
            await evil.leave()  # its call may have ended in the middle of what it still wrote
        assert brought == ["z"]
        assert not hub.state.failure

    run(test())


# ---- a hostile parent


@contextlib.asynccontextmanager
async def parent(talk: Callable[[Any], Awaitable[None]], experiment_json: str | None = None) -> AsyncIterator[str]:
    """A server that answers as the test wants."""
    text = experiment_to_json(experiment(heartbeat_s=0.05)) if experiment_json is None else experiment_json

    async def get(_: Any, __: Any) -> bytes:
        return session_pb2.GetExperimentResponse(run_id="run-1", experiment_json=text).SerializeToString()

    async def join(_: Any, context: Any) -> None:
        await context.read()
        await talk(context)
        await asyncio.sleep(30)

    server = grpc.aio.server(options=serve.OPTIONS)
    rpcs = {"GetExperiment": grpc.unary_unary_rpc_method_handler(get), "Join": grpc.stream_stream_rpc_method_handler(join)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, rpcs),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        # A call has a task of grpc's that bears its name, also one that was cancelled before its handler began.
        await until(lambda: not any(SERVICE in repr(task) for task in asyncio.all_tasks()))


def welcome(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"run_id": "run-1", "n_members": 1, "heartbeat_s": 0.05}
    fields |= {"member_indices": [0], "numbers": [0], "clusters": [0]}
    return session_pb2.JoinResponse(welcome=session_pb2.Welcome(**{**fields, **changes})).SerializeToString()


def task(seq: int = 1, *messages: Message, **fields: Any) -> bytes:
    return encode(session_pb2.Task(seq=seq, attempt=1, **fields), messages, DOUBLE).head


PARENTS: dict[str, tuple[list[bytes], str]] = {
    "random bytes": ([np.random.default_rng(5).bytes(2000)], "is not a JoinResponse"),
    "a heartbeat that is no number": ([welcome(heartbeat_s=np.nan)], "a heartbeat of nan s, wanted the experiment's 0.05 s"),
    "a heartbeat without an end": ([welcome(heartbeat_s=np.inf)], "a heartbeat of inf s, wanted the experiment's 0.05 s"),
    "no heartbeat at all": ([welcome(heartbeat_s=0.0)], "a heartbeat of 0.0 s, wanted the experiment's 0.05 s"),
    "a second welcome": ([welcome(), welcome()], "a second welcome on one stream"),
    "another run": ([welcome(run_id="run-2")], "welcomed to run 'run-2', wanted 'run-1'"),
    "too many users": ([welcome(member_indices=[0, 1])], "welcomed with 2 member indices for 1 users"),
    "a member too many": ([welcome(member_indices=[7])], "welcomed with 1 member indices for 1 users, wanted one each, ascending"),
    "numbers of nobody": ([welcome(numbers=[])], "welcomed with 0 numbers"),
    "a task before the welcome": ([task(1, Block(np.ones((1, 4))))], "came before the welcome"),
    "a tail without a head": (
        [session_pb2.JoinResponse(chunk=session_pb2.Chunk(data=b"a")).SerializeToString()],
        "no tensor is incomplete",
    ),
    "a tensor of 2^50 bytes": (
        [
            session_pb2.JoinResponse(
                task=session_pb2.Task(seq=1, parts=[tensor_pb2.Part(kind="echo.Block", tensors=[tensor_pb2.Tensor(chunked_bytes=1 << 50)])])
            ).SerializeToString()
        ],
        "were announced, wanted at most",
    ),
    "millions of empty parts": ([wrapped(2, b"\x4a\x00" * (FEW // 2))], "more than 100000 parts, users"),
    "another's rows": ([welcome(), task(1, Block(np.ones((1, 4)), users=np.array([3])))], "came for members that are not on host 'a'"),
    "settings that are no JSON": ([welcome(), task(1, Block(np.ones((1, 4))), stage_json="[" * 50_000)], "the settings of a stage are"),
    "settings of nothing": ([welcome(), task(1, Block(np.ones((1, 4))), stage_json="{}")], "the settings of a stage are '{}'"),
    "a method that nobody knows": (
        [welcome(), task(1, Block(np.ones((1, 4))), stage_json='{"stage": "s", "options": {"../../os": {}}}')],
        "sends messages of '../../os', for which there is no client half",
    ),
    "a method without a half": (
        [welcome(), task(1, Block(np.ones((1, 4))), stage_json='{"stage": "s", "options": {"ditto": {}}}')],
        "sends settings of 'ditto', which is no client half but the local update of one",
    ),
    "a row too many": ([welcome(), task(1, Block(np.ones((2, 4))))], "axis 'rows' is 2, wanted 1"),
}


@pytest.mark.parametrize("name", PARENTS)
def test_a_hostile_parent_is_left_with_a_reason(name: str) -> None:
    frames, sentence = PARENTS[name]

    async def talk(context: Any) -> None:
        for frame in frames:
            await context.write(frame)

    async def test() -> None:
        async with parent(talk) as address:
            with memory_within(MOST_MB), pytest.raises(ProtocolError, match=sentence):
                await serve_member(maker("a", ["u0"]), address, name="a", patience_s=20.0)

    # The parent is told why, and never closes the stream: so long one waits for it.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.session.member_session.CLOSE_S", 0.2)
        run(test())


@pytest.mark.parametrize(
    ("text", "family", "sentence"),
    [
        ("no JSON", ProtocolError, "experiment of 7 characters is not JSON"),
        ("[" * 100_000, ProtocolError, "experiment of 100000 characters is not JSON"),
        ("{}", ConfigError, "name"),
        ('{"name": 1e999}', ConfigError, "name"),
    ],
)
def test_an_experiment_that_is_none_is_refused(text: str, family: type[CoterieError], sentence: str) -> None:
    async def talk(_: Any) -> None:
        return

    async def test() -> None:
        async with parent(talk, text) as address:
            with pytest.raises(family, match=sentence):
                await serve_member(maker("a", ["u0"]), address, name="a", patience_s=20.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("coterie.session.dial.CLOSE_S", 0.2)
        run(test())


@pytest.mark.parametrize("frames", [[], [welcome()], [welcome(), task(1, Block(np.ones((1, 4))))]])
def test_a_parent_that_falls_silent_is_dialled_again(frames: list[bytes]) -> None:
    n_streams = 0

    async def talk(context: Any) -> None:
        nonlocal n_streams
        n_streams += 1
        for frame in frames:
            await context.write(frame)

    async def test() -> None:
        async with parent(talk) as address, hosts(serve_member(maker("a", ["u0"]), address, name="a", patience_s=20.0)):
            await until(lambda: n_streams > 1, 20.0)

    run(test())


def test_a_parent_that_sends_more_than_can_be_done_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.session.member_session.MAX_QUEUED_BYTES", 4 << 20)
    n_sent = n_streams = 0
    flood = session_pb2.JoinResponse.FromString(task(1, Block(np.ones((1, 12_500)))))

    async def talk(context: Any) -> None:
        nonlocal n_sent, n_streams
        n_streams += 1
        await context.write(welcome())
        for number in range(1, 4000):  # 400 MB
            flood.task.seq = number
            await context.write(flood.SerializeToString())
            n_sent = number

    def slow(name: str) -> Any:
        make = maker(name, ["u0"])

        def made(found: Any, run_id: str) -> Any:
            host = make(found, run_id)
            monkeypatch.setattr(host, "handle", lambda _: time.sleep(0.7))
            return host

        return made

    async def test() -> None:
        async with parent(talk) as address:
            with memory_within(MOST_MB):
                async with hosts(serve_member(slow("a"), address, name="a", patience_s=20.0)) as (host,):
                    await until(lambda: n_streams)
                    await asyncio.sleep(1.0)
                    assert not host.done()
                    assert n_streams == 1, "the parent is not silent: it is we who do not read"
            assert n_sent < 800

    run(test())
