"""What the rounds of local training spend of a privacy budget, and the noise of the server.

With `privacy.unit: row` users add noise to their steps. Rows of different users are different, so the epsilon of a run is the largest of
the users' own. With `user` the server clips each user's change of the shared tensors, and adds noise to their sum:

    phi^{t+1} = phi^t + (sum_i clip(phi_i - phi^t; C) + s C z) / m,   z standard normal, m the users drawn

DP-FedAvg of McMahan, Ramage, Talwar and Zhang (2018). With heads that are trained first and stay with their users it is CENTAUR of Shen,
Ye, Kang, Hassani and Shokri (2023). The sum is divided by m also where some of the users drawn have not answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.secret import Secret, digest
from coterie.experiment.privacy import Draws, Privacy
from coterie.families.partial import Single, Training


@dataclass(frozen=True)
class Budget:
    """The draws of one round, with their noise multipliers: of all users, or of each number of rows."""

    privacy: Privacy
    parts: Sequence[tuple[Draws, float]]

    @classmethod
    def of(cls, privacy: Privacy, config: Training, n_rows: Indices, rounds: int) -> Budget:
        """That of users with these numbers of rows (n,). ConfigError if no noise is enough for `privacy.epsilon`."""
        if privacy.unit == "row":
            draws = [config.row_draws(n) for n in np.unique(n_rows).tolist()]
        else:
            n_users = n_rows.size
            m = config.n_selected(n_users)
            draws = [Draws(1, m / n_users, "fixed" if m < n_users else "poisson", n_users)]
        return cls(privacy, [(one, privacy.multiplier(one, rounds)) for one in draws])

    def spent(self, rounds: int) -> float:
        """The epsilon of this many rounds."""
        return max(self.privacy.spent(draws, multiplier, rounds) for draws, multiplier in self.parts)

    @property
    def multiplier(self) -> float:
        """The largest noise multiplier."""
        return max(multiplier for _, multiplier in self.parts)


def noised_sum(rows: Sequence[NDArray[np.floating]], before: Array, clip: float, multiplier: float, secret: Secret) -> Array:
    """(size,) sum_i clip(rows_i - before; clip), plus noise, of arrays (k, size) in order. Noise depends on the key and on the sum.

    So a round that is repeated with the same replies has the same bits, and other replies get independent noise.
    """
    total = np.zeros(before.size)
    for array in rows:
        for row in array:
            change = row.astype(np.float64) - before
            norm = float(np.sqrt(np.vecdot(change, change)))
            total += change * (clip / max(norm, clip))
    noise = secret.child(digest(total.tobytes(), before.tobytes())).numbers().normal(total.size)
    return total + multiplier * clip * noise


def noised(rows: Sequence[Single], before: Single, m: int, budget: Budget, secret: Secret) -> Single:
    """(size,) phi^{t+1} from phi^t and the tensors (k, size) that users have returned, of m who were drawn."""
    was = before.astype(np.float64)
    moved: Single = (was + noised_sum(rows, was, budget.privacy.clip, budget.multiplier, secret) / m).astype(before.dtype)
    return moved


def drawn_in_secret(secret: Secret, n_users: int, m: int) -> Indices:
    """(m,) users of a round, sorted, which nobody without the key knows: only then a draw makes epsilon smaller."""
    found: Indices = np.sort(secret.child("participation").numbers().order(n_users)[:m])
    return found


def doubts(budget: Budget, n_rows: Indices) -> list[str]:
    """A warning where delta is so large that it allows a single unit to be revealed entirely."""
    privacy = budget.privacy
    n_units = int(n_rows.min()) if privacy.unit == "row" else n_rows.size
    if privacy.delta * n_units < 1:
        return []
    whose = f"the {n_units:,} rows of the smallest user" if privacy.unit == "row" else f"{n_units:,} users"
    return [f"privacy.delta is {privacy.delta:g}, which is not below one over {whose}: want a smaller delta"]


def said(budget: Budget) -> str:
    """How much noise there is, in a sentence."""
    privacy, multipliers = budget.privacy, [multiplier for _, multiplier in budget.parts]
    least, most = min(multipliers), max(multipliers)
    many = f"{least:.3g}" != f"{most:.3g}"
    noise = f"{least:.3g} to {most:.3g} clips, by the users' numbers of rows" if many else f"{most:.3g} clips"
    what = "gradients of rows" if privacy.unit == "row" else "changes of users"
    return f"privacy: {what} are clipped at {privacy.clip:g}; the noise of their sum is {noise}; delta is {privacy.delta:g}"
