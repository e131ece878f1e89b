"""Averages of known clusters as exact sums: the same bits on any hosts and with aggregators, and no user's own model at its parent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import Experiment
from coterie.methods.async_l2gd import MESSAGES
from coterie.wire.precision import Precision
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check.federations import CASES
from coterie_deploy.studies.check.world import World
from coterie_server.families import known_clusters
from coterie_server.interface.half import Sum
from coterie_server.run.coordinator import Finished
from tests.simulation import query
from tests.two_tier import COORDINATOR, Death, Tiers, flat, small

L2GD = {
    "name": "async_l2gd",
    "iterations": 40,
    "gamma": {"c0": 1.0, "c1": 0.7, "c2": 1.3},
    "alpha": 0.4,
    "p0": 0.3,
    "p": 0.3,
    "trace_every": 20,
}
EVEN = {**L2GD, "gamma": 1.0}
AL2SGD = {**EVEN, "name": "async_al2sgd", "rho": 0.2}
METHODS = {"uneven": L2GD, "even": EVEN, "al2sgd": AL2SGD}
OF_HOSTS = ("within_vectors_expected", "within_targets_expected")  # figures that depend on the number of hosts


def made(method: dict[str, Any], *, exact: bool = True, **rules: Any) -> Experiment:
    return small(method, exact_sums=exact, federation={"hosts_per_cluster": 2, **rules})


def left(finished: Finished) -> dict[str, Any]:
    outcome = finished.outcomes[finished.final_stage]
    models = {} if outcome.models is None else {"models": outcome.models.tobytes()}
    return {**models, **{name: value for name, value in outcome.figures.items() if name not in OF_HOSTS}}


@pytest.mark.parametrize("name", METHODS)
def test_one_and_two_hosts_and_aggregators_leave_the_same_bits_which_are_those_of_members_sums_but_for_rounding(
    name: str, tmp_path: Path
) -> None:
    method = {**METHODS[name], "collect_models": True}
    found = [flat(made(method), n) for n in (1, 2)]
    tiers = Tiers(made(method), tmp_path, 2)
    found.append(tiers.run())
    assert left(found[0]) == left(found[1]) == left(found[2])
    assert tiers.books().agree
    assert verdict_on(tmp_path / "run").agrees
    plain, exact = (finished.outcomes[finished.final_stage] for finished in (flat(made(method, exact=False), 2), found[0]))
    assert plain.models is not None
    assert exact.models is not None
    np.testing.assert_allclose(exact.models, plain.models, rtol=0, atol=1e-12)
    assert {key: exact.figures[key] for key in ("objective", "gap_at_least")} == pytest.approx(
        {key: plain.figures[key] for key in ("objective", "gap_at_least")}, rel=1e-8
    )


def test_a_host_sends_one_vector_for_all_its_users_of_a_cluster(tmp_path: Path) -> None:
    sent = {}
    for exact in (False, True):
        tiers = Tiers(made({**EVEN, "reuse": "never"}, exact=exact), tmp_path / str(exact), 2)
        tiers.run()
        ups = "SELECT SUM(vectors) FROM ledger WHERE step = 'within-average' AND direction = 'up' AND scope = 'within-cluster'"
        ((sent[exact],),) = tiers.query(ups)
    assert sent[False] == 2 * sent[True] > 0  # each host has two users of its cluster


def test_the_rounding_of_averages_is_a_figure_of_each_round(tmp_path: Path) -> None:
    tiers = Tiers(made(EVEN), tmp_path, 2)
    tiers.run()
    found = {value for (value,) in tiers.query("SELECT value FROM figures WHERE name = 'rounding' AND round > 0")}
    assert found
    assert all(0 < value < 1e-12 for value in found)


# ---- masks


@pytest.mark.parametrize("name", ["uneven", "even"])
def test_under_masks_the_coordinator_learns_totals_over_clusters_with_the_same_bits(name: str, tmp_path: Path) -> None:
    opened = left(flat(made(METHODS[name]), 2))
    tiers = Tiers(made(METHODS[name], sums="masked"), tmp_path, 2)
    assert left(tiers.run()) == opened
    assert tiers.books().agree
    assert verdict_on(tmp_path / "run").agrees
    ups = "SELECT DISTINCT kind FROM ledger WHERE scope = '{}' AND direction = 'up' AND (vectors > 0 OR scalars > 0) AND round > 0"
    between = {kind for (kind,) in tiers.query(ups.format("between-cluster"))}
    within = {kind for (kind,) in tiers.query(ups.format("within-cluster"))}
    assert {f"async_l2gd.{kind}Total" for kind in ("ClusterSums", "ClusterState", "ClusterSpread", "ClusterGap")} <= between
    assert {f"async_l2gd.{kind}Total" for kind in ("Models", "UserState", "UserSpread", "UserGap")} <= within
    assert {kind for kind in between | within if not kind.endswith("Total")} == {"async_l2gd.Judgement"}


def test_members_are_killed_under_masks_and_the_bits_stay(tmp_path: Path) -> None:
    opened = left(flat(made(L2GD), 2))
    deaths = [Death("c0", COORDINATOR, 9), Death("c1", "c1", 12), Death("c2-1", "c2", 15), Death(COORDINATOR, COORDINATOR, 16)]
    tiers = Tiers(made(L2GD, sums="masked"), tmp_path, 2, deaths)
    assert left(tiers.run()) == opened
    assert tiers.books().agree


def spread_out(sums: str, folder: Path) -> Experiment:
    """Users of each cluster on each of three hosts of a flat run."""
    experiment = CASES["async_l2gd sums"].experiment(folder)
    rules = experiment.federation.model_copy(update={"sums": sums, "hosts": 3})
    return experiment.model_copy(update={"federation": rules})


def test_a_flat_run_masks_the_averages_of_each_cluster(tmp_path: Path) -> None:
    found = []
    for name in ("open", "masked"):
        finished = World(spread_out(name, tmp_path), tmp_path / name, 3).run()
        finished.database.close()
        found.append(left(finished))
        assert verdict_on(tmp_path / name).agrees
    assert found[0] == found[1]
    assert query(tmp_path / "masked", "SELECT COUNT(*) > 0 FROM ledger WHERE kind = 'masking.Covered'") == [(1,)]


def test_where_hosts_have_no_users_of_some_clusters_there_is_no_closed_form_of_the_masked_sums_inside(tmp_path: Path) -> None:
    world = World(spread_out("masked", tmp_path), tmp_path / "run", 3)
    users = [f"u{number}" for number in range(12)]  # four of each cluster
    world.users = {"h0": [users[0], users[4], users[8]], "h1": [users[1], *users[5:8], users[9]], "h2": [users[2], users[3], *users[10:]]}
    world.run().database.close()
    assert verdict_on(tmp_path / "run").agrees


def test_masks_are_refused_where_the_aggregator_needs_each_users_answer() -> None:
    for method, said in (
        (AL2SGD, "'async_al2sgd' also sends of each user the largest smoothness"),
        ({**L2GD, "collect_models": True}, "'async_l2gd' also sends of each user the final model"),
    ):
        with pytest.raises(ConfigError, match=said):
            made(method, sums="masked")


# ---- refusals


def test_among_peers_sums_are_refused_since_aggregators_see_each_others() -> None:
    with pytest.raises(ConfigError, match="with topology 'peers' aggregators see each other's sums: want topology 'clusters'"):
        made(EVEN, topology="peers")


def test_a_host_does_not_send_a_users_model_where_sums_are_agreed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = known_clusters.averaged

    async def curious(*args: Any, **how: Any) -> Any:
        return await real(*args, **{**how, "is_exact": False})

    for walk in ("async_l2gd", "async_al2sgd"):
        monkeypatch.setattr(f"coterie_server.methods.{walk}.walk.averaged", curious)
    for case in ("async_l2gd sums", "async_al2sgd sums"):
        with pytest.raises(RunError, match=r"the parent asks for a step that this experiment does not have \(rule C9\)"):
            World(CASES[case].experiment(tmp_path), tmp_path / case, 2).run()


def test_a_sum_of_more_than_it_is_written_for_is_refused() -> None:
    one, precision = Sum(MESSAGES.models, capacity=3), Precision.of("float64", is_convex=True)
    assert one.forms(np.arange(2), precision) == one.forms(np.arange(3), precision)
    with pytest.raises(RunError, match=r"no exact sum of async_l2gd.Models: a total weight of 4, want at most 3"):
        one.forms(np.arange(4), precision)
