"""How much of a bare gRPC stream's speed is left once messages are declared, checked, booked and fenced.

For each size, rounds per second of `Hub.exchange` with a client half that returns what it was sent, over those of a bare `grpc.aio`
bidirectional stream with the same number of processes, which sends the same bytes both ways (in pieces of 1 MiB; a process answers once
it has its whole block, as any method must). Both are up at once and measured in turn, slice by slice; the ratios of neighbouring slices
count. The same ratio of CPU time, of all processes together, is steadier on a busy machine. A third stream is bare too, but sends as many
messages as ours, and as long ones: it tells what the length of chunks costs.

Where the CPU time beyond the bare stream goes, measured on two busy cores (`perf`, cProfile, medians of this benchmark):

- Messages: what is larger than 480 KiB has a head and chunks of 480 KiB, and each message wakes two threads at both ends. That is 30 % of
  the time beyond at 10 x 1,000,000 with 3 processes, hardly anything with one, and nothing for the smaller sizes, which are one message.
- At 60 x 3 three quarters of all CPU time is the interpreter's. The event loops take no more turns than those of the bare stream. In a
  loop without gRPC a round takes 165 microseconds: encode 27, frames parsed 17, decode 20; the rest is the hub, the host, its half, books
  and checks, a few microseconds each. Between two wakeups of a thread the same code is about twice as slow.
- At 60 x 1,000 with one process there are two copies more at each receiver: protobuf copies the frame, and then the tensor out of it. They
  and the joined frame are fresh memory: 140 page faults a round and end, against 30 of the bare stream.
- At 10 x 1,000,000 there are one copy into the frames, one out of them, and a look for numbers that are not finite. Page faults are no
  more than those of the bare stream.

Usage:

    python -m tests.benchmarks.bench_transport [--seconds 0.5] [--repeats 11] [--hosts 1 3] [--sizes 60x3 60x1000 10x1000000]
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import sys
import time
import types
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import grpc
import numpy as np

from coterie.arrays import Array
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.record.ledger import Row
from coterie.session import dial
from coterie.wire.codec import INLINE_BYTES
from coterie.wire.fields import CHUNK_BYTES
from coterie.wire.messages import Broadcast, Rows, Vectors, declare
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import OPTIONS, serving
from tests.benchmarks import record
from tests.benchmarks.record import Figure

PIECE_BYTES = 1 << 20
HEAD_BYTES = 100
WARM_UP_S = 0.5
WANTED = {"60x3": 0.7, "60x1000": 0.7, "10x1000000": 0.8}
ADDRESS = "127.0.0.1:0"
EXPERIMENT = {
    "name": "bench",
    "data": {"source": "ellipses"},
    "problem": {"loss": "least_squares"},
    "method": {"name": "pdmm", "penalty": 1.0},
}


@declare(method="bench", step="B1")
@dataclass(frozen=True)
class Block(Rows):
    """One row per user, there and back."""

    x: Annotated[Array, Vectors("rows", "d")]


class Echo:
    """The client half."""

    def init(self, options: Any, local: Local, previous: Any) -> int:
        return 0

    def step(self, state: int, inbox: Inbox, local: Local) -> tuple[int, list[Rows | Broadcast]]:
        return state + 1, [Block(inbox[Block].x)]


class NoRecorder:
    """Books nothing, so that the transport alone is measured."""

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Any]], useful: bool) -> None:
        for _ in rows:
            pass

    def book_host(self, link: str, rows: Iterable[Row]) -> None: ...

    def event(self, kind: str, text: str, **data: Any) -> None: ...

    def decide(self, seq: int, kind: str, value: Any) -> None: ...

    def reserve(self, seq: int) -> None: ...

    def flush(self) -> None: ...


@dataclass(frozen=True)
class Rounds:
    """What makes one round, and the client processes that take part."""

    one: Callable[[], Awaitable[None]]
    processes: Sequence[multiprocessing.process.BaseProcess]

    def cpu_s(self) -> float:
        """CPU seconds of this process and the clients."""
        return time.process_time() + sum(time.clock_gettime(~process.pid << 3 | 2) for process in self.processes if process.pid)

    async def slice(self, seconds: float) -> tuple[float, float]:
        """(seconds, CPU seconds) of a round, for at least two rounds."""
        start, cpu, n_rounds = time.perf_counter(), self.cpu_s(), 0
        while n_rounds < 2 or time.perf_counter() - start < seconds:
            await self.one()
            n_rounds += 1
        return (time.perf_counter() - start) / n_rounds, (self.cpu_s() - cpu) / n_rounds


# ---- ours


def host_process(address: str, name: str, users: tuple[str, ...]) -> None:
    module: Any = types.ModuleType("coterie_client.methods.bench")
    module.CLIENT = ClientHalf(init=Echo().init, step=Echo().step)
    sys.modules[module.__name__] = module
    empty = np.zeros((0, 1))

    def make_host(experiment: Experiment, run_id: str) -> Host:
        data = [UserData(user, None, empty, empty[:, 0], empty, empty[:, 0]) for user in users]
        return Host(name, experiment, run_id, data, lambda _: cast(Local, None), None, name)

    asyncio.run(dial.serve_member(make_host, address, name=name))


@contextlib.asynccontextmanager
async def ours(n_users: int, d: int, n_hosts: int, recorder: Any = None) -> AsyncIterator[Rounds]:
    """A federation over gRPC that sends every user a row and gets it back."""
    experiment = experiment_from({**EXPERIMENT, "federation": {"hosts": n_hosts}})
    hub = Hub(experiment, "bench", recorder or NoRecorder(), time.monotonic, keep_log=False)
    x = np.random.default_rng(0).standard_normal((n_users, d))
    split = np.array_split(np.arange(n_users), n_hosts)
    async with serving(hub, experiment_to_json(experiment), ADDRESS) as server:
        address = f"127.0.0.1:{server.port}"
        processes = [_started(host_process, address, f"h{i}", tuple(f"u{k}" for k in own)) for i, own in enumerate(split)]
        try:
            await hub.gather()
            hub.begin_stage(1, '{"stage": "bench", "options": {"bench": {}}}')

            async def one_round() -> None:
                hub.state.round += 1
                replies = await hub.exchange(Block(x))
                assert replies[Block].x.shape == x.shape

            yield Rounds(one_round, processes)
            await hub.finish("done", failed=False)
        finally:
            await asyncio.to_thread(_ended, processes)


# ---- the bare stream


def echo_process(address: str, n_bytes: int) -> None:
    async def run() -> None:
        async with grpc.aio.insecure_channel(address, options=dial.OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Echo/Join")()
            await call.write(b"%d" % n_bytes)
            pieces: list[bytes] = []
            missing = n_bytes
            while isinstance(data := await call.read(), bytes):
                pieces.append(data)
                missing -= len(data)
                if not missing:
                    for piece in pieces:
                        await call.write(piece)
                    pieces, missing = [], n_bytes
            await call.done_writing()

    asyncio.run(run())


def cuts(n_bytes: int, *, as_ours: bool) -> list[int]:
    """Where the messages of a block begin and end: of 1 MiB each, or those of ours: what is too large for one follows a head in chunks."""
    if not as_ours:
        return [*range(0, n_bytes, PIECE_BYTES), n_bytes]
    return [0, n_bytes] if n_bytes <= INLINE_BYTES else [0, *range(HEAD_BYTES, n_bytes, CHUNK_BYTES), n_bytes]


@contextlib.asynccontextmanager
async def bare_stream(n_users: int, d: int, n_hosts: int, *, as_ours: bool = False) -> AsyncIterator[Rounds]:
    """The bare stream; with `as_ours` its messages are as many and as long as ours."""
    x = np.random.default_rng(0).standard_normal((n_users, d))
    split = [x[own[0] : own[-1] + 1] for own in np.array_split(np.arange(n_users), n_hosts)]
    contexts: asyncio.Queue[Any] = asyncio.Queue()
    over = asyncio.Event()

    async def join(_: Any, context: Any) -> None:
        await contexts.put((int(await context.read()), context))
        await over.wait()

    server = grpc.aio.server(options=OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(cast(Any, join))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Echo", {"Join": handler}),))
    port = server.add_insecure_port(ADDRESS)
    await server.start()
    processes = [_started(echo_process, f"127.0.0.1:{port}", block.nbytes) for block in split]
    try:
        arrived = [await asyncio.wait_for(contexts.get(), 60) for _ in processes]
        # In whatever order they came: each gets a block of the size that it waits for.
        streams = [context for _, context in sorted(arrived, key=lambda one: -one[0])]

        async def there_and_back(context: Any, block: Array) -> None:
            data = block.reshape(-1).view(np.uint8).data
            for start, end in itertools.pairwise(cuts(len(data), as_ours=as_ours)):
                await context.write(bytes(data[start:end]))
            missing = len(data)
            while missing:
                missing -= len(await context.read())

        async def one_round() -> None:
            await asyncio.gather(*(there_and_back(context, block) for context, block in zip(streams, split, strict=True)))

        yield Rounds(one_round, processes)
    finally:
        over.set()
        await server.stop(2.0)
        await asyncio.to_thread(_ended, processes)


async def bare(n_users: int, d: int, n_hosts: int, seconds: float) -> float:
    """Rounds per second of the bare stream."""
    async with bare_stream(n_users, d, n_hosts) as rounds:
        return await _rate(rounds.one, seconds)


# ---- both


def _started(target: Callable[..., None], *args: Any) -> multiprocessing.process.BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)
    process.start()
    return process


def _ended(processes: Iterable[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        process.join(5)
        if process.is_alive():
            process.terminate()
            process.join(5)


async def _rate(one_round: Callable[[], Awaitable[None]], seconds: float) -> float:
    """Rounds per second, after a warm-up."""
    start = time.perf_counter()
    n_rounds = -1
    while n_rounds < 1 or time.perf_counter() - start < seconds:
        if n_rounds < 0 and time.perf_counter() - start < WARM_UP_S:
            await one_round()
            continue
        if n_rounds < 0:
            start, n_rounds = time.perf_counter(), 0
        await one_round()
        n_rounds += 1
    return n_rounds / (time.perf_counter() - start)


Pair = tuple[float, float]  # seconds and CPU seconds of a round


async def _in_turn(n_users: int, d: int, n_hosts: int, seconds: float, repeats: int) -> list[tuple[Pair, Pair, Pair]]:
    """Of the bare stream, of the bare stream in our messages, and of ours, slice by slice."""
    sizes = n_users, d, n_hosts
    async with bare_stream(*sizes) as plain, bare_stream(*sizes, as_ours=True) as cut, ours(*sizes) as mine:
        for rounds in (plain, cut, mine):
            await rounds.slice(WARM_UP_S)
        return [(await plain.slice(seconds), await cut.slice(seconds), await mine.slice(seconds)) for _ in range(repeats)]


def figures(
    seconds: float = 0.5, repeats: int = 11, hosts: tuple[int, ...] = (1, 3), sizes: tuple[str, ...] = tuple(WANTED)
) -> Iterator[Figure]:
    for size in sizes:
        n_users, d = (int(number) for number in size.split("x"))
        for n_hosts in hosts:
            found = asyncio.run(_in_turn(n_users, d, n_hosts, seconds, repeats))
            case = f"{size}, {n_hosts} process{'es' if n_hosts > 1 else ''}, "
            for place, (what, wanted) in enumerate((("speed", WANTED.get(size)), ("CPU", None))):
                plain, cut, mine = (np.array([one[kind][place] for one in found]) for kind in range(3))
                yield Figure(case + f"{what}: bare stream over ours", "", list(plain / mine), "more", wanted)
                yield Figure(case + f"{what}: bare stream in our messages over ours", "", list(cut / mine), "more")
                yield Figure(case + f"{what}: a round", "ms", list(1e3 * mine), None)


if __name__ == "__main__":
    record.main(figures)
