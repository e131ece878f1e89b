"""Real processes, real SIGKILL: client hosts, aggregators and coordinators die at random rounds, and the run ends with the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import run
from coterie_deploy.read.models import finished_run, models_of
from coterie_deploy.read.verify import verdict_on
from tests.networks import CLASSES, write_users
from tests.processes import SERVER, Processes, arrays_of, processes
from tests.simulation import query

ROUNDS = 900
SHARES = {"a": "#0..#19", "b": "#20..#34", "c": "#35..#59"}
FEW_SHARES = {"a": "#0..#1", "b": "#2..#5", "c": "#6..#8"}
CLUSTERS = ("c0", "c1", "c2")
EXPERIMENT: dict[str, Any] = {
    "name": "kills",
    "seed": 11,
    "data": {"source": "ellipses", "test_per_class": 50},
    "problem": {"loss": "squared_hinge", "l2": 1e-3},
    "stop": {"rounds": ROUNDS, "residual": None},
    "snapshots": {"every_rounds": 50},
    "federation": {"hosts": len(SHARES), "absence_timeout_s": 30},
}
PAPER = {"name": "pdmm", "penalty": 0.09, "placement": "paper", "sampling": "paired", "primal_fraction": 0.3, "evaluate_every": 10}
LEAN = {"name": "pdmm", "penalty": 0.09}
WEIGHTS = {"gamma": 1.0, "alpha": 0.4, "p0": 0.2, "p": 0.3, "collect_models": True}
FEW = {  # users, so that the time goes into what is tested
    **EXPERIMENT,
    "data": {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 10},
    "problem": {"loss": "least_squares", "l2": 0.1, "intercept": False},
}
L2GD = {**FEW, "method": {"name": "async_l2gd", "iterations": 3000, **WEIGHTS}}
AL2SGD = {**FEW, "method": {"name": "async_al2sgd", "iterations": 1500, "rho": 0.1, **WEIGHTS}}
LINEAR = {
    **{key: value for key, value in EXPERIMENT.items() if key != "problem"},
    "data": {"source": "representation", "users": 9, "d": 10, "k": 2, "rows_per_user": 20},
    "method": {"name": "fedrep_linear", "participation": 0.5, "eta": 0.1, "batch": "fixed"},
    "stop": {"rounds": 2000},
}


def calm(folder: Path, content: Mapping[str, Any]) -> Path:
    """The run folder of the same run in one process, undisturbed."""
    run({**content, "federation": {"hosts": 1}}, output=folder / "calm")
    return folder / "calm"


def assert_same_bits(found: Path, wanted: Path, stage: str) -> None:
    ours, theirs = arrays_of(found, stage), arrays_of(wanted, stage)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        np.testing.assert_array_equal(ours[name], array)


def strike(seed: int, folder: Path, content: Mapping[str, Any], *, stage: int, total: int, **how: Any) -> Processes:
    """A run in which a member dies at a random round, and at a later one another (odd seeds), or the coordinator, or both (2, 6, ...)."""
    draws = np.random.default_rng(seed)
    first, second = sorted(int(number) for number in draws.integers(total // 20, total // 2, 2))
    with processes(folder, content, **how) as under_fire:
        members = [name for name in under_fire.commands if name != SERVER]
        one, other = str(draws.choice(members)), str(draws.choice(members))
        last = (other,) if seed % 2 else (SERVER, other) if seed % 4 == 2 else (SERVER,)
        under_fire.wait_for_round(first, stage)
        under_fire.kill(one)
        under_fire.wait_for_round(second, stage)
        under_fire.kill(*last)
        under_fire.end()
        attempts = "1" if seed % 2 else "2"
        assert under_fire.rows("SELECT value FROM run WHERE key = 'attempt'") == [(attempts,)], "it must have died in the middle"
        verdict = verdict_on(under_fire.run)
        assert verdict.agrees, (verdict.books, verdict.differences)
        return under_fire


def strike_pdmm(seed: int, folder: Path, method: Mapping[str, Any]) -> None:
    content = {**EXPERIMENT, "method": method}
    struck = strike(seed, folder, content, stage=1, total=ROUNDS, hosts=SHARES)  # stage 0 is the reference that it starts from
    kept = struck.rows("SELECT count(DISTINCT round) FROM ledger WHERE useful AND stage = 1 AND step = 'S5'")
    assert kept == [(ROUNDS,)], "each round must count once"
    assert_same_bits(struck.run, calm(folder, content), "pdmm")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_host_and_then_a_killed_coordinator_end_with_the_same_bits(tmp_path: Path) -> None:
    strike_pdmm(0, tmp_path, PAPER)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 7))
def test_kills_at_six_random_pairs_of_rounds_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    strike_pdmm(seed, tmp_path, PAPER if seed == 1 else LEAN)


def strike_clusters(seed: int, folder: Path, content: Mapping[str, Any], tier: str) -> None:
    stage = str(content["method"]["name"])
    undisturbed = calm(folder, content)
    total = int(query(undisturbed, "SELECT max(round) FROM figures")[0][0])
    rules = content["federation"]
    two_tiers = {**content, "federation": {**rules, "topology": "clusters"}}
    where: Any = (two_tiers, {"clusters": CLUSTERS}) if tier == "clusters" else (content, {"hosts": FEW_SHARES})
    struck = strike(seed, folder, where[0], stage=0, total=total, **where[1])
    assert_same_bits(struck.run, undisturbed, stage)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_member_of_two_tiers_and_then_a_killed_coordinator_end_with_the_same_bits(tmp_path: Path) -> None:
    strike_clusters(0, tmp_path, L2GD, "clusters")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("method", ["async_l2gd", "async_al2sgd"])
def test_kills_of_clusters_at_random_rounds_end_with_the_same_bits(method: str, seed: int, tmp_path: Path) -> None:
    """Seeds below 4 have aggregators, which are among those that die."""
    strike_clusters(seed, tmp_path, L2GD if method == "async_l2gd" else AL2SGD, "clusters" if seed < 4 else "flat")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(6))
def test_kills_of_linear_fedrep_at_random_rounds_end_with_the_same_bits(seed: int, tmp_path: Path) -> None:
    struck = strike(seed, tmp_path, LINEAR, stage=0, total=LINEAR["stop"]["rounds"], hosts=FEW_SHARES)
    assert_same_bits(struck.run, calm(tmp_path, LINEAR), "fedrep_linear")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("hosts", [1, 3, 7])
def test_grpc_with_any_number_of_hosts_gives_the_bits_of_the_loopback(hosts: int) -> None:
    content = {**EXPERIMENT, "method": LEAN, "federation": {"hosts": hosts}, "stop": {"rounds": 100}}
    far, near = run(content, transport="grpc", hosts=hosts), run({**content, "federation": {"hosts": 1}})
    for user, model in near.models.items():
        np.testing.assert_array_equal(far.models[user], model)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(2))
def test_networks_and_heads_have_the_same_bits_after_kills(seed: int, tmp_path: Path) -> None:
    rounds = 120
    changes = {
        "data": {"source": "npz", "path": str(write_users(tmp_path / "users.npz", n_users=60))},
        "problem": {"loss": "cross_entropy"},
        "model": {"name": "mlp", "hidden": [6, 4], "classes": CLASSES},
        "stop": {"rounds": rounds},
        "snapshots": {"every_rounds": 15},
    }
    method: dict[str, object] = {"name": "fedrep", "participation": 0.3, "head_epochs": 2, "evaluate_every": 10}
    undisturbed = finished_run(calm(tmp_path, {**EXPERIMENT, **changes, "method": method}))
    draws = np.random.default_rng(seed)
    with processes(tmp_path, {**EXPERIMENT, **changes, "method": method}, hosts=SHARES) as killed:
        killed.wait_for_round(int(draws.integers(5, rounds // 2)))
        killed.kill(str(draws.choice(list(SHARES))))
        killed.wait_for_round(int(draws.integers(rounds // 2, rounds - 5)))
        killed.kill(SERVER)
        killed.end()
    again = finished_run(killed.run)
    assert {name: array.tobytes() for name, array in again.shared.items()} == {n: a.tobytes() for n, a in undisturbed.shared.items()}
    whole = models_of(undisturbed, None)
    restarted = {user: tensors for state in killed.states.values() for user, tensors in models_of(again, state).items()}
    assert len(whole) == len(restarted) == 60
    for user, tensors in whole.items():
        assert {name: array.tobytes() for name, array in tensors.items()} == {n: a.tobytes() for n, a in restarted[user].items()}
