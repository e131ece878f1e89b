"""Checks that a method has the same bits wherever it is computed: again, on other hosts, in processes, with aggregators."""

from __future__ import annotations

from coterie_deploy.engines.shares import by_cluster
from coterie_deploy.read.verify import verdict_on
from coterie_deploy.studies.check.counts import check_books, check_counts
from coterie_deploy.studies.check.declared import why_flat
from coterie_deploy.studies.check.results import results_of
from coterie_deploy.studies.check.trial import Failed, NotApplicable, Trial
from coterie_deploy.studies.check.world import Shuffled, World
from coterie_server.record import summary
from coterie_server.record.rundb import BETWEEN, WITHIN, read_run

_HOSTS_PER_CLUSTER = 2


def repeat(trial: Trial) -> str:
    """The run once more."""
    trial.compare(trial.run(trial.world(World, "again")), "when the run is made again")
    return ""


def hosts(trial: Trial) -> str:
    """All users on one host."""
    if trial.n_hosts == 1:
        raise NotApplicable("the federation has one user")
    run = trial.run(trial.world(World, "one-host", n_hosts=1))
    trial.compare_results(run.results, f"with one host instead of {trial.n_hosts}")
    return ""


def arrival(trial: Trial) -> str:
    """Answers in random order."""
    if trial.n_hosts == 1:
        raise NotApplicable("the federation has one user")
    world = trial.world(Shuffled, "shuffled", trial.seed)
    trial.compare_results(trial.run(world).results, "when answers arrive in another order")
    if not any(order != tuple(sorted(order)) for order in world.orders):
        raise NotApplicable("no exchange asks more than one host")
    return ""


def grpc(trial: Trial) -> str:
    """Client processes over gRPC."""
    for n_hosts in dict.fromkeys((1, trial.n_hosts)):
        folder = trial.run_folder(f"grpc-{n_hosts}")
        trial.compare_results(results_of(trial.launched(folder, n_hosts), folder), f"with {n_hosts} client processes over gRPC")
    return ""


def aggregators(trial: Trial) -> str:
    """An aggregator process for each known cluster."""
    if why := why_flat(trial.experiment):
        raise NotApplicable(why)
    if not all(head.cluster for head in trial.heads):
        raise NotApplicable("the users have no known clusters")
    clusters = by_cluster(trial.heads)
    below = min(_HOSTS_PER_CLUSTER, *(len(users) for users in clusters.values()))
    folder = trial.run_folder("aggregators")
    finished = trial.launched(folder, len(clusters), topology="clusters", hosts_per_cluster=below)
    trial.compare_results(results_of(finished, folder), f"with {len(clusters)} aggregators")
    verdict = verdict_on(folder)
    check_books(verdict)
    check_counts(verdict)
    with read_run(folder) as connection:
        scopes = {row.scope for row in summary.traffic(connection) if row.expected or row.expected_scalars}
    if missing := {BETWEEN, WITHIN} - scopes:
        raise Failed(f"with aggregators, no step has a closed form of what travels {' and '.join(sorted(missing))}")
    return ""
