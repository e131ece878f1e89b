"""Aggregators that average among themselves, in containers: their network, their certificates, kills and a cut."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
from pathlib import Path

import pytest

from coterie_deploy.containers.certs import Asked, init, issue
from coterie_deploy.read.verify import verdict_on
from tests.commands import in_one_process
from tests.e2e.containers import docker, federation, same_models, wait_until, wants_an_engine

pytestmark = pytest.mark.e2e

CLUSTERS = ("c0", "c1", "c2")
EXPERIMENT = """
name: peers
seed: 4
data: {source: hlm, clusters: 3, users_per_cluster: 2, rows_per_user: 6, d: 3}
problem: {loss: least_squares, l2: 0.1, intercept: false}
method: {name: async_l2gd, iterations: 3000, gamma: 1.0, alpha: 0.4, p0: 0.3, p: 0.3, collect_models: true}
snapshots: {every_rounds: 60}
federation: {topology: peers, hosts: 3, heartbeat_s: 1, silence_s: 6, absence_timeout_s: 60, links: {between: 1Gbit/2ms, within: 1Gbit/1ms}}
"""
KILLED_AT, CUT_AT = 60, 130  # rounds of about 630


@pytest.fixture(autouse=True, scope="module")
def engine() -> None:
    wants_an_engine()


def certificates(folder: Path) -> None:
    """Those of all members, which the images' user can read."""
    init(folder)
    issue(folder, Asked("coordinator", "coordinator", ["coordinator"]))
    for cluster in CLUSTERS:
        issue(folder, Asked("aggregator", f"aggregator-{cluster}", [f"aggregator-{cluster}"], cluster=cluster))
        issue(folder, Asked("host", f"host-{cluster}-1", cluster=cluster))
    subprocess.run(["chown", "-R", "10001:10001", str(folder)], check=True)


def test_peers_keep_the_bits_of_a_flat_run_when_containers_are_killed_and_a_network_is_cut(tmp_path: Path) -> None:
    certificates(tmp_path / "certs")
    with federation(tmp_path, "peers", EXPERIMENT, "--hosts", "1", "--mtls", "certs") as made:
        made.up()
        made.reaches(KILLED_AT)
        carried = made.carried("aggregator-c0")
        for act in (made.kill, made.start):
            for both in ("aggregator-c1", "coordinator"):
                act(both)
        made.reaches(CUT_AT)
        network, cut = f"{made.name}_peers", made.container("aggregator-c2")
        docker("network", "disconnect", network, cut)
        missed = "aggregator 'aggregator-c2' cannot be reached"
        wait_until(lambda: any(missed in made.logs(f"aggregator-{cluster}") for cluster in ("c0", "c1")), "a peer that misses it")
        docker("network", "connect", "--alias", "peer-aggregator-c2", network, cut)
        assert made.ends() == 0, made.logs("coordinator")
        run = made.run_folder()
    (tmp_path / "flat.yaml").write_text(EXPERIMENT.replace("topology: peers, hosts: 3", "topology: flat, hosts: 1"))
    same_models(run, in_one_process(tmp_path, "flat.yaml"))
    verdict = verdict_on(run)
    assert verdict.agrees, verdict.differences
    # A name of the aggregator that leads to the backbone as well would leave the network of peers empty.
    with contextlib.closing(sqlite3.connect(run / "run.db")) as connection:
        query = "SELECT SUM(message_bytes) FROM ledger WHERE scope = 'between-peers' AND link LIKE 'aggregator-c0<>%' AND round < ?"
        assert carried["peers"] > connection.execute(query, (KILLED_AT,)).fetchone()[0] > 0
