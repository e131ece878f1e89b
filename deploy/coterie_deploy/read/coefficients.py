"""Coefficients of a run's models by name and in natural units, with standard errors where the run has measured what they need.

A model w of standardised features (a - mean)/scale and a target (y - m)/t gives y = m + t (w.(a - mean)/scale - b). So the natural
coefficients are T (w, b) plus a constant, with the covariance T C T'; the intercept has its usual sign.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.registry import method
from coterie.text.names import normal, unknown_user
from coterie.text.quoting import some
from coterie_deploy.read.frames import Columns, coded, partial
from coterie_deploy.read.models import StageModels
from coterie_server.families.known_clusters import clusters_of
from coterie_server.interface.half import Members
from coterie_server.maths import hlm
from coterie_server.maths.covariance import sandwich, symmetric
from coterie_server.maths.variance_components import Components, Statistics, conditional, error_variance, estimated
from coterie_server.run.plan import stages_of

Errors = Literal["classical", "robust"]
INTERCEPT = "(intercept)"
EVERYONE = "everyone"
_LIKELIHOODS = ("least_squares", "logistic", "poisson")  # the losses whose Hessian gives a covariance by itself
_NAMED_STAGES = 4
NOT_MEASURED = "standard errors were not measured: run the experiment with --set inference=true"


@dataclass(frozen=True)
class Coefficient:
    """One number of one model. Missing figures are None."""

    model: str  # whose it is: user, cluster or everyone
    name: str  # of the user or cluster
    cluster: str  # of a user, "" for none
    coefficient: str
    estimate: float
    standard_error: float | None
    low: float | None
    high: float | None
    n_rows: int | None  # training rows that the model is fitted to


@dataclass(frozen=True)
class Variances:
    """Variance components of users in known clusters, and the weights that they suggest."""

    reml: Components
    ml: Components
    icc_cluster: float | None  # correlation of two rows of a cluster, and of a user, for a row at the origin; None without an intercept
    icc_user: float | None
    gamma: float  # sigma^2 / tau_user^2 by REML, in the units of method.gamma: infinite where the variance is 0
    lam: float
    gamma_used: tuple[float, float]  # the least and the largest of the run
    lam_used: tuple[float, float]
    has_scale: bool  # whether features are standardised

    @property
    def units(self) -> str:
        """Sentences on what varies, and on the units of the components."""
        per = "its standard deviation in all training rows" if self.has_scale else "one unit of it"
        all_vary = "Intercept and slopes vary with one variance, so this is no model of random intercepts alone"
        return f"{all_vary}. Variances are in squared units of the target. Those of a feature's effects are for {per}"


@dataclass(frozen=True)
class Table:
    """The coefficients of a stage."""

    stage: str
    errors: str  # "classical", "robust", "conditional", or "" without standard errors
    level: float
    rows: tuple[Coefficient, ...]
    notes: tuple[str, ...] = ()
    variances: Variances | None = None

    def columns(self) -> Columns:
        """For a data frame."""
        numbers = ("estimate", "standard_error", "low", "high", "n_rows")
        listed = {field.name: [getattr(row, field.name) for row in self.rows] for field in fields(Coefficient)}
        counts = {"n_rows": np.array(listed["n_rows"], dtype=np.int64)} if None not in listed["n_rows"] else {}
        return {name: partial(values) if name in numbers else coded(values) for name, values in listed.items()} | counts


def members_of(connection: sqlite3.Connection) -> Members:
    """From the database of a run."""
    found = connection.execute("SELECT name, cluster FROM members ORDER BY position").fetchall()
    return Members(tuple(name for name, _ in found), tuple(cluster for _, cluster in found))


@dataclass(frozen=True)
class Asked:
    """Whose coefficients are wanted, and which standard errors."""

    users: Sequence[str] = ()
    cluster: str | None = None
    level: float = 0.95
    errors: Errors | None = None  # None: classical where the loss is a likelihood, else robust
    everyone: bool = False  # only the model of everyone

    def __post_init__(self) -> None:
        """ConfigError for a level that is none, and for everyone's model together with others."""
        if self.everyone and (self.users or self.cluster is not None):
            raise ConfigError("everyone's model is one (--global), want no user and no cluster beside it")
        if not 0.0 < self.level < 1.0:
            raise ConfigError(f"the level is {self.level:g}, want a number between 0 and 1, such as 0.95")


