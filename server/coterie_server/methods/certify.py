"""`certify`: the penalties for which a partition solves (3), and Theorems 1 and 2 at one of them. One round, many exchanges.

Armacki, Bajovic, Jakovetic and Kar (2022), conditions (6) and (13); penalties are LAM, the lambda of (6). The interval is that of
`certificate.recovery_interval`, whose conditions are weaker than those of the theorems. An exchange moves one vector each way for each
user, and a value and a Hessian up. Nobody can be left out (skip): the conditions are on all pairs of users.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.families.consensus import GroupModel, Slopes
from coterie.methods.certify import Config
from coterie_server.families.consensus import group_derivatives
from coterie_server.interface.half import CONVERGED, Counts, Federation, Members, Outcome, ServerHalf, Setting, StageHalf, half_of
from coterie_server.maths import certificate
from coterie_server.maths.clusters import canonical
from coterie_server.methods.oracle import known_labels

# By (7) the right side of (13) is at most the penalty, and equal to it for two groups of one size, where rounding would decide. The
# solutions of (5) are exact to about 1e-8 relative.
_MARGIN = 1e-6


@dataclass(frozen=True)
class State:
    """The group models w_k of (5) at the penalty `at`, and the findings; empty before the only round."""

    w: Array  # (K, d)
    figures: Mapping[str, float]


@dataclass
class _Asking:
    """The oracles of `certificate` on a federation. Users' gradients come with the sums, and are kept until the next point."""

    federation: Federation
    labels: Indices
    n_exchanges: int = 0
    point: Array = field(default_factory=lambda: np.zeros((0, 0)))
    gradients: Array = field(default_factory=lambda: np.zeros((0, 0)))  # (n, d), at the point of each user's group

    async def groups(self, w: Array) -> tuple[Array, Array, Array]:
        """Sums over each group at w (K, d): values (K,), gradients (K, d), Hessians (K, d, d)."""
        replies = await self.federation.exchange(GroupModel(w[self.labels]))
        self.n_exchanges, self.point, self.gradients = self.n_exchanges + 1, w, replies[Slopes].gradient
        values, gradients, hessians = group_derivatives(replies, self.labels, len(w))
        if hessians is None:
            raise RunError("no member answered with Hessians, which the method waits for")
        return values, gradients, hessians

    async def users(self, w: Array) -> Array:
        """The users' gradients (n, d) at w (K, d)."""
        if not np.array_equal(w, self.point):
            await self.groups(w)
        return self.gradients


@dataclass(frozen=True)
class Certify:
    """The server half for one stage."""

    config: Config
    labels: Indices  # (n,), numbered from 0
    d: int

    @property
    def client_options(self) -> Mapping[str, Any]:
        return {"consensus": {"ridge": None, "with_hessians": True}}

    async def init(self, federation: Federation) -> State:  # noqa: ARG002
        return State(np.zeros((int(self.labels.max()) + 1, self.d)), {})

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:  # noqa: ARG002
        """Finds the interval, then tests one penalty. Figures: penalties as LAM, right sides of conditions, and 0 or 1 for verdicts.

        lower_end, upper_end: the penalties that give exactly these clusters; lower_end is infinite when none does, upper_end for one
        cluster. merging_penalty: where (5) merges two groups. theorem1, theorem2: the right sides of (6) and (13) `at` a penalty, and
        whether they hold there, (13) by more than rounding. exact: the least penalty for (9) there, and whether it is met with all groups
        apart.
        """
        asking, sizes = _Asking(federation, self.labels), np.bincount(self.labels)
        found = await certificate.recovery_interval(asking.groups, asking.users, self.labels, state.w, self.config.tolerance)
        at = self.config.at or _inside(found)
        solution = await certificate.solve_blocks(asking.groups, state.w, sizes, at)
        gradients = await asking.users(solution.w)
        theorem1 = certificate.theorem1_bound(gradients, self.labels)
        theorem2 = certificate.theorem2_bound(solution.gradients / sizes[:, None], sizes)
        exact = certificate.exact_lower_end(gradients, self.labels, self.config.tolerance / 100).upper
        apart = len(np.unique(solution.merged)) == len(sizes)
        figures = {
            "lower_end": found.lower,
            "upper_end": found.upper,
            "merging_penalty": found.merging,
            "at": at,
            "theorem1": theorem1,
            "theorem1_holds": float(at >= theorem1),
            "theorem2": theorem2,
            "theorem2_holds": float(at < theorem2 * (1 - _MARGIN)),
            "exact": exact,
            "exact_holds": float(at >= exact and apart),
            "clusters": float(len(sizes)),
            "exchanges": float(asking.n_exchanges),
        }
        return State(solution.w, figures), {**figures, CONVERGED: 1.0}

    async def finish(self, state: State, federation: Federation) -> Outcome:  # noqa: ARG002
        """The solution of (5) at the penalty `at`, which solves (3) where the certificate holds."""
        return Outcome(state.w[self.labels], self.labels, state.figures)

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """One vector down and one up for each user and exchange."""
        n_vectors = sum(f["exchanges"] for f in figures) * len(self.labels)
        return {("query", "down"): n_vectors, ("gradient", "up"): n_vectors}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Counts:
        """With each gradient a value, d + 1 scalars, and the upper triangle of a Hessian, d(d+1)/2."""
        n_asked = sum(f["exchanges"] for f in figures) * len(self.labels)
        return {("gradient", "up"): n_asked * (self.d + 1), ("hessian", "up"): n_asked * self.d * (self.d + 1) / 2}


def _inside(found: certificate.RecoveryInterval) -> float:
    """A penalty to test: the middle of the interval, its lower end if the upper one is infinite, half the merging penalty if it is empty.

    It is never 0: conditions at 0 say nothing.
    """
    middle = found.lower if np.isinf(found.upper) else (found.lower + found.upper) / 2
    return (found.merging / 2 if np.isinf(found.lower) else middle) or float(np.finfo(float).eps)


def set_up(config: Config, setting: Setting) -> Certify:
    """The server half for one stage. ConfigError when there is no partition of all users."""
    return Certify(config, _labels(config, setting), setting.known_facts.d)


def _labels(config: Config, setting: Setting) -> Indices:
    if config.labels is not None:
        return _given_labels(config.labels, setting.members)
    if config.partition == "known":
        return known_labels(setting.members)
    if setting.start is None or setting.start.labels is None:
        raise ConfigError("method 'certify' with partition 'found' needs a stage before it that finds clusters")
    return setting.start.labels


def _given_labels(given: Mapping[str, str], members: Members) -> Indices:
    """The clusters (n,) of users by name."""
    if missing := [name for name in members.names if name not in given]:
        raise ConfigError(f"user {missing[0]!r} has no label, want one for each of the {len(members)} users")
    if unknown := [name for name in given if name not in members.names]:
        raise ConfigError(f"labels names user {unknown[0]!r}, who is not a member, want the {len(members)} users of the run")
    numbers = {label: number for number, label in enumerate(dict.fromkeys(given.values()))}
    return canonical(np.array([numbers[given[name]] for name in members.names], dtype=np.int64))


def build(config: Config, setting: Setting) -> StageHalf[State]:
    return half_of(set_up(config, setting))


SERVER = ServerHalf(build=build, needs_everyone="its conditions are on all pairs of users")
