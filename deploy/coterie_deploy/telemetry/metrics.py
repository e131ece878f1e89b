"""The Prometheus metrics of a coordinator or an aggregator, and the HTTP(S) server for them.

Each scrape reads what is new in the run database, and the state of the hub. So rounds between scrapes cost nothing. No label names a user
or a host: there are as many series as steps, directions and scopes, kinds of events, and figures of a method.

`prometheus_client` answers requests. This module adds /healthz, the check of the certificate's role, timeouts and a limit of threads,
and the time of the last scrape.
"""

import contextlib
import json
import platform
import socketserver
import sqlite3
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, MetricsHandler, ProcessCollector
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from coterie import __version__
from coterie.errors import CoterieError
from coterie.session.tls import MONITOR, identity_of
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_deploy.telemetry.logs import LEVELS
from coterie_server.record.query import Amounts
from coterie_server.record.rundb import PEERS_FILE, open_run
from coterie_server.record.tally import Key, Tally
from coterie_server.session.hub import Hub

_MEASURES = {
    "vectors": "Models sent; one to all counts once",
    "scalars": "Numbers sent; those to all count once",
    "payload_bytes": "Bytes of the numbers sent",
    "message_bytes": "Bytes of protobuf messages",
    "wire_bytes": "Bytes of messages with the header of each gRPC frame",
    "frames": "gRPC frames",
}
_REPEATED = "sent again, too late or in rounds made again: no progress"


@dataclass(frozen=True)
class Subject:
    """A hub whose metrics are served. `folder` has its run database."""

    hub: Hub
    folder: Path
    role: Literal["coordinator", "aggregator"]
    name: str  # of the experiment, or the aggregator's


@dataclass(frozen=True)
class _Latest:
    attempt: int
    status: str
    stage: str
    made_at: float | None  # seconds since the epoch


class RunCollector(Collector):
    """The metrics of one run. `collect` raises sqlite3.Error where its database cannot be read."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._tally = Tally(of_aggregator=subject.role == "aggregator")
        self._among_peers = Tally(of_aggregator=True)  # of links to other aggregators
        self._has_peers = (subject.folder / PEERS_FILE).is_file()
        self._lock = threading.Lock()
        with self._reading() as connection:
            self._tally.begin(connection)

    @contextlib.contextmanager
    def _reading(self, name: str = "run.db") -> Iterator[sqlite3.Connection]:
        """The database at one moment. It is not kept open: a run that ends puts it into one file, unless a reader is there."""
        with contextlib.closing(open_run(self._subject.folder, name)) as connection:
            connection.execute("BEGIN")
            yield connection

    def collect(self) -> Iterator[Metric]:
        with self._lock, self._reading() as connection:
            self._tally.read(connection)
            if self._has_peers:
                with self._reading(PEERS_FILE) as of_peers:
                    self._among_peers.read(of_peers)
            latest = _latest(connection)
            families = [*self._of_run(latest), *self._of_progress(latest)]
            sent, repeated = self._tally.sent | self._among_peers.sent, self._tally.repeated | self._among_peers.repeated
            for measure, text in _MEASURES.items():
                families.append(_by_step("coterie", measure, f"{text}, useful or not.", sent))
                families.append(_by_step("coterie_repeated", measure, f"{text}, {_REPEATED}.", repeated))
        yield from families

    def _of_run(self, latest: _Latest) -> Iterator[Metric]:
        hub, subject = self._subject.hub, self._subject
        hosts = list(hub.roster.hosts.values())
        facts = {"version": __version__, "protocol": str(PROTOCOL_VERSION), "python": platform.python_version()}
        yield InfoMetricFamily("coterie_build", "Versions of the program.", facts)
        identity = {"run": hub.run_id, "name": subject.name, "role": subject.role, "cluster": hub.cluster or ""}
        yield InfoMetricFamily("coterie_run", "Which run it is.", identity)
        status = GaugeMetricFamily("coterie_run_status", "How it is: 1 for one of these; a coordinator knows.", labels=("status",))
        for one in ("running", "finished", "failed") if latest.status else ():
            status.add_metric((one,), one == latest.status)
        yield status
        yield GaugeMetricFamily("coterie_attempt", "How often the run was started or resumed here.", latest.attempt)
        yield GaugeMetricFamily("coterie_members_expected", "Hosts or aggregators that join here.", hub.rules.hosts)
        yield GaugeMetricFamily("coterie_members_present", "Those that are connected.", sum(host.link is not None for host in hosts))
        yield GaugeMetricFamily("coterie_users", "Users for whom they speak.", sum(len(host.users) for host in hosts))

    def _of_progress(self, latest: _Latest) -> Iterator[Metric]:
        hub = self._subject.hub
        told = str(json.loads(hub.state.stage_json)["stage"]) if hub.state.stage_json else ""  # an aggregator has no table of stages
        yield InfoMetricFamily("coterie_stage", "The stage under way.", {"stage": latest.stage or told})
        yield GaugeMetricFamily("coterie_stage_number", "Its number, from 0.", hub.state.stage)
        yield GaugeMetricFamily("coterie_round", "The round under way; 0 while a stage starts.", hub.state.round)
        yield CounterMetricFamily("coterie_rounds", "Rounds made by this process, those made again too.", self._tally.rounds)
        yield GaugeMetricFamily("coterie_exchange", "The exchange under way, counted through the whole run.", hub.seq)
        if latest.made_at is not None:
            yield GaugeMetricFamily("coterie_latest_round_timestamp_seconds", "When the last round was over.", latest.made_at)
        objective = GaugeMetricFamily("coterie_objective", "The objective of the stage, as a round gave it last.", labels=("stage",))
        others = GaugeMetricFamily("coterie_figure", "The method's other figures.", labels=("stage", "name"))
        for name, value in self._tally.figures.items():
            family, labels = (objective, ()) if name == "objective" else (others, (name,))
            family.add_metric((latest.stage, *labels), value)
        yield from (objective, others)
        events = CounterMetricFamily("coterie_events", "Events of the run.", labels=("kind",))
        for kind in sorted({*LEVELS, *self._tally.events}):  # those that have not happened too, so that the first time is an increase
            events.add_metric((kind,), self._tally.events.get(kind, 0))
        yield events


def registry_of(subject: Subject) -> CollectorRegistry:
    """The run's metrics and the process's."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(RunCollector(subject))
    return registry


