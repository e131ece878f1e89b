"""on_loss: skip, over gRPC. A host that lies or breaks ends itself, not the run, and the others' bits are those of a run that lost it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import CoterieError, ProtocolError, RunError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile
from coterie.session.computer import Thread
from coterie.session.dial import serve_member
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received, encode
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_deploy.read.verify import verdict_on
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.integration.test_loss import NEVER, Story, everything, linear
from tests.integration.test_loss import run as run_lost
from tests.networks import network_experiment, write_users
from tests.simulation import query, small_experiment
from tests.slow import slow_after

RULES = {"hosts": 3, "on_loss": "skip", "absence_timeout_s": 60, "join_timeout_s": 20}  # nobody waits for an absent host in these tests
AT = 6  # the exchange in which h1 breaks
LIAR = "h1"
PATIENCE_S = 20.0


# ---- lies

Lie = Callable[[Host, list[Message]], list[Message]]


def _changed(messages: list[Message], change: Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]) -> list[Message]:
    """The first float field of the first message, changed."""
    first, *rest = messages
    name = next(name for name, spec in first.specs if spec.is_float)
    return [dataclasses.replace(first, **{name: change(getattr(first, name))}), *rest]


def nan(_: Host, messages: list[Message]) -> list[Message]:
    return _changed(messages, lambda array: np.full_like(array, np.nan))


def wrong_shape(_: Host, messages: list[Message]) -> list[Message]:
    return _changed(messages, lambda array: np.concatenate([array, array[..., :1]], axis=-1))


def cannot_go_on(host: Host, messages: list[Message]) -> list[Message]:
    raise RunError(f"host {host.name!r} cannot write its state: No space left on device", Finding("R5"))


def mistake(host: Host, messages: list[Message]) -> list[Message]:
    raise ZeroDivisionError("in a local solve")


@dataclass(frozen=True)
class Kind:
    lie: Lie
    said: str  # by the coordinator
    family: type[Exception]  # what the host itself ends with


KINDS = {
    "NaN": Kind(nan, "host 'h1' returned nan for user", ProtocolError),
    "wrong shape": Kind(wrong_shape, "host 'h1' broke the protocol: ", ProtocolError),
    "cannot go on": Kind(cannot_go_on, "host 'h1': a file cannot be written ", RunError),
    "a mistake in a local solve": Kind(mistake, "host 'h1': a mistake of the program itself ", ZeroDivisionError),
}


def lying(host: Host, lie: Lie, at: int = AT) -> Host:
    """The host, which lies in one exchange: it puts other messages into its reply than it has computed."""
    honest = host.handle

    def handle(received: Received) -> Encoded | None:
        encoded = honest(received)
        if encoded is None or received.frame.seq != at:  # type: ignore[union-attr]
            return encoded
        reply = session_pb2.JoinRequest.FromString(encoded.head).reply
        messages, _ = Received(reply, tuple(bytearray(tail) for tail in encoded.tails), len(encoded.head)).decode(len(host.users))
        fences = session_pb2.Reply(seq=reply.seq, attempt=reply.attempt, durable_seq=reply.durable_seq)
        return encode(fences, lie(host, list(messages)), Precision.of_run(host.experiment))

    host.handle = handle  # type: ignore[method-assign]
    return host


# ---- runs


def experiment_of(kind: str, tmp_path: Path, **rules: Any) -> Experiment:
    federation = {**RULES, **rules}
    if kind == "pdmm":
        return small_experiment({"name": "pdmm", "penalty": 0.3, "start": "zero"}, federation=federation)
    path = tmp_path / "archive.npz"
    if not path.exists():
        write_users(path)
    return network_experiment(path, {"name": kind, "participation": 1.0, "evaluate_last": 2}, federation=federation, stop={"rounds": 8})


@dataclass
class Lied:
    """A run and what its hosts have ended with."""

    finished: Finished
    ends: list[Any]


class OneThread(Thread):
    """Where all hosts of a test compute, in turns: networks are built with torch's generator, of which a process has one."""

    async def close(self) -> None:
        """One of them has ended."""


