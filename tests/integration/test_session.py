"""Sessions over real gRPC on loopback: most in one process, some with hosts in processes of their own (this file is their program)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.findings import Finding
from coterie.record.ledger import Row
from coterie.record.snapshot import SnapshotFile
from coterie.session import dial
from coterie.session.computer import Thread
from coterie.session.dial import serve_member
from coterie.session.member_session import MemberSession
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import PROTOCOL_VERSION, Received, encode
from coterie.wire.messages import Broadcast, Rows, Vectors, declare
from coterie.wire.precision import Precision
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import SERVICE, Serving, serving
from tests.tries import no_task_is_left
from tests.two_tier import free_port

LOOPBACK = "127.0.0.1:0"


@declare(method="echo", step="E1")
@dataclass(frozen=True)
class Block(Rows):
    """One row per user, there and back."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="echo", step="E2")
@dataclass(frozen=True)
class Order(Broadcast):
    """A number that tells the half how to behave."""

    what: Annotated[Array, Vectors("d")]


FAIL, WAIT = 1.0, 2.0


@dataclass
class Gate:
    """Lets a test hold a half in the middle of a step."""

    entered: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)


GATE = Gate()


class Echo:
    """Adds up what it was sent, and answers with the sum: a reply is right only if every task was handled once, in order."""

    def init(self, options: Mapping[str, Any], local: Local, previous: Any) -> list[Array]:
        return []

    def step(self, state: list[Array], inbox: Inbox, local: Local) -> tuple[list[Array], list[Rows]]:
        order = inbox.get(Order)
        if order is not None and order.what[0] == FAIL:
            raise TypeError("a mistake in the half")
        if order is not None and order.what[0] == WAIT:
            GATE.entered.set()
            assert GATE.opened.wait(20)
        total = inbox[Block].x + state[0] if state else np.array(inbox[Block].x)
        return [total], [Block(total / 3.0)]


def install() -> None:
    module: Any = types.ModuleType("coterie_client.methods.echo")
    module.CLIENT = ClientHalf(init=Echo().init, step=Echo().step)
    sys.modules[module.__name__] = module


install()


@dataclass
class Notes:
    """What the hub writes down."""

    events: list[tuple[str, str]] = field(default_factory=list)
    rows: list[tuple[str, Row]] = field(default_factory=list)
    host_rows: list[tuple[str, Row]] = field(default_factory=list)

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Indices | None]], useful: bool) -> None:
        self.rows += [(link, row) for row, _ in rows]

    def book_host(self, link: str, rows: Iterable[Row]) -> None:
        self.host_rows += [(link, row) for row in rows]

    def event(self, kind: str, text: str, **data: Any) -> None:
        self.events.append((kind, text))

    def decide(self, seq: int, kind: str, value: Any) -> None: ...

    def reserve(self, seq: int) -> None: ...

    def flush(self) -> None: ...


def experiment(*, method: Mapping[str, Any] | None = None, **rules: Any) -> Experiment:
    return experiment_from(
        {
            "name": "session",
            "data": {"source": "ellipses"},
            "problem": {"loss": "least_squares"},
            "method": method or {"name": "pdmm", "penalty": 1.0},
            "federation": {"hosts": 1, "heartbeat_s": 0.2, "silence_s": 5.0, **rules},
        }
    )


def new_hub(run_id: str = "run-1", **rules: Any) -> Hub:
    return Hub(experiment(**rules), run_id, Notes(), time.monotonic)


def notes(hub: Hub) -> Notes:
    return cast(Notes, hub.recorder)


def maker(name: str, users: Iterable[str], store: SnapshotFile | None = None, instance: str = "1") -> Callable[[Experiment, str], Host]:
    empty = np.zeros((0, 1))
    data = [UserData(user, None, empty, empty[:, 0], empty, empty[:, 0]) for user in users]
    return lambda found, run_id: Host(name, found, run_id, data, lambda _: cast(Local, None), store, instance)


@contextlib.asynccontextmanager
async def served(hub: Hub, address: str = LOOPBACK) -> AsyncIterator[tuple[Serving, str]]:
    async with serving(hub, experiment_to_json(experiment(**hub.rules.model_dump(exclude_none=True))), address) as server:
        yield server, f"127.0.0.1:{server.port}"


