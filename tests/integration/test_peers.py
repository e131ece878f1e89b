"""Aggregators that average among themselves, as tasks of one event loop over gRPC: bits, books, what the coordinator sees, kills, cuts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

import coterie
from coterie.errors import ConfigError, RunError
from coterie.experiment.config import experiment_from, experiment_to_json
from coterie_client.data import list_users, load_users
from coterie_deploy.read.shipped import load
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.roles.listening import Listening
from coterie_server.record.rundb import PEERS
from coterie_server.run.plan import stages_of
from coterie_server.run.tiers import check_tiers
from coterie_server.session.peering import Peering
from tests.two_tier import QUICK, Death, Tiers, bits, flat, small

L2GD = {"name": "async_l2gd", "iterations": 60, "gamma": 1.0, "alpha": 0.4, "p0": 0.3, "p": 0.3, "collect_models": True}
AL2SGD = {**L2GD, "name": "async_al2sgd", "rho": 0.2}
METHODS = {"l2gd": L2GD, "al2sgd": AL2SGD}
RING = {"topology": "peers", "ring_above": 1}
ALL = {"topology": "peers"}
SHAPES = {"all": ALL, "ring": RING}
N_CLUSTERS = 3


def objective(finished: Any) -> dict[str, float]:
    (outcome,) = finished.outcomes.values()
    return {name: outcome.figures[name] for name in ("objective", "gradient_norm", "gap_at_least")}


CASES = [
    ("l2gd", "all", "float64"),
    ("al2sgd", "ring", "float32"),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (("l2gd", "ring", "float32"), ("al2sgd", "all", "float64"))),
]


@pytest.mark.parametrize(("method", "shape", "payload"), CASES)
def test_peers_have_the_bits_of_a_flat_run_and_no_average_leaves_them(tmp_path: Path, method: str, shape: str, payload: str) -> None:
    traced = {**METHODS[method], "trace_every": 20}
    calm = flat(small(traced, payload=payload))
    tiers = Tiers(small(traced, payload=payload, federation=SHAPES[shape]), tmp_path)
    finished = tiers.run()
    assert bits(finished) == bits(calm)
    assert objective(finished) == objective(calm)
    books, verdict = tiers.books(), verdict_on(tmp_path / "run")
    assert books.agree, books
    assert verdict.agrees, verdict.differences
    links = {link for (link,) in tiers.query(f"SELECT DISTINCT link FROM ledger WHERE scope = '{PEERS}'")}
    assert links == {"c0<>c1", "c1<>c2"} | ({"c0<>c2"} if shape == "all" else set())
    (rounds,) = tiers.query("SELECT value FROM results WHERE name = 'between_rounds'")
    found = f"SELECT SUM(vectors) FROM ledger WHERE useful AND step = 'between-average' AND scope = '{PEERS}'"
    each = N_CLUSTERS * (N_CLUSTERS - 1) if shape == "all" else 2 * (N_CLUSTERS - 1)
    assert tiers.query(found) == [(each * rounds[0],)]
    # Vectors that the coordinator sees are final models, since `collect_models` is set, and come back to their users to be judged.
    seen = "SELECT DISTINCT kind FROM ledger WHERE scope = 'between-cluster' AND vectors > 0"
    assert {str(kind).partition(".")[2] for (kind,) in tiers.query(seen)} == {"FinalModels"}
    up = "SELECT DISTINCT kind FROM ledger WHERE scope = 'between-cluster' AND direction = 'up' AND scalars > 0 AND vectors = 0"
    told = {str(kind).partition(".")[2] for (kind,) in tiers.query(up)}
    assert told == {"ClusterPart", "ClusterGap", "Judgement", "Scores"} | (
        {"ClusterConstants"} if method == "al2sgd" else {"UserSmoothness"}
    )


def shipped(name: str, **changes: Any) -> Any:
    """A shipped experiment, shorter and without references."""
    rules = ["references=[]", "method.iterations=120", "method.trace_every=60", "method.collect_models=true"]
    content = json.loads(experiment_to_json(load(name, rules)))
    return experiment_from({**content, **changes})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_schools_and_a_few_authorities_of_exams_have_the_same_bits_in_every_topology(tmp_path: Path) -> None:
    """Ten authorities are more than `ring_above`."""
    heads = [head for head in list_users(load("exams").data, 0) if head.cluster is not None]
    chosen = sorted({str(head.cluster) for head in heads}, key=lambda name: sum(head.cluster == name for head in heads))[:10]
    users = load_users(load("exams").data, 0, [head.name for head in heads if head.cluster in chosen])
    sizes = [len(user.features) for user in users]
    arrays = {
        "features": np.concatenate([user.features for user in users]),
        "target": np.concatenate([user.target for user in users]),
        "user": np.repeat(np.arange(len(users)), sizes),
        "cluster": np.repeat([str(user.cluster) for user in users], sizes),
    }
    np.savez(tmp_path / "exams.npz", **arrays)
    few = {"source": "npz", "path": str(tmp_path / "exams.npz"), "cluster": "cluster", "standardize": True}
    for experiment, n in ((shipped("schools"), 2), (shipped("exams", data=few), 10)):
        found = {}
        for topology in ("clusters", "peers"):
            rules = experiment.federation.model_copy(update={"topology": topology, "hosts": n, **QUICK})
            changed = experiment.model_copy(update={"federation": rules})
            found[topology] = bits(Tiers(changed, tmp_path / f"{experiment.name}-{topology}").run(120))
            assert verdict_on(tmp_path / f"{experiment.name}-{topology}" / "run").agrees
        assert found["peers"] == found["clusters"] == bits(flat(experiment))


def test_one_cluster_has_nobody_to_send_to(tmp_path: Path) -> None:
    options = {"clusters": 1, "users_per_cluster": 3, "rows": 3, "d": 2}
    data = {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users", "options": options}
    experiment = small(L2GD, data=data, federation={**ALL, "hosts": 1})
    tiers = Tiers(experiment, tmp_path)
    assert bits(tiers.run()) == bits(flat(experiment))
    assert verdict_on(tmp_path / "run").agrees


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"method": {"name": "oracle"}}, "the coordinator makes the averages of method 'oracle', which aggregators cannot exchange among"),
        ({"method": {"name": "pdmm", "penalty": 0.1}}, "method 'pdmm' has no clusters of its own, want federation.topology 'flat'"),
        ({"references": ["global"]}, "reference 'global' sends the coordinator what users compute, .*: want references: \\[\\]"),
    ],
)
def test_what_needs_a_coordinator_is_refused(changes: dict[str, Any], sentence: str) -> None:
    content = small(L2GD, federation=ALL).model_dump(mode="json")
    experiment = experiment_from({**content, **changes})
    with pytest.raises(ConfigError, match=sentence):
        check_tiers(experiment, [stage.method for stage in stages_of(experiment)])


def test_the_loopback_runs_it_flat_with_the_same_bits() -> None:
    one, other = (coterie.run(small(L2GD, federation=rules)) for rules in (ALL, {"topology": "flat", "hosts": 1}))
    assert {user: model.tobytes() for user, model in one.models.items()} == {user: model.tobytes() for user, model in other.models.items()}


# ---- faults


def deaths(seed: int, n: int, last: int) -> list[Death]:
    """Aggregators that die at random exchanges of the coordinator, no two at the same."""
    draws = random.Random(seed)  # noqa: S311 - no secret
    places = sorted(draws.sample(range(3, last), n))
    return [Death(draws.choice(["c0", "c1", "c2"]), "", place) for place in places]


def test_an_aggregator_that_is_killed_in_the_middle_of_an_exchange_changes_no_bits(tmp_path: Path) -> None:
    tiers = Tiers(small(L2GD, federation=RING), tmp_path, deaths=[Death("c1", "", 9)])
    assert bits(tiers.run()) == bits(flat(small(L2GD)))
    assert tiers.books().agree
    assert verdict_on(tmp_path / "run").agrees


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("method", "shape"), [("l2gd", "all"), ("al2sgd", "ring")])
def test_ten_kills_of_aggregators_and_one_of_the_coordinator_change_no_bits(tmp_path: Path, method: str, shape: str) -> None:
    longer = {**METHODS[method], "iterations": 120}
    listed = deaths(seed=len(method) + len(shape), n=10, last=28)
    tiers = Tiers(small(longer, federation=SHAPES[shape]), tmp_path, deaths=[*listed, Death("", "", listed[5].seq)])
    assert bits(tiers.run(250)) == bits(flat(small(longer)))
    assert tiers.books().agree, tiers.books()
    assert verdict_on(tmp_path / "run").agrees


class Gate:
    """A TCP proxy in front of an aggregator, for its peers alone. While it is shut, it accepts nobody and passes nothing on."""

    def __init__(self) -> None:
        self.port, self.target = 0, 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def shut(self) -> None:
        if self._server is not None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.target)
        pair = {writer, there_writer}
        self._writers |= pair
        try:
            await asyncio.gather(_pump(reader, there_writer), _pump(there_reader, writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.transport.abort()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.transport.abort()


async def behind(tiers: Tiers, gate: Gate, cluster: str, shut_at: int, again_s: float | None) -> Any:
    """The run with an aggregator whose peers reach it through the gate, which is shut when it has its task of an exchange."""
    gate.target = tiers.ports[cluster]
    await gate.open()
    begin, found_at, waiting = Peering.begin, Listening.found_at, []

    async def shut() -> None:
        await gate.shut()
        if again_s is not None:
            await asyncio.sleep(again_s)
            await gate.open()

    def beginning(peering: Peering, task: Any, durable_seq: int) -> None:
        if peering.name == cluster and task.seq >= shut_at and not waiting:
            waiting.append(asyncio.create_task(shut()))
        begin(peering, task, durable_seq)

    def found(at: Listening, port: int) -> str:
        return f"127.0.0.1:{gate.port}" if at.name == cluster else found_at(at, port)

    try:
        with mock.patch.object(Peering, "begin", beginning), mock.patch.object(Listening, "found_at", found):
            async with tiers.members():
                return await tiers.coordinated()
    finally:
        assert waiting, "the link must have been cut"
        await asyncio.gather(*waiting)
        await gate.shut()


@pytest.mark.slow
def test_a_link_between_two_that_is_cut_for_a_time_changes_no_bits(tmp_path: Path) -> None:
    tiers = Tiers(small(L2GD, federation={**ALL, "absence_timeout_s": 60.0}), tmp_path)

    async def run() -> Any:
        async with asyncio.timeout(100):
            return await behind(tiers, Gate(), "c1", shut_at=8, again_s=20.0)

    assert bits(asyncio.run(run())) == bits(flat(small(L2GD)))
    assert tiers.books().agree, tiers.books()
    assert verdict_on(tmp_path / "run").agrees
    assert tiers.query("SELECT COUNT(*) > 0 FROM events WHERE kind = 'lost' AND text LIKE 'aggregator ''c1'' cannot be reached%'") == [(1,)]


def test_a_peer_that_is_gone_for_good_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    tiers = Tiers(small(L2GD, federation={**ALL, "absence_timeout_s": 1.0}), tmp_path)

    async def run() -> None:
        async with asyncio.timeout(40):
            await behind(tiers, Gate(), "c1", shut_at=8, again_s=None)

    with pytest.raises(RunError, match=r"aggregator 'c[02]': another aggregator could not be reached for too long \(rule R8\)"):
        asyncio.run(run())


def test_vectors_of_a_ring_are_added_in_the_order_of_clusters() -> None:
    from coterie_server.families.known_clusters import weighted_average

    values = np.array([[1e16], [1.0], [-1e16], [1.0]] * 5)
    running = values[0]
    for value in values[1:]:
        running = running + value
    assert weighted_average(values, np.ones(20)).tolist() == (running / 20).tolist()
