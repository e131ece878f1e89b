"""Checks of runs: that they end, that their ledgers are true, and that they have the same bits wherever and however they are made."""

import itertools
import os
import signal
from collections.abc import Set as AbstractSet
from pathlib import Path

import numpy as np

from coterie.errors import ConfigError
from coterie_deploy.engines.shares import by_cluster
from coterie_deploy.read.verify import CONTROL, Verdict, verdict_on
from coterie_deploy.studies.check.declared import why_flat
from coterie_deploy.studies.check.results import arrays_in
from coterie_deploy.studies.check.trial import Failed, NotApplicable, Trial
from coterie_deploy.studies.check.world import CoordinatorKilledError, Faults, Leaving, Shuffled, World, random_faults
from coterie_server.interface.half import server_half
from coterie_server.record import summary
from coterie_server.record.rundb import BETWEEN, PEERS, WITHIN, read_run
from coterie_server.run.engine import Progress
from coterie_server.run.plan import stages_of, why_everyone

# ---- an undisturbed run and its ledger


def ends(trial: Trial) -> str:
    """The run ends, and what it leaves are numbers."""
    finished = trial.calm.finished
    outcome, stage = finished.outcomes[finished.final_stage], f"stage {finished.final_stage!r}"
    if not (any(True for _ in arrays_in([outcome.models, outcome.shared])) or outcome.by_user or outcome.figures):
        raise Failed(f"{stage} has left nothing: neither models, nor shared tensors, nor figures")
    if not all(np.isfinite(array).all() for _, array in arrays_in([outcome.models])):
        raise Failed(f"{stage} has left models that are not finite")
    return ""


def closed_form(trial: Trial) -> str:
    """Every step that moves vectors or scalars has a closed form, and it holds."""
    verdict = verdict_on(trial.calm.folder)
    check_counts(verdict)
    with read_run(trial.calm.folder) as connection:
        rows = [row for row in summary.traffic(connection) if row.step != CONTROL]
    if not any(row.expected or row.expected_scalars for row in rows):
        raise Failed("no step has a closed form of vectors or scalars")
    return ""


def check_counts(verdict: Verdict, where: str = "") -> None:
    """Failed unless the measured counts are those of the formulas; `where` begins the sentence."""
    without = [one.note for listed in verdict.judged.values() for one in listed if not one.has_form]
    if said := " ".join(verdict.differences[:3]) or next(iter(without), ""):
        raise Failed(f"{where}: {said}" if where else said)


def books(trial: Trial) -> str:
    """Sender and receiver agree."""
    check_books(verdict_on(trial.calm.folder))
    return ""


def check_books(verdict: Verdict) -> None:
    """Failed unless every message is in both books with the same counts."""
    if not verdict.books.agree:
        raise Failed("; ".join(verdict.books.differences[:3]) or "the books of sender and receiver differ")
    if verdict.books.absent:
        raise Failed(f"no book came from {', '.join(sorted(verdict.books.absent))}")
    if not verdict.books.n_agreed:
        raise Failed("the books are empty")


def check_ledger(folder: Path) -> None:
    """Failed unless the books of a run agree, and the measured counts are those of the formulas."""
    verdict = verdict_on(folder)
    check_books(verdict)
    check_counts(verdict)


# ---- again, on other hosts, in processes, with aggregators

_HOSTS_PER_CLUSTER = 2
_ADVICE = (
    "A message that is the same for all users travels once to each aggregator and once more inside each cluster: "
    "send it as Rows with `users`, which count once for each user; "
    f"or give both counts, with {BETWEEN!r} and {WITHIN!r} as the third part of their keys; "
    "or refuse aggregators with ServerHalf(tiers='flat only')."
)


def repeat(trial: Trial) -> str:
    """The run once more."""
    trial.compare(trial.run(trial.world(World, "again")), "when the run is made again")
    return ""


def hosts(trial: Trial) -> str:
    """All users on one host, or on two where one alone could not hide its sums."""
    trial.check_several_hosts()
    run = trial.run(trial.world(World, "few-hosts", n_hosts=trial.fewest_hosts))
    trial.compare_results(run.results, f"with {'one host' if trial.fewest_hosts == 1 else 'two hosts'} instead of {trial.n_hosts}")
    return ""