def asked_for(wanted: Mapping[str, Any]) -> Asked:
    """From keyword arguments. ConfigError for unknown ones, and for errors that are neither classical nor robust."""
    names = [field.name for field in fields(Asked)]
    unknown = next((name for name in wanted if name not in names), None)
    if unknown is not None:
        raise ConfigError(f"coefficients have no choice {unknown!r}, want some of {', '.join(names)}")
    if wanted.get("errors") not in (None, *get_args(Errors)):
        raise ConfigError(f"errors is {wanted['errors']!r}, want {' or '.join(get_args(Errors))}")
    users = wanted.get("users", ())
    return Asked(**{**wanted, "users": (users,) if isinstance(users, str) else tuple(users)})


@dataclass(frozen=True)
class _Model:
    """One model with its covariance in working units (NaN: unknown), and the degrees of freedom of its intervals."""

    kind: str
    name: str
    cluster: str
    x: Array
    covariance: Array | None = None
    freedom: float = math.inf
    n_rows: int | None = None
    whose: tuple[str, ...] = ()  # the users whose model it is


def _unbiased(experiment: Experiment, biased: str) -> str:
    """Names the later stages, such as refits, whose models can have standard errors, if there are some."""
    stages = stages_of(experiment)
    after = stages[[stage.name for stage in stages].index(biased) + 1 :]
    named = [stage.name for stage in after if method(stage.method).intervals(stage.config)]
    return f"; those of {some(named, _NAMED_STAGES)} can have them (--stage)" if named else ""


def coefficients(experiment: Experiment, models: StageModels, members: Members, asked: Asked) -> Table:
    """The table of a stage. ConfigError for models that stay at their users, and unknown users and clusters."""
    models.by_user()
    if experiment.problem.is_distance or experiment.model is not None:
        raise ConfigError("the models of this run have no coefficients, because they are points or networks: want a loss with targets")
    stage = next(one for one in stages_of(experiment) if one.name == models.stage)
    kind = method(stage.method).intervals(stage.config)
    errors, notes, variances = "", [], None
    if kind == "":
        listed = _of_users(models, members)
        notes.append(
            f"models of stage {models.stage!r} have no standard errors, because a penalty biases them{_unbiased(experiment, models.stage)}"
        )
    elif not models.moments:
        listed = _groups(experiment, models, members, None) if kind == "groups" else _of_users(models, members)
        notes.append(NOT_MEASURED)
    elif kind == "groups":
        errors = asked.errors or ("classical" if experiment.problem.loss in _LIKELIHOODS else "robust")
        if errors == "classical" and experiment.problem.loss not in _LIKELIHOODS:
            raise ConfigError(f"the loss {experiment.problem.loss} has no classical standard errors, want --errors robust")
        listed = _groups(experiment, models, members, errors)
        if experiment.problem.l2:
            notes.append(f"problem.l2 is {experiment.problem.l2:g}: standard errors do not include the bias that this penalty causes")
    else:
        if asked.errors is not None:
            raise ConfigError(f"the intervals of stage {models.stage!r} are conditional on the variances, want no --errors")
        errors = "conditional"
        listed, variances, notes = _nested(experiment, models, members, stage.config)
    chosen = _chosen(listed, members, asked, models.stage)
    return Table(models.stage, errors, asked.level, tuple(_rows(experiment, models, chosen, asked.level)), tuple(notes), variances)


# ---- models


def _of_users(models: StageModels, members: Members) -> list[_Model]:
    assert models.models is not None  # noqa: S101 - `coefficients` has asked for them
    n_rows = models.moments.get("n_rows")
    counts = [None] * len(models.users) if n_rows is None else n_rows.tolist()
    parts = zip(models.users, members.clusters, models.models, counts, strict=True)
    return [_Model("user", user, cluster, x, n_rows=count, whose=(user,)) for user, cluster, x, count in parts]


def _groups(experiment: Experiment, models: StageModels, members: Members, errors: str | None) -> list[_Model]:
    """One model for each cluster of the stage, for everyone, or for each user."""
    users = _of_users(models, members)
    labels = models.labels
    if labels is None:
        groups = [np.array([place]) for place in range(len(users))]
        found = users
    else:
        groups = [np.flatnonzero(labels == label) for label in range(int(labels.max()) + 1)]
        names = cluster_names(labels, members)
        kinds = ["everyone" if len(groups) == 1 else "cluster"] * len(groups)
        found = [
            _Model(kind, EVERYONE if kind == "everyone" else name, "", users[group[0]].x, None, math.inf, _total(users, group), whose)
            for kind, name, group in zip(kinds, names, groups, strict=True)
            if (whose := tuple(users[place].name for place in group))
        ]
    if errors is None:
        return found
    sums = _Sums(experiment, models)
    return [sums.with_errors(model, group, errors) for model, group in zip(found, groups, strict=True)]