@contextlib.asynccontextmanager
async def hosts(*running: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Hosts that are ended with the block, whatever happens in it."""
    tasks = [asyncio.create_task(one) for one in running]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ready(hub: Hub) -> None:
    await hub.gather()
    hub.begin_stage(1, '{"stage": "s", "options": {"echo": {}}}')


def inputs(n: int, d: int, rounds: int) -> list[Array]:
    rng = np.random.default_rng(n + d)
    return [rng.standard_normal((n, d)) for _ in range(rounds)]


def expected(blocks: Iterable[Array]) -> list[Array]:
    total: Any = None
    answers = []
    for block in blocks:
        total = block if total is None else block + total
        answers.append(total / 3.0)
    return answers


def run(test: Coroutine[Any, Any, None], seconds: float = 30.0) -> None:
    async def limited() -> None:
        async with asyncio.timeout(seconds):
            await test
        await no_task_is_left()

    asyncio.run(limited())


# ---- a run


@pytest.mark.parametrize(("n", "d"), [(6, 3), (6, 20_000), (4, 200_000)])
@pytest.mark.parametrize("quick_s", [0.0, 10.0])
def test_hosts_join_answer_and_leave_with_their_books(n: int, d: int, quick_s: float) -> None:
    async def test() -> None:
        hub = new_hub(hosts=2)
        blocks = inputs(n, d, 6)
        users = [f"u{i}" for i in range(n)]
        async with served(hub) as (_, address):
            a = serve_member(maker("a", users[: n // 2]), address, name="a", computer=Thread(quick_s))
            b = serve_member(maker("b", users[n // 2 :]), address, name="b", computer=Thread(quick_s))
            async with hosts(a, b) as running:
                await ready(hub)
                for block, wanted in zip(blocks, expected(blocks), strict=True):
                    replies = await hub.exchange(Block(block))
                    np.testing.assert_array_equal(replies[Block].x, wanted)
                await hub.finish("all done", failed=False)
                assert await asyncio.gather(*running) == ["all done", "all done"]
        booked = {(link, row) for link, row in notes(hub).rows if row.seq}
        assert booked == set(notes(hub).host_rows)
        session = {(link, row.direction): row.message_bytes for link, row in notes(hub).rows if not row.seq}
        assert min(session.values()) > 0

    run(test())


@pytest.mark.parametrize("quick_s", [0.0, 10.0])
def test_a_host_settles_after_each_reply(quick_s: float) -> None:
    """The first task brings the stage, and is of another sort; three more tell that their sort is quick."""

    async def test() -> None:
        hub, done = new_hub(hosts=1), list[int]()
        host = maker("a", ["u0", "u1"])(experiment(), hub.run_id)
        host.settle = lambda: done.append(host.last_seq)  # type: ignore[method-assign]
        async with (
            served(hub) as (_, address),
            hosts(serve_member(lambda *_: host, address, name="a", computer=Thread(quick_s))),
        ):
            await ready(hub)
            for block in inputs(2, 3, 6):
                await hub.exchange(Block(block))
        assert done[:5] == [1, 2, 3, 4, 5]

    run(test())


def small_task(**flags: Any) -> Any:
    """As a host receives it."""
    encoded = encode(session_pb2.Task(seq=1, **flags), [Block(np.ones((1, 3)))], Precision.of("float64"))
    return Assembler(session_pb2.JoinResponse).feed(encoded.head)


def test_a_task_with_a_snapshot_is_never_handled_on_the_event_loop() -> None:
    host = maker("a", ["u0"])(experiment(), "run-1")
    host.handle = lambda _: None  # type: ignore[method-assign, assignment]
    computer = Thread(10.0)

    def is_quick_in_the_end(**flags: Any) -> bool:
        task = small_task(**flags)
        for _ in range(5):
            computer.handle(host, task)
        return computer.is_quick(task)

    assert is_quick_in_the_end()
    assert not is_quick_in_the_end(snapshot=1)
    run(computer.close())


def test_a_sort_of_task_is_quick_after_several_quick_ones_in_a_row() -> None:
    """What a host takes for a task is what the test says, on a clock of its own."""
    host = maker("a", ["u0"])(experiment(), "run-1")
    computer, clock = Thread(0.05), [0.0]
    found = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("coterie.session.computer.time.perf_counter", lambda: clock[0])
        for seconds in (0.04, 0.04, 0.06, 0.04, 0.04, 0.04, 0.06):
            host.handle = lambda _, seconds=seconds: clock.__setitem__(0, clock[0] + seconds)  # type: ignore[method-assign, misc]
            task = small_task()
            computer.handle(host, task)
            found.append(computer.is_quick(task))
    assert found == [False, False, False, False, False, True, False]
    run(computer.close())


def test_tasks_that_wait_in_line_are_handled_on_the_event_loop_once_their_sort_is_quick() -> None:
    """Otherwise a parent that is quick too keeps a host in its thread: the next task comes while the thread settles the last."""
    host = maker("a", ["u0"])(experiment(), "run-1")
    by = list[str]()

    def handle(received: Received) -> None:
        by.append(threading.current_thread().name)

    host.handle = handle  # type: ignore[method-assign, assignment]
    welcome = session_pb2.Welcome(run_id="run-1", member_indices=[0], n_members=1, heartbeat_s=0.2, numbers=[0], clusters=[0])
    task = encode(session_pb2.Task(seq=1), [Block(np.ones((1, 3)))], Precision.of("float64")).head
    frames = iter([session_pb2.JoinResponse(welcome=welcome).SerializeToString(), *[task] * 6])

    class Call:
        async def read(self) -> bytes:
            if (frame := next(frames, None)) is None:
                await asyncio.Event().wait()
            return frame or b""

        async def write(self, _: bytes) -> None: ...

        def cancel(self) -> None: ...

    async def test() -> None:
        computer = Thread(10.0)
        session = MemberSession(cast(Any, Call()), host, computer, asyncio.Event(), asyncio.Event(), lambda: None)
        serving_it = asyncio.create_task(session.run())
        async with asyncio.timeout(10):
            while len(by) < 6:
                await asyncio.sleep(0.01)
        serving_it.cancel()
        await asyncio.wait((serving_it,))
        await computer.close()

    run(test())
    assert [name.startswith("coterie-compute") for name in by] == [True, True, True, False, False, False]


def test_a_reply_does_not_wait_for_the_snapshot_that_its_task_asked_for(tmp_path: Path) -> None:
    """The snapshot is written when the host settles, or at the latest before the next task: its state is that of the task either way."""
    store = SnapshotFile(tmp_path, "a")
    host = maker("a", ["u0", "u1"], store)(experiment(), "run-1")
    host.welcome(session_pb2.Welcome(run_id="run-1", member_indices=[0, 1], n_members=2, heartbeat_s=0.2, numbers=[0, 1], clusters=[0, 0]))
    frames, replies = Assembler(session_pb2.JoinResponse), Assembler(session_pb2.JoinRequest)

    def asked(seq: int, **flags: Any) -> session_pb2.Reply:
        task = session_pb2.Task(seq=seq, attempt=1, stage=1, round=seq, stage_json='{"stage": "s", "options": {"echo": {}}}', **flags)
        reply = host.handle(frames.feed(encode(task, [Block(np.ones((2, 3)))], Precision.of("float64")).head))
        assert reply is not None
        return replies.feed(reply.head).frame  # type: ignore[union-attr, no-any-return]

    assert asked(1, snapshot=1).durable_seq == 0
    assert store.load() is None
    host.settle()
    assert store.load()["last_seq"] == 1
    assert asked(2, snapshot=1).durable_seq == 0, "there is one snapshot: the one before it was of no task"
    assert asked(3).durable_seq == 1
    saved = store.load()
    assert (saved["last_seq"], [reply["seq"] for reply in saved["replies"]]) == (2, [1, 2])


def test_hosts_in_processes_of_their_own_give_the_same_bits() -> None:
    async def test() -> None:
        hub = new_hub(hosts=2, silence_s=20.0)
        blocks = inputs(5, 1000, 5)
        async with served(hub) as (_, address):
            with processes((address, "a", "u0,u3"), (address, "b", "u1,u2,u4")) as started:
                await ready(hub)
                for block, wanted in zip(blocks, expected(blocks), strict=True):
                    np.testing.assert_array_equal((await hub.exchange(Block(block)))[Block].x, wanted)
                await hub.finish("all done", failed=False)
                assert [await asyncio.to_thread(process.wait, 10) for process in started] == [0, 0]

    run(test())


def test_a_process_that_is_killed_and_started_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    async def test() -> None:
        hub = new_hub(silence_s=20.0)
        blocks = inputs(2, 50, 6)
        answers = []
        async with served(hub) as (_, address):
            with processes((address, "a", "u0,u1", str(tmp_path))) as (first,):
                await ready(hub)
                answers += [(await hub.exchange(Block(block)))[Block].x for block in blocks[:2]]
                hub.request_snapshots()
                answers.append((await hub.exchange(Block(blocks[2])))[Block].x)
                answers.append((await hub.exchange(Block(blocks[3])))[Block].x)
                first.kill()
                await asyncio.to_thread(first.wait, 10)
            waiting = asyncio.create_task(hub.exchange(Block(blocks[4])))
            with processes((address, "a", "u0,u1", str(tmp_path))) as (second,):
                answers.append((await waiting)[Block].x)
                answers.append((await hub.exchange(Block(blocks[5])))[Block].x)
                await hub.finish("all done", failed=False)
                assert await asyncio.to_thread(second.wait, 10) == 0
        for answer, wanted in zip(answers, expected(blocks), strict=True):
            np.testing.assert_array_equal(answer, wanted)
        assert "replay" in [kind for kind, _ in notes(hub).events]

    run(test())


@contextlib.contextmanager
def processes(*arguments: tuple[str, ...]) -> Iterator[list[subprocess.Popen[bytes]]]:
    started = [
        subprocess.Popen([sys.executable, "-m", "tests.integration.test_session", *listed], cwd=Path(__file__).parents[2])
        for listed in arguments
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait(10)


# ---- streams that break


class Proxy:
    """A TCP proxy that can cut its connections, at once or after a number of bytes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._writers: set[asyncio.StreamWriter] = set()
        self._left: int | None = None
        self.is_frozen = False
        self.n_cuts = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.cut()
            await server.wait_closed()

    def cut(self) -> None:
        """Ends all connections as a broken network does: with a reset."""
        self._left = None
        self.n_cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()

    def cut_after(self, n_bytes: int) -> None:
        self._left = n_bytes

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pair = {writer, there_writer}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                while self.is_frozen:
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()
                if self._left is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self.cut()
            writer.transport.abort()


@pytest.mark.parametrize("after", [0, 2_000, 500_000, 2_000_000, 3_500_000, 5_000_000])
def test_a_stream_cut_in_the_middle_changes_no_bits(after: int) -> None:
    async def test() -> None:
        hub = new_hub()
        blocks = inputs(2, 200_000, 4)  # 3.2 MB each way
        async with served(hub) as (server, _):
            proxy = Proxy(server.port)
            async with proxy.running() as address, hosts(serve_member(maker("a", ["u0", "u1"]), address, name="a")) as (host,):
                await ready(hub)
                answers = [(await hub.exchange(Block(blocks[0])))[Block].x]
                proxy.cut_after(after)
                answers += [(await hub.exchange(Block(block)))[Block].x for block in blocks[1:]]
                assert proxy.n_cuts == 1
                await hub.finish("all done", failed=False)
                assert await host == "all done"
        for answer, wanted in zip(answers, expected(blocks), strict=True):
            np.testing.assert_array_equal(answer, wanted)
        assert "lost" in [kind for kind, _ in notes(hub).events]

    run(test())


def test_a_reply_computed_while_the_stream_was_lost_is_sent_after_joining_again() -> None:
    async def test() -> None:
        GATE.entered.clear()
        GATE.opened.clear()
        hub = new_hub()
        (block,) = inputs(1, 3, 1)
        async with served(hub) as (server, _):
            proxy = Proxy(server.port)
            async with proxy.running() as address, hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (host,):
                await ready(hub)
                exchange = asyncio.create_task(hub.exchange(Block(block), Order(np.array([WAIT]))))
                try:
                    assert await asyncio.to_thread(GATE.entered.wait, 10)
                    proxy.cut()
                    while [kind for kind, _ in notes(hub).events].count("join") < 2:
                        await asyncio.sleep(0.02)
                finally:
                    GATE.opened.set()
                np.testing.assert_array_equal((await exchange)[Block].x, block / 3.0)
                await hub.finish("all done", failed=False)
                assert await host == "all done"

    run(test())


def test_heartbeats_go_on_during_a_long_computation() -> None:
    async def test() -> None:
        GATE.entered.clear()
        GATE.opened.clear()
        hub = new_hub(heartbeat_s=0.1, silence_s=2.0)
        (block,) = inputs(1, 3, 1)
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (host,):
            await ready(hub)
            exchange = asyncio.create_task(hub.exchange(Block(block), Order(np.array([WAIT]))))
            try:
                assert await asyncio.to_thread(GATE.entered.wait, 10)
                await asyncio.sleep(3.0)  # longer than silence_s
            finally:
                GATE.opened.set()
            await exchange
            assert [kind for kind, _ in notes(hub).events].count("join") == 1
            await hub.finish("all done", failed=False)
            assert await host == "all done"

    run(test())


def test_a_silent_parent_is_noticed_and_dialled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        hub = new_hub(heartbeat_s=0.05)
        monkeypatch.setattr("coterie_server.transport.serve.TICK_S", 0.05)
        async with served(hub) as (server, _):
            proxy = Proxy(server.port)
            async with proxy.running() as address, hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (host,):
                await ready(hub)
                proxy.is_frozen = True
                while time.monotonic() - hub.roster.hosts["a"].heard_at < 1.5:  # three times what the host puts up with
                    await asyncio.sleep(0.02)
                proxy.is_frozen = False
                while [kind for kind, _ in notes(hub).events].count("join") < 2:
                    await asyncio.sleep(0.02)
                await hub.finish("all done", failed=False)
                assert await host == "all done"

    run(test())


def test_a_parent_that_is_started_again_is_joined_again_and_its_absence_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(dial, "SAY_S", 0.01)

    async def test() -> None:
        blocks = inputs(1, 3, 3)
        port = free_port()
        address = f"127.0.0.1:{port}"
        first = new_hub()
        telling: dict[str, Any] = {"on_wait": lambda why, _: said.append(why), "on_back": lambda _: said.append("back")}
        async with hosts(serve_member(maker("a", ["u0"]), address, name="a", patience_s=20, **telling)) as (host,):
            async with served(first, address):
                await ready(first)
                for block in blocks[:2]:
                    await first.exchange(Block(block))
                memory = first.memory()
            while not any("refused" in why for why in said):
                await asyncio.sleep(0.01)
            second = new_hub()
            second.state.attempt = 2
            second.restore(memory)
            async with served(second, address):
                await second.gather()
                second.resume_stage(1, 0, "")
                replies = await second.exchange(Block(blocks[2]))
                np.testing.assert_array_equal(replies[Block].x, expected(blocks)[2])
                await second.finish("all done", failed=False)
                assert await host == "all done"

    run(test())
    assert said[-1] == "back"
    assert said.count("back") == 1


def test_a_host_whose_parent_stays_away_gives_up_with_a_sentence() -> None:
    async def test() -> None:
        hub = new_hub()
        async with hosts() as _:
            async with served(hub) as (_, address):
                host = asyncio.create_task(serve_member(maker("a", ["u0"]), address, name="a", patience_s=3.0))
                await ready(hub)
            with pytest.raises(RunError, match=rf"host 'a' has had no session with {address} for 3 s"):
                await host

    run(test())


# ---- starting


def test_a_host_waits_for_a_server_that_is_not_up_yet() -> None:
    async def test() -> None:
        port = free_port()
        async with hosts(serve_member(maker("a", ["u0"]), f"127.0.0.1:{port}", name="a", patience_s=20)) as (host,):
            await asyncio.sleep(0.3)
            hub = new_hub()
            async with served(hub, f"127.0.0.1:{port}"):
                await ready(hub)
                await hub.finish("all done", failed=False)
                assert await host == "all done"

    run(test())


def test_a_host_that_waits_in_vain_says_for_what() -> None:
    async def test() -> None:
        address = f"127.0.0.1:{free_port()}"
        with pytest.raises(RunError, match=f"waited 0.5 s for a server at {address}: none answered"):
            await serve_member(maker("a", ["u0"]), address, name="a", patience_s=0.5)

    run(test())


@pytest.mark.parametrize("taken_by", ["a plain socket", "another server"])
def test_a_port_in_use_is_an_error(taken_by: str) -> None:
    async def test() -> None:
        async with contextlib.AsyncExitStack() as stack:
            if taken_by == "another server":
                server, _ = await stack.enter_async_context(served(new_hub()))
                port = server.port
            else:
                listener = stack.enter_context(socket.socket())
                listener.bind(("127.0.0.1", 0))
                listener.listen()
                port = listener.getsockname()[1]
            with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
                await stack.enter_async_context(served(new_hub(), f"127.0.0.1:{port}"))

    run(test())


@pytest.mark.parametrize("turns", [0, 1, 2, 5, 10, 20])
def test_a_server_that_is_cancelled_while_it_stops_gives_its_port_back(turns: int) -> None:
    async def test() -> None:
        port = free_port()
        begun = asyncio.Event()

        async def serve() -> None:
            async with served(new_hub(), f"127.0.0.1:{port}"):
                begun.set()
                await asyncio.Event().wait()

        serving_it = asyncio.create_task(serve())
        await begun.wait()
        serving_it.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
        serving_it.cancel()
        await asyncio.gather(serving_it, return_exceptions=True)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))

    run(test())


