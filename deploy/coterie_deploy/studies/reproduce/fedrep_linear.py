"""Figures 1, 3 and 4 of Collins, Hassani, Mokhtari and Shakkottai (2021), by federated runs from each seed; printed without numbers.

The data are those of section 5.1 (`coterie_client.data.representation`). These are our choices where the paper says nothing:

    figure 1    n = 100 users with m fixed rows each, d = 20, k = 2; the error of a user's model theta_i is |theta_i - B* w*_i|^2, which is
                its mean squared error on new rows without noise
    figure 3    m = 5 fresh rows a round and eta = 1 for all; GD-GD and 10GD-GD have the step of the heads with which they are quickest
    figure 4    m = 10 fresh rows a round, eta = .5, 200 rounds; then users who did not take part, each with m_new rows

All are runs of the engine. FedRep and its relatives are method `fedrep_linear`. So is federated averaging, with one head for all and a
random start, since the method of moments would give it what it cannot learn. Local models are method `local`. New users join as by
`coterie adapt`. Users judge their own models on held-out rows that give the error exactly (`users`).
"""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import JsonValue
from rich.console import Console

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_client.data import UserData, load_users, user_source
from coterie_deploy.engines.api import Result, run
from coterie_deploy.engines.launch import Launch, launch
from coterie_deploy.studies.adapt import adapted_from
from coterie_deploy.studies.plots import Axis, Point, curves, panels
from coterie_deploy.studies.reproduce.study import Study, Work, models_of, seeds_of
from coterie_deploy.terminal.tables import figure, table
from coterie_deploy.view.charts import Spec
from coterie_server.interface.half import Outcome
from coterie_server.run.coordinator import Finished

Algorithm = Literal["fedrep", "gd_gd", "10gd_gd"]
Learner = Literal["fedrep", "fedavg", "local"]

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
_LARGE = 5000  # here FedRep alone is run, and for fewer rounds: it is at its floor soon
_ROUNDS_LARGE = 20


@dataclass(frozen=True)
class Distances:
    """The principal angle distance (9) of the representation from the truth in one run."""

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


def figure3(seed: int, work: Work) -> list[Distances]:
    """One trajectory for each algorithm and n. Raises RunError when the folder cannot be written."""
    found = []
    for n_users in SIZES:
        for algorithm in ALGORITHMS:
            if n_users < _LARGE or algorithm == "fedrep":
                experiment = figure3_experiment(seed, n_users, algorithm)
                name, said = f"fedrep-figure3-seed{seed}-{algorithm}-{n_users}", f"seed {seed}: {algorithm}, {n_users} users"
                found += work.rows(name, said, [experiment], Distances, _distances, experiment, algorithm)
    return found


def figure3_experiment(seed: int, n_users: int, algorithm: Algorithm) -> Experiment:
    """One run of figure 3: "d = 10, k = 2, m = 5, and r = 0.1"."""
    method = {"eta": 1.0, "batch": "fresh", "batch_rows": 5, **ALGORITHMS[algorithm]}
    rounds = ROUNDS_3[algorithm] if n_users < _LARGE else _ROUNDS_LARGE
    data = {"source": "representation", "users": n_users, "d": 10, "k": K, "rows_per_user": 5}
    return _experiment(seed, data, method, rounds)


def figure1(seed: int, work: Work) -> list[Errors]:
    """The users' errors for each m, by what each learner makes of their rows."""
    found = []
    for rows in ROWS:
        fedrep, fedavg = (_experiment(seed, _users(0, N_USERS, rows), {"batch": "fixed", **method}, ROUNDS) for method in (FEDREP, FEDAVG))
        runs = {"fedrep": fedrep, "fedavg": fedavg, "local": _local(seed, 0, N_USERS, rows)}
        said = f"seed {seed}: FedRep, FedAvg and local models on {rows} rows a user"
        found += work.rows(f"fedrep-figure1-seed{seed}-m{rows}", said, list(runs.values()), Errors, _errors_of_users, runs, rows)
    return found