def cluster_names(labels: Indices, members: Members) -> list[str]:
    """The names of the clusters that labels (n,) number: of known ones where they are the same, else the number."""
    known = [{members.clusters[place] for place in np.flatnonzero(labels == label).tolist()} for label in range(int(labels.max()) + 1)]
    names = [next(iter(found)) if len(found) == 1 else "" for found in known]
    return names if all(names) and len(set(names)) == len(names) else [str(number) for number in range(len(names))]


def _total(users: Sequence[_Model], group: Indices) -> int | None:
    counts = [users[place].n_rows for place in group]
    return None if None in counts else sum(count for count in counts if count is not None)


class _Sums:
    """What users have told of a stage's models, and what follows for groups of them."""

    def __init__(self, experiment: Experiment, models: StageModels) -> None:
        problem, told = experiment.problem, models.moments
        d = told["gradient"].shape[1]
        self.hessians, self.outers = (symmetric(told[name], d) for name in ("hessian", "outer"))
        self.residual, self.n_rows = told["residual"], told["n_rows"]
        self.weights = np.ones(len(self.n_rows)) if problem.reduction == "sum" else 1.0 / np.maximum(self.n_rows, 1)
        self.ridge = np.full(d, problem.l2)
        if problem.has_intercept:
            self.ridge[-1] = 0.0
        self.is_least_squares = problem.loss == "least_squares"

    def with_errors(self, model: _Model, group: Indices, errors: str) -> _Model:
        """The model of these users with its covariance and degrees of freedom."""
        free = float(self.n_rows[group].sum() - self.ridge.size)
        variance, freedom = 1.0, math.inf
        if errors == "classical" and self.is_least_squares:
            variance, freedom = (float(self.residual[group].sum()) / free, free) if free > 0 else (math.nan, math.nan)
        meats = self.outers if errors == "robust" else self.hessians
        found = sandwich(self.hessians[group], meats[group], self.weights[group], self.ridge * len(group), variance)
        return replace(model, covariance=found, freedom=freedom)


# ---- users in known clusters


def _nested(experiment: Experiment, models: StageModels, members: Members, config: Any) -> tuple[list[_Model], Variances | None, list[str]]:
    """The common model, the clusters' and the users', with conditional covariances; the variance components; and notes."""
    users, problem = _of_users(models, members), experiment.problem
    if problem.loss != "least_squares":
        return users, None, [f"the loss {problem.loss} has no variance components here"]
    sums, clusters = _Sums(experiment, models), clusters_of(config, members)
    assert models.models is not None  # noqa: S101 - `coefficients` has asked for them
    moment = np.matmul(sums.hessians, models.models[:, :, None])[:, :, 0] - models.moments["gradient"]
    fitted = np.vecdot(models.models, np.matmul(sums.hessians, models.models[:, :, None])[:, :, 0])
    squares = sums.residual + 2 * np.vecdot(models.models, moment) - fitted
    if not np.isfinite(squares).all():
        return users, None, ["some users have not told their sums: there are no intervals"]
    told = Statistics(sums.hessians, moment, squares, sums.n_rows, clusters.segments.place)
    gamma, lam = clusters.gamma, hlm.lambda_of(clusters.alpha, clusters.gamma_sums)
    scale = 1.0  # of a row's weight in the objective
    notes = []
    if problem.reduction == "mean":
        scale = float(sums.n_rows[0])
        if (sums.n_rows != sums.n_rows[0]).any():
            notes.append("problem.reduction is mean, and users have different numbers of rows: conditional intervals need reduction: sum")
    if not (gamma > 0).all() or not (lam > 0).all():
        notes.append("gamma or lam is 0: conditional intervals need positive weights")
    known = None if problem.reduction == "mean" and notes else scale
    variances = _variances(experiment, told, gamma, lam, known, has_scale=models.scale is not None)
    if notes:
        return users, variances, notes
    variance = error_variance(told, scale * gamma, scale * lam)
    found = conditional(told, scale * gamma, scale * lam, variance, scale * sums.ridge)
    shown = variance * (experiment.data.target_scale or (0.0, 1.0))[1] ** 2
    notes.append(f"intervals are conditional on gamma, lam and sigma^2 = {shown:.4g}, which are taken as known")
    if problem.l2:
        notes.append(f"problem.l2 is {problem.l2:g}: intervals include this penalty as a prior around 0")
    listed = [_Model(EVERYONE, EVERYONE, "", found.common, found.common_covariance, n_rows=int(sums.n_rows.sum()))]
    counts = clusters.segments.sums(sums.n_rows).tolist()
    parts = zip(clusters.names, found.clusters, found.cluster_covariances, counts, strict=True)
    listed += [_Model("cluster", name, "", x, covariance, n_rows=count) for name, x, covariance, count in parts]
    listed += [replace(user, covariance=covariance) for user, covariance in zip(users, found.user_covariances, strict=True)]
    return listed, variances, notes


