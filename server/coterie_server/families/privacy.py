"""What the rounds of local training spend of a privacy budget, and the noise of the server.

With `privacy.unit: row` users add noise to their steps. Rows of different users are different, so the epsilon of a run is the largest of
the users' own. With `user` the server clips each user's change of the shared tensors, and adds noise to their sum:

    phi^{t+1} = phi^t + (sum_i clip(phi_i - phi^t; C) + s C z) / m,   z standard normal, m the users drawn

DP-FedAvg of McMahan, Ramage, Talwar and Zhang (2018). With heads that are trained first and stay with their users it is CENTAUR of Shen,
Ye, Kang, Hassani and Shokri (2023). The sum is divided by m also where some of the users drawn have not answered.

With `where: hosts` the same sum comes with its noise, as a masked total of the hosts' noised sums (`coterie.draws.shares`). The server
knows which users it draws, so a draw makes epsilon no smaller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.secret import Secret, digest
from coterie.draws.shares import Shares
from coterie.experiment.config import Experiment
from coterie.experiment.privacy import PARTS_PER_SUM, Draws, Privacy
from coterie.families.partial import Single, Training
from coterie.families.shares import EACH_ROUND, form_of, shared
from coterie.wire.fixed_point import Form
from coterie_server.interface.half import Facts
from coterie_server.interface.stages import Stage

CLIP = "clip"  # a figure, and an array of a state


@dataclass(frozen=True)
class Budget:
    """The draws of one round, with their noise multipliers: of all users, or of each number of rows."""

    privacy: Privacy
    parts: Sequence[tuple[Draws, float]]
    n_shares: int = 0  #: see `SumLinks`

    @classmethod
    def of(cls, privacy: Privacy, config: Training, n_rows: Indices, rounds: int, n_shares: int = 0) -> Budget:
        """That of users with these numbers of rows (n,). ConfigError if no noise is enough for `privacy.epsilon`, or for the count."""
        if privacy.unit == "row":
            draws = [config.row_draws(n) for n in np.unique(n_rows).tolist()]
        elif privacy.is_shared:
            draws = [EACH_ROUND]
        else:
            n_users = n_rows.size
            m = config.n_selected(n_users)
            draws = [Draws(1, m / n_users, "fixed" if m < n_users else "poisson", n_users)]
        found = cls(privacy, [(one, privacy.multiplier(one, rounds)) for one in draws], n_shares)
        if privacy.adapt is not None:
            privacy.adapt.multiplier(found.multiplier, config.n_selected(n_rows.size))  # which is refused before the first round
        return found

    def spent(self, rounds: int) -> float:
        """The epsilon of this many rounds."""
        return max(self.privacy.spent(draws, multiplier, rounds) for draws, multiplier in self.parts)

    @property
    def multiplier(self) -> float:
        """The largest noise multiplier."""
        return max(multiplier for _, multiplier in self.parts)

    @cached_property
    def shares(self) -> Shares | None:
        """The noise of the hosts; None where they add none to their sums."""
        return Shares(self.privacy.clip, self.multiplier, self.n_shares) if self.privacy.is_shared else None

    @property
    def form(self) -> Form | None:
        """How the sums of the users' changes are written, if hosts add noise to them."""
        return None if self.shares is None else form_of(self.shares)


async def compute_noise(experiment: Experiment, stage: Stage, facts: Facts | None) -> None:
    """Finds the noise multipliers of a stage in a thread, so that heartbeats go on. The accountant keeps them for the half.

    They take seconds where users have many numbers of rows. ConfigError if no noise is enough.
    """
    if experiment.privacy is not None and facts is not None and isinstance(stage.config, Training):
        await asyncio.to_thread(Budget.of, experiment.privacy, stage.config, facts.n_rows, stage.stop.rounds)


def noised_sum(rows: Sequence[NDArray[np.floating]], before: Array, clip: float, multiplier: float, secret: Secret) -> Array:
    """(size,) sum_i clip(rows_i - before; clip), plus noise, of arrays (k, size) in order. Noise depends on the key and on the sum.

    So a round that is repeated with the same replies has the same bits, and other replies get independent noise.
    """
    total = np.zeros(before.size)
    for change, length in _changes(rows, before):
        total += change * (clip / max(length, clip))
    noise = secret.child(digest(total.tobytes(), before.tobytes())).numbers().normal(total.size)
    return total + multiplier * clip * noise


def _changes(rows: Sequence[NDArray[np.floating]], before: Array) -> Iterator[tuple[Array, float]]:
    """Each user's change (size,), and its length."""
    for array in rows:
        for row in array:
            change = row.astype(np.float64) - before
            yield change, float(np.sqrt(np.vecdot(change, change)))


