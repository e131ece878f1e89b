"""The objective of the methods for known clusters, and its weights.

Lyu, Hanzely and Kolar, *Personalized Federated Learning with Multiple Known Clusters* (2022). Client i of cluster j has the loss f_i and
the weight gamma_i >= 0, cluster j has alpha_j in [0, 1], and (2.1) is

    F(theta) = sum_i f_i(theta_i)
             + sum_j sum_{i in I_j} [ (1 - alpha_j) gamma_i/2 |theta_i - bar_j|^2 + alpha_j gamma_i/2 |theta_i - bar|^2 ],
    bar_j = sum_{I_j} gamma_i theta_i / Gamma_j,   Gamma_j = sum_{I_j} gamma_i,
    bar   = sum_i alpha_{j(i)} gamma_i theta_i / sum_i alpha_{j(i)} gamma_i.

(The paper's shorter form of bar agrees only if all Gamma_j are equal.) The multi-task form (2.3) has lambda_j instead of alpha_j. By
Proposition 2.2 both have the same minimiser for alpha_j = lambda_j / (lambda_j + Gamma_j).

One cluster with alpha = 1 is the objective of Hanzely and Richtarik, *Federated learning of a mixture of global and local models* (2020),
with their lambda = gamma for every client. It is also problem (4) of the convex clustering paper (method `squared`): since sum_{i<j} |x_i -
x_j|^2 = n sum_i |x_i - mean|^2, its penalty GAM is gamma = 2 n GAM, and its gamma of (4) is gamma / (4 n^2).
"""

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Self

import numpy as np
from pydantic import BeforeValidator, model_validator

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.evaluation import judged
from coterie.text.names import normal
from coterie.text.quoting import quoted


def _checked(value: Any, *, largest: float = math.inf) -> Any:
    """The value, with its numbers parsed. ValueError for the first number outside 0 to `largest`, with its name."""
    # pydantic would report a wrong number twice, once as a number that should have been a mapping.
    if isinstance(value, Mapping):
        value = {normal(name) if isinstance(name, str) else name: _as_number(number) for name, number in value.items()}
    else:
        value = _as_number(value)
    for name, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        if not isinstance(name, str):
            raise ValueError(f"has the key {quoted(name)}, want names of users or clusters as text")
        if isinstance(number, bool) or not isinstance(number, int | float) or not (0 <= number <= largest and math.isfinite(number)):
            wanted = "a finite number of at least 0" if largest == math.inf else f"a number from 0 to {largest:g}"
            raise ValueError(f"is {quoted(number)}{f' for {quoted(name)}' if name else ''}, want {wanted}")
    return value