def _variances(experiment: Experiment, told: Statistics, gamma: Array, lam: Array, scale: float | None, *, has_scale: bool) -> Variances:
    """`scale`: a row's weight in the objective is 1/scale; None where it differs between users."""
    reml, ml = estimated(told), estimated(told, restricted=False)
    total = reml.cluster + reml.user + reml.error
    has_origin = experiment.problem.has_intercept and total > 0
    unit = (experiment.data.target_scale or (0.0, 1.0))[1] ** 2
    known = math.nan if scale is None else scale
    scaled = [Components(unit * one.cluster, unit * one.user, unit * one.error, one.criterion) for one in (reml, ml)]
    return Variances(
        reml=scaled[0],
        ml=scaled[1],
        icc_cluster=reml.cluster / total if has_origin else None,
        icc_user=(reml.cluster + reml.user) / total if has_origin else None,
        gamma=_ratio(reml.error, reml.user) / known,
        lam=_ratio(reml.error, reml.cluster) / known,
        gamma_used=(float(gamma.min()), float(gamma.max())),
        lam_used=(float(lam.min()), float(lam.max())),
        has_scale=has_scale,
    )


def _ratio(above: float, below: float) -> float:
    return math.inf if below == 0.0 else above / below


# ---- rows


def _chosen(listed: Sequence[_Model], members: Members, asked: Asked, stage: str) -> list[_Model]:
    """Those of the users, the cluster or everyone, as asked for. ConfigError where there are none."""
    users = [normal(user) for user in asked.users]
    for user in users:
        if user not in members.names:
            raise unknown_user(user, members.names)
    chosen = [one for one in listed if one.kind == EVERYONE] if asked.everyone else list(listed)
    if not chosen:
        raise ConfigError(f"stage {stage!r} has no model of everyone, want another --stage, such as that of a reference")
    if asked.cluster is not None:
        known = {cluster for cluster in members.clusters if cluster} | {one.name for one in listed if one.kind == "cluster"}
        if asked.cluster not in known:
            raise ConfigError(f"the run has no cluster {asked.cluster!r}, want one of {', '.join(sorted(known)) or 'none'}")
        chosen = [one for one in chosen if asked.cluster in (one.cluster, one.name if one.kind == "cluster" else None)]
    if users:
        chosen = [one for one in chosen if not set(users).isdisjoint(one.whose)]
    return chosen


def natural(experiment: Experiment, models: StageModels, d: int) -> tuple[Array, Array, tuple[str, ...]]:
    """T (c, d), the constant (c,) and the names of c natural coefficients T x + constant of a model x (d,); the intercept is the last."""
    p = d - experiment.problem.has_intercept
    names = models.columns or tuple(f"x{number}" for number in range(1, p + 1))
    centre, unit = experiment.data.target_scale or (0.0, 1.0)
    scale = np.ones(p) if models.scale is None else models.scale
    shift = np.zeros(p) if models.mean is None or models.scale is None else models.mean / scale
    transform = np.zeros((p + 1, d))
    transform[:p, :p] = np.diag(unit / scale)
    transform[p, :p] = -unit * shift
    if experiment.problem.has_intercept:
        transform[p, p] = -unit
    constant = np.append(np.zeros(p), centre)
    has_row = bool(experiment.problem.has_intercept or shift.any() or centre)
    return transform[: p + has_row], constant[: p + has_row], (*names, INTERCEPT)[: p + has_row]


def _rows(experiment: Experiment, models: StageModels, listed: Sequence[_Model], level: float) -> Iterator[Coefficient]:
    from scipy.special import stdtrit  # noqa: PLC0415 - slow to import

    for one in listed:
        transform, constant, names = natural(experiment, models, one.x.size)
        estimates = transform @ one.x + constant
        errors: Sequence[float | None] = [None] * len(names)
        if one.covariance is not None:
            squared = np.diagonal(transform @ one.covariance @ transform.T)
            errors = [math.sqrt(value) if value >= 0 else None for value in squared.tolist()]
        width = float(stdtrit(min(one.freedom, 1e12), (1 + level) / 2))
        for name, estimate, error in zip(names, estimates.tolist(), errors, strict=True):
            low, high = (None, None) if error is None else (estimate - width * error, estimate + width * error)
            yield Coefficient(one.kind, one.name, one.cluster, name, estimate, error, low, high, one.n_rows)
