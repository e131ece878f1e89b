"""A stand-in for tables 2 and 3 and figure 2 of Lyu, Hanzely and Kolar (2022), by federated runs from each seed.

The paper's donor data are not public. The shipped experiment `exams` is like them in what matters: many small users in known clusters, and
a logistic loss. Four sets of models, all by runs of the engine:

    local            method `local`
    single model     method `global`
    single cluster   method `async_l2gd` with alpha = 1: no cluster has an average of its own, all users are tied to that of all
    known clusters   method `async_l2gd` with the weights of the shipped experiment

A seed draws the held-out rows (a fifth of each school's) and the coins. The performance ratio compares two sets of models school by school,
so the study collects the models and judges them with the schools' own code.

If all training rows of a school have one label, its loss with a free intercept has no minimiser. For the local models alone the intercept
is therefore a feature, a column of -1 beside the standardised ones, under the l2 term. All models keep the same coordinates.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from pydantic import JsonValue
from rich.console import Console

from coterie.arrays import Array
from coterie.experiment.config import Experiment
from coterie.experiment.data import PythonData
from coterie.experiment.problem import ProblemConfig
from coterie_client.data import UserData, deviations, load_users, standardize, totals, user_source
from coterie_client.problems import build_problem
from coterie_deploy.engines.api import Result, run
from coterie_deploy.read import shipped
from coterie_deploy.studies.plots import HEIGHT, WIDTH, panels
from coterie_deploy.studies.reproduce import known_clusters
from coterie_deploy.studies.reproduce.known_clusters import Estimator
from coterie_deploy.studies.reproduce.study import Study, Work, deviation, models_of, seeds_of
from coterie_deploy.terminal.tables import table
from coterie_deploy.view.charts import Spec, spec_of


@dataclass(frozen=True)
class Scores:
    """One set of models on the held-out rows of one draw: means over the rows of each user."""

    seed: int
    estimator: Estimator
    users: list[str]
    losses: list[float]  # cross-entropy in nats
    accuracies: list[float]


def rows_of(seed: int, work: Work) -> list[Scores]:
    """The scores of each estimator. Raises RunError when the folder cannot be written."""
    experiments = [make(seed) for make in (known_clusters_experiment, single_cluster_experiment, local_experiment)]
    said = f"seed {seed}: federated runs of the four estimators"
    return work.rows(f"known-clusters-exams-seed{seed}", said, experiments, Scores, _measured, seed, experiments)


def known_clusters_experiment(seed: int) -> Experiment:
    """The shipped experiment, with the single model as a reference."""
    return shipped.load("exams", [f"seed={seed}", "method.collect_models=true", "method.trace_every=0"])


def single_cluster_experiment(seed: int) -> Experiment:
    """The same with alpha = 1 for all: L2GD of Hanzely and Richtarik (2020)."""
    experiment = known_clusters_experiment(seed)
    return experiment.model_copy(update={"method": experiment.method.model_copy(update={"lam": None, "alpha": 1.0}), "references": ()})


def local_experiment(seed: int) -> Experiment:
    """The local models, with the intercept as a feature."""
    whole = ["references=[]", "method={name: local}", "problem.intercept=false"]
    experiment = shipped.load("exams", [f"seed={seed}", *whole])
    return experiment.model_copy(update={"data": PythonData(source="python", path=f"{__name__}:schools")})


@user_source
def schools(options: dict[str, JsonValue], seed: int) -> Iterable[UserData]:  # noqa: ARG001
    """The schools with the held-out rows of the shipped experiment, standardised as there, and with a column of -1."""
    users = load_users(shipped.load("exams").data, seed, None)
    of_all = totals(users)
    n_rows = of_all.n_rows.sum()
    mean = of_all.sums.sum(axis=0) / n_rows
    scale = np.sqrt((deviations(users, mean) ** 2).sum(axis=0) / n_rows)
    found = []
    for user in (standardize(user, mean, scale) for user in users):
        features, test_features = (np.column_stack([rows, np.full(len(rows), -1.0)]) for rows in (user.features, user.test_features))
        found.append(replace(user, features=features, test_features=test_features, schema=()))
    return found


def _measured(seed: int, experiments: Sequence[Experiment]) -> list[Scores]:
    users = list(schools({}, seed))
    known, single, local = map(run, experiments)
    found: Mapping[Estimator, tuple[Result, str]] = {
        "local": (local, "local"),
        "single_model": (known, "global"),
        "single_cluster": (single, "async_l2gd"),
        "known_clusters": (known, "async_l2gd"),
    }
    names = [user.name for user in users]
    config = ProblemConfig(loss="logistic", intercept=False, reduction="mean")
    problem = build_problem(config, names, [user.features for user in users], [user.target for user in users])
    held_out = [user.test_features for user in users], [user.test_target for user in users]
    rows = []
    for estimator, (result, stage) in found.items():
        scores: Any = problem.evaluate(models_of(result, stage), *held_out)
        rows.append(Scores(seed, estimator, names, *(values.tolist() for values in scores)))
    return rows


# ---- what is printed and drawn

TITLES = {estimator: title for estimator, title in known_clusters.TITLES.items() if estimator != "single_coin"}
CAP = 100.0  # on the loss of a user, which an overconfident model may make arbitrarily large
_EDGES = np.linspace(0.0, 3.0, 31).tolist()  # of the bars of the plot
HIGH = 1.0  # "183 ZIP codes have cross-entropy loss greater than 1 in the personalized model, whereas 202 [...] in the single-model"

# Of other data, 29,490 ZIP codes of donors in 5 clusters: mean, standard deviation, quartiles, maximum; the share of ZIP codes above 1.
PAPER_TABLE2: Mapping[Estimator, str] = {
    "local": "0.413 0.932 0.173 0.247 0.313 6",
    "single_model": "0.211 0.176 0.058 0.201 0.273 2.76 0.0068",
    "known_clusters": "0.215 0.179 0.069 0.209 0.283 2.668 0.0062",
}
# Mean, standard deviation, quartiles, performance ratio.
PAPER_TABLE3: Mapping[Estimator, str] = {
    "local": "0.940 0.070 0.919 0.947 1 0.972",
    "single_model": "0.942 0.067 0.921 0.948 1 0.986",
    "known_clusters": "0.942 0.066 0.921 0.948 1 1",
}
# Mean losses on these data, with other held-out rows, found independently of this system.
OTHER_DRAWS: Mapping[Estimator, str] = {"local": "1.090", "single_model": "0.4756", "single_cluster": "0.4529", "known_clusters": "0.4529"}


class Summary(NamedTuple):
    """A figure of one estimator's users: means over the seeds."""

    mean: float
    error: float  # between seeds
    spread: float  # standard deviation over the users of a seed
    quartiles: tuple[float, float, float]
    maximum: float

    def shown(self) -> tuple[str, ...]:
        """All but the maximum as cells."""
        return f"{self.mean:.4f}", f"{self.error:.4f}", f"{self.spread:.3f}", *(f"{quartile:.3f}" for quartile in self.quartiles)


