"""Traces of a run for OpenTelemetry: run > stage > round > exchange > the answer of each member, from its task to its reply.

Ids are computed from the run's id. So all attempts of a run are one trace, and the exchanges of an aggregator are below the coordinator's
exchange with it, though no id travels between the two. Of the first 100 rounds of a stage all are traced, then each tenth up to 1,000, each
hundredth up to 10,000, and so on; or every nth round when asked for.

This module, and with it OpenTelemetry, is imported only when a run is to be traced. The span processor decides where spans go.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence
from os import environ

from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import NonRecordingSpan, Span, SpanContext, SpanKind, Status, StatusCode, TraceFlags, set_span_in_context

from coterie import __version__
from coterie.errors import CoterieError
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES, Entry
from coterie.wire.messages import Message

RUN, STAGE, ROUND, EXCHANGE, ANSWER = "coterie.run", "coterie.stage", "coterie.round", "coterie.exchange", "coterie.answer"  # spans
_ALL_OF_THE_FIRST = 100  # rounds of a stage


class _Ids(RandomIdGenerator):
    """Ids of spans that another process must know are computed, all others are random."""

    trace = 0  # the run's
    next_span = 0  # the id of the span that is started next, 0 for any

    def generate_trace_id(self) -> int:
        return self.trace

    def generate_span_id(self) -> int:
        chosen, self.next_span = self.next_span, 0
        return chosen or super().generate_span_id()


def is_traced(round_number: int, every: int | None = None) -> bool:
    """Whether a round of a stage, from 1, is one of those that are traced."""
    if every is not None:
        return round_number % every == 0
    return round_number <= _ALL_OF_THE_FIRST or round_number % 10 ** (len(str(round_number - 1)) - 2) == 0


class RunTracer:
    """Makes spans from the calls of a hub and its engine. Starting and ending spans is its whole cost for the run."""

    def __init__(self, processor: SpanProcessor, role: str, every: int | None = None) -> None:
        self._ids, self._every = _Ids(), every
        attributes = {SERVICE_VERSION: __version__}
        if not environ.get("OTEL_SERVICE_NAME"):
            attributes[SERVICE_NAME] = f"coterie-{role}"
        self.provider = TracerProvider(resource=Resource.create(attributes), id_generator=self._ids, shutdown_on_exit=False)
        self.provider.add_span_processor(processor)
        self._tracer = self.provider.get_tracer("coterie", __version__)
        self._run: Span | None = None
        self._stage: Span | None = None
        self._round: Span | None = None
        self._exchange: Span | None = None
        self._parent: Span | None = None  # of the next exchange; None: it is not traced
        self._answers: dict[str, Span] = {}  # of members that have yet to answer
        self._run_id = self._stage_name = self._step = ""  # the step is that of the exchange under way
        self._number = self._attempt = self._n_asked = 0  # the number is that of the round
        self._seq = 0  # of the exchange under way, 0 for none

    def begin_run(self, run_id: str, attempt: int, experiment: str, method: str) -> None:
        """A coordinator has begun an attempt at a run."""
        self.belong_to(run_id)
        about: dict[str, str | int] = {"run_id": run_id, "attempt": attempt, "experiment": experiment, "method": method}
        self._run = self._parent = self._started(RUN, None, {f"coterie.{name}": value for name, value in about.items()})

    def belong_to(self, run_id: str) -> None:
        """The trace is that of this run."""
        self._run_id, self._ids.trace = run_id, _number_of(16, "run", run_id)

    def end_run(self, error: BaseException | None) -> None:
        """Ends all spans that are open."""
        self._end_stage(error)
        _end(self._run, error)
        self._run = self._parent = None

    def enter(self, stage: str, method: str, round_number: int, *, is_round: bool) -> None:
        """A round begins; without `is_round`, the work of a stage before its first round or after its last."""
        _end(self._round)
        self._round = None
        if stage != self._stage_name:
            self._end_stage()
            self._stage_name = stage
            self._stage = self._started(STAGE, self._run, {"coterie.stage": stage, "coterie.method": method})
        self._number, self._parent = round_number, self._stage
        if is_round:
            if is_traced(round_number, self._every):
                self._round = self._started(ROUND, self._stage, {"coterie.stage": stage, "coterie.round": round_number})
            self._parent = self._round

    def _end_stage(self, error: BaseException | None = None) -> None:
        _end(self._round, error)
        _end(self._stage, error)
        self._stage, self._stage_name, self._round = None, "", None

    def task(self, aggregator: str, seq: int, attempt: int, stage: str, round_number: int) -> None:
        """An aggregator begins a task: the parent of its exchanges is the coordinator's span for its answer."""
        self._stage_name, self._number, self._parent = stage, round_number, None
        if not round_number or is_traced(round_number, self._every):
            is_sampled = self.provider.sampler.should_sample(None, self._ids.trace, RUN).decision is Decision.RECORD_AND_SAMPLE
            flags = TraceFlags(TraceFlags.SAMPLED if is_sampled else TraceFlags.DEFAULT)
            above = _number_of(8, "answer", self._run_id, attempt, seq, aggregator)
            self._parent = NonRecordingSpan(SpanContext(self._ids.trace, above, is_remote=True, trace_flags=flags))

    @contextlib.contextmanager
    def exchange(self, seq: int, attempt: int, messages: Sequence[Message]) -> Iterator[None]:
        """While an exchange goes on."""
        if self._parent is None:
            yield
            return
        self._seq, self._attempt, self._n_asked = seq, attempt, 0
        self._step = ", ".join(dict.fromkeys(message.step for message in messages))
        self._exchange = self._started(EXCHANGE, self._parent, self._where())
        error = None
        try:
            yield
        except BaseException as caught:
            error = caught
            raise
        finally:
            for span in self._answers.values():  # of members that the exchange went on without, or that failed it
                span.set_attribute("coterie.left_out", True)
                _end(span, error)
            self._answers.clear()
            self._exchange.set_attribute("coterie.members_asked", self._n_asked)
            _end(self._exchange, error)
            self._exchange, self._seq = None, 0

    def sent(self, member: str, seq: int, entries: Sequence[Entry]) -> None:
        """A task has been sent to a member, perhaps again."""
        if self._exchange is None or seq != self._seq:
            return
        if member in self._answers:
            self._answers[member].add_event("coterie.sent_again", {"coterie.bytes_down": wire_bytes(entries)})
            return
        self._n_asked += 1
        self._ids.next_span = _number_of(8, "answer", self._run_id, self._attempt, seq, member)
        attributes = {**self._where(), "coterie.member": member, "coterie.bytes_down": wire_bytes(entries)}
        self._answers[member] = self._started(ANSWER, self._exchange, attributes, SpanKind.CLIENT)

    def answered(self, member: str, entries: Sequence[Entry]) -> None:
        """A member has given the answer that is waited for."""
        span = self._answers.pop(member, None)
        if span is not None:
            span.set_attribute("coterie.bytes_up", wire_bytes(entries))
            span.end()

    def _where(self) -> dict[str, str | int]:
        at: dict[str, str | int] = {"stage": self._stage_name, "round": self._number, "step": self._step, "seq": self._seq}
        return {f"coterie.{name}": value for name, value in {**at, "attempt": self._attempt}.items()}

    def _started(self, name: str, parent: Span | None, attributes: dict[str, str | int], kind: SpanKind = SpanKind.INTERNAL) -> Span:
        context = None if parent is None else set_span_in_context(parent)
        return self._tracer.start_span(name, context, kind=kind, attributes=attributes)


def wire_bytes(entries: Sequence[Entry]) -> int:
    """The bytes of one message on the wire, as the ledger counts them."""
    return sum(entry.message_bytes + GRPC_FRAME_HEADER_BYTES * entry.frames for entry in entries)


def _number_of(n_bytes: int, *words: str | int) -> int:
    """An id, not 0, computed from these words."""
    digest = hashlib.sha256("\n".join(["coterie", *map(str, words)]).encode()).digest()
    return int.from_bytes(digest[:n_bytes], "big") or 1


def _end(span: Span | None, error: BaseException | None = None) -> None:
    if span is not None:
        if error is not None:
            span.set_attribute(ERROR_TYPE, type(error).__qualname__)
            span.set_status(Status(StatusCode.ERROR, error.public if isinstance(error, CoterieError) else None))
        span.end()
