"""The federated runs behind figures 1, 3 and 4 of Collins, Hassani, Mokhtari and Shakkottai (2021), and what is measured in them.

Section 5.1's data (`coterie_client.data.representation`). What the paper does not say is here:

    figure 1    n = 100 users with m fixed rows each, d = 20, k = 2; the error of a user's model theta_i is |theta_i - B* w*_i|^2, which is
                its mean squared error on new rows without noise
    figure 3    m = 5 fresh rows a round and eta = 1 for all; GD-GD and 10GD-GD have the step of the heads with which they are quickest
    figure 4    m = 10 fresh rows a round, eta = .5, 200 rounds; then users who have not taken part, each with m_new rows

All by runs on the engine with hosts, messages and a ledger: FedRep and its relatives are method `fedrep_linear`, federated averaging too
(one head for all, from a random start: the method of moments would give it what it cannot learn), and local models are method `local`. New
users join as by `coterie adapt`. Users judge themselves on held-out rows that give the error exactly (`users`). Numbers are kept in the
output folder.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import JsonValue

from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_client.data import UserData, load_users, user_source
from coterie_deploy.engines.api import Result, run
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.reproduce.files import fingerprint_of, kept_rows
from coterie_deploy.studies.reproduce.known_clusters import models_of
from coterie_server.interface.half import Outcome

Algorithm = Literal["fedrep", "gd_gd", "10gd_gd"]
Learner = Literal["fedrep", "fedavg", "local"]
Say = Callable[[str], None]

N_USERS, D, K = 100, 20, 2  # figures 1 and 4
PARTICIPATION = 0.1  # "r = 0.1"
ROWS = (2, 5, 10, 20, 30, 50, 100)  # m of figure 1
NEW_ROWS = (1, 2, 3, 5, 10, 20)  # m_new of figure 4
N_NEW = 50  # new users of a seed
ROUNDS = 200
FEDREP: Mapping[str, Any] = {"eta": 0.5}
FEDAVG: Mapping[str, Any] = {"heads": "shared", "start": "random", "eta": 0.2, "head_eta": 0.2}

# Figure 3: n, and how many rounds each algorithm has.
SIZES = (100, 500, 1000, 5000)
ALGORITHMS: Mapping[Algorithm, Mapping[str, Any]] = {
    "fedrep": {},
    "10gd_gd": {"heads": "gradient", "head_steps": 10, "head_eta": 0.15},
    "gd_gd": {"heads": "gradient", "head_steps": 1, "head_eta": 0.15},
}
ROUNDS_3: Mapping[Algorithm, int] = {"fedrep": 50, "10gd_gd": 60, "gd_gd": 120}
_LARGE = 5000  # where heads by gradient steps are not run, and FedRep for some rounds only: it is at its floor soon
_ROUNDS_LARGE = 20


@dataclass(frozen=True)
class Distances:
    """How far the representation is from the truth in one run: the principal angle distance (9)."""

    seed: int
    algorithm: Algorithm
    n_users: int
    distances: list[float]  # at the start and after each round


@dataclass(frozen=True)
class Errors:
    """The users' errors |theta_i - B* w*_i|^2 in one run."""

    seed: int
    learner: Learner
    rows: int  # m or m_new
    errors: list[float]


def figure3(seed: int, folder: Path, say: Say) -> list[Distances]:
    """One trajectory for each algorithm and n, from the folder where they are there. Raises RunError when it cannot be written."""
    found = []
    for n_users in SIZES:
        for algorithm in ALGORITHMS:
            if n_users < _LARGE or algorithm == "fedrep":
                say(f"seed {seed}: {algorithm}, {n_users} users")
                experiment = figure3_experiment(seed, n_users, algorithm)
                kept = folder / f"fedrep-figure3-seed{seed}-{algorithm}-{n_users}.json"
                found += kept_rows(kept, fingerprint_of(experiment), Distances, functools.partial(_distances, experiment, algorithm))
    return found


def figure3_experiment(seed: int, n_users: int, algorithm: Algorithm) -> Experiment:
    """One run of figure 3: "d = 10, k = 2, m = 5, and r = 0.1"."""
    method = {"eta": 1.0, "batch": "fresh", "batch_rows": 5, **ALGORITHMS[algorithm]}
    rounds = ROUNDS_3[algorithm] if n_users < _LARGE else _ROUNDS_LARGE
    data = {"source": "representation", "users": n_users, "d": 10, "k": K, "rows_per_user": 5}
    return _experiment(seed, data, method, rounds)


def figure1(seed: int, folder: Path, say: Say) -> list[Errors]:
    """The users' errors for each m, with what each learner makes of the users' rows."""
    found = []
    for rows in ROWS:
        say(f"seed {seed}: FedRep, FedAvg and local models on {rows} rows a user")
        makers = (_learnt(seed, rows, FEDREP), _learnt(seed, rows, FEDAVG), _local(seed, 0, N_USERS, rows))
        kept = folder / f"fedrep-figure1-seed{seed}-m{rows}.json"
        found += kept_rows(kept, fingerprint_of(*makers), Errors, functools.partial(_errors_of_users, makers, rows))
    return found


