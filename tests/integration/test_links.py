"""Shaped links over gRPC: the time a run takes, and that nothing else changes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.links import link_rule
from coterie.findings import Finding
from coterie.session.dial import serve_member
from coterie.v1 import session_pb2
from coterie.wire.codec import PROTOCOL_VERSION
from coterie_client.data import list_users
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.view.project import projection_of
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import SERVICE, serving
from tests.integration.test_session import Block, hosts, maker, new_hub, notes, ready, run, served
from tests.tries import no_task_is_left, soon_enough
from tests.two_tier import L2GD, Death, Tiers, bits, small
from tests.two_tier import flat as flat_run

# What does not depend on how long anything takes: heartbeats do.
LEDGER = """SELECT scope, link, seq, stage, round, kind, direction, useful, vectors, scalars, payload_bytes, message_bytes, frames
FROM ledger WHERE seq > 0 ORDER BY scope, link, seq, direction, kind"""
MADE = {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users"}


def flat(links: Mapping[str, str], *, rounds: int = 6, d: int = 3) -> Experiment:
    return experiment_from(
        {
            "name": "links",
            "data": {**MADE, "options": {"clusters": 2, "users_per_cluster": 2, "rows": 3, "d": d}},
            "problem": {"loss": "least_squares", "l2": 0.1, "intercept": False},
            "method": {"name": "pdmm", "penalty": 0.05},
            "stop": {"rounds": rounds},
            "federation": {"hosts": 2, "links": links, "heartbeat_s": 4.0, "silence_s": 40.0},
        }
    )


def tiers(links: Mapping[str, str], d: int = 3, iterations: int = 60) -> Experiment:
    options = {"clusters": 3, "users_per_cluster": 4, "rows": 3, "d": d}
    method = {**L2GD, "iterations": iterations}
    return small(method, data={**MADE, "options": options}, federation={"links": links, "heartbeat_s": 4.0, "silence_s": 40.0})


def over_grpc(experiment: Experiment, folder: Path) -> Finished:
    """A flat run as tasks of one event loop, none of which is left."""
    users = [user.name for user in list_users(experiment.data, experiment.seed)]
    n_hosts = experiment.federation.hosts

    async def host(place: int, port: int) -> None:
        def make(found: Experiment, run_id: str) -> Host:
            return build_host(f"host-{place}", found, run_id, users[place::n_hosts])

        await serve_member(make, f"127.0.0.1:{port}", name=f"host-{place}", patience_s=20.0)

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        async with (
            serving(hub, experiment_to_json(experiment), "127.0.0.1:0") as server,
            hosts(*(host(place, server.port) for place in range(n_hosts))) as running,
        ):
            yield
            await asyncio.gather(*running)

    async def whole() -> Finished:
        async with asyncio.timeout(50):
            finished = await coordinate(experiment, connect, Options(folder))
        await no_task_is_left()
        return finished

    return asyncio.run(whole())


def query(folder: Path, sql: str) -> list[Any]:
    with contextlib.closing(open_run(folder)) as connection:
        return connection.execute(sql).fetchall()


def events(folder: Path, *kinds: str) -> list[str]:
    listed = ", ".join(f"'{kind}'" for kind in kinds)
    return [text for (text,) in query(folder, f"SELECT text FROM events WHERE kind IN ({listed}) ORDER BY text")]


def check_books(folder: Path) -> None:
    with contextlib.closing(open_run(folder)) as connection:
        books = summary.reconcile(connection)
    assert books.agree, books
    assert books.n_agreed
    assert not books.absent


def test_a_run_on_shaped_links_takes_the_time_of_its_turns_and_has_the_same_bits_and_ledger(tmp_path: Path) -> None:
    plain = over_grpc(flat({}), tmp_path / "plain")
    ((n_turns,),) = query(tmp_path / "plain", "SELECT count(DISTINCT seq) FROM ledger WHERE seq > 0")
    # Beside the turns: the question for the experiment and its answer, hello, finish, books.
    wanted_s = (2 * n_turns + 5) * 0.02

    def shaped_run(number: int) -> tuple[float, float]:
        folder, start = tmp_path / f"shaped-{number}", time.monotonic()
        shaped = over_grpc(flat({"direct": "1Gbit/20ms"}), folder)
        seconds = time.monotonic() - start
        assert bits(shaped) == bits(plain)
        assert query(folder, LEDGER) == query(tmp_path / "plain", LEDGER)
        check_books(folder)
        assert events(folder, "links", "lost", "warning") == ["links are shaped to 1Gbit/20ms: direct"]
        assert seconds > wanted_s * 0.98
        return seconds, wanted_s * 1.5 + 2.0

    soon_enough(shaped_run)
    assert not events(tmp_path / "plain", "links", "lost", "warning")


def test_the_links_of_two_tiers_are_shaped_each_by_its_parent(tmp_path: Path) -> None:
    runs, finished, seconds = ("plain", "shaped"), {}, {}
    for name, links in zip(runs, ({}, {"between": "1Gbit/15ms", "within": "100Mbit/1ms", "direct": "10Mbit/1s"}), strict=True):
        start = time.monotonic()
        finished[name] = Tiers(tiers(links, iterations=12), tmp_path / name).run()
        seconds[name] = time.monotonic() - start
    plain, shaped = tmp_path / "plain" / "run", tmp_path / "shaped" / "run"
    assert bits(finished["shaped"]) == bits(finished["plain"])
    ((n_turns,),) = query(plain, "SELECT count(DISTINCT seq) FROM ledger WHERE seq > 0 AND scope = 'between-cluster'")
    assert seconds["shaped"] > (2 * n_turns + 5) * 0.015
    assert query(shaped, LEDGER) == query(plain, LEDGER)
    check_books(shaped)
    within = ["links are shaped to 100Mbit/1ms: within"] * 3
    said = [text for text in events(shaped, "links", "lost", "warning") if "ends away from the optimum" not in text]  # after 12 iterations
    assert said == [*within, "links are shaped to 1Gbit/15ms: between"]


def test_links_between_peers_take_their_time_too_and_change_no_bits(tmp_path: Path) -> None:
    finished, seconds = {}, {}
    for name, links in (("plain", {}), ("shaped", {"peers": "100Mbit/30ms"})):
        experiment = small(
            {**L2GD, "iterations": 12}, federation={"topology": "peers", "links": links, "heartbeat_s": 4.0, "silence_s": 40.0}
        )
        start = time.monotonic()
        finished[name] = Tiers(experiment, tmp_path / name).run()
        seconds[name] = time.monotonic() - start
    plain, shaped = tmp_path / "plain" / "run", tmp_path / "shaped" / "run"
    assert bits(finished["shaped"]) == bits(finished["plain"])
    ((n_averages,),) = query(plain, "SELECT count(DISTINCT seq) FROM ledger WHERE seq > 0 AND scope = 'between-peers'")
    assert n_averages > 2
    assert seconds["shaped"] > 2 * 0.03 * n_averages
    assert query(shaped, LEDGER) == query(plain, LEDGER)
    check_books(shaped)
    said = [text for text in events(shaped, "links", "lost", "warning") if "ends away from the optimum" not in text]
    assert said == ["links are shaped to 100Mbit/30ms: peers"] * 3
    measured = projection_of(shaped).scopes["peers"].measured_on
    assert measured == link_rule("100Mbit/30ms")


def test_messages_that_take_longer_than_one_may_be_silent_keep_their_rate_and_their_stream() -> None:
    wanted_s = 2 * (3.2e6 * 8 / 10e6 + 0.01)
    took: list[float] = []

    async def test() -> None:
        rules = {"hosts": 1, "silence_s": 2.0, "heartbeat_s": 0.2, "links": {"direct": "10Mbit/10ms"}}
        hub = new_hub(**rules)
        block = np.random.default_rng(1).standard_normal((4, 100_000))  # 3.2 MB, 2.56 s there and as much back
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0", "u1", "u2", "u3"]), address, name="a")) as running:
            await ready(hub)
            start = time.monotonic()
            replies = await hub.exchange(Block(block))
            took.append(time.monotonic() - start)
            np.testing.assert_array_equal(replies[Block].x, block / 3.0)
            await hub.finish("all done", failed=False)
            assert await asyncio.gather(*running) == ["all done"]
        assert took[-1] > wanted_s * 0.98
        assert [kind for kind, _ in notes(hub).events] == ["links", "join"]

    def exchanged(_: int) -> tuple[float, float]:
        run(test())
        return took[-1], wanted_s * 1.5 + 1.0

    soon_enough(exchanged)


def test_a_run_that_fails_tells_hosts_on_slow_links_why() -> None:
    async def test() -> None:
        hub = new_hub(links={"direct": "1Mbit/100ms"}, silence_s=30.0, heartbeat_s=3.0)
        async with served(hub) as (_, address), hosts(serve_member(maker("a", ["u0"]), address, name="a")) as running:
            await ready(hub)
            await hub.finish("the coordinator alone says more", failed=True, finding=Finding("R3", 2))
            with pytest.raises(RunError, match=r"the run has failed: 2 members were absent, or did not answer, for too long \(rule R3\)"):
                await running[0]

    run(test())


def test_links_of_another_topology_and_those_of_the_loopback_are_warned_about(tmp_path: Path) -> None:
    asyncio.run(launch(flat({"direct": "1Gbit/1ms"}), Launch("loopback", folder=tmp_path / "loopback")))
    (said,) = events(tmp_path / "loopback", "links", "warning")
    assert said.startswith("transport 'loopback' has no links, so links.direct 1Gbit/1ms is ignored")
    over_grpc(flat({"between": "1Gbit/1s", "within": "1Gbit/1s"}), tmp_path / "flat")
    (said,) = events(tmp_path / "flat", "links", "warning")
    assert said == "federation.links.between, links.within shapes no link of this run, whose topology is 'flat': want links.direct"


def test_the_question_for_the_experiment_takes_its_time_on_the_link_too() -> None:
    took: list[float] = []

    async def test() -> None:
        hub = new_hub(links={"direct": "1Gbit/100ms"})
        async with served(hub) as (_, address), grpc.aio.insecure_channel(address) as channel:
            await channel.channel_ready()
            get: Any = channel.unary_unary(f"/{SERVICE}/GetExperiment")
            start = time.monotonic()
            await get(session_pb2.GetExperimentRequest(protocol=PROTOCOL_VERSION, host="a").SerializeToString())
            took.append(time.monotonic() - start)

    def asked(_: int) -> tuple[float, float]:
        run(test())
        assert took[-1] > 0.199
        return took[-1], 1.0

    soon_enough(asked)


@pytest.mark.parametrize("heartbeat_s", [0.4, 0.2])  # with the shorter one the host itself hears nothing for more than ten heartbeats
def test_a_hello_may_take_longer_than_one_may_be_silent(heartbeat_s: float) -> None:
    async def test() -> None:
        hub = new_hub(hosts=1, silence_s=2.0, heartbeat_s=heartbeat_s, links={"direct": "10Mbit/1ms"})
        users = [f"{number:0200}" for number in range(15_000)]  # 3 MB, 2.4 s
        async with served(hub) as (_, address), hosts(serve_member(maker("a", users), address, name="a")) as running:
            assert len(await hub.gather()) == len(users)
            await hub.finish("all done", failed=False)
            assert await asyncio.gather(*running) == ["all done"]
        assert [kind for kind, _ in notes(hub).events] == ["links", "join"]

    run(test())


@pytest.mark.slow
def test_those_who_die_on_shaped_links_come_back_and_the_bits_are_those_of_a_calm_run(tmp_path: Path) -> None:
    shaped = tiers({"between": "20Mbit/20ms", "within": "1Gbit/2ms"})
    deaths = [Death("c0-0", "c0", 9), Death("c1", "", 7), Death("", "", 10), Death("c2", "c2", 16)]
    fire = Tiers(shaped, tmp_path, deaths=deaths)
    assert bits(fire.run()) == bits(flat_run(tiers({})))
    assert fire.books().agree, fire.books()