def _as_number(value: Any) -> Any:
    """YAML reads 1e-3, without a decimal point, as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


PerName = Annotated[float | dict[str, float], BeforeValidator(_checked)]
Shares = Annotated[float | dict[str, float], BeforeValidator(partial(_checked, largest=1.0))]


class Weights(Settings):
    """gamma, and one of lam and alpha. A mapping gives values by the name of a cluster or, for gamma, also of a user."""

    #: Weight gamma_i that holds a user near its cluster. A number, or a mapping by cluster or user; a user's name goes before its
    #: cluster's.
    gamma: PerName
    #: Weight lambda_j of (2.3) that holds a cluster near the others. A number, or a mapping by cluster. Give this or `alpha`.
    lam: PerName | None = None
    #: Share alpha_j of (2.1): 0 leaves clusters apart, 1 pulls users to the mean of all. A number, or a mapping by cluster.
    alpha: Shares | None = None

    @model_validator(mode="after")
    def _one_of_lam_and_alpha(self) -> Self:
        if (self.lam is None) == (self.alpha is None):
            raise ValueError("want exactly one of lam (lambda of (2.3)) and alpha (of (2.1))")
        return self

    def restricted(self, names: Collection[str]) -> Self:
        """The same weights, without users and clusters that are not in `names`."""
        mappings = {key: value for key in ("gamma", "lam", "alpha") if isinstance(value := getattr(self, key), Mapping)}
        kept = {key: {name: each for name, each in value.items() if name in names} for key, value in mappings.items()}
        return self.model_copy(update=kept)

    def gamma_of(self, names: Sequence[str], clusters: Sequence[str]) -> Array:
        """(n,) gamma_i of these users. ConfigError when a mapping lacks a user, or has an unknown name."""
        if not isinstance(self.gamma, Mapping):
            return np.full(len(names), self.gamma)
        known = {*names, *clusters}
        unknown = next((key for key in self.gamma if key not in known), None)
        if unknown is not None:
            raise ConfigError(f"method.gamma names {quoted(unknown)}, which is neither a user nor a cluster of the run")
        values = [self.gamma.get(name, self.gamma.get(cluster)) for name, cluster in zip(names, clusters, strict=True)]
        missing = next((name for name, value in zip(names, values, strict=True) if value is None), None)
        if missing is not None:
            raise ConfigError(f"method.gamma has no value for user {missing!r} nor for its cluster, want one for every user")
        return np.array(values, dtype=np.float64)

    def alpha_of(self, clusters: Sequence[str], gamma_sums: Array) -> Array:
        """(k,) alpha_j of these clusters with Gamma_j = `gamma_sums` (k,). ConfigError for a missing or an unknown cluster in a mapping."""
        if self.alpha is not None:
            return _by_cluster("alpha", self.alpha, clusters)
        lam = _by_cluster("lam", self.lam if self.lam is not None else 0.0, clusters)
        total = lam + gamma_sums
        return np.divide(lam, total, out=np.zeros_like(lam), where=total > 0)


def _by_cluster(key: str, value: float | Mapping[str, float], clusters: Sequence[str]) -> Array:
    if not isinstance(value, Mapping):
        return np.full(len(clusters), value)
    unknown = next((name for name in value if name not in clusters), None)
    if unknown is not None:
        raise ConfigError(f"method.{key} names cluster {quoted(unknown)}, want one of {', '.join(clusters)}")
    missing = next((name for name in clusters if name not in value), None)
    if missing is not None:
        raise ConfigError(f"method.{key} has no value for cluster {missing!r}, want one for every cluster")
    return np.array([value[name] for name in clusters], dtype=np.float64)


def check_all_clustered(names: Sequence[str], clusters: Sequence[str]) -> None:
    """ConfigError when a user has no known cluster."""
    for name, cluster in zip(names, clusters, strict=True):
        if not cluster:
            raise ConfigError(f"user {name!r} has no known cluster, want one for every user: name their column in data.cluster_column")


class Segments:
    """Sums over the users of each cluster."""

    def __init__(self, cluster_of: Indices, numbers: Indices) -> None:
        """`cluster_of` (n,) is the number of each user's cluster; `numbers` (c,) are those of the clusters, ascending, each with a user."""
        self.numbers = numbers
        self.place = np.searchsorted(numbers, cluster_of)  # (n,) of each user's cluster among `numbers`
        self._order = np.argsort(self.place, kind="stable")
        self._starts = np.searchsorted(self.place[self._order], np.arange(numbers.size))

    def sums(self, values: Array) -> Array:
        """(c, ...) for `values` (n, ...). A cluster's rows are summed by themselves in member order, so other clusters do not matter."""
        return np.add.reduceat(values[self._order], self._starts, axis=0)

    def maxima(self, values: Array) -> Array:
        """(c,) for `values` (n,)."""
        return np.maximum.reduceat(values[self._order], self._starts)

    def minima(self, values: Array) -> Array:
        """(c,) for `values` (n,)."""
        return np.minimum.reduceat(values[self._order], self._starts)


AVERAGES = {"between_rounds": "between clusters", "within_rounds": "inside clusters"}  # closing figures that count them
STEPS = {
    "parameters": "probabilities, weights and step sizes",
    "within-average": "users' models, and their cluster's average",
    "between-average": "clusters' sums, and the average of all",
    "trace": "values of the objective",
    "gap": "how far from the optimum the stage has ended",
    "evaluate": "final models, and how their users judge them",
    "models": "final models, where they are collected",
}


def averaged(method: str, *more: str) -> tuple[Reveal, ...]:
    """What users reveal to a method that averages them at their aggregator. `more` are steps that average other vectors, "within-..."."""
    often = tuple(f"{method}/{step}" for step in ("parameters", "control", "within-average", *more))
    between = (f"{method}/between-average", *(f"{method}/{step.replace('within', 'between')}" for step in more))
    trace, of_one = (f"{method}/trace",), "of a cluster with one user that user's"
    bounds = "two bounds on what the objective can fall by, and whether its rows leave a direction free"
    fits = "how well its model fits; the coordinator sees the sums over a cluster"
    summed, vectors = (f"{what} for each round of the trace, summed over clusters" for what in ("a value", "a vector"))
    models = "sums of models over a cluster"
    trajectory = "the trajectory of the user's model, as far as it is averaged"
    on_host = "sums over a cluster's users on one host"
    averages, values = f"{on_host} of models, as far as they are averaged", f"{on_host} of losses, models and distances from their average"
    return (
        Reveal("models at averaging rounds", trajectory, often, seen="aggregator", summed=averages),
        Reveal("only sums of models over a cluster", f"the averages of a cluster; {of_one} model", between, seen="between", summed=models),
        Reveal(
            "its loss and its model, for each round of the trace",
            "as for its models",
            trace,
            seen="aggregator",
            summed=f"{values}, for each round of the trace",
        ),
        Reveal(summed, f"the objective of a cluster; {of_one}", trace, seen="coordinator", summed=summed),
        Reveal(vectors, f"the averages of a cluster; {of_one} model", trace, seen="between", summed=vectors),
        Reveal(
            f"at the end the length of its gradient, {bounds}",
            fits,
            (f"{method}/gap",),
            seen="aggregator",
            summed=f"{on_host}, at the end, of the length of gradients, {bounds}",
        ),
        Reveal("the final model", "what a model says of its rows", (f"{method}/models",), needs={"collect_models": True}),
        judged(f"{method}/evaluate"),
    )