@pytest.mark.parametrize("address", ["0.0.0.0:0", "[::]:0", "192.0.2.1:5000"])
def test_only_loopback_is_listened_on_without_tls(address: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="without TLS would let anyone join"):
            async with serving(new_hub(), "{}", address):
                pass

    run(test())


def test_listening_without_tls_can_be_asked_for_and_is_an_event() -> None:
    async def test() -> None:
        hub = new_hub()
        async with serving(hub, "{}", "0.0.0.0:0", insecure=True) as server:
            assert server.port
        assert [kind for kind, _ in notes(hub).events] == ["insecure"]

    run(test())


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1:http", ":5000", "127.0.0.1:70000"])
def test_an_address_without_host_or_port_is_a_config_error(address: str) -> None:
    async def test() -> None:
        with pytest.raises(ConfigError, match="want HOST:PORT"):
            async with serving(new_hub(), "{}", address):
                pass

    run(test())


# ---- refusals and failures


@pytest.mark.parametrize("rpc", ["GetExperiment", "Join"])
def test_another_protocol_version_is_refused(rpc: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        hub = new_hub()
        monkeypatch.setattr(
            "coterie.session.dial.PROTOCOL_VERSION" if rpc == "GetExperiment" else "coterie.session.member.PROTOCOL_VERSION", 9
        )
        async with served(hub) as (_, address):
            with pytest.raises(ProtocolError, match=rf"host 'a' speaks protocol 9, wanted {PROTOCOL_VERSION}"):
                await serve_member(maker("a", ["u0"]), address, name="a")

    run(test())


def test_a_host_without_users_is_told_so() -> None:
    async def test() -> None:
        hub = new_hub(hosts=2)
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")):
            while not hub.roster.hosts:
                await asyncio.sleep(0.01)
            with pytest.raises(ConfigError, match="user 'u0' is claimed by host 'b', but another host speaks for it"):
                await serve_member(maker("b", ["u0"]), address, name="b")

    run(test())


def test_a_run_that_is_over_takes_nobody() -> None:
    async def test() -> None:
        hub = new_hub()
        async with served(hub) as (_, address):
            await hub.finish("", failed=True)
            with pytest.raises(RunError, match="run run-1 has ended"):
                await serve_member(maker("a", ["u0"]), address, name="a")

    run(test())


def test_a_member_that_comes_when_the_run_has_finished_hears_that_and_ends_well() -> None:
    async def test() -> None:
        hub = new_hub()
        async with served(hub) as (_, address):
            await hub.finish("all done", failed=False)
            assert await serve_member(maker("a", ["u0"]), address, name="a") == "all done"
        assert not hub.roster.hosts

    run(test())


def test_data_that_cannot_be_loaded_is_reported_before_the_host_exits() -> None:
    def make_host(_: Experiment, __: str) -> Host:
        raise ConfigError("cannot read users.csv: no such file", Finding("D2", place="federation.heartbeat_s"))

    async def test() -> None:
        hub = new_hub()
        async with served(hub) as (_, address), hosts(serve_member(make_host, address, name="a")) as (host,):
            with pytest.raises(ConfigError, match=r"^cannot read users.csv"):
                await host
            why = f"a data file or folder is missing or cannot be opened (federation.heartbeat_s: {hub.rules.heartbeat_s}) (rule D2)"
            assert hub.journal.refused == {"a": f"host 'a' cannot join: {why}; its own log names it"}

    run(test())


@pytest.mark.parametrize("quick_s", [0.0, 10.0])
def test_a_mistake_in_a_half_fails_the_run_and_the_host(quick_s: float) -> None:
    async def test() -> None:
        hub = new_hub()
        (block,) = inputs(1, 3, 1)
        async with (
            served(hub) as (_, address),
            hosts(serve_member(maker("a", ["u0"]), address, name="a", computer=Thread(quick_s))) as (host,),
        ):
            await ready(hub)
            for _ in range(5):
                await hub.exchange(Block(block), Order(np.zeros(1)))
            with pytest.raises(RunError, match=r"^host 'a': a mistake of the program itself \(rule X2\); its own log names it$"):
                await hub.exchange(Block(block), Order(np.array([FAIL])))
            with pytest.raises(TypeError, match="a mistake in the half"):
                await host

    run(test())


def test_a_failed_run_is_a_run_error_at_the_host() -> None:
    async def test() -> None:
        hub = new_hub()
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (host,):
            await ready(hub)
            await hub.finish("", failed=True, finding=Finding("R5"))
            with pytest.raises(RunError, match=r"^the run has failed: a file cannot be written \(rule R5\)$"):
                await host

    run(test())


@pytest.mark.parametrize(
    ("frames", "code", "sentence"),
    [
        ([b"\xff\xff"], "INVALID_ARGUMENT", "before the hello was complete"),
        ([b"\x0a\xff"], "INVALID_ARGUMENT", "is not a JoinRequest"),
        ([session_pb2.JoinRequest(chunk=session_pb2.Chunk(data=b"a")).SerializeToString()], "INVALID_ARGUMENT", "wanted a hello"),
        ([session_pb2.JoinRequest(reply=session_pb2.Reply(seq=1)).SerializeToString()], "INVALID_ARGUMENT", "wanted a hello"),
        ([session_pb2.JoinRequest(hello=session_pb2.Hello(host="x")).SerializeToString()], "FAILED_PRECONDITION", "speaks protocol 0"),
        ([bytes(9 << 20)], "RESOURCE_EXHAUSTED", "larger than max"),
        ([], "DEADLINE_EXCEEDED", "no hello came within 0.5 s"),
    ],
)
def test_a_stranger_that_breaks_the_contract_gets_a_status_and_harms_nobody(frames: list[bytes], code: str, sentence: str) -> None:
    async def test() -> None:
        hub = new_hub(silence_s=0.5)
        async with served(hub) as (_, address), grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Join")()

            async def talk() -> None:
                for frame in frames:
                    await call.write(frame)
                while await call.read() is not grpc.aio.EOF:
                    pass

            with pytest.raises(grpc.aio.AioRpcError) as error:
                await talk()
            assert error.value.code().name == code
            assert sentence in (error.value.details() or "")
            async with hosts(serve_member(maker("a", ["u0"]), address, name="a")):
                await ready(hub)
                await hub.exchange(Block(np.ones((1, 2))))

    run(test())


def test_a_host_that_answers_without_reading_is_given_up() -> None:
    async def test() -> None:
        hub = new_hub(silence_s=1.0, heartbeat_s=0.1, absence_timeout_s=0.5)
        async with served(hub) as (_, address), grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.stream_stream(f"/{SERVICE}/Join")()
            users = [session_pb2.User(name="u0")]
            hello = session_pb2.Hello(protocol=PROTOCOL_VERSION, host="a", users=users, instance="x")
            await call.write(session_pb2.JoinRequest(hello=hello).SerializeToString())
            await hub.gather()
            x = np.ones((1, 6000))

            async def answer_blindly() -> None:
                for seq in range(1, 10_000):
                    while hub.seq < seq:
                        await asyncio.sleep(0.001)
                    reply = encode(session_pb2.Reply(seq=seq, attempt=1), [Block(np.ones((1, 1)))], Precision.of("float64"))
                    await call.write(reply.head)

            async def go_on() -> None:
                for _ in range(10_000):
                    await hub.exchange(Block(x))

            async with hosts(answer_blindly()):
                with pytest.raises(RunError, match=r"host 'a' .* absent since round"):
                    await go_on()

    run(test())


# ---- stopping, and health


def test_a_host_that_is_asked_to_stop_finishes_its_task_and_writes_its_state_down(tmp_path: Path) -> None:
    async def test() -> None:
        GATE.entered.clear()
        GATE.opened.clear()
        hub = new_hub()
        blocks = inputs(1, 3, 2)
        stop = asyncio.Event()
        store = SnapshotFile(tmp_path, "a")
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"], store), address, name="a", stop=stop)) as (host,):
            await ready(hub)
            exchange = asyncio.create_task(hub.exchange(Block(blocks[0]), Order(np.array([WAIT]))))
            try:
                assert await asyncio.to_thread(GATE.entered.wait, 10)
                stop.set()
                await asyncio.sleep(0.1)
            finally:
                GATE.opened.set()
            np.testing.assert_array_equal((await exchange)[Block].x, expected(blocks)[0])
            assert await host is None
            assert (store.load() or {})["last_seq"] == 1
            waiting = asyncio.create_task(hub.exchange(Block(blocks[1])))
            async with hosts(serve_member(maker("a", ["u0"], store, "2"), address, name="a")):
                np.testing.assert_array_equal((await waiting)[Block].x, expected(blocks)[1])

    run(test())


@pytest.mark.parametrize("is_up", [True, False])
def test_a_host_can_be_stopped_while_it_waits(is_up: bool) -> None:
    async def test() -> None:
        stop = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            address = (await stack.enter_async_context(served(new_hub(hosts=2))))[1] if is_up else f"127.0.0.1:{free_port()}"
            (host,) = await stack.enter_async_context(hosts(serve_member(maker("a", ["u0"]), address, name="a", stop=stop)))
            await asyncio.sleep(0.2)
            stop.set()
            assert await asyncio.wait_for(host, 5) is None

    run(test())


def test_the_health_service_says_when_no_one_can_join() -> None:
    async def test() -> None:
        status = health_pb2.HealthCheckResponse
        hub = new_hub()
        async with served(hub) as (server, address), grpc.aio.insecure_channel(address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            for service in ("", SERVICE):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status == status.SERVING
            await server.drain()
            for service in ("", SERVICE):
                assert (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)).status == status.NOT_SERVING

    run(test())


def test_the_health_service_notices_by_itself_that_the_run_is_over() -> None:
    async def test() -> None:
        hub = new_hub()
        async with served(hub) as (_, address), grpc.aio.insecure_channel(address) as channel:
            watch: Any = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=10)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            await hub.finish("all done", failed=False)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING

    run(test())


