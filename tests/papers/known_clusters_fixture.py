"""The fixtures with known clusters as a data source, and runs of them in one process.

"Fixture" is tests/fixtures/known_clusters_{linear,logistic}.json: six users in three clusters, with closed-form optima and 20 iterations of
both algorithms on recorded coins.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import JsonValue

import coterie
from coterie.arrays import Indices
from coterie.experiment.config import Experiment, experiment_from
from coterie.wire.messages import Message, PerCluster, select_clusters
from coterie.wire.precision import Precision
from coterie_client.data import UserData, list_users, load_users
from coterie_client.data.sources import user_source
from coterie_client.hosting.build import build_host
from coterie_client.hosting.host import Host
from coterie_client.interface.half import Inbox, Local, client_half
from coterie_client.problems import ConvexProblem, build_problem
from coterie_deploy.engines.loopback import join_all
from coterie_server.interface.half import ClusterSetting, Facts, Members, Outcome, Replies, Setting, Sum, Totals, server_half
from coterie_server.interface.totals import total
from coterie_server.run.coordinator import Finished, Options, coordinate
from coterie_server.run.engine import Progress
from coterie_server.run.tiers import hosted
from coterie_server.session.hub import Hub

FOLDER = Path(__file__).parents[1] / "fixtures"
KINDS = ("linear", "logistic")


@functools.cache
def fixture(kind: str) -> dict[str, Any]:
    """The fixture "linear" or "logistic"."""
    content: dict[str, Any] = json.loads((FOLDER / f"known_clusters_{kind}.json").read_text(encoding="utf-8"))
    return content


@user_source
def users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """Users "u0" to "u5" of the fixture `kind`, in clusters "c0" to "c2"; they are judged on their own rows."""
    content = fixture(str(options["kind"]))
    made = []
    for place, (cluster, n_rows) in enumerate(zip(content["cid"], content["cnt"], strict=True)):
        rows, targets = np.array(content["X"][place][:n_rows]), np.array(content["y"][place][:n_rows], float)
        made.append(UserData(f"u{place}", f"c{cluster}", rows, targets, rows, targets))
    return made


@user_source
def made_users(options: dict[str, JsonValue], seed: int) -> list[UserData]:
    """`clusters` clusters of `users_per_cluster` users with `rows` to `rows` + 4 rows of `d` features each; targets may be `labels`.

    The user with the number `unclustered` has no cluster.
    """
    numbers = {key: int(str(options[key])) for key in ("clusters", "users_per_cluster", "rows", "d")}
    draws = np.random.default_rng(int(str(options.get("seed", 0))))
    made = []
    for place in range(numbers["clusters"] * numbers["users_per_cluster"]):
        n_rows = numbers["rows"] + place % 5
        rows = draws.standard_normal((n_rows, numbers["d"]))
        targets = rows @ draws.standard_normal(numbers["d"]) + draws.standard_normal(n_rows)
        if options.get("labels"):
            targets = np.where(targets > 0, 1.0, -1.0)
        cluster = None if place == options.get("unclustered") else f"c{place // numbers['users_per_cluster']}"
        made.append(UserData(f"u{place}", cluster, rows, targets, rows, targets))
    return made


def experiment(kind: str, method: Mapping[str, Any], **more: Any) -> Experiment:
    """An experiment on the fixture's rows, with its losses and weights."""
    content = fixture(kind)
    gamma = {f"u{place}": value for place, value in enumerate(content["gamma"])}
    lam = {f"c{place}": value for place, value in enumerate(content["lam"])}
    return experiment_from(
        {
            "name": "fixture",
            "data": {"source": "python", "path": "tests.papers.known_clusters_fixture:users", "options": {"kind": kind}},
            "problem": {"loss": {"linear": "least_squares", "logistic": "logistic"}[kind], "l2": content["mu0"], "intercept": False},
            "method": {"gamma": gamma, "lam": lam, "collect_models": True, **method},
            **more,
        }
    )