def figure4(seed: int, work: Work) -> list[Errors]:
    """New users' errors for each m_new, on what each learner has learnt from others."""
    trained = {"fedrep": figure4_experiment(seed, FEDREP), "fedavg": figure4_experiment(seed, FEDAVG)}
    experiments = [*trained.values(), *(_new_users(trained["fedrep"], rows) for rows in NEW_ROWS)]
    said = f"seed {seed}: FedRep and FedAvg, then {N_NEW} new users"
    return work.rows(f"fedrep-figure4-seed{seed}", said, experiments, Errors, _errors_of_new_users, seed, trained)


def figure4_experiment(seed: int, method: Mapping[str, Any]) -> Experiment:
    """The run that new users join after it has ended."""
    data = {"source": "representation", "users": N_USERS, "d": D, "k": K, "rows_per_user": 10}
    return _experiment(seed, data, {"batch": "fresh", "batch_rows": 10, **method}, ROUNDS)


@user_source
def users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """The users numbered `first` to `first` + `count` - 1 of these data, with `rows` rows each.

    Their held-out rows are sqrt(d) times the unit vectors, without noise. So a model's mean squared error on them is |theta_i - B* w*_i|^2,
    its expectation over new rows.
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


def _local(seed: int, first: int, count: int, rows: int) -> Experiment:
    problem = {"loss": "least_squares", "intercept": False, "l2": 1e-8}  # gives the minimiser of least norm of few rows to seven digits
    content = {"name": "local", "seed": seed, "data": _users(first, count, rows), "problem": problem, "method": {"name": "local"}}
    return experiment_from(content)


def _new_users(trained: Experiment, rows: int) -> Experiment:
    return adapted_from(trained, _users(N_USERS, N_NEW, rows), [], 1)


def _distances(experiment: Experiment, algorithm: Algorithm) -> list[Distances]:
    result = run(experiment)
    distances = [row["distance"] for row in result.history()]
    start = result.metrics[result.final_stage]["distance_at_start"]
    return [Distances(experiment.seed, algorithm, len(result.users), [start, *distances])]


def _errors_of_users(experiments: Mapping[Learner, Experiment], rows: int) -> list[Errors]:
    found = []
    for learner, experiment in experiments.items():
        result = run(experiment)
        errors = _errors_of_local(experiment, result) if learner == "local" else _judged(result)
        found.append(Errors(experiment.seed, learner, rows, errors))
    return found


def _errors_of_new_users(seed: int, trained: Mapping[Learner, Experiment]) -> list[Errors]:
    found = []
    for learner, experiment in trained.items():
        result = run(experiment)
        learnt = Outcome(None, shared=result.outcomes[result.final_stage].shared)
        for rows in NEW_ROWS:
            joined = asyncio.run(launch(_new_users(experiment, rows), Launch(transport="loopback", start=learnt)))
            found.append(Errors(seed, learner, rows, _judged(joined)))
    alone = ((rows, _local(seed, N_USERS, N_NEW, rows)) for rows in NEW_ROWS)
    return found + [Errors(seed, "local", rows, _errors_of_local(experiment, run(experiment))) for rows, experiment in alone]


def _judged(result: Result | Finished) -> list[float]:
    """The users' mean squared errors on their held-out rows, as the users measured them."""
    errors: list[float] = result.outcomes[result.final_stage].by_user["heldout_metric"].tolist()
    return errors


def _errors_of_local(experiment: Experiment, result: Result) -> list[float]:
    """The same of local models, which the method collects."""
    owners = {user.name: user for user in load_users(experiment.data, experiment.seed, None)}
    models = zip(result.users, models_of(result, "local"), strict=True)
    return [float(np.square(owners[name].test_features @ model - owners[name].test_target).mean()) for name, model in models]


# ---- what is printed and drawn. The numbers of other draws are medians, found independently of this system.

