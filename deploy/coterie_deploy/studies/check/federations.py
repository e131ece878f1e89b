"""Small federations to run a method on, with all of their data: each takes a second or so.

`CASES` has those of Coterie's own methods, by the method's name and, if there are several, a variant. A new method is a new row. For other
methods `cases_of` chooses by what the method declares.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import registry
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, experiment_from
from coterie.experiment.overrides import apply_overrides
from coterie.families.partial import Training
from coterie.registry import is_method, unknown_method
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.interface.half import Outcome, server_half

Content = Mapping[str, Any]
Make = Callable[[Path, Sequence[str]], Experiment]

N_USERS, CLASSES, WIDTH = 7, 3, 5  # of the federation with a network
N_FEATURES = 3  # of that with convex losses
LEAST_SQUARES: Content = {"loss": "least_squares", "l2": 0.1}


@dataclass(frozen=True)
class Case:
    """A small federation: `make` writes its data to a folder, and returns the experiment with "key.key=value" changes."""

    make: Make
    data: Path | None = None  # where relative paths of its data start
    starts_from: Make | None = None  # the run whose shared tensors it starts from
    changes: Sequence[str] = ()

    def experiment(self, folder: Path) -> Experiment:
        """The experiment, with its data in the folder. ConfigError when it is wrong."""
        return self.make(folder, self.changes)

    def start(self, folder: Path) -> Outcome | None:
        """What the run before has left."""
        if self.starts_from is None:
            return None
        finished = asyncio.run(launch(self.starts_from(folder, ()), Launch("loopback")))
        return finished.outcomes[finished.final_stage]


# ---- data


def write_labelled(path: Path, n_users: int = N_USERS, rows: int = 14) -> Path:
    """An archive of users whose labels depend on a common projection of their rows, each user with its own order of the labels."""
    rng = np.random.default_rng(3)
    projection = rng.standard_normal((WIDTH, CLASSES))
    users = []
    for number in range(n_users):
        mine = rng.standard_normal((rows + number, WIDTH))
        labels = (mine @ projection).argmax(axis=1)
        users.append((mine, rng.permutation(CLASSES)[labels]))
    return _saved(path, users)


def write_rows(path: Path, loss: str = "least_squares", n_users: int = 5, rows: int = 10, spread: float = 0.5) -> Path:
    """An archive of users with uneven numbers of rows, and models and scales of their own."""
    rng = np.random.default_rng(4)
    common = rng.standard_normal(N_FEATURES)
    users = []
    for number in range(n_users):
        mine = rng.standard_normal((rows + 4 * number, N_FEATURES)) * (1 + 0.2 * number)
        model = common + spread * rng.standard_normal(N_FEATURES)
        users.append((mine, targets_of(loss, mine @ model + 0.3 * rng.standard_normal(len(mine)))))
    return _saved(path, users)


def write_clustered(path: Path, n_clusters: int = 3, users_per_cluster: int = 4) -> Path:
    """An archive of users in known clusters, with uneven numbers of rows, and models near those of their cluster."""
    rng = np.random.default_rng(6)
    users, cluster = [], []
    for number in range(n_clusters * users_per_cluster):
        place, own = divmod(number, users_per_cluster)
        centre = np.random.default_rng(place).standard_normal(N_FEATURES)
        mine = rng.standard_normal((6 + number % 5, N_FEATURES))
        users.append((mine, mine @ (centre + 0.2 * own * rng.standard_normal(N_FEATURES)) + rng.standard_normal(len(mine))))
        cluster += [f"c{place}"] * len(mine)
    return _saved(path, users, cluster=np.array(cluster))


def targets_of(loss: str, scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """Targets that the loss knows, by the scores of a linear model."""
    if loss in ("logistic", "squared_hinge"):
        return np.where(scores >= 0, 1.0, -1.0)
    return np.floor(np.exp(np.clip(scores, -2.0, 2.0))) if loss == "poisson" else scores


def _saved(path: Path, users: Sequence[tuple[NDArray[Any], NDArray[Any]]], **more: NDArray[Any]) -> Path:
    features, target = (np.concatenate(arrays) for arrays in zip(*users, strict=True))
    user = np.repeat([f"u{number}" for number in range(len(users))], [len(mine) for mine, _ in users])
    np.savez(path, features=features, target=target, user=user, **more)  # type: ignore[arg-type]
    return path


# ---- experiments


def small_experiment(method: Content, **extra: Any) -> Experiment:
    """Nine users in three clusters, on ellipses, with snapshots every few rounds."""
    data = {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 50}
    own = {"name": "small", "data": data, "problem": {"loss": "squared_hinge", "l2": 1e-3}, "stop": {"rounds": 30}}
    return _experiment(own, method, 4, **extra)


def network_experiment(path: Path, method: Content, **extra: Any) -> Experiment:
    """Seven users with an MLP, snapshots every few rounds."""
    model = {"name": "mlp", "hidden": [6, 4], "classes": CLASSES}
    usual = _known(method, participation=0.5, optimizer={"lr": 0.05})
    own = {"name": "networks", "data": _archive(path), "model": model, "stop": {"rounds": 6}}
    return _experiment(own, {**usual, **method}, 3, **extra)


def convex_experiment(path: Path, method: Content, **extra: Any) -> Experiment:
    """Five users with least squares, who descend with minibatches, snapshots every few rounds."""
    usual = _known(method, participation=0.5, batch_size=4, optimizer={"lr": 0.05})
    own = {"name": "convex", "data": _archive(path), "problem": LEAST_SQUARES, "stop": {"rounds": 6}}
    return _experiment(own, {**usual, **method}, 3, **extra)


def clustered_experiment(path: Path, method: Content, **extra: Any) -> Experiment:
    """Twelve users in three known clusters, with least squares."""
    data, problem = _archive(path, cluster="cluster"), {**LEAST_SQUARES, "intercept": False}
    return _experiment({"name": "clustered", "seed": 4, "data": data, "problem": problem}, method, 4, **extra)


def _experiment(own: Content, method: Content, every_rounds: int, *, changes: Sequence[str] = (), **extra: Any) -> Experiment:
    """With a snapshot after so many rounds."""
    content = {"seed": 5, **own, "method": dict(method), "snapshots": {"every_rounds": every_rounds}, **extra}
    return experiment_from(apply_overrides(content, changes))


def _archive(path: Path, **more: str) -> Content:
    return {"source": "npz", "path": str(path), "test_fraction": 0.3, **more}


def _known(method: Content, **settings: Any) -> dict[str, Any]:
    """Those of these settings that a method has."""
    name = str(method["name"])
    return {key: value for key, value in settings.items() if not is_method(name) or key in registry.method(name).config.model_fields}


# ---- federations


def pairwise(method: Content, **extra: Any) -> Case:
    """Convex losses, and users in clusters that nobody knows."""
    return Case(lambda _, changes: small_experiment(method, changes=changes, **{"stop": {"rounds": 12}, **extra}))


def _with_data(write: Callable[[Path], Path], make: Callable[..., Experiment]) -> Callable[..., Case]:
    def case(method: Content, **extra: Any) -> Case:
        return Case(lambda folder, changes: make(write(folder / "users.npz"), method, changes=changes, **extra))

    return case


clustered = _with_data(write_clustered, clustered_experiment)  # convex losses, and users in known clusters
network = _with_data(write_labelled, network_experiment)  # a small network
descent = _with_data(write_rows, convex_experiment)  # convex losses that users descend, as they do networks


def linear(**method: Any) -> Case:
    """Nine users whose regressions share a representation."""
    data = {"source": "representation", "users": 9, "d": 5, "k": 2, "rows_per_user": 8}
    own = {"name": "linear", "seed": 2, "data": data, "stop": {"rounds": 8}}
    hyper = {"name": "fedrep_linear", "participation": 0.5, "eta": 0.1, **method}
    return Case(lambda _, changes: _experiment(own, hyper, 3, changes=changes))


def _robust(rule: str, **keys: float) -> Content:
    return {"robust": {"rule": rule, **keys}}


_COINS = {"iterations": 60, "gamma": 1.0, "p0": 0.3, "p": 0.3}
_L2GD = {"name": "async_l2gd", **_COINS, "alpha": 0.4}
_AL2SGD = {"name": "async_al2sgd", **_COINS, "alpha": 0.4, "rho": 0.2}
_GAMMA = {"c0": 1.0, "u5": 0.7, "c1": 1.3, "c2": 0.9}
_UNEVEN = {"c0": 0.2, "c1": 0.4, "c2": 0.6}
_STANDARDIZED = {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 9, "standardize": True}
_MASKED = {"sums": "masked", "hosts": 3}
_FEDREP = {"name": "fedrep", "head_epochs": 1}
_STACKED = {"name": "mlp", "hidden": [6, 4], "classes": CLASSES, "training": "stacked"}
_SHORT = {"evaluate_last": 1, "fine_tune": []}


def _thin(**rules: Content) -> Content:
    return {"compress": rules}


# One of each method whose users share a model that is convex.
CONVEX_METHODS: Mapping[str, Content] = {
    "fedavg": {"name": "fedavg"},
    "fedprox": {"name": "fedprox"},
    "scaffold": {"name": "scaffold"},
    "apfl": {"name": "apfl", "adaptive": True},
    "ditto": {"name": "ditto"},
    "l2gd": {"name": "l2gd", "p": 0.4, "penalty": 3.0},
    "pfedme": {"name": "pfedme", "beta": 0.5},
    "ifca": {"name": "ifca", "clusters": 3},
}

CASES: Mapping[str, Case] = {
    "pdmm lean": pairwise({"name": "pdmm", "penalty": 0.3, "evaluate_every": 3}),
    "pdmm accelerated": pairwise({"name": "pdmm", "penalty": 0.3, "acceleration": "anderson", "anderson_memory": 2}),
    "pdmm paper": pairwise({"name": "pdmm", "penalty": 0.3, "placement": "paper", "order": "jacobi", "start": "zero"}),
    "pdmm paired": pairwise({"name": "pdmm", "penalty": 0.3, "placement": "paper", "sampling": "paired", "primal_fraction": 0.5}),
    "pdmm uniform": pairwise({"name": "pdmm", "penalty": 0.3, "sampling": "uniform", "primal_fraction": 0.5}),
    "pdmm arrival": pairwise({"name": "pdmm", "penalty": 0.3, "sampling": "arrival", "max_staleness": 0}),
    "pdmm drawn": pairwise({"name": "pdmm", "penalty": 0.3, "sampling": "arrival", "delays": {"u1": 3}, "evaluate_every": 0}),
    "pdmm drawn graph": pairwise(
        {"name": "pdmm", "path": [0.5, 0.3], "sampling": "arrival", "delays": {"u1": 3}, "graph": {"neighbours": 2}}
    ),
    "pdmm svrg": pairwise({"name": "pdmm", "penalty": 0.3, "x_update": {"name": "svrg", "batch_size": 4}}),
    "pdmm path": pairwise({"name": "pdmm", "path": [0.5, 0.2], "refit": True}, references=["local", "oracle"]),
    "pdmm forecast": pairwise({"name": "pdmm", "path": [0.5, 0.2], "forecast": 0.1}),
    "pdmm graph": pairwise({"name": "pdmm", "path": [0.5, 0.2], "graph": {"neighbours": 2}}),
    "local": pairwise({"name": "local"}),
    "global": pairwise({"name": "global"}, data=_STANDARDIZED),
    "global few": pairwise({"name": "global", "newton_up_to": 1}),
    "global sums": pairwise({"name": "global"}, exact_sums=True, payload="float32"),
    "global masked": pairwise({"name": "global"}, exact_sums=True, federation=_MASKED),
    "oracle": clustered({"name": "oracle"}),
    "oracle sums": clustered({"name": "oracle"}, exact_sums=True),
    "oracle inference": clustered({"name": "oracle"}, inference=True),
    "squared": pairwise({"name": "squared", "penalty": 0.07}),
    "squared sums": pairwise({"name": "squared", "penalty": 0.07}, exact_sums=True),
    "son_newton": pairwise({"name": "son_newton", "penalty": 0.3}),
    "son_newton bfgs": pairwise({"name": "son_newton", "penalty": 0.3, "hessian": "bfgs"}),
    "son_newton path": pairwise(
        {"name": "son_newton", "path": [0.5, 0.2], "graph": {"neighbours": 2}, "refit": True, "certificate": True}, references=["oracle"]
    ),
    "hlm_exact": clustered({"name": "hlm_exact", "gamma": 1.0, "alpha": 0.4}),
    "hlm_exact inference": clustered({"name": "hlm_exact", "gamma": 1.0, "lam": 2.0}, references=["local", "global"], inference=True),
    "async_l2gd": clustered({**_L2GD, "collect_models": True, "trace_every": 20}),
    "async_l2gd uneven": clustered({**_L2GD, "alpha": _UNEVEN, "round_iterations": 7}),
    "async_l2gd never": clustered({**_L2GD, "reuse": "never"}),
    "async_l2gd single": clustered({**_L2GD, "variant": "single_coin", "p": None}),
    "async_l2gd robust": clustered(_L2GD, federation=_robust("trimmed_mean", fraction=0.25)),
    "async_l2gd thin": clustered(_L2GD, federation=_thin(up={"lossless": "zlib"}, down={"lossless": "zlib"})),
    "async_al2sgd": clustered({**_AL2SGD, "collect_models": True, "trace_every": 20}),
    "async_l2gd sums": clustered({**_L2GD, "gamma": _GAMMA, "collect_models": True, "trace_every": 20}, exact_sums=True),
    "async_al2sgd sums": clustered({**_AL2SGD, "collect_models": True, "trace_every": 20}, exact_sums=True),
    "fedrep_linear": linear(),
    "fedrep_linear shared": linear(heads="shared", head_eta=0.05, start="random"),
    "certify": pairwise({"name": "certify", "partition": "known"}),
    "fedrep": network({**_FEDREP, "evaluate_every": 2}),
    "fedrep stacked": network(_FEDREP, model=_STACKED),
    "fedper": network({"name": "fedper", "evaluate_last": 0}),
    "fedrep sums": network({**_FEDREP, "evaluate_every": 2}, exact_sums=True),
    "fedrep masked": network({**_FEDREP, "evaluate_every": 2}, exact_sums=True, federation=_MASKED),
    "fedavg": network({"name": "fedavg"}),
    "fedavg robust": network({"name": "fedavg", "participation": 1.0}, federation=_robust("multi_krum")),
    "fedavg thin": network({"name": "fedavg"}, federation=_thin(up={"top_k": 0.3, "lossless": "zlib"})),
    "ditto thin": network({"name": "ditto", **_SHORT}, federation=_thin(up={"top_k": 0.1, "feedback": True})),
    "fedavg thin convex": descent({"name": "fedavg"}, federation=_thin(up={"rand_k": 0.3, "feedback": True})),
    "fedavg thin rank": network({"name": "fedavg"}, federation=_thin(up={"low_rank": 1, "feedback": True})),
    "fedrep thin": network(_FEDREP, federation=_thin(up={"quantize": {"bits": 4, "rotate": "hadamard"}}, down={"quantize": {}})),
    "lg_fedavg": network({"name": "lg_fedavg"}),
    "local_network": network({"name": "local_network"}),
    "fedprox": network({"name": "fedprox", **_SHORT}),
    "ditto": network({"name": "ditto", **_SHORT}),
    "scaffold": network({"name": "scaffold", **_SHORT}),
    "scaffold stacked": network({"name": "scaffold", **_SHORT}, model=_STACKED),
    "apfl": network({"name": "apfl", "adaptive": True, **_SHORT}),
    "pfedme": network({"name": "pfedme", "beta": 0.5, **_SHORT}),
    "fed_mtl": network({"name": "fed_mtl", **_SHORT}),
    "per_fedavg": network({"name": "per_fedavg", "hessian": "hf", **_SHORT}),
    "l2gd": network({"name": "l2gd", "p": 0.3, **_SHORT}),
    "ifca": network({"name": "ifca", "clusters": 3, **_SHORT}),
    "ifca robust": network({"name": "ifca", "clusters": 2, "participation": 1.0, **_SHORT}, federation=_robust("geometric_median")),
    "adapt": Case(network({"name": "adapt"}).make, starts_from=network(_FEDREP).make),
    **{f"{name} convex": descent({**method, **_SHORT}) for name, method in CONVEX_METHODS.items()},
    "fedavg convex sums": descent({"name": "fedavg", **_SHORT}, exact_sums=True),
    "fed_mtl steps": descent({"name": "fed_mtl", "solver": "steps", "mu": 0.5, **_SHORT}),
    "fed_mtl convex": pairwise({"name": "fed_mtl", "mu": 0.5, "relations": "learned", "users_per_round": 6}),
}


def compressed(by: str) -> Case:
    """A small federation whose users send their models by this compressor."""
    return descent({"name": "fedavg"}, federation=_thin(up={"by": by}))


def cases_of(name: str) -> dict[str, Case]:
    """The small federations of a method by name, that to begin with first. `name` may be that of a row of `CASES`, or of any method.

    ConfigError where there is no such method.
    """
    if rows := {row: case for row, case in CASES.items() if name in (row, row.partition(" ")[0])}:
        return {name: rows[name]} if name in rows and " " in name else rows
    if not is_method(name):
        raise ConfigError(unknown_method(name))
    return dict(_chosen(name))


def _chosen(name: str) -> Iterator[tuple[str, Case]]:
    """For the kinds of models that the method declares, with the changes that it asks for."""
    method, content = registry.method(name), {"name": name}
    if "network" in method.models:
        yield name, replace(network(content), changes=method.checked_with)
    if "convex" in method.models:
        row = f"{name} convex" if "network" in method.models else name
        made = descent if issubclass(method.config, Training) else clustered if _has_tiers(name) else pairwise
        yield row, replace(made(content), changes=method.checked_with)


def _has_tiers(name: str) -> bool:
    try:
        return callable(server_half(name).tiers)
    except LookupError:  # a check says so
        return False