def made_experiment(method: Mapping[str, Any], *, problem: Mapping[str, Any] | None = None, **options: Any) -> Experiment:
    """An experiment on `made_users`; `seed`, `payload` and `snapshots` may be among the options."""
    more = {key: options.pop(key) for key in ("seed", "payload", "snapshots") if key in options}
    collected = {"collect_models": True} if str(method["name"]).startswith("async") else {}
    made = {"clusters": 3, "users_per_cluster": 4, "rows": 3, "d": 3, **options}
    return experiment_from(
        {
            "name": "made",
            "data": {"source": "python", "path": "tests.papers.known_clusters_fixture:made_users", "options": made},
            "problem": {"loss": "least_squares", "l2": 0.1, "intercept": False, **(problem or {})},
            "method": {**collected, **method},
            **more,
        }
    )


@dataclass
class Run:
    """A finished run, and what its users kept after each round."""

    finished: Finished
    hosts: Sequence[Host]
    states: dict[int, dict[str, np.ndarray[Any, Any]]] = field(default_factory=dict)  # iteration -> name -> (n, d), its latest

    @property
    def figures(self) -> Mapping[str, float]:
        return self.finished.outcomes[self.finished.final_stage].figures

    @property
    def models(self) -> np.ndarray[Any, Any]:
        models = self.finished.outcomes[self.finished.final_stage].models
        assert models is not None
        return models

    def rounds(self) -> list[dict[str, float]]:
        return self.finished.database.figures_of(0)


def run(experiment: Experiment, spread: Sequence[Sequence[int]] | None = None, *, watch: Sequence[str] = ()) -> Run:
    """Runs in one process; `spread` lists the users of each host by number, `watch` names arrays of the users' state to keep."""
    names = [user.name for user in list_users(experiment.data, experiment.seed)]
    spread = spread or [range(len(names))]
    rules = experiment.federation.model_copy(update={"hosts": len(spread)})
    experiment = experiment.model_copy(update={"federation": rules})
    hosts: list[Host] = []
    states: dict[int, dict[str, np.ndarray[Any, Any]]] = {}

    @contextlib.asynccontextmanager
    async def connect(hub: Hub) -> AsyncIterator[None]:
        listed = [build_host(f"h{i}", experiment, hub.run_id, [names[user] for user in own]) for i, own in enumerate(spread)]
        hosts.extend(listed)
        join_all(hub, listed)
        yield

    def observer(progress: Progress) -> None:
        kept = {name: gathered(hosts, experiment.method.name, name) for name in watch}
        states[int(progress.figures["iteration"])] = kept

    finished = asyncio.run(coordinate(experiment, connect, Options(observer=observer if watch else None)))
    return Run(finished, hosts, states)


def run_apart(experiment: Experiment) -> np.ndarray[Any, Any]:
    """The models (n, d) of a run over gRPC with a process for each cluster's aggregator and host."""
    n_clusters = len({user.cluster for user in list_users(experiment.data, experiment.seed)})
    rules = experiment.federation.model_copy(update={"topology": "clusters", "hosts": n_clusters})
    result = coterie.run(experiment.model_copy(update={"federation": rules}), transport="grpc")
    return np.array([result.models[user] for user in result.users])


def gathered(hosts: Sequence[Host], method: str, name: str) -> np.ndarray[Any, Any]:
    """An array (n, d) of the users' states, in member order."""
    first = getattr(hosts[0].states[method], name)
    whole = np.empty((sum(len(host.indices) for host in hosts), *first.shape[1:]))
    for host in hosts:
        whole[host.indices] = getattr(host.states[method], name)
    return whole


# ---- both tiers without an engine


def _carried(message: Message, precision: Precision) -> Message:
    """The message as the other side sees it."""
    floats = [name for name, spec in message.specs if spec.is_float and not spec.is_exact]
    rounded: dict[str, Any] = {name: precision.rounded(getattr(message, name)) for name in floats}
    return dataclasses.replace(message, **rounded)


