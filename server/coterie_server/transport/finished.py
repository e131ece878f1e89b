"""The server of a run that has finished before: it tells members who dial, so that they end as well."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from coterie.session.dial import to_the_end
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie_server.session.refusal import MAX_REASON_CHARS, short_name
from coterie_server.transport.grpc_link import Context
from coterie_server.transport.host_session import not_named
from coterie_server.transport.serve import OPTIONS, STOP_GRACE_S, bound, handlers

_MOST_AT_ONCE = 1000  # calls, and members that are remembered


@dataclass
class Telling:
    """A server that tells the outcome of a run. `told` are the names of those who know."""

    port: int = 0
    told: set[str] = field(default_factory=set)


@contextlib.asynccontextmanager
async def telling(run_id: str, outcome: str, address: str, tls: Tls | None) -> AsyncIterator[Telling]:
    """Tells at HOST:PORT while the block runs. ConfigError when the server cannot listen there."""
    found, answer = Telling(), session_pb2.GetExperimentResponse(run_id=run_id, outcome=outcome)

    async def get_experiment(request: session_pb2.GetExperimentRequest, context: Any) -> session_pb2.GetExperimentResponse:
        if tls is not None and (why := not_named(context, request.host)) is not None:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why[:MAX_REASON_CHARS])
        if len(found.told) < _MOST_AT_ONCE:
            found.told.add(short_name(request.host))
        return answer

    async def join(_: Any, context: Context) -> None:
        """A member that was in the run before: it asks again what the run is about."""
        await context.abort(grpc.StatusCode.UNAVAILABLE, outcome)

    server = grpc.aio.server(options=OPTIONS, maximum_concurrent_rpcs=_MOST_AT_ONCE)
    server.add_generic_rpc_handlers((handlers(get_experiment, join),))
    try:
        found.port = bound(server, address, tls)
        await server.start()
        yield found
    finally:
        await to_the_end(server.stop(STOP_GRACE_S))