def noised(
    rows: Sequence[Single], before: Single, beside: Mapping[str, NDArray[Any]], m: int, budget: Budget, secret: Secret
) -> dict[str, Any]:
    """What changes in a state: phi^{t+1}, and the next clip. From the tensors (k, size) that users have returned, of m who were drawn."""
    privacy, was = budget.privacy, before.astype(np.float64)
    clip, multiplier = clip_of(beside).get(CLIP, privacy.clip), budget.multiplier
    if privacy.adapt is not None:
        multiplier = privacy.adapt.multiplier(multiplier, m)
    total = noised_sum(rows, was, clip, multiplier, secret)
    moved: dict[str, Any] = {"weights": (was + total / m).astype(before.dtype)}
    if privacy.adapt is None:
        return moved
    within = sum((length <= clip) - 0.5 for _, length in _changes(rows, was))
    noise = secret.child("count", digest(total.tobytes(), np.float64(within).tobytes())).numbers().normal(1)[0]
    share = (within + privacy.adapt.count_deviation(m) * noise) / m + 0.5
    following = clip * np.exp(-privacy.adapt.rate * (share - privacy.adapt.quantile))
    return {**moved, "beside": {**beside, CLIP: np.array([following])}}


def moved(before: Single, total: Array, m: int) -> Single:
    """phi^{t+1}, from the sum (size,) of the clipped changes of m users that has its noise."""
    return (before + total / m).astype(before.dtype)


def first_clip(budget: Budget | None) -> Mapping[str, Array]:
    """What a state holds of a clip that is adapted, before the first round."""
    return {} if budget is None or budget.privacy.adapt is None else {CLIP: np.array([budget.privacy.clip])}


def clip_of(beside: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """The figure of a clip that is adapted: that of the next round."""
    return {CLIP: float(beside[CLIP][0])} if CLIP in beside else {}


def closing(budget: Budget | None, beside: Mapping[str, NDArray[Any]]) -> dict[str, float]:
    """Closing figures of a stage with privacy."""
    if budget is None:
        return {}
    privacy = budget.privacy
    return {"delta": privacy.delta, CLIP: privacy.clip, "noise_multiplier": budget.multiplier, **clip_of(beside)}


def drawn_in_secret(secret: Secret, n_users: int, m: int) -> Indices:
    """(m,) users of a round, sorted, which nobody without the key knows: only then a draw makes epsilon smaller."""
    found: Indices = np.sort(secret.child("participation").numbers().order(n_users)[:m])
    return found


def doubts(budget: Budget, n_rows: Indices, m: int, size: int) -> list[str]:
    """A warning where delta is so large that it allows a single unit to be revealed entirely.

    ConfigError where sums over m users of `size` numbers do not fit the noise of hosts.
    """
    privacy = budget.privacy
    if budget.shares is not None:
        budget.shares.check(m, size)
    n_units = int(n_rows.min()) if privacy.unit == "row" else n_rows.size
    if privacy.delta * n_units < 1:
        return []
    whose = f"the {n_units:,} rows of the smallest user" if privacy.unit == "row" else f"{n_units:,} users"
    return [f"privacy.delta is {privacy.delta:g}, which is not below one over {whose}: want a smaller delta"]


def said_of_sums(budget: Budget, rounds: int) -> str:
    """As `said`, of sums of gradients and Hessians."""
    privacy = budget.privacy
    clips = f"gradients of {privacy.unit}s are clipped at {privacy.clip:g}, and their Hessians at {privacy.clip_hessian:g}"
    noise = f"the noise of each sum is {PARTS_PER_SUM * budget.multiplier:.3g} of its clips"
    return f"privacy: {clips}; {noise}, in at most {rounds} round{'s' * (rounds > 1)}; delta is {privacy.delta:g}"


def said(budget: Budget) -> str:
    """How much noise there is, in a sentence."""
    privacy, multipliers = budget.privacy, [multiplier for _, multiplier in budget.parts]
    least, most = min(multipliers), max(multipliers)
    many = f"{least:.3g}" != f"{most:.3g}"
    noise = f"{least:.3g} to {most:.3g} clips, by the users' numbers of rows" if many else f"{most:.3g} clips"
    what = "gradients of rows" if privacy.unit == "row" else "changes of users"
    first = "" if privacy.adapt is None else ", which follows them"
    sentence = f"privacy: {what} are clipped at {privacy.clip:g}{first}; the noise of their sum is {noise}; delta is {privacy.delta:g}"
    return sentence if budget.shares is None else f"{sentence}; {shared(budget.n_shares)}"
