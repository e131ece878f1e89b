"""Metrics: totals that only grow and are those of the summary to the byte, names as Prometheus wants them, and no series per user."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from coterie.errors import ConfigError
from coterie.record.ledger import DOWN, UP, Row
from coterie.session.tls import load_tls
from coterie_deploy.containers import certs
from coterie_deploy.telemetry.metrics import RunCollector, Subject, registry_of
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_server.record import summary
from coterie_server.record.query import Amounts
from coterie_server.record.rundb import WITHIN, RunDatabase, open_run
from coterie_server.record.tally import Key, Tally
from coterie_server.run.coordinator import Options, coordinate
from coterie_server.session.hub import Hub
from tests.simulation import CoordinatorKilledError, Faults, World, small_experiment

PAPER = {"name": "pdmm", "penalty": 0.3, "placement": "paper", "order": "jacobi"}
HOSTS = ["h0", "h1", "h2"]
Totals = dict[Key, tuple[int, ...]]


def of(totals: dict[Key, Amounts]) -> Totals:
    return {
        key: (one.vectors, one.scalars, one.payload_bytes, one.message_bytes, one.wire_bytes, one.frames) for key, one in totals.items()
    }


def wanted(folder: Path, *, repeats: bool = False) -> Totals:
    """What the summary says."""
    with contextlib.closing(open_run(folder)) as connection:
        rows = summary.by_step(summary.traffic(connection, repeats=repeats))
    names = ("vectors", "scalars", "payload_bytes", "message_bytes", "wire_bytes", "frames")
    return {(row.step, row.direction, row.scope): tuple(getattr(row, name) for name in names) for row in rows}


def together(*several: Totals) -> Totals:
    keys = {key for one in several for key in one}
    return {key: tuple(map(sum, zip(*(one[key] for one in several if key in one), strict=True))) for key in keys}


def grows(before: dict[Any, Any], after: dict[Any, Any]) -> None:
    """No total is gone or smaller."""
    for key, total in before.items():
        assert all(new >= old for old, new in zip(total, after[key], strict=True)), (key, total, after[key])


class Watched:
    """A run whose totals are read after every round, by one reader over all attempts."""

    def __init__(self, folder: Path, faults: Faults) -> None:
        self.world = World(small_experiment(PAPER), folder, len(HOSTS), faults)
        self.tally, self.hub = Tally(), Hub(self.world.experiment, "", None, lambda: 0.0)  # type: ignore[arg-type]
        self.readings: list[tuple[Totals, Totals, dict[str, tuple[int]], int]] = []

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> Any:
        self.hub = hub
        if not self.readings:
            with contextlib.closing(open_run(self.world.folder)) as connection:
                self.tally.begin(connection)
        async with self.world.connect(hub):
            yield

    def observe(self, progress: object) -> None:
        self.hub.settle()
        self.hub.recorder.flush()  # type: ignore[attr-defined]
        self.read()

    def read(self) -> None:
        with contextlib.closing(open_run(self.world.folder)) as connection:
            self.tally.read(connection)
        events = {kind: (number,) for kind, number in self.tally.events.items()}
        self.readings.append((of(self.tally.sent), of(self.tally.repeated), events, self.tally.rounds))

    def run(self) -> None:
        for attempt in range(1 + len(self.world.faults.coordinator)):
            options = Options(self.world.folder, bool(attempt), observer=self.observe)
            with contextlib.suppress(CoordinatorKilledError):
                asyncio.run(coordinate(self.world.experiment, self.connect, options))
        self.read()


def test_totals_are_those_of_the_summary_to_the_byte_and_never_shrink_when_hosts_and_coordinators_die(tmp_path: Path) -> None:
    watched = Watched(tmp_path, Faults({14: "h1"}, {20: "h2"}, (27, 33)))
    watched.run()
    assert len(watched.world.done) == 4, "all must have died"
    sent, repeated, events, n_rounds = watched.readings[-1]
    assert repeated == wanted(tmp_path, repeats=True)
    assert sent == together(wanted(tmp_path), wanted(tmp_path, repeats=True))
    assert any(total[0] for total in repeated.values())
    assert events["resume"] == (2,)
    for before, after in zip(watched.readings, watched.readings[1:], strict=False):
        for old, new in zip(before[:3], after[:3], strict=True):
            grows(old, new)
        assert after[3] >= before[3]
    made = [reading[3] for reading in watched.readings[:-1]]
    assert made == list(range(1, len(made) + 1)), "each round counts, also one that is made again"
    assert n_rounds == made[-1] > max(row[0] for row in query_rounds(tmp_path))


def query_rounds(folder: Path) -> list[Any]:
    with contextlib.closing(open_run(folder)) as connection:
        return connection.execute("SELECT COUNT(*) FROM rounds WHERE round > 0").fetchall()


def booked(database: RunDatabase, seq: int, hosts: list[str], *, attempt: int = 1, useful: bool = True) -> None:
    """A broadcast of 2 vectors to these hosts, and a reply of each."""
    for host in hosts:
        down = Row(seq, attempt, 0 if useful else 1, DOWN, "consensus.AskLocalModels", 2, 6, 48, 60, 1)
        up = Row(seq, attempt, 0, UP, "consensus.Slopes", 1, 3, 24, 30, 1)
        database.book(host, (0, seq), [(down, None), (up, None)], useful)
    database.flush()


def read_of(folder: Path, tally: Tally) -> Totals:
    with contextlib.closing(open_run(folder)) as connection:
        tally.read(connection)
    return of(tally.sent)


def test_a_broadcast_counts_once_also_when_its_hosts_are_booked_between_two_readings(tmp_path: Path) -> None:
    database, tally = RunDatabase(tmp_path / "run.db"), Tally()
    booked(database, 1, ["a"])
    first = read_of(tmp_path, tally)
    booked(database, 1, ["b", "c"])
    booked(database, 1, ["c"], useful=False)
    second = read_of(tmp_path, tally)
    [down] = [key for key in first if key[1] == DOWN]
    assert (first[down][0], first[down][3]) == (2, 60)
    assert (second[down][0], second[down][3]) == (4, 240)  # once to all, and once again to one
    assert second == together(wanted(tmp_path), wanted(tmp_path, repeats=True))
    database.close()


@pytest.mark.parametrize("is_said", [True, False])
def test_a_resume_is_noticed_by_its_event_or_by_a_new_attempt_and_a_look_in_between_misses_nothing(tmp_path: Path, is_said: bool) -> None:
    """An aggregator that was killed before its first snapshot begins anew without an event that says so."""
    database, tally = RunDatabase(tmp_path / "run.db"), Tally()
    database.put("attempt", "1")
    booked(database, 1, ["a"])
    booked(database, 2, ["a"])
    read_of(tmp_path, tally)
    database.put("attempt", "2")
    if is_said:
        read_of(tmp_path, tally)
    database.rewind(1, 0, 1)
    if is_said:
        database.event("resume", "resumed")
        database.flush()
    assert read_of(tmp_path, tally) == together(wanted(tmp_path), wanted(tmp_path, repeats=True))
    assert of(tally.repeated) == wanted(tmp_path, repeats=True) != {}
    database.close()


def test_a_coordinator_leaves_what_aggregators_bring_to_the_aggregators(tmp_path: Path) -> None:
    database = RunDatabase(tmp_path / "run.db", scope=WITHIN)
    database.put("attempt", "1")
    booked(database, 1, ["x/a"])
    database.events_of("x", '[1.0, "join", "host a joined", {"host": "a"}]')
    database.event("start", "it starts")
    database.flush()
    above, below = Tally(), Tally(of_aggregator=True)
    assert read_of(tmp_path, above) == {}
    assert read_of(tmp_path, below) == wanted(tmp_path) != {}
    assert above.events == {"start": 1}
    database.close()


# ---- what is exported


@pytest.fixture
def subject(tmp_path: Path) -> Iterator[Subject]:
    """A run under way: two of three hosts have booked something."""
    database = RunDatabase(tmp_path / "run.db")
    for key, value in (("attempt", "2"), ("status", "failed: host 'a' is gone")):
        database.put(key, value)
    experiment = small_experiment(PAPER)
    hub = Hub(
        experiment.model_copy(update={"federation": experiment.federation.model_copy(update={"hosts": 3})}), "r1", database, lambda: 0.0
    )
    database.stage(1, "pdmm", "pdmm", 0, "", 0.0)
    found = Subject(hub, tmp_path, "coordinator", 'small "one"')
    registry = registry_of(found)  # from here on rounds are counted
    assert registry is not None
    for number, figures in enumerate(({"objective": 3.0, "clusters": 4.0}, {"objective": float("nan")}), 1):
        database.figures(1, number, figures)
    database.event("join", "host 'a' joined", host="a")
    booked(database, 1, ["a", "b"])
    yield found
    database.close()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def test_what_a_run_is_doing_is_exported(subject: Subject) -> None:
    found = samples(generate_latest(registry_of(subject)).decode())
    named = {name: value for (name, labels), value in found.items() if not labels}
    assert (named["coterie_members_expected"], named["coterie_members_present"], named["coterie_attempt"]) == (3, 0, 2)
    assert found["coterie_figure", (("name", "clusters"), ("stage", "pdmm"))] == 4  # of the last round that had it
    assert found["coterie_events_total", (("kind", "join"),)] == 1
    [run] = [labels for name, labels in found if name == "coterie_run_info"]
    assert dict(run) == {"run": "r1", "name": 'small "one"', "role": "coordinator", "cluster": ""}
    status = {dict(labels)["status"]: value for (name, labels), value in found.items() if name == "coterie_run_status"}
    assert status == {"running": 0, "finished": 0, "failed": 1}
    assert [name for name, _ in found if name == "coterie_build_info"]
    assert named["process_resident_memory_bytes"] > 0


def test_names_are_as_prometheus_wants_them_and_no_label_is_of_a_user_or_a_host(subject: Subject) -> None:
    text = generate_latest(registry_of(subject)).decode()
    families = list(text_string_to_metric_families(text))
    own = [family for family in families if family.name.startswith("coterie_")]
    assert len(own) > 20
    assert len({family.name for family in families}) == len(families)
    for family in own:
        assert re.fullmatch(r"coterie(_[a-z]+)+", family.name)
        assert family.documentation.endswith(".")
        assert (family.type == "counter") == all(
            sample.name.endswith("_total") for sample in family.samples if family.samples
        ) or not family.samples
        reserved = ("_total", "_count", "_sum", "_bucket", "_created")
        assert family.type == "counter" or not any(sample.name.endswith(reserved) for sample in family.samples)
        assert not re.search(r"kilo|mega|milli|_(ms|kb|mb)(_|$)", family.name), "base units alone"
        labels = {label for sample in family.samples for label in sample.labels}
        assert labels <= {
            "step",
            "direction",
            "scope",
            "kind",
            "stage",
            "name",
            "run",
            "role",
            "cluster",
            "status",
            "version",
            "protocol",
            "python",
        }
    strict = openmetrics(registry_of(subject)).decode()
    assert {family.name for family in openmetrics_families(strict)} >= {"coterie_wire_bytes", "coterie_rounds", "coterie_run"}


# ---- the server


async def served(how: Metrics, subject: Subject, then: Any) -> Any:
    async with metrics_served(how, subject.hub, subject.folder, "coordinator", "small") as url:
        assert url is not None
        return await asyncio.to_thread(then, url)


def get(url: str, context: Any = None) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_metrics_and_health_are_served_while_the_run_is_and_nothing_is_left(subject: Subject) -> None:
    def look(url: str) -> list[tuple[int, str]]:
        health = url.replace("/metrics", "/healthz")
        before = get(health)
        subject.hub.state.finish = object()  # type: ignore[assignment]
        return [get(url), before, get(health), get(url.replace("/metrics", "/")), get(f"{url}?name[]=coterie_round")]

    threads = set(threading.enumerate())
    metrics, before, after, elsewhere, _ = asyncio.run(served(Metrics("127.0.0.1:0"), subject, look))
    assert metrics[0] == 200
    assert "coterie_wire_bytes_total{" in metrics[1]
    assert before == (200, "SERVING\n")
    assert after == (503, "NOT_SERVING\n")
    assert elsewhere[0] == 404
    deadline = time.monotonic() + 5.0
    while set(threading.enumerate()) != threads:  # a connection's thread ends when its answer is written
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_who_says_nothing_holds_up_neither_others_nor_the_end(subject: Subject) -> None:
    def look(url: str) -> tuple[int, str]:
        port = int(url.split(":")[2].split("/", maxsplit=1)[0])
        silent.extend(socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(10))
        return get(url)

    silent: list[socket.socket] = []
    try:
        assert asyncio.run(asyncio.wait_for(served(Metrics("127.0.0.1:0"), subject, look), 5))[0] == 200
    finally:
        for one in silent:
            one.close()


def test_a_scrape_that_began_before_the_end_is_not_the_last_one(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever scrapes again and again is given what the books say in the end, however slow a scrape under way is."""
    started, is_over = threading.Event(), threading.Event()
    collect = RunCollector.collect

    def slow(self: RunCollector) -> list[Metric]:
        families = list(collect(self))
        if not started.is_set():
            started.set()
            is_over.wait(5)
        return families

    def look(url: str) -> threading.Thread:
        assert (get(url)[0], get(url)[0]) == (200, 200)
        monkeypatch.setattr(RunCollector, "collect", slow)
        thread = threading.Thread(target=lambda: answers.extend((get(url), get(url))))
        thread.start()
        assert started.wait(5)
        subject.hub.state.round = 77
        threading.Timer(0.2, is_over.set).start()
        return thread

    answers: list[tuple[int, str]] = []
    thread = asyncio.run(served(Metrics("127.0.0.1:0"), subject, look))
    thread.join()
    assert ["coterie_round 77.0" in text for _, text in answers] == [False, True]