def summary(values: Sequence[Array]) -> Summary:
    """Of each seed's values (n,), which differ by user."""
    means = [float(each.mean()) for each in values]
    low, middle, high = np.mean([np.quantile(each, [0.25, 0.5, 0.75]) for each in values], axis=0).tolist()
    spread, maximum = (float(np.mean([measure(each) for each in values])) for measure in (np.std, np.max))
    return Summary(float(np.mean(means)), deviation(means), spread, (low, middle, high), maximum)


def losses_of(rows: Sequence[Scores], estimator: Estimator) -> list[Array]:
    """Each seed's losses (n,), capped."""
    return [np.minimum(row.losses, CAP) for row in rows if row.estimator == estimator]


def accuracies_of(rows: Sequence[Scores], estimator: Estimator) -> list[Array]:
    """Each seed's accuracies (n,)."""
    return [np.array(row.accuracies) for row in rows if row.estimator == estimator]


def performance_ratio(rows: Sequence[Scores], estimator: Estimator) -> float:
    """ "The proportion of clients with accuracy no less than the model being compared to", here the known clusters; mean over the seeds."""
    pairs = zip(accuracies_of(rows, estimator), accuracies_of(rows, "known_clusters"), strict=True)
    return float(np.mean([(own >= known).mean() for own, known in pairs]))