class Users:
    """Some users on one host, as the parent's half of one method sees them."""

    def __init__(self, experiment: Experiment, members: Members, data: Sequence[UserData], n_clusters: int) -> None:
        problem = build_problem(experiment.problem, members.names, [u.features for u in data], [u.target for u in data])
        everyone, self.precision = np.arange(len(members)), Precision.of(experiment.payload)
        numbers = {"numbers": members.number_of, "clusters": members.cluster_of}
        self.local = Local(experiment.seed, members.names, everyone, len(members), self.precision, data, problem, **numbers)
        found = client_half(experiment.method.name)
        assert found is not None
        _, self.client = found
        self.state: Any = None
        self.n_clusters = n_clusters  # of the run

    def begin(self, options: Mapping[str, Any], start: Mapping[str, np.ndarray[Any, Any]]) -> None:
        """The first state; `start` has arrays (n, d) of all users of the run, or (k, d) of its clusters, to take the place of its own."""
        self.state = self.client.init(json.loads(json.dumps(options)), self.local, None)
        rows = {name: self.state.clusters if len(array) == self.n_clusters else self.local.numbers for name, array in start.items()}
        own = {name: array[rows[name]] for name, array in start.items()}
        self.state = dataclasses.replace(self.state, **own)

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Any = (), within: int | None = None) -> Replies:
        """One task for the host."""
        kept = [select_clusters(m, self.state.clusters) if isinstance(m, PerCluster) else m for m in messages]
        sent = {type(m): _carried(m, self.precision) for m in kept if m is not None}
        self.state, answers = self.client.step(self.state, Inbox("", 0, sent), self.local)
        return Replies({type(m): _carried(m, self.precision) for m in answers}, None)

    async def total(self, *messages: Message, of: Sequence[Sum], to: Indices | None = None, wanted: Any = ()) -> Totals:
        return await total(self.exchange, messages, of, to, wanted, self.local.n_own, self.precision, is_exact=False)


class Aggregators:
    """One aggregator for each cluster, as the coordinator's half sees them; `sent` has what has gone over their links."""

    def __init__(self, half_of: Callable[[ClusterSetting], Any], users: Sequence[Users], settings: Sequence[ClusterSetting]) -> None:
        self.users, self.precision = users, settings[0].precision
        self.halves = [half_of(setting) for setting in settings]
        self.states = [half.init() for half in self.halves]
        self.sent: list[Message] = []

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Any = (), within: int | None = None) -> Replies:
        """`PerCluster` messages are for the halves, others for the users."""
        self.sent += messages
        answers: list[list[Message]] = []
        for j, (half, below) in enumerate(zip(self.halves, self.users, strict=True)):
            if not isinstance(messages[0], PerCluster):
                answers.append(list((await below.exchange(*messages)).messages))
                continue
            own = [_carried(part, self.precision) for m in messages if (part := select_clusters(m, np.array([j]))) is not None]  # type: ignore[arg-type]
            self.states[j], said = await half.step(self.states[j], {type(m): m for m in own}, below)
            answers.append([_carried(m, self.precision) for m in said])
        kinds = [type(m) for m in answers[0]]
        self.sent += [m for listed in answers for m in listed]
        return Replies({cls: self._merged(cls, [listed[i] for listed in answers]) for i, cls in enumerate(kinds)}, None)

    async def total(self, *messages: Message, of: Sequence[Sum], to: Indices | None = None, wanted: Any = ()) -> Totals:
        n_members = sum(below.local.n_own for below in self.users)
        return await total(self.exchange, messages, of, to, wanted, n_members, self.precision, is_exact=False)

    def _merged(self, cls: type[Message], parts: Sequence[Message]) -> Message:
        whole = {name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in cls.specs}
        if not issubclass(cls, PerCluster):
            order = np.argsort(np.concatenate([below.local.numbers for below in self.users]))
            whole = {name: array[order] for name, array in whole.items()}
        return cls(**whole)


