"""Metrics of whole runs over HTTP: while they go on, at their end, to the byte of the ledger, and with two tiers."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from coterie_deploy.cli import app as cli
from coterie_deploy.roles import aggregator
from coterie_deploy.telemetry.metrics_server import Metrics, metrics_served
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.session.hub import Hub
from tests.processes import processes
from tests.two_tier import Tiers, free_port, small

LABELS = ("step", "direction", "scope")
Samples = dict[tuple[str, tuple[str, ...]], float]


def scraped(address: str) -> Samples | None:
    """The samples by name and the values of their labels; None when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError):
        return None
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            names = LABELS if LABELS[0] in sample.labels else sorted(sample.labels)
            found[sample.name, tuple(sample.labels[name] for name in names)] = sample.value
    return found


class Scraper:
    """Looks again and again, as Prometheus does."""

    def __init__(self, addresses: list[str], every_s: float) -> None:
        self.addresses, self._every_s = addresses, every_s
        self.seen: dict[str, list[Samples]] = {address: [] for address in addresses}
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.wait(self._every_s):
            for address in self.addresses:
                if (samples := scraped(address)) is not None:
                    self.seen[address].append(samples)


@contextlib.contextmanager
def scraping(*addresses: str, every_s: float = 0.1) -> Iterator[Scraper]:
    scraper = Scraper(list(addresses), every_s)
    thread = threading.Thread(target=scraper.run)
    thread.start()
    try:
        yield scraper
    finally:
        scraper.is_over.set()
        thread.join()


def totals(samples: Samples, what: str) -> dict[tuple[str, ...], float]:
    return {labels: value for (name, labels), value in samples.items() if name == f"coterie_{what}_total"}


def wanted(folder: Path, what: str) -> dict[tuple[str, ...], float]:
    with contextlib.closing(open_run(folder)) as connection:
        rows = summary.by_step([*summary.traffic(connection), *summary.traffic(connection, repeats=True)])
    return {(row.step, row.direction, row.scope): float(getattr(row, what)) for row in rows}


def check_growing(seen: list[Samples]) -> None:
    for before, after in itertools.pairwise(seen):
        for key, value in before.items():
            assert not key[0].startswith("coterie") or not key[0].endswith("_total") or after[key] >= value, key


def check_end(folder: Path, last: list[Samples]) -> None:
    """All that the ledger has is in the last look at the servers, together, and nothing twice.

    Aggregators count questions and heartbeats among themselves at the end alone.
    """
    for what in ("vectors", "scalars", "payload_bytes", "message_bytes", "wire_bytes", "frames"):
        found: dict[tuple[str, ...], float] = {}
        for samples in last:
            for labels, value in totals(samples, what).items():
                assert labels not in found or labels[2] != "between-cluster", "two servers tell of the same traffic"
                found[labels] = found.get(labels, 0.0) + value
        seen, booked = (
            {labels: n for labels, n in one.items() if (labels[0], labels[2]) != ("control", "between-peers")}
            for one in (found, wanted(folder, what))
        )
        assert seen == booked


def test_a_server_is_watched_from_its_start_to_its_last_byte(tmp_path: Path) -> None:
    content = {
        "name": "watched",
        "data": {"source": "ellipses", "users_per_cluster": 2, "test_per_class": 20},
        "problem": {"loss": "squared_hinge", "l2": 1e-3},
        "method": {"name": "pdmm", "penalty": 0.3},
        "stop": {"rounds": 300},
        "federation": {"hosts": 2},
    }
    address = f"127.0.0.1:{free_port()}"
    hosts = {"a": "#0..#2", "b": "#3..#5"}
    with (
        scraping(address) as scraper,
        processes(tmp_path, content, hosts=hosts, options=["--metrics", address, "--log-format", "json"]) as run,
    ):
        run.end()
    seen = scraper.seen[address]
    assert len(seen) > 3
    check_growing(seen)
    check_end(run.run, seen[-1:])
    now = {name: value for (name, labels), value in seen[-1].items() if not labels}
    assert (now["coterie_members_expected"], now["coterie_users"]) == (2, 6)
    assert max(samples["coterie_members_present", ()] for samples in seen) == 2
    [[n_rounds]] = run.rows("SELECT COUNT(*) FROM rounds WHERE round > 0")
    assert now["coterie_rounds_total"] == n_rounds
    assert seen[-1]["coterie_run_status", ("finished",)] == 1
    [[stage]] = run.rows("SELECT name FROM stages ORDER BY number DESC LIMIT 1")
    objectives = "SELECT value FROM figures WHERE name = 'objective' ORDER BY stage DESC, round DESC LIMIT 1"
    assert [(seen[-1]["coterie_objective", (stage,)],)] == run.rows(objectives)


def test_an_address_that_is_taken_is_one_sentence_and_the_run_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        code = cli._run(["server", "ellipses", "--listen", "127.0.0.1:0", "--output", "run", "--metrics", address])
    assert code == 2
    assert capsys.readouterr().err == f"error: cannot listen on {address} for metrics: Address already in use\n"
    assert not (tmp_path / "run").exists()


class WatchedTiers(Tiers):
    """All servers of two tiers with metrics."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.metrics = {name: f"127.0.0.1:{free_port()}" for name in ("", *self.clusters)}

    def role(self, cluster: str, **changes: Any) -> aggregator.AggregatorRole:
        return super().role(cluster, metrics=self.metrics[cluster], **changes)

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        beside = metrics_served(Metrics(self.metrics[""]), hub, self.folder / "run", "coordinator", "tiers")
        async with beside, super().connect(hub):
            yield


@pytest.mark.parametrize("topology", ["clusters", "peers"])
def test_with_two_tiers_the_servers_tell_of_all_traffic_together_and_of_none_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topology: str
) -> None:
    monkeypatch.setattr("coterie_deploy.telemetry.metrics_server._SOONEST_S", 20.0)  # the last look ends it
    tiers = WatchedTiers(small(federation={"topology": topology}), tmp_path, 2)
    with scraping(*tiers.metrics.values()) as scraper:
        tiers.run()
    last = [scraper.seen[address][-1] for address in tiers.metrics.values()]
    for seen in scraper.seen.values():
        check_growing(seen)
    check_end(tmp_path / "run", last)
    scopes = [{labels[2] for labels in totals(samples, "frames")} for samples in last]
    among = {"between-peers"} if topology == "peers" else set()  # of each link at the aggregator of the smaller cluster
    assert scopes == [{"between-cluster"}, *[{"within-cluster"} | among] * 2, {"within-cluster"}]
    stages = [labels for samples in last for name, labels in samples if name == "coterie_stage_info"]
    assert stages == [("async_l2gd",)] * 4
