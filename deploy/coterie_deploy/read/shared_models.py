"""Models for users that a run has not seen: that of a cluster, or of everyone.

Where the users of a cluster have one model (`oracle`, refits) it is theirs. Methods for known clusters shrink users' models to w_j of (2.3)
in Lyu, Hanzely and Kolar (2022), which follows from them: w_j = (1 - alpha_j) bar_j + alpha_j bar, and the common model is bar.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.experiment.model import X
from coterie.families.known_clusters import Weights
from coterie.registry import built_in_methods, method
from coterie_deploy.read.coefficients import cluster_names
from coterie_deploy.read.models import StageModels
from coterie_server.families.known_clusters import averages_of, clusters_of
from coterie_server.interface.half import Members
from coterie_server.run.plan import stages_of


@dataclass(frozen=True)
class Whose:
    """The model that predicts: a user's, a cluster's or everyone's, of a stage (None: the result's)."""

    user: str | None = None
    cluster: str | None = None
    everyone: bool = False
    stage: str | None = None

    def __post_init__(self) -> None:
        """ConfigError unless exactly one is asked for."""
        if (self.user is not None) + (self.cluster is not None) + self.everyone != 1:
            raise ConfigError("want one of --user USER, --cluster CLUSTER and --global (user, cluster, global_): whose model predicts")


def reference_for(whose: str) -> str:
    """The reference whose stage has a model for "everyone" or for each "cluster", where that of the method has none."""
    return next(name for name in built_in_methods() if method(name).is_reference and method(name).one_model_for == whose)


@dataclass(frozen=True)
class Shared:
    """A model x (d,) of several users, of which stage, and whose it is in words."""

    stage: StageModels
    x: Array
    whose: str


def shared_model(
    experiment: Experiment, members: Members, whose: Whose, final: str, listed: Sequence[str], read: Callable[[str], StageModels]
) -> Shared:
    """The model of a cluster or of everyone, of the stage asked for, or else of the `final` one or its reference among those `listed`."""
    stages = [whose.stage or final]
    reference = reference_for("everyone" if whose.everyone else "cluster")
    if whose.stage is None and reference in listed and reference != final:
        stages.append(reference)
    if whose.cluster is None:
        return of_everyone(experiment, members, stages, read)
    return of_cluster(experiment, members, stages, read, whose.cluster)


def of_everyone(experiment: Experiment, members: Members, stages: Sequence[str], read: Callable[[str], StageModels]) -> Shared:
    """The model of everyone in the first of these stages that has one. ConfigError if none has."""
    for stage in map(read, stages):
        if (x := _common(experiment, members, stage)) is not None:
            return Shared(stage, x, f"everyone ({stage.stage})")
    raise ConfigError(
        f"stage {stages[0]!r} has no model for everyone: run the experiment with --set 'references=[{reference_for('everyone')}]'"
    )


def of_cluster(experiment: Experiment, members: Members, stages: Sequence[str], read: Callable[[str], StageModels], cluster: str) -> Shared:
    """The model of this cluster in the first of these stages that has clusters. ConfigError if none has, and for an unknown cluster."""
    for stage in map(read, stages):
        found = _by_cluster(experiment, members, stage)
        if found and cluster not in found:
            raise ConfigError(f"stage {stage.stage!r} has no cluster {cluster!r}, want one of {', '.join(found)}")
        if found:
            return Shared(stage, found[cluster], f"cluster {cluster} ({stage.stage})")
    raise ConfigError(
        f"stage {stages[0]!r} has no models of clusters: run the experiment with --set 'references=[{reference_for('cluster')}]'"
    )


def _common(experiment: Experiment, members: Members, stage: StageModels) -> Array | None:
    shared = stage.shared.get(X)
    if shared is not None and shared.ndim == 1:
        return np.asarray(shared, dtype=np.float64)
    if stage.models is None:
        return None
    if (weights := _weights(experiment, stage)) is not None:
        _, alpha, sums, means = _averages(weights, members, stage.models)
        common: Array = (alpha * sums) @ means / (alpha * sums).sum() if (alpha * sums).any() else means.mean(axis=0)
        return common
    return stage.models[0] if (stage.models == stage.models[0]).all() else None


def _by_cluster(experiment: Experiment, members: Members, stage: StageModels) -> dict[str, Array]:
    """The models of clusters by name, none where there are no clusters."""
    if stage.models is None:
        return {}
    if (weights := _weights(experiment, stage)) is not None:
        names, alpha, _, means = _averages(weights, members, stage.models)
        common = _common(experiment, members, stage)
        return {name: (1 - share) * mean + share * common for name, share, mean in zip(names, alpha, means, strict=True)}
    if stage.labels is None or not stage.labels.any():
        return {}
    names = cluster_names(stage.labels, members)
    return {name: _mean(stage.models[stage.labels == number]) for number, name in enumerate(names)}


def _mean(models: Array) -> Array:
    """Of models that may differ a little, as those of found clusters do; of equal ones, to the last bit, one of them."""
    found: Array = models[0] if (models == models[0]).all() else models.mean(axis=0)
    return found


def _weights(experiment: Experiment, stage: StageModels) -> Weights | None:
    config = next(one.config for one in stages_of(experiment) if one.name == stage.stage)
    return config if isinstance(config, Weights) else None


def _averages(weights: Weights, members: Members, models: Array) -> tuple[Sequence[str], Array, Array, Array]:
    """Names, alpha_j (k,), Gamma_j (k,) and bar_j (k, d) of the known clusters; plain means where all gamma_i are 0."""
    clusters = clusters_of(weights, members)
    plain = clusters.segments.sums(models) / clusters.sizes[:, None]
    weighted = averages_of(clusters, np.arange(clusters.size), models)
    return clusters.names, clusters.alpha, clusters.gamma_sums, np.where(clusters.gamma_sums[:, None] > 0, weighted, plain)
