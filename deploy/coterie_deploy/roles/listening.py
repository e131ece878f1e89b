"""A server of a run at its address: the port, the metrics, and what its log says of both. For coordinators and aggregators."""

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import grpc

from coterie.experiment.config import Experiment, experiment_to_json
from coterie.record.files import written_whole
from coterie.session.tls import Tls
from coterie.session.where import ADDRESS
from coterie.text.addresses import host_and_port, with_port
from coterie_deploy.roles.health import beating
from coterie_deploy.telemetry.logs import Log, LogLevel
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_deploy.terminal.signals import Stop
from coterie_server.run.coordinator import FINISHED
from coterie_server.session.hub import Hub
from coterie_server.transport.finished import telling
from coterie_server.transport.serve import check_address, plain_text, serving

TELL_S = 30.0  # of a server whose run has finished before, for members that are started with it
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True)
class Listening:
    """Who listens where."""

    role: Literal["coordinator", "aggregator"]
    name: str  # for its metrics
    who: str  # in words, and what it expects
    expects: str
    folder: Path
    address: str  # HOST:PORT
    tls: Tls | None
    insecure: bool
    metrics: str | None  # HOST:PORT
    says: Path  # the folder in which the address file says where it is
    announce: str | None = None  # the name in that file; None: the host of `address`, or this machine's name

    def found_at(self, port: int) -> str:
        """HOST:PORT as others dial it."""
        host, _ = host_and_port(self.address, least_port=0)
        with contextlib.suppress(ValueError):
            if ipaddress.ip_address(host).is_unspecified:
                host = socket.gethostname()
        return with_port(self.announce or host, port)


@contextlib.asynccontextmanager
async def listening(
    hub: Hub, experiment: Experiment, at: Listening, log: Log, stop: Stop, more: Sequence[grpc.GenericRpcHandler] = ()
) -> AsyncIterator[int]:
    """Serves the hub, and `more` rpcs, while the block runs: its port. The address file is there meanwhile, and no older one before."""
    _remove(at.says / ADDRESS)
    metrics = None if at.metrics is None else Metrics(at.metrics, at.tls, at.insecure, stop)
    async with (
        metrics_served(metrics, hub, at.folder, at.role, at.name) as url,
        serving(hub, experiment_to_json(experiment), at.address, at.tls, insecure=at.insecure, more=more) as server,
        beating(),
    ):
        if at.insecure and at.tls is None:
            log.say("insecure", f"warning: {plain_text(at.address)}", LogLevel.warning)
        if url is not None:
            log.say("metrics", f"metrics are at {url}", url=url)
        place = with_port(host_and_port(at.address, least_port=0)[0], server.port)
        log.say("listen", f"{at.who} listens on {place} for {at.expects}", address=place)
        with _said(at, server.port, hub.run_id):
            yield server.port


async def tell_of_the_end(run_id: str, n_members: int, at: Listening, log: Log, stop: Stop) -> None:
    """Tells members who dial that the run has finished before: until so many know it, at most `TELL_S`, and until asked to stop."""
    check_address(at.address, is_secure=at.insecure or at.tls is not None)
    async with telling(run_id, FINISHED, at.address, at.tls) as found, beating():
        log.say("finished", f"{at.who} has finished before; for {TELL_S:g} s at most {at.expects} can ask", run=run_id)
        with _said(at, found.port, run_id), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                while len(found.told) < n_members and not stop.is_set():
                    await asyncio.sleep(_LOOK_EVERY_S)


@contextlib.contextmanager
def _said(at: Listening, port: int, run_id: str) -> Iterator[None]:
    """The address file is there while the block runs."""
    file = at.says / ADDRESS
    with written_whole(file, "the address file") as written:
        written.write(f"{at.found_at(port)}\n{run_id}\n".encode())
    try:
        yield
    finally:
        _remove(file)


def _remove(file: Path) -> None:
    """A file that stays names an address where nobody listens, which those who read it find out."""
    with contextlib.suppress(OSError):
        file.unlink(missing_ok=True)