LEVELS = (0.1, 0.01, 0.001)  # distances to be reached
FLOOR = 10  # rounds at the end, over which the distance is averaged
QUARTILES = (0.25, 0.5, 0.75)
ALGORITHM_TITLES: Mapping[Algorithm, str] = {"fedrep": "FedRep", "10gd_gd": "10GD-GD", "gd_gd": "GD-GD"}
LEARNER_TITLES: Mapping[Learner, str] = {"fedrep": "FedRep", "fedavg": "FedAvg", "local": "local models"}

# The distance at the start, the rounds to LEVELS, and the floor, for eta = 1.
OTHER_DRAWS_3: Mapping[tuple[Algorithm, int], tuple[str, ...]] = {
    ("fedrep", 100): (".44", "4", "10", "15", "4.2e-4"),
    ("fedrep", 500): (".21", "1", "4", "7", "1.8e-4"),
    ("fedrep", 1000): (".14", "1", "4", "6", "1.3e-4"),
    ("fedrep", 5000): (".06", "0", "3", "5", "5.5e-5"),
    **{("10gd_gd", n): (start, "", rounds) for n, start, rounds in ((100, ".44", "29"), (500, ".21", "14"), (1000, ".14", "10"))},
    **{("gd_gd", n): (start, "", rounds) for n, start, rounds in ((100, ".44", "79"), (500, ".21", "54"), (1000, ".14", "46"))},
}
# By m_new.
OTHER_DRAWS_4: Mapping[Learner, Mapping[int, str]] = {
    "fedrep": {1: ".94", 2: "3.3e-6", 3: "1.2e-6", 5: "5.4e-7", 10: "3.0e-7"},
    "fedavg": dict.fromkeys(NEW_ROWS, "about 2"),
    "local": {1: "1.95", 2: "1.86", 3: "1.74", 5: "1.52", 10: "1.0", 20: "4.5e-5"},
}


def rounds_to(distances: Sequence[float], level: float) -> float:
    """The first round after which the distance is at most `level`, 0 for the start, infinity for none."""
    reached = np.flatnonzero(np.asarray(distances) <= level)
    return float(reached[0]) if reached.size else np.inf


def median_line(found: Sequence[Distances]) -> tuple[float, ...]:
    """Medians over the seeds: the distance at the start, the rounds to each of LEVELS, the floor."""
    rows = [
        (run.distances[0], *(rounds_to(run.distances, level) for level in LEVELS), float(np.mean(run.distances[-FLOOR:]))) for run in found
    ]
    return tuple(float(value) for value in np.median(rows, axis=0))


def errors_at(found: Sequence[Errors], learner: Learner, rows: int) -> Array:
    """The errors of all users of all seeds."""
    return np.concatenate([run.errors for run in found if (run.learner, run.rows) == (learner, rows)])


def _runs(found: Sequence[Distances], algorithm: Algorithm, n_users: int) -> list[Distances]:
    return [run for run in found if (run.algorithm, run.n_users) == (algorithm, n_users)]


def _show_figure3(found: Sequence[Distances], console: Console) -> None:
    lines = []
    for n_users, algorithm in itertools.product(SIZES, ALGORITHMS):
        if runs := _runs(found, algorithm, n_users):
            start, *rounds, floor = median_line(runs)
            reached = (f"{value:g}" if np.isfinite(value) else f"> {len(runs[0].distances) - 1}" for value in rounds)
            lines.append((ALGORITHM_TITLES[algorithm], str(n_users), f"{start:.2f}", *reached, f"{floor:.1e}"))
            lines.append(("  other draws", "", *OTHER_DRAWS_3[algorithm, n_users]))
    columns = ("", "n", "start", *(f"to {level:g}" for level in LEVELS), "floor")
    console.print(table(f"Distance of the representation, and rounds to a distance, {seeds_of(found)}", columns, lines))
    console.print(
        f"Medians over the seeds; d = 10, k = 2, m = 5 fresh rows, r = .1, eta = 1. The floor is a mean over the last {FLOOR} rounds. "
        "The heads' steps of GD-GD and 10GD-GD are tuned; for n = 5000 only FedRep is run. The paper gives no numbers for its figure."
    )