@dataclass
class Tiers:
    """One stage of an experiment, driven round by round: aggregators apart, or their half in the coordinator."""

    experiment: Experiment
    two_tier: bool = False
    start: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        experiment, config = self.experiment, self.experiment.method
        data = load_users(experiment.data, experiment.seed, None)
        members = Members(tuple(u.name for u in data), tuple(u.cluster or "" for u in data))
        n_clusters = len(members.cluster_names)
        self.everyone = Users(experiment, members, data, n_clusters)
        problem = self.everyone.local.problem
        facts = Facts(problem.n_rows, problem.d, problem.smoothness(), problem.strong_convexity())
        setting = Setting(experiment.seed, config.name, members, self.everyone.precision, facts)
        half = server_half(config.name)
        build_clusters = half.tiers
        assert callable(build_clusters)
        self.method = half.build(config, setting)
        below = [members]
        if self.two_tier:
            below = [_of_cluster(members, number) for number in range(n_clusters)]
        settings = [ClusterSetting(experiment.seed, config.name, own, self.everyone.precision) for own in below]
        self.users = [Users(experiment, own, [data[i] for i in own.number_of], n_clusters) for own in below]
        self.federation: Any = self.users[0]
        if self.two_tier:
            self.federation = Aggregators(lambda setting: build_clusters(config, setting), self.users, settings)
        else:
            self.method = hosted(self.method, build_clusters(config, settings[0]), settings[0])
        for users in self.users:
            users.begin(self.method.client_options[config.name], self.start)

    def run(self) -> Outcome:
        """The outcome of the stage."""
        return asyncio.run(self._run())

    async def _run(self) -> Outcome:
        state, number, figures = await self.method.init(self.federation), 0, {"has_ended": 0.0}
        while not figures["has_ended"]:
            number += 1
            state, figures = await self.method.round(state, self.federation, number)
        outcome: Outcome = await self.method.finish(state, self.federation)
        return outcome

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """An array (n, d) of the users' states, in member order."""
        order = np.argsort(np.concatenate([users.local.numbers for users in self.users]))
        whole: np.ndarray[Any, Any] = np.concatenate([getattr(users.state, name) for users in self.users])[order]
        return whole


def optimum(problem: ConvexProblem, gamma: Any, alpha: Any, cluster_of: Indices) -> np.ndarray[Any, Any]:
    """The minimiser (n, d) of (2.1) for quadratic losses, gamma (n,) and alpha (k,), from the normal equations."""
    n, d = problem.n_users, problem.d
    own = np.asarray(alpha)[cluster_of] * gamma
    rest = gamma - own
    together = np.equal.outer(cluster_of, cluster_of)
    pull = np.diag(gamma) - together * np.outer(rest, gamma) / (together @ gamma)[:, None]
    if own.any():
        pull -= np.outer(own, own) / own.sum()
    system = np.kron(pull, np.eye(d))
    for i, hessian in enumerate(problem.hessian(np.zeros((n, d)))):
        system[i * d : (i + 1) * d, i * d : (i + 1) * d] += hessian
    minimiser: np.ndarray[Any, Any] = np.linalg.solve(system, -problem.gradient(np.zeros((n, d))).ravel()).reshape(n, d)
    return minimiser


def _of_cluster(members: Members, number: int) -> Members:
    """The members of one cluster, as its aggregator knows them."""
    own = np.flatnonzero(members.cluster_of == number)
    names, clusters = ([listed[i] for i in own] for listed in (members.names, members.clusters))
    return Members(tuple(names), tuple(clusters), own, np.full(own.size, number))


__all__ = [
    "KINDS",
    "Run",
    "Tiers",
    "experiment",
    "fixture",
    "gathered",
    "made_experiment",
    "made_users",
    "optimum",
    "run",
    "run_apart",
    "users",
]
