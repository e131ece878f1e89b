"""The interface to the losses of a host's users, which the client halves of the methods use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from coterie.arrays import Array, Indices
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems.blocks import Block


class Problem(Protocol):
    """The losses f_i of a host's users; n is the number of listed users, `users=None` lists all.

    `users` holds positions among the host's users. Results have one row per listed user, in that order.
    """

    @property
    def config(self) -> ProblemConfig: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def n_users(self) -> int: ...
    @property
    def n_rows(self) -> Indices: ...  # (n_users,)
    @property
    def d(self) -> int: ...

    def value(self, x: Array, users: Indices | None = None) -> Array:
        """(n,) f_i(x_i), for x (n, d)."""

    def gradient(self, x: Array, users: Indices | None = None) -> Array:
        """(n, d), for x (n, d)."""

    def hessian(self, x: Array, users: Indices | None = None) -> Array:
        """(n, d, d), for x (n, d); an element of the generalised Hessian at kinks of the slope."""

    def look_ahead(self, x: Array, ridge: float | None = None) -> None:
        """Computes in idle time what a later `gradient` of all users at x (n_users, d), or `argmin` from x, will need.

        ridge: that of the `argmin`, None for `gradient`. No result depends on it. It discards what was computed ahead before.
        """

    def smoothness(self) -> Array:
        """(n_users,) L_i: the largest curvature of f_i, exact for worst-case targets."""

    def strong_convexity(self) -> Array:
        """(n_users,) mu_i >= 0, a lower bound on the curvature of f_i that holds everywhere."""

    def row_gradient(self, x: Array, rows: Indices, users: Indices | None = None) -> Array:
        """(n, d) the gradient of f_il at x_i for row l = rows[i] of each listed user, where f_i = (1/m_i) sum_l f_il.

        Each f_il has the whole penalty; with the reduction "sum" it has m_i times the loss of its row. Rows count from 0.
        """

    def row_smoothness(self) -> Array:
        """(n_users,) the largest curvature of any f_il of a user, exact for worst-case targets."""

    def row_strong_convexity(self) -> Array:
        """(n_users,) a lower bound on the curvature of all f_il of a user: mostly c, and 0 with an intercept."""

    def argmin(
        self,
        tilt: Array,
        ridge: Array | float,
        start: Array | None = None,
        users: Indices | None = None,
        *,
        allow_unbounded: bool = False,
    ) -> Array:
        """(n, d) argmin_x f_i(x) + ridge_i/2 |x|^2 - tilt_i.x; tilt and start (n, d), ridge >= 0 a scalar or (n,)."""

    def coercive(self) -> list[str | None]:
        """For each user: None, or why f_i alone has no unique bounded minimiser."""

    def check(self) -> None:
        """Raise `ConfigError` naming users whose f_i is not coercive."""

    def block(self, user: str, features: Array, targets: Array) -> Block:
        """The loss of one user with these rows (m, p) and targets (m,). Raises `ConfigError` naming the user."""

    def judge(self, x: Array, user: str, features: Array, targets: Array) -> tuple[float, float]:
        """As `evaluate`, for one user with rows. The loss is a mean over the rows, whatever the reduction."""

    def predict(self, x: Array, features: Array) -> Array:
        """(m,) labels -1/+1 or values that the model x (d,) predicts for features (m, p)."""

    def evaluate(self, x: Array, features: Sequence[Array], targets: Sequence[Array], users: Indices | None = None) -> tuple[Array, Array]:
        """(n,) loss without c, and (n,) accuracy, mean squared error or mean Poisson deviance, of x (n, d) on other rows of each user."""