def test_a_server_stops_in_the_middle_of_everything() -> None:
    async def test() -> None:
        hub = new_hub()
        start = 0.0
        async with contextlib.AsyncExitStack() as stack:
            (host,) = await stack.enter_async_context(hosts(asyncio.sleep(0)))
            async with served(hub) as (_, address):
                (host,) = await stack.enter_async_context(hosts(serve_member(maker("a", ["u0"]), address, name="a", patience_s=3.0)))
                await ready(hub)
                exchange = asyncio.create_task(hub.exchange(Block(np.ones((1, 1_000_000)))))
                await asyncio.sleep(0)
                start = time.monotonic()
            assert time.monotonic() - start < 5.0
            exchange.cancel()
            with pytest.raises(RunError, match="has had no session"):
                await host

    run(test())


def test_a_hello_of_ten_thousand_users_comes_in_pieces_and_is_welcomed() -> None:
    async def test() -> None:
        hub = new_hub(hosts=1)
        users = [f"u{i}" for i in range(10_000)]
        async with served(hub) as (_, address), hosts(serve_member(maker("a", users), address, name="a")) as (host,):
            await ready(hub)
            replies = await hub.exchange(Block(np.ones((10_000, 2))))
            np.testing.assert_array_equal(replies[Block].x, np.full((10_000, 2), 1 / 3.0))
            await hub.finish("all done", failed=False)
            assert await host == "all done"

    run(test())