def run(experiment: Experiment, folder: Path, kind: Kind | None = None, **options: Any) -> Lied:
    """A run over gRPC, each host a client of its own; h1 lies."""
    names = [user.name for user in list_users(experiment.data, experiment.seed)]
    ends: list[Any] = []
    computer = OneThread(quick_s=0.0)

    def maker(i: int) -> Callable[[Experiment, str], Host]:
        def make(found: Experiment, run_id: str) -> Host:
            host = build_host(f"h{i}", found, run_id, names[i::3])
            return lying(host, kind.lie) if kind is not None and host.name == LIAR else host

        return make

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        async with serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server:
            address = f"127.0.0.1:{server.port}"
            serve = partial(serve_member, server=address, patience_s=PATIENCE_S, computer=computer)
            hosts = [asyncio.create_task(serve(maker(i), name=f"h{i}")) for i in range(3)]
            try:
                yield
                ends.extend(await asyncio.gather(*hosts, return_exceptions=True))
            finally:
                for host in hosts:
                    host.cancel()
                await asyncio.gather(*hosts, return_exceptions=True)
                await super(OneThread, computer).close()

    async def limited() -> Finished:
        async with asyncio.timeout(50):
            return await coordinate(experiment, connect, Options(folder=folder, **options))

    return Lied(asyncio.run(limited()), ends)


def decisions(folder: Path) -> list[tuple[int, str, list[str]]]:
    return [(seq, kind, json.loads(value)) for seq, kind, value in query(folder, "SELECT seq, kind, value FROM decisions ORDER BY rowid")]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", slow_after(2, ["pdmm", "fedrep", "fedavg"]))
def test_a_host_that_lies_or_breaks_ends_itself_and_the_others_have_the_bits_of_a_run_without_it(
    method: str, name: str, tmp_path: Path
) -> None:
    kind, experiment = KINDS[name], experiment_of(method, tmp_path)
    lied = run(experiment, tmp_path / "lied", kind)
    assert query(tmp_path / "lied", "SELECT value FROM run WHERE key = 'status'") == [("finished",)]
    first, *later = decisions(tmp_path / "lied")
    assert first == (AT, "skip", [LIAR])
    assert later
    assert all(row[1:] == ("pass", [LIAR]) for row in later)
    ((said, seq),) = query(tmp_path / "lied", "SELECT text, json_extract(data, '$.seq') FROM events WHERE kind = 'skip'")
    assert said.startswith(f"going on without h1 from exchange {AT} on: {kind.said}")
    assert seq == AT
    assert [type(end) for end in lied.ends] == [str, kind.family, str]

    repeated = run(experiment, tmp_path / "repeated", decisions_of=tmp_path / "lied")
    assert everything(repeated.finished) == everything(lied.finished)
    assert [type(end) for end in repeated.ends] == [str, str, str]
    quick = experiment_of(method, tmp_path, absence_timeout_s=0.05)
    lost = run_lost(quick, tmp_path / "lost", Story(lost_at=AT, back_at=NEVER))
    assert everything(lost) == everything(lied.finished)
    calm = run(experiment, tmp_path / "calm")
    assert everything(calm.finished) != everything(lied.finished)


@pytest.mark.parametrize("name", KINDS)
def test_the_ledger_of_a_run_without_the_host_is_its_closed_form(name: str, tmp_path: Path) -> None:
    run(experiment_of("pdmm", tmp_path), tmp_path / "run", KINDS[name])
    verdict = verdict_on(tmp_path / "run")
    assert not verdict.differences
    assert verdict.is_finished
    assert verdict.agrees


@pytest.mark.parametrize("name", KINDS)
def test_below_min_hosts_the_run_ends_and_says_who_and_why(name: str, tmp_path: Path) -> None:
    kind, experiment = KINDS[name], experiment_of("pdmm", tmp_path, min_hosts=3)
    with pytest.raises(CoterieError, match=f"{kind.said}.*; on_loss is skip, but 2 of the at least 3 hosts wanted are left"):
        run(experiment, tmp_path / "run", kind)
    assert decisions(tmp_path / "run") == []


@pytest.mark.parametrize("name", KINDS)
def test_with_stop_the_run_ends_as_ever(name: str, tmp_path: Path) -> None:
    kind, experiment = KINDS[name], experiment_of("pdmm", tmp_path, on_loss="stop")
    with pytest.raises(CoterieError, match=kind.said) as error:
        run(experiment, tmp_path / "run", kind)
    assert "on_loss" not in str(error.value)


# ---- one process


class Killed(BaseException):
    """The coordinator is gone at once."""


class Killing(LoopbackLink):
    """The coordinator dies when it is about to ask the first host in the exchange after the lie."""

    def send(self, encoded: Encoded) -> None:
        if self._host.name == "h0" and self._hub.seq == AT + 1 and self._hub.state.attempt == 1:
            raise Killed
        super().send(encoded)