def _show_figure1(found: Sequence[Errors], console: Console) -> None:
    _show_errors(found, "m", ROWS, {}, console)
    console.print(
        "The error of a user's model, of its m rows, is the mean squared error on new rows without noise. 100 users, d = 20, k = 2, "
        "r = .1, 200 rounds on the same rows. The paper gives no numbers for its figure: local models suffer where m is small, a single "
        "model (FedAvg) for any m, FedRep never. Of k = 2 rows a head fits all, and nothing is left to learn a representation from."
    )


def _show_figure4(found: Sequence[Errors], console: Console) -> None:
    _show_errors(found, "m_new", NEW_ROWS, OTHER_DRAWS_4, console)
    console.print(
        "The error of a new user's model, of its m_new rows, is the mean squared error on new rows without noise. "
        f"{N_NEW} new users for each seed join what 100 others have learnt (coterie adapt); FedRep's and FedAvg's solve for a head. "
        "The paper gives no numbers for its figure."
    )


def _show_errors(
    found: Sequence[Errors], name: str, sizes: Sequence[int], others: Mapping[Learner, Mapping[int, str]], console: Console
) -> None:
    lines = []
    for learner, title in LEARNER_TITLES.items():
        low, middle, high = np.transpose([np.quantile(errors_at(found, learner, rows), QUARTILES) for rows in sizes]).tolist()
        lines += [
            (label, *(figure(value, 3) for value in values)) for label, values in ((title, middle), ("  25 %", low), ("  75 %", high))
        ]
        if others:
            lines.append(("  other draws", *(others[learner].get(rows, "") for rows in sizes)))
    console.print(table(f"Median error by {name}, {seeds_of(found)}", (name, *map(str, sizes)), lines))


def _figure3_chart(found: Sequence[Distances]) -> Spec:
    """Medians and quartiles of the trajectories, a panel for each n."""
    points = []
    for (algorithm, title), n_users in itertools.product(ALGORITHM_TITLES.items(), SIZES):
        values = np.transpose([run.distances for run in _runs(found, algorithm, n_users)])
        points += [_point(title, number, at, f"n = {n_users}") for number, at in enumerate(values)]
    distance = Axis("principal angle distance to the truth", is_log=True)
    return panels(curves(points, Axis("rounds"), distance, bands=True))


def _errors_chart(found: Sequence[Errors], x_title: str, sizes: Sequence[int]) -> Spec:
    points = [_point(title, rows, errors_at(found, learner, rows)) for learner, title in LEARNER_TITLES.items() for rows in sizes]
    return curves(points, Axis(x_title, is_log=True, ticks=sizes), Axis("error of a user's model", is_log=True), bands=True)


def _point(title: str, x: float, values: Array, panel: str = "") -> Point:
    low, middle, high = np.quantile(values, QUARTILES).tolist()
    return Point(title, x, middle, low, high, panel)


_ERRORS = (
    ("seed", "learner", "rows", "user", "error"),
    lambda run: [(run.seed, run.learner, run.rows, *point) for point in enumerate(run.errors)],
)
_DISTANCES = (
    ("seed", "algorithm", "n_users", "round", "distance"),
    lambda run: [(run.seed, run.algorithm, run.n_users, *point) for point in enumerate(run.distances)],
)
STUDIES = {
    "fedrep-figure1": Study(figure1, _show_figure1, lambda found: _errors_chart(found, "rows of a user, m", ROWS), *_ERRORS),
    "fedrep-figure3": Study(figure3, _show_figure3, _figure3_chart, *_DISTANCES),
    "fedrep-figure4": Study(figure4, _show_figure4, lambda found: _errors_chart(found, "rows of a new user, m_new", NEW_ROWS), *_ERRORS),
}
