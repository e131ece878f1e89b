"""What holds in every method: the ledger is the closed form, both ends of every link agree, and nothing counts twice after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.registry import methods
from coterie.wire.codec import Encoded
from coterie_deploy.engines.loopback import LoopbackLink
from coterie_deploy.read.verify import Verdict, verdict_on
from coterie_server.session.hub import Hub
from tests.conformance import CASES, differences, traffic, without_a_form
from tests.simulation import Faults, World, query, random_faults
from tests.two_tier import COORDINATOR, Death, Tiers

TWO_TIERS = [name for name, case in CASES.items() if case.has_clusters]
COUNTED = (
    "SELECT stage, round, step, direction, kind, link, SUM(vectors), SUM(scalars), SUM(payload_bytes) FROM ledger "
    "WHERE useful AND seq > 0 AND step != 'control' GROUP BY 1, 2, 3, 4, 5, 6"
)


def assert_verified(run: Path) -> None:
    verdict = verdict_on(run)
    assert verdict.agrees, (verdict.books, verdict.differences)
    assert verdict.is_finished
    assert not verdict.books.absent
    assert verdict.books.n_agreed > 0
    assert all(one.has_form for listed in verdict.judged.values() for one in listed)


def test_every_method_is_here() -> None:
    assert {name.partition(" ")[0] for name in CASES} == set(methods())


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_the_closed_form(name: str, tmp_path: Path) -> None:
    CASES[name].world(tmp_path).run()
    rows = traffic(tmp_path / "run")
    assert any(row.expected or row.expected_scalars for row in rows)
    assert not differences(rows)
    assert not without_a_form(rows)
    assert_verified(tmp_path / "run")


# ---- kills


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_the_closed_form_and_both_ends_agree_whoever_dies(name: str, seed: int, tmp_path: Path) -> None:
    """Two hosts and the coordinator die at random exchanges, in one process."""
    for folder in ("calm", "faulty"):
        (tmp_path / folder).mkdir()
    CASES[name].world(tmp_path / "calm").run()
    n_exchanges = int(query(tmp_path / "calm" / "run", "SELECT MAX(seq) FROM ledger")[0][0])
    hosts = [f"h{i}" for i in range(CASES[name].n_hosts)]
    faults = random_faults(seed, n_exchanges, hosts) if n_exchanges >= 3 else Faults({1: hosts[0]}, {}, (n_exchanges,))
    world = CASES[name].world(tmp_path / "faulty", faults=faults, keeps_hosts=bool(seed % 2))
    world.run()
    assert world.done, "somebody must have died"
    assert_verified(tmp_path / "faulty" / "run")
    assert query(tmp_path / "faulty" / "run", COUNTED) == query(tmp_path / "calm" / "run", COUNTED)


# ---- hosts that are left out

LEFT_OUT = {
    "pdmm lean": ("pdmm", {"evaluate_every": 1}),
    "pdmm uniform": ("pdmm", {"evaluate_every": 2}),
    "fedrep_linear": ("fedrep_linear", {}),
    "fedrep_linear shared": ("fedrep_linear", {}),
    "fedrep": ("fedrep", {}),
    "local_network": ("local_network", {}),
    "fed_mtl convex": ("fed_mtl", {}),
}


class Leaving(World):
    """Host h1 is gone before it is asked in one exchange, and back when h0 is asked in a later one."""

    lost_at: int = 0
    back_at: int = 0

    @contextlib.asynccontextmanager
    async def connect(self, hub: Hub) -> AsyncIterator[None]:
        world = self

        class Link(LoopbackLink):
            def send(self, encoded: Encoded) -> None:
                if self._host.name == "h0" and hub.seq == world.lost_at:
                    hub.lost("h1", links["h1"], "gone")
                if self._host.name == "h0" and hub.seq == world.back_at:
                    asyncio.get_running_loop().call_soon(links["h1"].join)
                super().send(encoded)

        links = {name: Link(hub, self.host(name, hub.run_id)) for name in self.users}
        for link in links.values():
            link.join()

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.005)
                hub.tick()

        ticking = asyncio.create_task(tick())
        yield
        ticking.cancel()


def leaving(name: str, folder: Path, lost_at: int, back_at: int) -> Verdict:
    """What is to be said of a run that goes on without h1 from one exchange to another."""
    content = json.loads(experiment_to_json(CASES[name].make(folder)))
    content["method"] |= LEFT_OUT[name][1]
    content["federation"] |= {"on_loss": "skip", "absence_timeout_s": 0.02}
    world = Leaving(experiment_from(content), folder / "run", 3)
    world.lost_at, world.back_at = lost_at, back_at
    world.run()
    return verdict_on(folder / "run")


def first_exchange(name: str, folder: Path) -> tuple[int, int]:
    """The first and the last exchange of the stage in which hosts may be left out."""
    CASES[name].world(folder).run()
    stage, _ = LEFT_OUT[name]
    steps = "step NOT IN ('standardize', 'describe', 'control')"
    where = f"stage = (SELECT number FROM stages WHERE name = '{stage}') AND {steps}"
    ((first, last),) = query(folder / "run", f"SELECT MIN(seq), MAX(seq) FROM ledger WHERE {where}")
    return first, last


@pytest.mark.parametrize("name", ["pdmm lean", "fedrep"])
def test_the_closed_form_knows_of_hosts_that_are_left_out(name: str, tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    _, last = first_exchange(name, tmp_path / "calm")
    verdict = leaving(name, tmp_path, last - 4, last - 1)
    assert query(tmp_path / "run", "SELECT DISTINCT kind FROM decisions") == [("skip",), ("pass",)]
    assert not verdict.differences
    assert verdict.agrees


@pytest.mark.slow
@pytest.mark.parametrize("comes_back", [True, False])
@pytest.mark.parametrize("name", LEFT_OUT)
def test_the_closed_form_knows_of_hosts_that_are_left_out_anywhere(name: str, comes_back: bool, tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    first, last = first_exchange(name, tmp_path / "calm")
    n_decisions = 0
    for lost_at in range(first, last + 1):
        folder = tmp_path / str(lost_at)
        folder.mkdir()
        verdict = leaving(name, folder, lost_at, lost_at + 3 if comes_back else 0)
        assert not verdict.differences, (lost_at, verdict.differences)
        assert verdict.books.agree, (lost_at, verdict.books)
        n_decisions += query(folder / "run", "SELECT COUNT(*) FROM decisions")[0][0]
    assert n_decisions > last - first


# ---- two tiers


def two_tiers(name: str, folder: Path, deaths: Sequence[Death] = ()) -> Tiers:
    """The case with an aggregator and two hosts for each cluster."""
    experiment: Experiment = CASES[name].make(folder)
    rules = experiment.federation.model_copy(update={"topology": "clusters", "hosts": 3, "hosts_per_cluster": 2})
    return Tiers(experiment.model_copy(update={"federation": rules}), folder, hosts_per_cluster=2, deaths=deaths)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO_TIERS)
def test_with_aggregators_the_ledger_is_the_closed_form_in_both_scopes(name: str, tmp_path: Path) -> None:
    two_tiers(name, tmp_path).run()
    assert_verified(tmp_path / "run")
    scopes = {row.scope for row in traffic(tmp_path / "run") if row.expected}
    assert scopes == {"between-cluster", "within-cluster"}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TWO_TIERS)
def test_with_aggregators_it_is_whoever_dies(name: str, seed: int, tmp_path: Path) -> None:
    """A host, an aggregator and the coordinator die, in an order and at exchanges that the seed draws."""
    (tmp_path / "calm").mkdir()
    two_tiers(name, tmp_path / "calm").run()
    links = "SELECT MAX(seq) FROM ledger WHERE scope = ? AND link LIKE ?"
    n_above = int(query(tmp_path / "calm" / "run", links.replace("?", "'between-cluster'", 1).replace("?", "'%'"))[0][0])
    n_below = int(query(tmp_path / "calm" / "run", links.replace("?", "'within-cluster'", 1).replace("?", "'%c1/%'"))[0][0])
    draws = np.random.default_rng(seed)
    above = [int(seq) for seq in draws.choice(np.arange(1, n_above + 1), 2, replace=False)]
    below = int(draws.integers(1, n_below + 1))
    deaths = [Death("c0", COORDINATOR, above[0]), Death(COORDINATOR, COORDINATOR, above[1]), Death("c1-0", "c1", below)]
    two_tiers(name, tmp_path, deaths).run()
    assert_verified(tmp_path / "run")
