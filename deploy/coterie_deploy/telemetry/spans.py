"""`--trace`: spans of a run, to an OpenTelemetry collector over OTLP/gRPC.

The libraries read the standard environment variables (OTEL_EXPORTER_OTLP_*, OTEL_BSP_*, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES,
...). A slow or missing collector does not slow the run: spans wait in a bounded queue of another thread. Spans that do not fit, or that are
not delivered at the end, are lost, and one warning says so.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rich.console import Console

from coterie.errors import ConfigError
from coterie.extras import extra
from coterie_deploy.terminal.printable import printable

if TYPE_CHECKING:
    from coterie_server.record.tracing import RunTracer

FLUSH_S = 5.0  # at the end of a run, for what has not been delivered yet
_QUEUE = 1 << 15  # spans; the libraries' own default is for services with fewer at a time
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


@dataclass(frozen=True)
class Telemetry:
    """The endpoint of the spans, and which rounds have spans."""

    endpoint: str | None = None  # None: what the environment says, or http://localhost:4317
    every: int | None = None  # every nth round; None: ever fewer, see `coterie_server.record.tracing`

    @property
    def options(self) -> list[str]:
        """The command-line options of a launched aggregator."""
        endpoint = [] if self.endpoint is None else ["--otlp", self.endpoint]
        every = [] if self.every is None else ["--trace-every", str(self.every)]
        return ["--trace", *endpoint, *every]


def telemetry(trace: bool, otlp: str | None, every: int | None) -> Telemetry | None:
    """What the options `--trace`, `--otlp` and `--trace-every` ask for. ConfigError when it cannot be had."""
    if not trace and otlp is None and every is None:
        return None
    asked = Telemetry(otlp, every)
    for name, value in (("--otlp", otlp), *((name, os.environ.get(name)) for name in _ENDPOINTS)):
        if value:
            parts = urlsplit(value)
            if parts.scheme not in ("http", "https") or not parts.netloc:
                raise ConfigError(f"{name} is {value!r}, want http://HOST:PORT, or https://HOST:PORT for TLS")
            break
    protocol = next((os.environ[name] for name in _PROTOCOLS if os.environ.get(name)), "grpc")
    if protocol != "grpc":
        raise ConfigError(f"{' or '.join(_PROTOCOLS)} is {protocol!r}, want 'grpc': traces go to the gRPC port of a collector, 4317")
    for module in ("opentelemetry.exporter.otlp.proto.grpc.trace_exporter", "coterie_server.record.tracing"):
        with extra("telemetry", "opentelemetry", "traces need opentelemetry-sdk"):
            importlib.import_module(module)
    return asked


@contextlib.contextmanager
def tracing(asked: Telemetry | None, role: str, console: Console) -> Iterator[RunTracer | None]:
    """A tracer while the block runs, or None; at its end, a few seconds are left for delivery. Lost spans give one warning."""
    if asked is None:
        yield None
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 - an extra
    from opentelemetry.sdk.environment_variables import OTEL_BSP_MAX_QUEUE_SIZE  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    from coterie_server.record.tracing import RunTracer  # noqa: PLC0415

    where = asked.endpoint or next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), "http://localhost:4317")

    def say(reason: str) -> None:
        console.print(printable(f"warning: traces do not all arrive at {where}: {reason}"), markup=False, highlight=False, soft_wrap=True)

    with _said_once(say) as listener:
        exporter = OTLPSpanExporter(endpoint=asked.endpoint)
        processor = BatchSpanProcessor(exporter, max_queue_size=None if os.environ.get(OTEL_BSP_MAX_QUEUE_SIZE) else _QUEUE)
        tracer = RunTracer(processor, role, asked.every)
        error: BaseException | None = None
        try:
            yield tracer
        except BaseException as caught:
            error = caught
            raise
        finally:
            tracer.end_run(error)
            delivery = threading.Thread(target=tracer.provider.shutdown, daemon=True)
            delivery.start()
            delivery.join(FLUSH_S)
            listener.is_needed = delivery.is_alive()
            if listener.is_needed:
                listener.note(f"they were not taken in {FLUSH_S:g} s")


class _Listener(logging.Handler):
    """Passes the first warning that the libraries log on."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._say = say
        self._has_said = threading.Lock()
        self.is_needed = False  # after the run too: a delivery that was given up may still warn

    def emit(self, record: logging.LogRecord) -> None:
        self.note(" ".join(record.getMessage().split()))

    def note(self, reason: str) -> None:
        if self._has_said.acquire(blocking=False):
            self._say(reason)


@contextlib.contextmanager
def _said_once(say: Callable[[str], None]) -> Iterator[_Listener]:
    logger, listener = logging.getLogger("opentelemetry"), _Listener(say)
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(listener)
    try:
        yield listener
    finally:
        if not listener.is_needed:
            logger.removeHandler(listener)
            logger.propagate = propagated