def main(address: str, name: str, users: str, folder: str = "") -> None:
    store = SnapshotFile(Path(folder), name) if folder else None
    make_host = maker(name, users.split(","), store, instance=str(time.time_ns()))
    outcome = asyncio.run(serve_member(make_host, address, name=name, patience_s=20))
    print(json.dumps(outcome))


if __name__ == "__main__":
    main(*sys.argv[1:])


def test_a_second_client_with_a_name_that_is_in_use_hears_the_reason_at_once_and_takes_the_place_when_it_is_free() -> None:
    said: list[str] = []

    async def test() -> None:
        hub = new_hub(hosts=2)
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")) as (first,):
            await until_joined(hub)
            second = serve_member(maker("a", ["u0"], instance="2"), address, name="a", on_trouble=said.append)
            async with hosts(second) as (waiting,):
                async with asyncio.timeout(10):
                    while not said:
                        await asyncio.sleep(0.01)
                assert not waiting.done()
                first.cancel()
                async with asyncio.timeout(10):
                    while "a" not in hub.roster.hosts or hub.roster.hosts["a"].instance != "2":
                        await asyncio.sleep(0.01)
                await hub.finish("all done", failed=False)
                assert await waiting == "all done"

    run(test())
    assert len(said) == 1
    assert said[0].startswith("host 'a' is still connected from another process")


async def until_joined(hub: Hub) -> None:
    async with asyncio.timeout(10):
        while not hub.roster.hosts:
            await asyncio.sleep(0.01)
