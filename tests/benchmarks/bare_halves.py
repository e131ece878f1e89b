"""The least that a PDMM round over gRPC can cost: the method's two halves with a bare `grpc.aio` stream between two processes.

No task, reply, fence, booking, check or deadline: the server half's vectors go down as their bytes, and the client half's models come up.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import grpc
import numpy as np

from coterie.experiment.config import Experiment
from coterie.families.pdmm_messages import Aggregates, UpdatedModels
from coterie.session import dial
from coterie.wire.precision import Precision
from coterie_client.hosting.build import build_host
from coterie_client.interface.half import Inbox, Local
from coterie_client.methods.pdmm import CLIENT
from coterie_server.interface.half import Facts, Members, Replies, Setting
from coterie_server.methods.pdmm.half import Pdmm, set_up
from coterie_server.transport.serve import OPTIONS
from tests.benchmarks.bench_transport import ADDRESS, _ended, _started


def halves(described: Experiment) -> tuple[Local, Pdmm]:
    """What the client half may know, and the server half."""
    host = build_host("all", described, "bench", None)
    host.indices, host.n_members = np.arange(len(host.users)), len(host.users)
    local = host.local
    facts = Facts(local.problem.n_rows, local.problem.d, local.problem.smoothness())
    members = Members(local.names, ("",) * local.n_own)
    return local, set_up(described.method, Setting(3, "pdmm", members, Precision.of("float64"), facts))


def client_process(address: str, described: Experiment) -> None:
    local, method = halves(described)

    async def run() -> None:
        state, number = CLIENT.init(method.client_options["pdmm"], local, None), 0
        async with grpc.aio.insecure_channel(address, options=dial.OPTIONS) as channel:
            call: Any = channel.stream_stream("/bare.Halves/Join")()
            await call.write(b"here")
            while isinstance(data := await call.read(), bytes):
                number += 1
                task = Aggregates(np.frombuffer(data).reshape(local.n_own, -1))
                state, answers = CLIENT.step(state, Inbox("pdmm", number, {Aggregates: task}), local)
                await call.write(cast(UpdatedModels, answers[0]).x.tobytes())
            await call.done_writing()

    asyncio.run(run())


class _Stream:
    """A federation of one process at the other end of a stream."""

    def __init__(self, context: Any, n_users: int) -> None:
        self._context, self._n_users = context, n_users

    async def exchange(self, *messages: Any, to: Any = None, wanted: Any = ()) -> Replies:
        await self._context.write(messages[0].v.tobytes())
        models = np.frombuffer(await self._context.read()).reshape(self._n_users, -1)
        return Replies({UpdatedModels: UpdatedModels(models)}, None)


async def round_s(described: Experiment, rounds: int) -> float:
    """Seconds for a round, over the second half of them."""
    local, method = halves(described)
    arrived: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def join(_: Any, context: Any) -> None:
        await context.read()
        arrived.set_result(context)
        await over.wait()

    server = grpc.aio.server(options=OPTIONS)
    handler: Any = grpc.stream_stream_rpc_method_handler(cast(Any, join))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Halves", {"Join": handler}),))
    port = server.add_insecure_port(ADDRESS)
    await server.start()
    process = _started(client_process, f"127.0.0.1:{port}", described)
    try:
        federation = _Stream(await asyncio.wait_for(arrived, 60), local.n_own)
        state, started = await method.init(federation), 0.0
        for number in range(1, rounds + 1):
            if number == rounds // 2:
                started = time.perf_counter()
            state, figures = await method.round(state, federation, number)
            dict(figures)  # some are computed when they are looked at
        return (time.perf_counter() - started) / (rounds - rounds // 2 + 1)
    finally:
        over.set()
        await server.stop(2.0)
        await asyncio.to_thread(_ended, [process])
