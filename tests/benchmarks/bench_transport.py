"""How much of a bare gRPC stream's speed is left once messages are declared, checked, booked and fenced.

For each size, rounds per second of `Hub.exchange` with a client half that returns what it was sent, over those of a bare `grpc.aio`
bidirectional stream with the same number of processes, which sends the same bytes both ways (in pieces of 1 MiB; a process answers once
it has its whole block, as any method must). The two are measured in turn; medians are printed, of the ratios too. Usage:

    python -m tests.benchmarks.bench_transport [--seconds 1] [--repeats 5] [--hosts 1 3] [--sizes 60x3 60x1000 10x1000000]
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import time
import types
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Annotated, Any, cast

import grpc
import numpy as np

from coterie.arrays import Array
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.record.ledger import Row
from coterie.session import dial
from coterie.wire.messages import Broadcast, Rows, Vectors, declare
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import OPTIONS, serving

PIECE_BYTES = 1 << 20
WARM_UP_S = 0.5
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


async def ours(n_users: int, d: int, n_hosts: int, seconds: float) -> float:
    experiment = experiment_from({**EXPERIMENT, "federation": {"hosts": n_hosts}})
    hub = Hub(experiment, "bench", NoRecorder(), time.monotonic, keep_log=False)
    x = np.random.default_rng(0).standard_normal((n_users, d))
    split = np.array_split(np.arange(n_users), n_hosts)
    async with serving(hub, experiment_to_json(experiment), ADDRESS) as server:
        address = f"127.0.0.1:{server.port}"
        processes = [_started(host_process, address, f"h{i}", tuple(f"u{k}" for k in own)) for i, own in enumerate(split)]
        try:
            await hub.gather()
            hub.begin_stage(1, '{"stage": "bench", "options": {"bench": {}}}')

            async def one_round() -> None:
                replies = await hub.exchange(Block(x))
                assert replies[Block].x.shape == x.shape

            rate = await _rate(one_round, seconds)
            await hub.finish("done", failed=False)
        finally:
            await asyncio.to_thread(_ended, processes)
    return rate


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


async def bare(n_users: int, d: int, n_hosts: int, seconds: float) -> float:
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
            for start in range(0, len(data), PIECE_BYTES):
                await context.write(bytes(data[start : start + PIECE_BYTES]))
            missing = len(data)
            while missing:
                missing -= len(await context.read())

        async def one_round() -> None:
            await asyncio.gather(*(there_and_back(context, block) for context, block in zip(streams, split, strict=True)))

        return await _rate(one_round, seconds)
    finally:
        over.set()
        await server.stop(2.0)
        await asyncio.to_thread(_ended, processes)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each number")
    parser.add_argument("--repeats", type=int, default=5, help="of both, in turn")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 3], help="numbers of client processes")
    parser.add_argument("--sizes", nargs="+", default=["60x3", "60x1000", "10x1000000"], help="users x scalars")
    arguments = parser.parse_args()
    print(f"{'users x scalars':>16} {'processes':>9} {'bare 1/s':>9} {'coterie 1/s':>11} {'ratio':>6}", flush=True)
    for size in arguments.sizes:
        n_users, d = (int(number) for number in size.split("x"))
        for n_hosts in arguments.hosts:
            there, here = [], []
            for _ in range(arguments.repeats):
                there.append(asyncio.run(bare(n_users, d, n_hosts, arguments.seconds)))
                here.append(asyncio.run(ours(n_users, d, n_hosts, arguments.seconds)))
            ratios = [mine / theirs for mine, theirs in zip(here, there, strict=True)]
            cells = f"{size:>16} {n_hosts:>9} {median(there):>9.2f} {median(here):>11.2f} {median(ratios):>6.2f}"
            print(f"{cells} ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)


if __name__ == "__main__":
    main()
