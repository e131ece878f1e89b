"""Traces: the tree of spans of a run, what they say, and that a collector, or none, changes nothing of the run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from rich.console import Console

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.engines.hosts import aggregator_process
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.roles.aggregator import AggregatorRole
from coterie_deploy.telemetry import spans as module
from coterie_deploy.telemetry.spans import Telemetry, telemetry, tracing
from coterie_server.record.tracing import ANSWER, EXCHANGE, ROUND, RUN, STAGE, RunTracer, is_traced
from coterie_server.run.coordinator import Finished
from coterie_server.session.hub import Hub
from tests.commands import commands_in
from tests.two_tier import Tiers, bits, small


def experiment(rounds: int = 3, hosts: int = 2, **more: Any) -> Experiment:
    return experiment_from(
        {
            "name": "traced",
            "seed": 2,
            "data": {"source": "ellipses", "users_per_cluster": 2},
            "problem": {"loss": "squared_hinge", "l2": 1e-3},
            "method": {"name": "pdmm", "penalty": 0.09},
            "references": ["global"],
            "stop": {"rounds": rounds},
            "federation": {"hosts": hosts},
            **more,
        }
    )


def traced(described: Experiment, every: int | None = None, **how: Any) -> tuple[Finished, Sequence[ReadableSpan]]:
    """A run in this process, and its spans in the order in which they began."""
    exporter = InMemorySpanExporter()
    tracer = RunTracer(SimpleSpanProcessor(exporter), "coordinator", every)
    error: BaseException | None = None
    try:
        finished = asyncio.run(launch(described, Launch("loopback", tracer=tracer, **how)))
    except BaseException as caught:
        error = caught
        raise
    finally:
        tracer.end_run(error)
        spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
        SPANS[:] = spans
    return finished, spans


@pytest.fixture(autouse=True)
def nobody_listens_yet() -> None:
    """A delivery that was given up in an earlier test is listened to for as long as the process lives."""
    logger = logging.getLogger("opentelemetry")
    logger.handlers.clear()
    logger.propagate = True


SPANS: list[ReadableSpan] = []  # of the latest run, also of one that failed


def rows_of(finished: Finished) -> list[Any]:
    finished.database.flush()
    return finished.database.connection.execute("SELECT * FROM ledger").fetchall()


def of(span: ReadableSpan, key: str) -> Any:
    return (span.attributes or {})[f"coterie.{key}"]


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def test_a_run_is_stages_rounds_exchanges_and_the_answers_of_its_hosts() -> None:
    finished, spans = traced(experiment())
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    assert len(by_id) == len(spans)
    above = {ANSWER: {EXCHANGE}, EXCHANGE: {ROUND, STAGE, RUN}, ROUND: {STAGE}, STAGE: {RUN}}
    for span in spans:
        parent = parent_of(span)
        assert (parent is None) == (span.name == RUN)
        if parent is not None:
            assert by_id[parent].name in above[span.name]
            assert by_id[parent].start_time <= span.start_time <= span.end_time <= by_id[parent].end_time  # type: ignore[operator]
    (run,) = [span for span in spans if span.name == RUN]
    assert run.attributes == {
        "coterie.run_id": finished.run_id,
        "coterie.attempt": 1,
        "coterie.experiment": "traced",
        "coterie.method": "pdmm",
    }
    assert [(of(span, "stage"), of(span, "method")) for span in spans if span.name == STAGE] == [("global", "global"), ("pdmm", "pdmm")]
    rounds = [of(span, "round") for span in spans if span.name == ROUND and of(span, "stage") == "pdmm"]
    assert rounds == [1, 2, 3]
    exchanges = [span for span in spans if span.name == EXCHANGE]
    assert [of(span, "seq") for span in exchanges] == list(range(1, len(exchanges) + 1))
    assert {of(span, "members_asked") for span in exchanges} == {2}
    last = next(span for span in reversed(exchanges) if of(span, "round") == 3)
    assert (of(last, "stage"), of(last, "attempt")) == ("pdmm", 1)
    assert "S7+S10" in {of(span, "step").partition(", ")[0] for span in exchanges if of(span, "round") == 2}


def test_an_answer_names_its_member_and_has_the_bytes_of_the_ledger() -> None:
    finished, spans = traced(experiment())
    answers = [span for span in spans if span.name == ANSWER]
    booked: dict[tuple[int, str, str], int] = {}
    finished.database.flush()
    query = "SELECT seq, link, direction, SUM(message_bytes + 5 * frames) FROM ledger WHERE seq > 0 GROUP BY 1, 2, 3"
    for seq, link, direction, n_bytes in finished.database.connection.execute(query):
        booked[seq, link, direction] = n_bytes
    assert {(of(span, "seq"), of(span, "member")) for span in answers} == {key[:2] for key in booked}
    for span in answers:
        seq, member = of(span, "seq"), of(span, "member")
        assert (of(span, "bytes_down"), of(span, "bytes_up")) == (booked[seq, member, "down"], booked[seq, member, "up"])
        assert span.kind is SpanKind.CLIENT
        assert "coterie.left_out" not in (span.attributes or {})
        assert {f"coterie.{key}" for key in ("stage", "round", "step", "attempt")} <= set(span.attributes or {})


def test_bits_and_bytes_are_the_same_with_and_without_traces() -> None:
    with_traces, _ = traced(experiment())
    without = asyncio.run(launch(experiment(), Launch("loopback")))
    assert bits(with_traces) == bits(without)
    assert rows_of(with_traces) == rows_of(without)


def test_what_fails_a_run_stands_in_the_spans_that_were_open() -> None:
    def fail(progress: Any) -> None:
        if (progress.number, progress.round) == (1, 2):
            raise RunError("enough")

    with pytest.raises(RunError, match="enough"):
        traced(experiment(), observer=fail)
    wrong = {span.name for span in SPANS if span.status.status_code is StatusCode.ERROR}
    assert wrong == {RUN, STAGE, ROUND}
    run = next(span for span in SPANS if span.name == RUN)
    assert (run.status.description, (run.attributes or {})["error.type"]) == ("enough", "RunError")


def test_a_member_that_is_left_out_is_said_to_be_and_one_that_is_asked_again_too() -> None:
    exporter = InMemorySpanExporter()
    tracer = RunTracer(SimpleSpanProcessor(exporter), "coordinator")
    tracer.begin_run("r", 1, "e", "m")
    tracer.enter("s", "m", 1, is_round=True)
    with contextlib.suppress(RunError), tracer.exchange(7, 1, []):
        tracer.sent("a", 7, [])
        tracer.sent("a", 7, [])
        tracer.sent("b", 6, [])
        raise RunError("gone")
    tracer.sent("a", 7, [])
    tracer.answered("a", [])
    answer, exchange = exporter.get_finished_spans()
    assert (of(answer, "member"), of(answer, "left_out"), [event.name for event in answer.events]) == ("a", True, ["coterie.sent_again"])
    assert {answer.status.description, exchange.status.description} == {"gone"}
    assert of(exchange, "members_asked") == 1


def test_of_many_rounds_ever_fewer_are_traced() -> None:
    chosen = [number for number in range(1, 12_001) if is_traced(number)]
    assert chosen[:101] == [*range(1, 101), 110]
    assert (len(chosen), chosen[-3:]) == (282, [10_000, 11_000, 12_000])
    assert [number for number in chosen if 900 < number <= 1300] == [*range(910, 1001, 10), 1100, 1200, 1300]
    assert [number for number in range(1, 8) if is_traced(number, 3)] == [3, 6]


def test_rounds_that_are_not_traced_have_no_spans() -> None:
    _, spans = traced(experiment(rounds=5), every=2)
    assert [of(span, "round") for span in spans if span.name == ROUND and of(span, "stage") == "pdmm"] == [2, 4]
    assert {of(span, "round") for span in spans if span.name in (EXCHANGE, ANSWER) and of(span, "stage") == "pdmm"} == {2, 4, 5}


def test_a_run_that_is_not_traced_imports_nothing_for_it(tmp_path: Path) -> None:
    code = (
        "import sys; from coterie import run; import coterie_deploy.cli.app, coterie_deploy.roles.server\n"
        "import coterie_deploy.roles.aggregator, coterie_deploy.engines.local\n"
        "run({'name': 'x', 'data': {'source': 'ellipses', 'users_per_cluster': 1}, 'method': {'name': 'local'}, "
        "'problem': {'loss': 'squared_hinge', 'l2': 1e-3}})\n"
        "print(*sorted({m for m in sys.modules if m.startswith('opentelemetry') or m == 'coterie_server.record.tracing'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True, cwd=tmp_path)
    assert done.stdout.strip() == ""


# ---- collectors


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP collector that keeps what it gets; with `silent` it never answers."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, trace_pb2.Span]] = []  # with the service's name
        self.headers: list[Any] = []
        self.silent: threading.Event | None = None
        self.url = ""

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802 - gRPC's name
        if self.silent is not None:
            self.silent.wait(30)
        self.headers += context.invocation_metadata()
        for resource in request.resource_spans:
            attributes = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
            self.spans += [(attributes["service.name"], span) for scope in resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def wait_for_deliveries() -> None:
    """One that was given up goes on for a while, and its complaints would be heard in the next test."""
    for thread in threading.enumerate():
        if "shutdown" in thread.name or "Otel" in thread.name:
            thread.join(20)
            assert not thread.is_alive(), thread.name


@pytest.fixture
def collector() -> Iterator[Collector]:
    servicer = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(servicer, server)
    servicer.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield servicer
    finally:
        if servicer.silent is not None:
            servicer.silent.set()
        wait_for_deliveries()
        server.stop(None).wait(10)


def run_with(asked: Telemetry) -> tuple[Finished, str, float]:
    """The run, what was said on the console, and the seconds that it took."""
    out = io.StringIO()
    start = time.monotonic()
    with tracing(asked, "coordinator", Console(file=out, width=40)) as tracer:
        finished = asyncio.run(launch(experiment(), Launch("loopback", tracer=tracer)))
    return finished, out.getvalue(), time.monotonic() - start


def text(span: trace_pb2.Span, key: str) -> str:
    return next(pair.value.string_value for pair in span.attributes if pair.key == f"coterie.{key}")


def test_a_collector_gets_every_span(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=let-me-in")
    finished, said, _ = run_with(Telemetry(collector.url))
    _, spans = traced(experiment())
    assert said == ""
    assert sorted(span.name for _, span in collector.spans) == sorted(span.name for span in spans)
    assert {name for name, _ in collector.spans} == {"coterie-coordinator"}
    assert len({span.trace_id for _, span in collector.spans}) == 1
    run = next(span for _, span in collector.spans if span.name == RUN)
    assert (text(run, "run_id"), run.parent_span_id) == (finished.run_id, b"")
    assert ("authorization", "let-me-in") in [tuple(pair) for pair in collector.headers]


def test_the_standard_variables_say_where_the_collector_is_and_who_speaks(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    run_with(Telemetry())
    assert {name for name, _ in collector.spans} == {"mine"}


def test_a_collector_that_is_not_there_costs_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")  # seconds that the library tries again for, ten if nothing is said
    finished, said, seconds = run_with(Telemetry("http://127.0.0.1:1"))
    assert bits(finished) == bits(asyncio.run(launch(experiment(), Launch("loopback"))))
    assert said.count("\n") == 1
    assert said.startswith("warning: traces do not all arrive at http://127.0.0.1:1: ")
    assert seconds < 5
    wait_for_deliveries()


def test_a_collector_that_never_answers_is_given_up(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.3)
    collector.silent = threading.Event()
    _, said, seconds = run_with(Telemetry(collector.url))
    assert said == f"warning: traces do not all arrive at {collector.url}: they were not taken in 0.3 s\n"
    assert seconds < 5
    logging.getLogger("opentelemetry.exporter").error("a complaint that comes late")
    assert "late" not in caplog.text


def test_spans_for_which_there_is_no_place_are_lost_and_that_is_said(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.3)
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "4")
    collector.silent = threading.Event()
    _, said, _ = run_with(Telemetry(collector.url))
    assert said == f"warning: traces do not all arrive at {collector.url}: Queue full, dropping Span.\n"


# ---- options


def test_no_option_asks_for_nothing_and_each_of_them_for_traces() -> None:
    assert telemetry(trace=False, otlp=None, every=None) is None
    assert telemetry(trace=True, otlp=None, every=None) == Telemetry()
    assert telemetry(trace=False, otlp="http://c:4317", every=None) == Telemetry("http://c:4317")
    assert telemetry(trace=False, otlp=None, every=5) == Telemetry(every=5)


def test_what_cannot_be_had_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--otlp is 'collector:4317', want http://HOST:PORT, or https://HOST:PORT for TLS"):
        telemetry(trace=True, otlp="collector:4317", every=None)
    wrong = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": ("somewhere", "OTEL_EXPORTER_OTLP_ENDPOINT is 'somewhere', want http://HOST:PORT"),
        "OTEL_EXPORTER_OTLP_PROTOCOL": ("http/protobuf", "OTEL_EXPORTER_OTLP_PROTOCOL is 'http/protobuf', want 'grpc'"),
    }
    for name, (value, sentence) in wrong.items():
        monkeypatch.setenv(name, value)
        with pytest.raises(ConfigError, match=sentence):
            telemetry(trace=True, otlp=None, every=None)
        monkeypatch.delenv(name)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"traces need opentelemetry-sdk, .* pip install 'coterie\[telemetry\]'"):
        telemetry(trace=True, otlp=None, every=None)


def test_launched_aggregators_are_traced_too(tmp_path: Path) -> None:
    process = aggregator_process("c0", [], tmp_path, Telemetry("http://c:4317", 5))
    assert process.command(1)[-5:] == ["--trace", "--otlp", "http://c:4317", "--trace-every", "5"]
    assert "--trace" not in aggregator_process("c0", [], tmp_path).command(1)


# ---- two tiers


class TracedTiers(Tiers):
    """Each aggregator, and the coordinator, sends its spans to a collector."""

    url = ""

    def role(self, cluster: str, **changes: Any) -> AggregatorRole:
        return super().role(cluster, telemetry=Telemetry(self.url), **changes)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        with tracing(Telemetry(self.url), "coordinator", Console()) as tracer:
            assert tracer is not None
            hub.state.tracer = tracer
            tracer.begin_run(hub.run_id, hub.state.attempt, "tiers", "async_l2gd")
            async with super().connect(hub):
                yield


def test_the_exchanges_of_aggregators_stand_below_those_of_the_coordinator(tmp_path: Path, collector: Collector) -> None:
    tiers = TracedTiers(small({"name": "async_l2gd", "iterations": 8, "gamma": 1.0, "alpha": 0.4}), tmp_path)
    tiers.url = collector.url
    tiers.run()
    spans = {span.span_id: (service, span) for service, span in collector.spans}
    assert len(spans) == len(collector.spans)
    assert len({span.trace_id for _, span in collector.spans}) == 1
    below = [span for service, span in collector.spans if service == "coterie-aggregator" and span.name == EXCHANGE]
    assert {text(span, "stage") for span in below} >= {"", "async_l2gd"}
    for span in below:
        service, parent = spans[span.parent_span_id]
        assert (service, parent.name, text(parent, "stage")) == ("coterie-coordinator", ANSWER, text(span, "stage"))
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano <= parent.end_time_unix_nano
    members = {text(span, "member") for service, span in collector.spans if service == "coterie-aggregator" and span.name == ANSWER}
    assert members == {f"{cluster}-0" for cluster in tiers.clusters}


@pytest.mark.slow
def test_a_run_in_processes_is_one_trace(tmp_path: Path, collector: Collector) -> None:
    with commands_in(tmp_path) as command:
        code, _, err = command("run", "schools", "--set", "method.iterations=200", "--otlp", collector.url, "--quiet").end()
    assert (code, err) == (0, "")
    assert {name for name, _ in collector.spans} == {"coterie-coordinator", "coterie-aggregator"}
    assert len({span.trace_id for _, span in collector.spans}) == 1
    ids = {span.span_id for _, span in collector.spans}
    assert {span.parent_span_id for _, span in collector.spans} <= ids | {b""}