def arrival(trial: Trial) -> str:
    """Answers in random order."""
    trial.check_several_hosts()
    world = trial.world(Shuffled, "shuffled", trial.seed)
    trial.compare_results(trial.run(world).results, "when answers arrive in another order")
    if not any(order != tuple(sorted(order)) for order in world.orders):
        raise NotApplicable("no exchange asks more than one host")
    return ""


def grpc(trial: Trial) -> str:
    """Client processes over gRPC."""
    for n_hosts in dict.fromkeys((trial.fewest_hosts, trial.n_hosts)):
        folder = trial.run_folder(f"grpc-{n_hosts}")
        trial.compare_results(trial.launched(folder, n_hosts), f"with {n_hosts} client processes over gRPC")
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
    results = trial.launched(folder, len(clusters), {"topology": "clusters", "hosts_per_cluster": below})
    trial.compare_results(results, f"with {len(clusters)} aggregators")
    _check_tiers(trial, folder, {BETWEEN, WITHIN})
    # Exact sums are refused among peers, who would see each other's.
    if not trial.experiment.exact_sums and all(server_half(stage.method).peers is not None for stage in stages_of(trial.experiment)):
        for shape, ring_above in (("", len(clusters)), (" around a ring", 1)):
            folder = trial.run_folder(f"peers{shape}")
            rules = {"topology": "peers", "hosts_per_cluster": below, "ring_above": ring_above}
            trial.compare_results(trial.launched(folder, len(clusters), rules), f"with {len(clusters)} aggregators that are peers{shape}")
            _check_tiers(trial, folder, {BETWEEN, WITHIN, PEERS})
    return ""


def _check_tiers(trial: Trial, folder: Path, wanted: AbstractSet[str]) -> None:
    """Failed unless the ledger of a run with aggregators agrees, and has closed forms in these scopes."""
    try:
        check_ledger(folder)
    except Failed as error:
        is_passed_on = all(server_half(stage.method).tiers is None for stage in stages_of(trial.experiment))
        raise Failed(f"{error} {_ADVICE}" if is_passed_on else str(error)) from error
    with read_run(folder) as connection:
        scopes = {row.scope for row in summary.traffic(connection) if row.expected or row.expected_scalars}
    if missing := wanted - scopes:
        raise Failed(f"with aggregators, no step has a closed form of what travels {' and '.join(sorted(missing))}")


# ---- restarts: snapshots and checkpoints hold all that has to survive a process

_MAX_RESTARTS = 12  # exchanges at which somebody is restarted, of a longer run


def snapshots(trial: Trial) -> str:
    """Everybody is restarted from disk in turn, with a snapshot after each round."""
    often = trial.experiment.snapshots.model_copy(update={"every_rounds": 1})
    experiment = trial.experiment.model_copy(update={"snapshots": often})
    exchanges = np.arange(1, trial.n_exchanges + 1)
    if exchanges.size > _MAX_RESTARTS:
        exchanges = np.sort(np.random.default_rng(trial.seed).choice(exchanges, _MAX_RESTARTS, replace=False))
    listed = exchanges.tolist()
    names = trial.hosts * len(listed)
    faults = Faults(dict(zip(listed, names, strict=False)), dict(zip(listed, names[1:], strict=False)), tuple(listed))
    world = trial.world(World, "restarted", experiment=experiment, faults=faults, keeps_hosts=False)
    trial.compare(trial.run(world), "when everybody is restarted from disk now and then")
    return ""


def kills(trial: Trial) -> str:
    """Hosts and coordinator die at random exchanges."""
    for number, keeps_hosts in enumerate((True, False)):
        faults = random_faults(2 * trial.seed + number, trial.n_exchanges, trial.hosts)
        world = trial.world(World, "killed", faults=faults, keeps_hosts=keeps_hosts)
        run = trial.run(world)
        who = [f"{name} in exchange {seq}" for seq, name in {**faults.hosts_before, **faults.hosts_after}.items()]
        where = f"after kills of {', '.join(who)} and the coordinator in exchange {faults.coordinator[0]}"
        if not world.done:
            raise Failed("nobody could be killed: the run asks no host for anything")
        trial.compare(run, where)
        check_books(verdict_on(run.folder))
    return ""