def _show(rows: Sequence[Scores], console: Console) -> None:
    losses, accuracies, shared = [], [], ("", "mean", "+-", "sd", "25 %", "50 %", "75 %")
    for estimator, title in TITLES.items():
        values = losses_of(rows, estimator)
        found, high = summary(values), float(np.mean([(each > HIGH).mean() for each in values]))
        losses.append((title, *found.shown(), f"{found.maximum:.2f}", f"{high:.4f}"))
        losses.append(("  other draws", OTHER_DRAWS[estimator]))
        accuracies.append((title, *summary(accuracies_of(rows, estimator)).shown(), f"{performance_ratio(rows, estimator):.3f}"))
        for lines, paper in ((losses, PAPER_TABLE2), (accuracies, PAPER_TABLE3)):
            if estimator in paper:
                mean, *others = paper[estimator].split()
                lines.append(("  paper, donors", mean, "", *others))
    where = f"{len(rows[0].users):,} schools, {seeds_of(rows)}"
    console.print(table(f"Cross-entropy of a user, {where}", (*shared, "largest", "above 1"), losses))
    console.print(table(f"Accuracy of a user, {where}", (*shared, "ratio"), accuracies))
    n_capped = sum(int((np.array(row.losses) > CAP).sum()) for row in rows)
    console.print(
        "On held-out rows, a fifth of each school's; means over the seeds. +- is the standard deviation between seeds, sd that between "
        f"users. Losses are capped at {CAP:g} ({n_capped} were above). "
        "ratio: the share of users with an accuracy no less than by known clusters."
    )
    console.print(
        "The paper's numbers are of other data, 29,490 ZIP codes of donors, which are not public: orders compare, digits do not. "
        "Other draws are of these data, with other held-out rows."
    )


def _chart(rows: Sequence[Scores]) -> Spec:
    """How the users' losses are distributed: shares, averaged over the seeds, in bars of which the last has what is above too."""
    bars, means = [], []
    last = (_EDGES[-2] + _EDGES[-1]) / 2
    for estimator, title in TITLES.items():
        values = losses_of(rows, estimator)
        shares = np.mean([np.histogram(np.minimum(each, last), _EDGES)[0] / len(each) for each in values], axis=0)
        bars += [(title, low, high, share) for low, high, share in zip(_EDGES, _EDGES[1:], shares.tolist(), strict=False)]
        mean, above = (float(np.mean([each.mean() for each in found])) for found in (values, [each > _EDGES[-1] for each in values]))
        means.append({"panel": title, "low": mean, "said": [f"mean {mean:.3f}", f"{above:.1%} above {_EDGES[-1]:g}"]})
    x = {"field": "low", "type": "quantitative", "title": "cross-entropy of held-out rows"}
    y = {"field": "share", "type": "quantitative", "title": "share of the users"}
    colour = {"field": "panel", "type": "nominal", "sort": list(TITLES.values()), "legend": None}
    # From one data set with the bars, which a facet divides among the panels.
    here = {"transform": [{"filter": "isValid(datum.said)"}]}
    layers = [
        {"transform": [{"filter": "isValid(datum.share)"}], "mark": {"type": "bar", "binSpacing": 0.5, "opacity": 0.8}}
        | {"encoding": {"x": {**x, "bin": "binned"}, "x2": {"field": "high"}, "y": y, "color": colour}},
        {**here, "mark": {"type": "rule", "strokeDash": [5, 4]}, "encoding": {"x": x}},
        {**here, "mark": {"type": "text", "align": "left", "dx": 5, "y": 8}, "encoding": {"x": x, "text": {"field": "said"}}},
    ]
    spec = spec_of({"layer": layers, "width": WIDTH, "height": HEIGHT}, ("panel", "low", "high", "share"), bars)
    spec["data"]["values"] += means
    return panels(spec)


STUDIES = {
    "known-clusters-table2": Study(
        rows_of,
        _show,
        _chart,
        ("seed", "estimator", "user", "loss", "accuracy"),
        lambda row: [(row.seed, row.estimator, *user) for user in zip(row.users, row.losses, row.accuracies, strict=True)],
    )
}