def attempt(experiment: Experiment, folder: Path, names: Sequence[str], kind: Kind, link: type[LoopbackLink], **options: Any) -> Finished:
    """The same hosts in this process; after a resume those alone that have not ended."""

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        for name in names:
            users = [user.name for user in list_users(experiment.data, experiment.seed)][int(name[1:]) :: 3]
            host = build_host(name, experiment, hub.run_id, users, store=SnapshotFile(folder / "hosts" / name, "host"))
            link(hub, lying(host, kind.lie) if name == LIAR else host).join()
        yield

    return asyncio.run(coordinate(experiment, connect, Options(folder=folder, **options)))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", slow_after(1, ["pdmm", "fedrep"]))
def test_the_loopback_decides_as_grpc_does(method: str, name: str, tmp_path: Path) -> None:
    kind, experiment = KINDS[name], experiment_of(method, tmp_path)
    lied = run(experiment, tmp_path / "grpc", kind)
    here = attempt(experiment, tmp_path / "loopback", ("h0", "h1", "h2"), kind, LoopbackLink)
    assert decisions(tmp_path / "loopback") == decisions(tmp_path / "grpc")
    assert everything(here) == everything(lied.finished)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("method", slow_after(1, ["pdmm", "fedrep"]))
def test_a_coordinator_that_is_killed_right_after_goes_on_without_the_host(method: str, name: str, tmp_path: Path) -> None:
    kind, experiment = KINDS[name], experiment_of(method, tmp_path, join_timeout_s=0.05)
    whole = attempt(experiment, tmp_path / "whole", ("h0", "h1", "h2"), kind, LoopbackLink)
    with pytest.raises(Killed):
        attempt(experiment, tmp_path / "killed", ("h0", "h1", "h2"), kind, Killing)
    assert decisions(tmp_path / "killed")[0] == (AT, "skip", [LIAR])
    resumed = attempt(experiment, tmp_path / "killed", ("h0", "h2"), kind, LoopbackLink, resume=True)
    assert everything(resumed) == everything(whole)
    assert query(tmp_path / "killed", "SELECT DISTINCT seq, kind, value FROM decisions ORDER BY seq") == query(
        tmp_path / "whole", "SELECT DISTINCT seq, kind, value FROM decisions ORDER BY seq"
    )


# ---- at the host

RUNS_AWAY: dict[str, tuple[dict[str, Any], str]] = {
    "steps": ({"name": "fedavg", "participation": 1.0, "optimizer": {"lr": 1e200}}, r"user 'u\d+' in round \d+: .* want finite numbers"),
    "a representation": (
        {"name": "fedrep_linear", "participation": 1.0, "heads": "gradient", "eta": 1e200, "head_eta": 1e200, "start": "random"},
        r"host 'h\d' has (nan|-?inf) for user 'u\d+' in fedrep_linear.UpdatedRepresentation.b in round \d+, wanted finite numbers",
    ),
}


@pytest.mark.parametrize("name", RUNS_AWAY)
def test_an_honest_host_whose_numbers_run_away_says_so_itself_and_sends_none_of_them(name: str, tmp_path: Path) -> None:
    method, sentence = RUNS_AWAY[name]
    experiment = small_experiment(method, federation=RULES) if name == "steps" else linear()
    experiment = experiment_from({**json.loads(experiment_to_json(experiment)), "method": method})
    raised: list[Exception] = []

    class Listening(LoopbackLink):
        def join(self) -> None:
            honest = self._host.handle

            def handle(received: Received) -> Encoded | None:
                try:
                    return honest(received)
                except CoterieError as error:
                    raised.append(error)
                    raise

            self._host.handle = handle  # type: ignore[method-assign]
            super().join()

    with pytest.raises(
        RunError,
        match=r"host 'h2': 1 number of its models is not finite .*; on_loss is skip, but 0 of the at least 1 hosts wanted are left",
    ):
        attempt(experiment, tmp_path / "run", ("h0", "h1", "h2"), Kind(lambda _, messages: messages, "", RunError), Listening)
    assert len(raised) == 3
    for error in raised:
        assert re.search(sentence, str(error))
        assert isinstance(error, RunError)
        assert error.finding.rule == "M1"
    refused = query(tmp_path / "run", "SELECT text FROM events WHERE kind = 'refused'")
    assert not [text for (text,) in refused if "broke the protocol" in text or "returned" in text]