def _by_step(prefix: str, measure: str, text: str, totals: dict[Key, Amounts]) -> Metric:
    family = CounterMetricFamily(f"{prefix}_{measure}", text, labels=("step", "direction", "scope"))
    for key, amounts in sorted(totals.items()):
        family.add_metric(key, getattr(amounts, measure))
    return family


def _latest(connection: sqlite3.Connection) -> _Latest:
    facts = dict(connection.execute("SELECT key, value FROM run WHERE key IN ('attempt', 'status')"))
    (stage,) = connection.execute("SELECT name FROM stages ORDER BY number DESC LIMIT 1").fetchone() or ("",)
    made = connection.execute("SELECT at FROM rounds ORDER BY stage DESC, round DESC LIMIT 1").fetchone()
    status = facts.get("status", "").partition(":")[0]  # the reason of a failure would be a series of its own
    return _Latest(int(facts.get("attempt", 0)), status, stage, None if made is None else made[0])


_MAX_THREADS = 64  # of the whole process
_TIMEOUT_S = 10.0  # for a handshake, a request, and writing an answer


class Server(socketserver.ThreadingTCPServer):
    """A thread for each connection."""

    allow_reuse_address = True
    daemon_threads = True  # the end does not wait for idle connections

    def __init__(
        self, family: int, place: Any, registry: CollectorRegistry, is_serving: Callable[[], bool], context: ssl.SSLContext | None
    ) -> None:
        self.address_family = family
        self.registry, self.is_serving = registry, is_serving
        self.looked_from = 0.0  # when the last scrape began; 0 before the first
        self.looked_every_s = 0.0  # time from the scrape before; 0 before the second
        self._context = context
        super().__init__(place, _Handler)

    def looked(self, since: float) -> None:
        """Notes a scrape that began at that moment."""
        self.looked_every_s = abs(since - self.looked_from) if self.looked_from else 0.0
        self.looked_from = max(since, self.looked_from)

    def get_request(self) -> tuple[Any, Any]:
        """A connection, whose handshake is made in its own thread."""
        request, address = super().get_request()
        request.settimeout(_TIMEOUT_S)
        if self._context is not None:
            request = self._context.wrap_socket(request, server_side=True, do_handshake_on_connect=False)
        return request, address

    def verify_request(self, request: Any, client_address: Any) -> bool:  # noqa: ARG002 - their names
        return threading.active_count() < _MAX_THREADS

    def finish_request(self, request: Any, client_address: Any) -> None:
        if self._context is not None:
            request.do_handshake()
            names: Any = (request.getpeercert() or {}).get("subjectAltName", ())
            identity = identity_of(value for kind, value in names if kind == "URI")
            if identity is None or identity.role not in (MONITOR, "coordinator"):
                return
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Bad requests and lost connections are not reported to anybody."""


class _Handler(MetricsHandler):
    server: Server

    @property
    def registry(self) -> CollectorRegistry:  # type: ignore[override]
        return self.server.registry

    def do_GET(self) -> None:  # noqa: N802 - their name
        path, since = urlsplit(self.path).path, time.monotonic()
        if path == "/healthz":
            is_serving = self.server.is_serving()
            self._say(*((HTTPStatus.OK, "SERVING") if is_serving else (HTTPStatus.SERVICE_UNAVAILABLE, "NOT_SERVING")))
        elif path != "/metrics":
            self._say(HTTPStatus.NOT_FOUND, "want /metrics or /healthz")
        else:
            try:
                super().do_GET()
            except (sqlite3.Error, CoterieError) as error:
                self._say(HTTPStatus.SERVICE_UNAVAILABLE, f"the run database cannot be read: {error}")
            else:
                self.server.looked(since)

    def _say(self, status: HTTPStatus, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.end_headers()
        self.wfile.write(f"{text}\n".encode())

    def version_string(self) -> str:
        """No version, which would help attackers to find old servers."""
        return "coterie"