def figure4(seed: int, folder: Path, say: Say) -> list[Errors]:
    """New users' errors for each m_new, on what each learner has learnt from others."""
    fedrep, fedavg = (figure4_experiment(seed, method) for method in (FEDREP, FEDAVG))
    newcomers = [_new_users(fedrep, rows) for rows in NEW_ROWS]
    kept = folder / f"fedrep-figure4-seed{seed}.json"
    return kept_rows(kept, fingerprint_of(fedrep, fedavg, *newcomers), Errors, lambda: _errors_of_new_users(fedrep, fedavg, say))


def figure4_experiment(seed: int, method: Mapping[str, Any]) -> Experiment:
    """The run that new users join after it has ended."""
    data = {"source": "representation", "users": N_USERS, "d": D, "k": K, "rows_per_user": 10}
    return _experiment(seed, data, {"batch": "fresh", "batch_rows": 10, **method}, ROUNDS)


@user_source
def users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """Users number `first` to `first` + `count` - 1 of these data, with `rows` rows each.

    Their held-out rows are sqrt(d) times the unit vectors and have no noise, so that a model's mean squared error on them is
    |theta_i - B* w*_i|^2, what it is on all rows that there could be.
    """
    first, count, rows = (int(str(options[key])) for key in ("first", "count", "rows"))
    data = RepresentationData(source="representation", users=first + count, d=D, k=K, rows_per_user=rows)
    names = [f"u{number}" for number in range(first, first + count)]
    truth = true_representation(data, seed)
    if truth is None:
        raise RunError("these data have no representation")
    axes = np.sqrt(D) * np.eye(D)
    loaded = load_users(data, seed, names)
    return [replace(u, test_features=axes, test_target=axes @ truth @ true_head(data, seed, u.name)) for u in loaded]


def _users(first: int, count: int, rows: int) -> dict[str, Any]:
    return {"source": "python", "path": f"{__name__}:users", "options": {"first": first, "count": count, "rows": rows}}


def _experiment(seed: int, data: Mapping[str, Any], method: Mapping[str, Any], rounds: int) -> Experiment:
    hyper = {"name": "fedrep_linear", "k": K, "participation": PARTICIPATION, **method}
    return experiment_from({"name": "fedrep", "seed": seed, "data": dict(data), "method": hyper, "stop": {"rounds": rounds}})


def _learnt(seed: int, rows: int, method: Mapping[str, Any]) -> Experiment:
    return _experiment(seed, _users(0, N_USERS, rows), {"batch": "fixed", **method}, ROUNDS)


def _local(seed: int, first: int, count: int, rows: int) -> Experiment:
    # Fewer rows than d have no single minimiser; this little l2 gives that of least norm to seven digits.
    problem = {"loss": "least_squares", "intercept": False, "l2": 1e-8}
    data = _users(first, count, rows)
    return experiment_from({"name": "local", "seed": seed, "data": data, "problem": problem, "method": {"name": "local"}})


def _new_users(trained: Experiment, rows: int) -> Experiment:
    return adapted_from(trained, _users(N_USERS, N_NEW, rows), [], 1)


def _distances(experiment: Experiment, algorithm: Algorithm) -> list[Distances]:
    result = run(experiment)
    distances = [row["distance"] for row in result.history()]
    start = result.metrics[result.final_stage]["distance_at_start"]
    return [Distances(experiment.seed, algorithm, len(result.users), [start, *distances])]


def _errors_of_users(experiments: Sequence[Experiment], rows: int) -> list[Errors]:
    fedrep, fedavg, local = experiments
    seed = fedrep.seed
    judged: tuple[tuple[Learner, Experiment], ...] = (("fedrep", fedrep), ("fedavg", fedavg))
    found = [Errors(seed, learner, rows, _judged(_outcome(run(experiment)))) for learner, experiment in judged]
    return [*found, Errors(seed, "local", rows, _errors_of_local(local))]


def _errors_of_new_users(fedrep: Experiment, fedavg: Experiment, say: Say) -> list[Errors]:
    found = []
    trained: tuple[tuple[Learner, Experiment], ...] = (("fedrep", fedrep), ("fedavg", fedavg))
    for learner, experiment in trained:
        say(f"seed {experiment.seed}: {learner}, then {N_NEW} new users")
        learnt = Outcome(None, shared=_outcome(run(experiment)).shared)
        for rows in NEW_ROWS:
            joined = asyncio.run(launch(_new_users(experiment, rows), Launch(transport="loopback", start=learnt)))
            found.append(Errors(experiment.seed, learner, rows, _judged(joined.outcomes[joined.final_stage])))
    seed = fedrep.seed
    return found + [Errors(seed, "local", rows, _errors_of_local(_local(seed, N_USERS, N_NEW, rows))) for rows in NEW_ROWS]


def _outcome(result: Result) -> Outcome:
    return result.outcomes[result.final_stage]


def _judged(outcome: Outcome) -> list[float]:
    """The users' mean squared errors on their held-out rows, by themselves."""
    errors: list[float] = outcome.by_user["heldout_metric"].tolist()
    return errors


def _errors_of_local(experiment: Experiment) -> list[float]:
    """Of models that the method collects, though nobody needs them."""
    result = run(experiment)
    owners = {user.name: user for user in load_users(experiment.data, experiment.seed, None)}
    models = zip(result.users, models_of(result, "local"), strict=True)
    return [float(np.square(owners[name].test_features @ model - owners[name].test_target).mean()) for name, model in models]