def test_a_database_that_cannot_be_read_is_said_in_one_line(subject: Subject) -> None:
    def look(url: str) -> tuple[int, str]:
        (subject.folder / "run.db").rename(subject.folder / "gone.db")
        try:
            return get(url)
        finally:
            (subject.folder / "gone.db").rename(subject.folder / "run.db")

    status, text = asyncio.run(served(Metrics("127.0.0.1:0"), subject, look))
    assert status == 503
    assert text.startswith("the run database cannot be read: ")
    assert text.count("\n") == 1


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("9464", "the address of --metrics is '9464', want HOST:PORT"),
        ("127.0.0.1:99999", "the address of --metrics is '127.0.0.1:99999', want HOST:PORT"),
        ("0.0.0.0:0", "metrics on 0.0.0.0:0 without TLS would be read by whoever reaches it: give certificates with --tls"),
        ("taken", r"cannot listen on 127.0.0.1:\d+ for metrics: Address already in use"),
        ("192.0.2.1:0", "cannot listen on 192.0.2.1:0 for metrics: "),
    ],
)
def test_a_wrong_address_is_one_sentence(subject: Subject, address: str, sentence: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place = f"127.0.0.1:{taken.getsockname()[1]}" if address == "taken" else address
        with pytest.raises(ConfigError, match=sentence):
            asyncio.run(served(Metrics(place, insecure=address.startswith("192")), subject, get))


def test_without_prometheus_client_the_extra_is_named(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "coterie_deploy.telemetry.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"--metrics needs prometheus-client, which is not installed: .*pip install 'coterie\[metrics\]'"):
        asyncio.run(served(Metrics("127.0.0.1:0"), subject, get))


def test_with_certificates_metrics_are_for_monitors_and_no_host_reads_them(subject: Subject, tmp_path: Path) -> None:
    authority = tmp_path / "ca"
    certs.init(authority)
    for role, name, addresses in (("coordinator", "c", ["c"]), ("monitor", "prometheus", []), ("host", "h", [])):
        certs.issue(authority, certs.Asked(role, name, addresses))
    tls = load_tls(authority / "c", is_server=True)
    dialling = {name: load_tls(authority / name, is_server=False).dialling for name in ("prometheus", "h")}
    for context in dialling.values():
        context.set_alpn_protocols(["h2", "http/1.1"])  # as Prometheus does

    def look(url: str) -> tuple[int, str]:
        assert url.startswith("https://")
        with pytest.raises((OSError, urllib.error.URLError)):
            get(url, dialling["h"])
        with pytest.raises((OSError, urllib.error.URLError)):
            get(url.replace("https", "http"))
        return get(url, dialling["prometheus"])

    status, text = asyncio.run(served(Metrics("127.0.0.1:0", tls), subject, look))
    assert status == 200
    assert "coterie_run_info" in text


def test_a_monitor_has_no_address_and_speaks_for_nobody(tmp_path: Path) -> None:
    certs.init(tmp_path)
    with pytest.raises(ConfigError, match="a monitor listens nowhere, but --address is 'm'"):
        certs.issue(tmp_path, certs.Asked("monitor", "m", ["m"]))
    with pytest.raises(ConfigError, match="a monitor speaks for no users"):
        certs.issue(tmp_path, certs.Asked("monitor", "m", users=["u1"]))


def test_a_server_that_was_watched_stays_for_one_more_look(subject: Subject) -> None:
    async def watch() -> list[bool]:
        over, seen = threading.Event(), []

        def look(url: str) -> None:
            for _ in range(2):
                get(url)
                threading.Event().wait(0.3)
            over.wait(5)
            threading.Event().wait(0.1)
            seen.append(get(url)[0] == 200)

        async with metrics_served(Metrics("127.0.0.1:0"), subject.hub, subject.folder, "coordinator", "small") as url:
            looking = asyncio.create_task(asyncio.to_thread(look, url))
            await asyncio.sleep(0.5)
            over.set()
        await looking
        return seen

    assert asyncio.run(asyncio.wait_for(watch(), 10)) == [True]