def processes(trial: Trial) -> str:
    """A client process is killed, then the coordinator; the run is resumed."""
    with read_run(trial.calm.folder) as connection:
        n_rounds = int(connection.execute("SELECT SUM(rounds) FROM stages").fetchone()[0])
    draws = np.random.default_rng(trial.seed)
    first, second = sorted(int(number) for number in draws.integers(1, n_rounds, 2, endpoint=True))
    name, started, rounds = f"host-{draws.integers(1, trial.n_hosts, endpoint=True)}", dict[str, int](), itertools.count(1)

    def after_round(_: Progress) -> None:
        number = next(rounds)
        if number == first:
            os.kill(started[name], signal.SIGKILL)
        if number == second:
            raise CoordinatorKilledError

    folder = trial.run_folder("processes")
    try:
        trial.launched(folder, trial.n_hosts, observer=after_round, on_process=started.__setitem__)
    except CoordinatorKilledError:
        results = trial.launched(folder, trial.n_hosts, resume=True)
    else:
        raise Failed(f"the run ended before round {second}, at which it ended undisturbed")
    trial.compare_results(results, f"after SIGKILL of a client process in round {first} and a resume of the coordinator in round {second}")
    check_ledger(folder)
    return ""


# ---- without the users of a lost host

_ABSENCE_S = 0.02  # until the run goes on without a host: all others answer at once
_AWAY = 3  # exchanges
_ASKED = (
    "SELECT seq, MAX(round BETWEEN 1 AND MAX(rounds - 1, 1)) FROM ledger JOIN stages ON number = stage "
    "WHERE link = ? AND direction = 'down' AND step NOT IN ('standardize', 'describe', 'smoothness', 'convexity', 'control') "
    "AND name IN ({}) GROUP BY seq"
)


def left_out(trial: Trial) -> str:
    """The method refuses to run without a host, or goes on, and another run repeats that."""
    trial.check_several_hosts()
    rules = trial.experiment.federation.model_copy(update={"on_loss": "skip", "absence_timeout_s": _ABSENCE_S})
    experiment = trial.experiment.model_copy(update={"federation": rules})
    stages = stages_of(trial.experiment)
    name = trial.experiment.method.name
    first = next(place for place, stage in enumerate(stages) if stage.method == name)
    if why := next(filter(None, map(why_everyone, stages[first:])), ""):
        try:
            trial.run(trial.world(World, "refused", experiment=experiment))
        except ConfigError as error:
            if why not in str(error):
                raise Failed(f"the run is refused, but not since it needs every user: {error}") from error
            return f"it needs every user: {why}"
        raise Failed(f"method {name!r} needs every user ({why}), but on_loss 'skip' was not refused")
    tolerant = [stage.name for stage in stages[first:]]
    draws, leaver = np.random.default_rng(trial.seed), trial.hosts[1]
    with read_run(trial.calm.folder) as connection:
        rows = list(connection.execute(_ASKED.format(", ".join("?" * len(tolerant))), (leaver, *tolerant)))
    asked = [seq for seq, _ in rows]
    # Once in a round for sure; of the last round the exchanges cannot be told from those of the end. Where no round asks, anywhere.
    in_rounds = [seq for seq, is_in_a_round in rows if is_in_a_round] or asked
    for comes_back in (True, False):
        lost_at = int(draws.choice(in_rounds if comes_back else asked))
        back_at = lost_at + _AWAY if comes_back else 1 << 30
        where = f"when host {leaver!r} is lost in exchange {lost_at} and {'comes back' if comes_back else 'stays away'}"
        run = trial.run(trial.world(Leaving, "without", leaver, lost_at, back_at, experiment=experiment))
        with read_run(run.folder) as connection:
            if not connection.execute("SELECT COUNT(*) FROM decisions").fetchone()[0]:
                raise Failed(f"{where}, nobody is left out")
        verdict = verdict_on(run.folder)
        if not verdict.books.agree:
            raise Failed(f"{where}, {'; '.join(verdict.books.differences[:3])}")
        check_counts(verdict, where)
        again = trial.run(trial.world(World, "repeated", experiment=experiment, decisions_of=run.folder))
        if found := run.results.first_difference(again.results, with_counts=False):
            raise Failed(f"{where}, a run that repeats these decisions has other bits: {found}")
    return "it goes on without them"
