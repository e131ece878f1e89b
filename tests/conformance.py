"""One small run of every method, for what must hold in all of them: a new method is a new row.

Shared by tests; nothing here is tested itself. `CASES` are by the method's name, with a variant behind it where one run is not enough.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.experiment.config import Experiment, experiment_from
from coterie_deploy.engines.launch import Launch, launch
from coterie_server.interface.half import Outcome
from coterie_server.record import summary
from coterie_server.record.rundb import open_run
from coterie_server.record.summary import Traffic
from tests import convex
from tests.networks import network_experiment, write_users
from tests.simulation import World, small_experiment
from tests.two_tier import small as clustered_experiment

Make = Callable[[Path], Experiment]
WITHOUT_A_FORM = frozenset({"control"})  # envelopes and sessions, whose bytes no method decides


@dataclass(frozen=True)
class Case:
    """A small run: `make` gives the experiment, with its data in a folder."""

    make: Make
    n_hosts: int = 3
    has_clusters: bool = False  # whether the same experiment can run with aggregators
    starts_from: Make | None = None  # the run whose shared tensors it starts from

    def start(self, folder: Path) -> Outcome | None:
        """What the run before has left."""
        if self.starts_from is None:
            return None
        return asyncio.run(launch(self.starts_from(folder), Launch("loopback"))).outcomes["fedrep"]

    def world(self, folder: Path, **more: Any) -> World:
        """The run in one process, in `folder`/run."""
        return World(self.make(folder), folder / "run", self.n_hosts, start=self.start(folder), **more)


def pairwise(method: Mapping[str, Any], **extra: Any) -> Make:
    """Nine users in three clusters, on ellipses."""
    return lambda folder: small_experiment(method, **{"stop": {"rounds": 12}, **extra})  # noqa: ARG005 - the data is generated


def clustered(method: Mapping[str, Any], **extra: Any) -> Make:
    """Twelve users in three known clusters, least squares; a flat run."""
    changes = {"federation": {"topology": "flat"}, **extra}
    return lambda folder: clustered_experiment(dict(method), **changes)  # noqa: ARG005


def network(method: Mapping[str, Any], **extra: Any) -> Make:
    """Seven users with a small network."""
    return lambda folder: network_experiment(write_users(folder / "users.npz"), method, **extra)


def descent(method: Mapping[str, Any], **extra: Any) -> Make:
    """Five users with convex losses and uneven rows."""
    return lambda folder: convex.convex_experiment(convex.write_rows(folder / "users.npz"), method, **extra)


def linear(**method: Any) -> Make:
    """Nine users with a common representation."""
    content: dict[str, Any] = {
        "name": "linear",
        "seed": 2,
        "data": {"source": "representation", "users": 9, "d": 5, "k": 2, "rows_per_user": 8},
        "method": {"name": "fedrep_linear", "participation": 0.5, "eta": 0.1, **method},
        "snapshots": {"every_rounds": 3},
        "stop": {"rounds": 8},
    }
    return lambda folder: experiment_from(content)  # noqa: ARG005


_COINS = {"iterations": 60, "gamma": 1.0, "p0": 0.3, "p": 0.3}
_L2GD = {"name": "async_l2gd", **_COINS, "alpha": 0.4}
_AL2SGD = {"name": "async_al2sgd", **_COINS, "alpha": 0.4, "rho": 0.2}
_UNEVEN = {"c0": 0.2, "c1": 0.4, "c2": 0.6}
_STANDARDIZED = {"source": "ellipses", "users_per_cluster": 3, "test_per_class": 9, "standardize": True}
_FEDREP = {"name": "fedrep", "head_epochs": 1}
_SHORT = {"evaluate_last": 1, "fine_tune": []}

CASES: Mapping[str, Case] = {
    "pdmm lean": Case(pairwise({"name": "pdmm", "penalty": 0.3, "evaluate_every": 3})),
    "pdmm accelerated": Case(pairwise({"name": "pdmm", "penalty": 0.3, "acceleration": "anderson", "anderson_memory": 2})),
    "pdmm paper": Case(pairwise({"name": "pdmm", "penalty": 0.3, "placement": "paper", "order": "jacobi", "start": "zero"})),
    "pdmm paired": Case(pairwise({"name": "pdmm", "penalty": 0.3, "placement": "paper", "sampling": "paired", "primal_fraction": 0.5})),
    "pdmm uniform": Case(pairwise({"name": "pdmm", "penalty": 0.3, "sampling": "uniform", "primal_fraction": 0.5})),
    "pdmm path": Case(pairwise({"name": "pdmm", "path": [0.5, 0.2], "refit": True}, references=["local", "oracle"])),
    "local": Case(pairwise({"name": "local"})),
    "global": Case(pairwise({"name": "global"}, data=_STANDARDIZED)),
    "global few": Case(pairwise({"name": "global", "newton_up_to": 1})),
    "oracle": Case(clustered({"name": "oracle"}), has_clusters=True),
    "squared": Case(pairwise({"name": "squared", "penalty": 0.07})),
    "hlm_exact": Case(clustered({"name": "hlm_exact", "gamma": 1.0, "alpha": 0.4}), has_clusters=True),
    "async_l2gd": Case(clustered({**_L2GD, "collect_models": True, "trace_every": 20}), has_clusters=True),
    "async_l2gd uneven": Case(clustered({**_L2GD, "alpha": _UNEVEN, "round_iterations": 7}), has_clusters=True),
    "async_l2gd never": Case(clustered({**_L2GD, "reuse": "never"}), has_clusters=True),
    "async_l2gd single": Case(clustered({**_L2GD, "variant": "single_coin", "p": None}), has_clusters=True),
    "async_al2sgd": Case(clustered({**_AL2SGD, "collect_models": True, "trace_every": 20}), has_clusters=True),
    "fedrep_linear": Case(linear()),
    "fedrep_linear shared": Case(linear(heads="shared", head_eta=0.05, start="random")),
    "certify": Case(pairwise({"name": "certify", "partition": "known"})),
    "fedrep": Case(network({**_FEDREP, "evaluate_every": 2})),
    "fedper": Case(network({"name": "fedper", "evaluate_last": 0})),
    "fedavg": Case(network({"name": "fedavg"})),
    "lg_fedavg": Case(network({"name": "lg_fedavg"})),
    "local_network": Case(network({"name": "local_network"})),
    "fedprox": Case(network({"name": "fedprox", **_SHORT})),
    "ditto": Case(network({"name": "ditto", **_SHORT})),
    "scaffold": Case(network({"name": "scaffold", **_SHORT})),
    "apfl": Case(network({"name": "apfl", "adaptive": True, **_SHORT})),
    "pfedme": Case(network({"name": "pfedme", "beta": 0.5, **_SHORT})),
    "fed_mtl": Case(network({"name": "fed_mtl", **_SHORT})),
    "per_fedavg": Case(network({"name": "per_fedavg", "hessian": "hf", **_SHORT})),
    "l2gd": Case(network({"name": "l2gd", "p": 0.3, **_SHORT})),
    "ifca": Case(network({"name": "ifca", "clusters": 3, **_SHORT})),
    "adapt": Case(network({"name": "adapt"}), starts_from=network(_FEDREP)),
    **{f"{name} convex": Case(descent({**method, **_SHORT})) for name, method in convex.METHODS.items()},
    "fed_mtl convex": Case(pairwise({"name": "fed_mtl", "mu": 0.5, "relations": "learned", "users_per_round": 6})),
}


def traffic(run: Path) -> list[Traffic]:
    """Measured beside closed form."""
    with contextlib.closing(open_run(run)) as connection:
        return summary.traffic(connection)


def without_a_form(rows: list[Traffic]) -> list[str]:
    """Steps that move vectors, or scalars, of which no closed form says how many. Those of a vector need none of their own."""
    return [
        f"{row.step} {row.direction} {row.scope}"
        for row in rows
        if row.step not in WITHOUT_A_FORM
        and ((row.vectors and row.expected is None) or (row.scalars and row.expected is None and row.expected_scalars is None))
    ]


def differences(rows: list[Traffic]) -> list[str]:
    """Where what was measured is not the closed form; a mean over coins is judged by the coins that were drawn."""
    found = []
    for row in rows:
        wanted = row.expected if row.drawn is None else row.drawn
        if wanted is not None and row.vectors != wanted:
            found.append(f"{row.step} {row.direction} {row.scope}: {row.vectors} vectors, closed form {wanted}")
        if row.expected_scalars is not None and row.scalars != row.expected_scalars:
            found.append(f"{row.step} {row.direction} {row.scope}: {row.scalars} scalars, closed form {row.expected_scalars}")
    return found
