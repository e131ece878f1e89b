"""The convex losses of all users of one host.

The host's users are computed together, in stacks of similar row counts. User i's result is the same to the last bit whether the host holds
it alone, among others, or is asked about a subset. This holds for one version of numpy, one CPU kernel and one BLAS thread, if the row loss
is elementwise.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError, RunError
from coterie.experiment.problem import ProblemConfig
from coterie.findings import Finding
from coterie.text.quoting import some
from coterie_client.problems.blocks import Block, Subsets, exact_layout
from coterie_client.problems.coercivity import margin_reasons
from coterie_client.problems.distances import distance_block
from coterie_client.problems.losses import Poisson, RowLoss, check_labels, resolve_row_loss
from coterie_client.problems.margins import MarginBlock, Moments, design, margin_block
from coterie_client.problems.newton import MAX_STEPS, Start, minimise, start_at
from coterie_client.problems.rows import Stack, joined, read_features, read_targets, stack_rows

_NAMED_OFFENDERS = 3
PIECE_ROWS = 16_384  # rows to evaluate at a time
_MAX_ALIKE = 1 << 19  # numbers in the rows of users that take local steps together: 4 MiB
_MAX_AHEAD = 1 << 20  # numbers in matrices that are computed at once, as the Hessians computed ahead: 8 MiB


class _Ahead(NamedTuple):
    """What `look_ahead` computed at x (n_users, d): gradients, or, with a ridge, the starts of the stacks' minimisations."""

    x: Array
    ridge: Array | float | None
    starts: tuple[Start, ...]
    gradient: Array | None


@dataclass(frozen=True)
class ConvexProblem:
    """The losses f_i of a host's users; n is the number of listed users, `users=None` lists all.

    `users` holds positions among the host's users. Results have one row per listed user, in that order. `x` is (n, d).
    """

    config: ProblemConfig
    names: tuple[str, ...]
    n_rows: Indices  # (n_users,)
    n_features: int  # p
    loss: RowLoss | None  # None: distances
    features: Sequence[Array]  # (m_i, p) of each user
    targets: Sequence[Array]  # (m_i,)

    @property
    def n_users(self) -> int:
        return len(self.names)

    @property
    def d(self) -> int:
        return self.n_features + self.config.has_intercept

    @cached_property
    def stacks(self) -> tuple[tuple[Indices, Block], ...]:
        """Positions of the host's users, and their losses. They hold a padded copy of all rows, so they are made when they are needed."""
        stacks = stack_rows(self.features, self.targets)
        return tuple((stack.members, _make_block(self.config, self.loss, stack, self.config.l2)) for stack in stacks)

    @cached_property
    def of_users(self) -> dict[int, object]:
        """What a solver keeps of each user."""
        return {}

    @cached_property
    def all_rows(self) -> tuple[Block, Indices]:
        """A block of which batches can be taken: all rows without padding, in one piece. And (n_users,) the places of first rows."""
        (one,) = stack_rows(self.features[:1], self.targets[:1])
        (features, starts), (targets, _) = joined(self.features), joined(self.targets)
        share = self.n_rows.astype(np.float64) if self.config.reduction == "sum" else np.ones(self.n_users)
        rows, alone = design(features, self.config.has_intercept), _make_block(self.config, self.loss, one, self.config.l2)
        return replace(alone, rows=rows[None], targets=targets[None], share=share), starts

    def value(self, x: Array, users: Indices | None = None) -> Array:
        """(n,) f_i(x_i)."""
        return self._each(lambda block, x: block.value(x, block.look(x)), x, users, ())

    def gradient(self, x: Array, users: Indices | None = None) -> Array:
        """(n, d)."""
        ahead = self._ahead_at(x, None) if users is None else None
        if ahead is not None and ahead.gradient is not None:
            return ahead.gradient.copy()
        return self._each(lambda block, x: block.gradient(x, block.look(x)), x, users, (self.d,))

    def hessian(self, x: Array, users: Indices | None = None) -> Array:
        """(n, d, d), an element of the generalised Hessian at kinks of the slope."""
        return self._each(lambda block, x: block.hessian(x, block.look(x)), x, users, (self.d, self.d))

    def moments(self, x: Array) -> Moments:
        """Sums over the rows of each user at x (n_users, d), for standard errors. ValueError for a distance loss."""
        if self.loss is None:
            raise ValueError(f"the loss {self.config.loss} has no moments, wanted one with targets")
        x, h = self._models(x, self.n_users), self.d * (self.d + 1) // 2
        result = Moments(*(np.empty((self.n_users, *shape)) for shape in ((h,), (h,), (self.d,), ())))
        for members, block in self.stacks:
            assert isinstance(block, MarginBlock)  # noqa: S101 - a loss with targets has no others
            for whole, part in zip(result, block.moments(x[members]), strict=True):
                whole[members] = part
        return result

    def clipped_sums(self, x: Array, clip: float, clip_hessian: float) -> tuple[Array, Array, Array]:
        """Of each user at x (n_users, d): gradient (n, d) and Hessian (n, d, d) without penalty; and the weight (n,) of a row, 1 or 1/m_i.

        Both parts of a row are shortened, until they are no longer than the clips times this weight. ValueError for a distance loss.
        """
        if self.loss is None:
            raise ValueError(f"the loss {self.config.loss} has no sums of rows, wanted one with targets")
        x, n = self._models(x, self.n_users), self.n_users
        gradients, hessians = np.empty((n, self.d)), np.empty((n, self.d, self.d))
        for members, block in self.stacks:
            assert isinstance(block, MarginBlock)  # noqa: S101 - a loss with targets has no others
            gradients[members], hessians[members] = block.clipped_sums(x[members], clip, clip_hessian)
        return gradients, hessians, np.ones(n) if self.config.reduction == "sum" else 1.0 / self.n_rows

    @property
    def shrink(self) -> Array:
        """(d,) the factors of the penalty, 0 for the intercept."""
        found = np.full(self.d, self.config.l2)
        if self.config.has_intercept:
            found[-1] = 0.0
        return found

    def look_ahead(self, x: Array, ridge: Array | float | None = None) -> None:
        """Computes in idle time what a later `gradient` of all users at x (n_users, d), or `argmin` from x, will need.

        ridge: that of the `argmin`, None for `gradient`. No result depends on it. It discards what was computed ahead before.
        """
        self._ahead.clear()
        if self.loss is None:  # its seen array is as large as the rows, and most minimisers have a closed form
            return
        x = self._models(x, self.n_users)
        with np.errstate(all="ignore"):  # errors surface when the result is used
            if ridge is None:
                self._ahead.append(_Ahead(x, None, (), self.gradient(x)))
                return
            wants_hessian = self.n_users * self.d**2 <= _MAX_AHEAD
            starts = tuple(
                start_at(part.stack, x[part.listed], np.full(self.n_users, ridge)[part.listed], wants_hessian=wants_hessian)
                for part in self._subsets.everyone
            )
        self._ahead.append(_Ahead(x, ridge, starts, None))

    def _ahead_at(self, x: Array, ridge: Array | float | None) -> _Ahead | None:
        """What was computed ahead for exactly this call."""
        for ahead in self._ahead:
            if np.array_equal(np.asarray(ahead.ridge), np.asarray(ridge)) and (x is ahead.x or np.array_equal(x, ahead.x)):
                return ahead
        return None

    @cached_property
    def _ahead(self) -> list[_Ahead]:
        return []

    def smoothness(self) -> Array:
        """(n_users,) L_i: the largest curvature of f_i, exact for worst-case targets."""
        return np.array(self._curvatures[0])

    def strong_convexity(self) -> Array:
        """(n_users,) mu_i >= 0, a lower bound on the curvature of f_i that holds everywhere."""
        return np.array(self._curvatures[1])

    @cached_property
    def _curvatures(self) -> Array:
        """(2, n_users) L_i and mu_i, from one decomposition. Few users at a time, which limits the memory for their matrices."""
        found = np.empty((2, self.n_users))
        for positions, block in self.stacks:
            _, size, d = block.rows.shape
            step = max(1, _MAX_AHEAD // max(size * d, min(size, d) ** 2))
            for first in range(0, len(positions), step):
                here = slice(first, first + step)
                found[:, positions[here]] = block.take(here).curvatures()
        return found

    def row_gradient(self, x: Array, rows: Indices, users: Indices | None = None) -> Array:
        """(n, d) the gradient of f_il at x_i for row l = rows[i] of each listed user, where f_i = (1/m_i) sum_l f_il.

        Each f_il has the whole penalty; with the reduction "sum" it has m_i times the loss of its row. Rows count from 0.
        """
        n_rows = self.n_rows if users is None else self.n_rows[users]
        if rows.shape != n_rows.shape:
            raise ValueError(f"row indices have shape {rows.shape}, wanted {n_rows.shape}")
        if ((rows < 0) | (rows >= n_rows)).any():  # padding must not give a gradient
            i = int(np.argmax((rows < 0) | (rows >= n_rows)))
            raise ValueError(f"row index {rows[i]} is asked of a user with {n_rows[i]} rows")
        x = self._models(x, len(n_rows))
        parts = self._subsets.parts(users)
        if len(parts) == 1:
            return parts[0].stack.row_gradient(x, parts[0].places, rows)
        result = np.empty((len(n_rows), self.d))
        for listed, places, block in parts:
            result[listed] = block.row_gradient(x[listed], places, rows[listed])
        return result

    def row_smoothness(self) -> Array:
        """(n_users,) the largest curvature of any f_il of a user, exact for worst-case targets."""
        return self._of_all(lambda block: block.row_smoothness())

    def row_strong_convexity(self) -> Array:
        """(n_users,) a lower bound on the curvature of all f_il of a user: mostly c, and 0 with an intercept."""
        return self._of_all(lambda block: block.row_strong_convexity())

    def argmin(
        self, tilt: Array, ridge: Array | float, start: Array | None = None, users: Indices | None = None, *, allow_unbounded: bool = False
    ) -> Array:
        """(n, d) `argmin_x f_i(x) + ridge_i/2 |x|^2 - tilt_i.x`; tilt and start (n, d), ridge >= 0 a scalar or (n,).

        The gradient norm is that stated in `coterie_client.problems.newton`. Raises `RunError` naming the users whose problem is unbounded
        or does not converge; with `allow_unbounded` their rows are NaN instead. This includes users with neither tilt nor ridge whose loss
        is not coercive.
        """
        n = self.n_users if users is None else len(users)
        tilt, ridges = self._models(tilt, n), np.full(n, ridge, dtype=np.float64)
        least = ridges.min(initial=np.inf)
        if not least >= 0.0:
            raise ValueError(f"ridge is {least}, it must be >= 0")
        start = np.zeros((n, self.d)) if start is None else self._models(start, n)
        ahead = self._ahead_at(start, ridge) if users is None else None
        starts: Sequence[Start | None] = ahead.starts if ahead is not None else [None] * len(self.stacks)
        blocks = self._subsets.blocks(users)
        if len(blocks) == 1:  # all of the list, in its order
            result, converged = minimise(blocks[0][1], tilt, ridges, start, starts[0])
            if least > 0.0 and converged.all():
                return result
            result[~converged] = np.nan
        else:
            result = np.empty((n, self.d))
            for (listed, block), known in zip(blocks, starts, strict=False):
                x, converged = minimise(block, tilt[listed], ridges[listed], start[listed], known)
                x[~converged] = np.nan
                result[listed] = x
        if least == 0.0:
            flat = np.array([reason is not None for reason in self._reasons])
            result[(ridges == 0.0) & ~tilt.any(axis=1) & (flat if users is None else flat[users])] = np.nan
        lost = np.isnan(result[:, 0])
        if lost.any() and not allow_unbounded:
            positions = np.flatnonzero(lost) if users is None else users[lost]
            offenders = some([repr(self.names[i]) for i in positions], _NAMED_OFFENDERS)
            raise RunError(
                f"the local problem of user {offenders} has no minimiser that {MAX_STEPS} Newton steps can find, "
                "wanted a bounded one: its loss, ridge and tilt leave a direction without growth",
                Finding("M3", len(positions)),
            )
        return result

    def coercive(self) -> list[str | None]:
        """For each user: None, or why f_i alone has no unique bounded minimiser."""
        return list(self._reasons)

    def check(self) -> None:
        """ConfigError naming users whose f_i is not coercive."""
        offenders = [f"user {name!r}: {reason}" for name, reason in zip(self.names, self._reasons, strict=True) if reason]
        if offenders:
            more = len(offenders) - _NAMED_OFFENDERS
            listed = "; ".join(offenders[:_NAMED_OFFENDERS]) + (f"; and {more} more" if more > 0 else "")
            said = f"{len(offenders)} of {self.n_users} users have a {self.config.loss} loss without a unique minimiser of its own"
            said += f", which a method or a reference of this experiment needs: {listed}"
            raise ConfigError(said)

    def predict(self, x: Array, features: Array) -> Array:
        """(m,) labels -1/+1 or values that the model x (d,) predicts for features (m, p). `ConfigError` for a distance loss."""
        if self.loss is None:
            raise ConfigError(f"loss {self.config.loss!r} has no predictions, wanted a loss with targets")
        (a,) = read_features(["predict"], [features], self.n_features)
        if not len(a):
            return np.empty(0)
        (stack,) = stack_rows([a], [np.zeros(len(a))])  # padded, so that scores have the bits of `evaluate`
        rows = design(stack.features, self.config.has_intercept)
        scores = np.matmul(rows, self._models(x[None], 1)[:, :, None])[0, : len(a), 0]
        return self.loss.predict(scores)

    def evaluate(self, x: Array, features: Sequence[Array], targets: Sequence[Array], users: Indices | None = None) -> tuple[Array, Array]:
        """(n,) loss without c, and (n,) accuracy, mean squared error or mean Poisson deviance, of x on other rows of each user.

        The loss has the reduction of the config. For distances the squared error is `|x - a_r|^2`. The metric of a `poisson` loss is the
        mean of 2 (y log(y/mu) - (y - mu)) over the rows, with mu as predicted.

        features: (m_i, p) and targets: (m_i,) for each listed user; NaN for users without rows. Raises `ConfigError`.
        """
        names = self.names if users is None else [self.names[i] for i in users]
        x = self._models(x, len(names))
        losses, metrics = np.full(len(names), np.nan), np.full(len(names), np.nan)
        for first, last in _pieces([len(rows) for rows in features]):
            here = slice(first, last)
            losses[here], metrics[here] = self._evaluate_piece(x[here], names[here], features[here], targets[here])
        return losses, metrics

    def block(self, user: str, features: Array, targets: Array) -> Block:
        """The loss of one user with these rows (m, p) and targets (m,). Raises `ConfigError` naming the user."""
        (stack,) = stack_rows(*_read(self.loss, [user], [features], [targets], self.n_features))
        return _make_block(self.config, self.loss, stack, self.config.l2)

    def alike(self, users: Indices) -> Iterator[Indices]:
        """The places in the list of users with equally many rows: few at a time, so that their rows stay in the processor's cache."""
        n_rows = self.n_rows[users]
        for m in np.unique(n_rows).tolist():
            listed, step = np.flatnonzero(n_rows == m), max(1, _MAX_ALIKE // (m * self.d))
            yield from (listed[first : first + step] for first in range(0, listed.size, step))

    def judge(self, x: Array, user: str, features: Array, targets: Array) -> tuple[float, float]:
        """As `evaluate`, for one user with rows. The loss is a mean over the rows, whatever the reduction."""
        (loss,), (metric,) = self._evaluate_piece(self._models(x[None], 1), [user], [features], [targets])
        return float(loss) / (len(features) if self.config.reduction == "sum" else 1), float(metric)

    def _evaluate_piece(self, x: Array, names: Sequence[str], features: Sequence[Array], targets: Sequence[Array]) -> tuple[Array, Array]:
        losses, metrics = np.full(len(names), np.nan), np.full(len(names), np.nan)
        for stack in stack_rows(*_read(self.loss, names, features, targets, self.n_features)):
            models = x[stack.members]
            block = _make_block(self.config, self.loss, stack, 0.0)
            seen = block.look(models)
            losses[stack.members] = block.value(models, seen)
            if self.loss is None:
                errors = np.vecdot(seen, seen)
            elif self.loss.is_classifier:
                errors = (self.loss.predict(seen) == stack.targets).astype(np.float64)
            elif isinstance(self.loss, Poisson):
                errors = self.loss.deviance(seen, stack.targets)
            else:
                errors = np.square(self.loss.predict(seen) - stack.targets)
            metrics[stack.members] = np.vecdot(stack.valid, errors) / stack.counts
        return losses, metrics

    @cached_property
    def _reasons(self) -> list[str | None]:
        reasons: list[str | None] = [None] * self.n_users
        for positions, block in self.stacks:
            if isinstance(block, MarginBlock):  # distances are always coercive
                for position, reason in zip(positions, margin_reasons(block, self.config.has_intercept), strict=True):
                    reasons[position] = reason
        return reasons

    def _models(self, x: Array, n: int) -> Array:
        x = np.asarray(x, dtype=np.float64)
        if x.ndim and not exact_layout(x):  # the caller's strides must not reach BLAS
            x = np.array(x, order="C")
        if x.shape != (n, self.d):
            raise ValueError(f"models have shape {x.shape}, wanted {(n, self.d)}")
        return x

    @cached_property
    def _subsets(self) -> Subsets:
        return Subsets(self.stacks, self.n_users)

    def _each(self, function: Callable[[Block, Array], Array], x: Array, users: Indices | None, shape: tuple[int, ...]) -> Array:
        n = self.n_users if users is None else len(users)
        x = self._models(x, n)
        blocks = self._subsets.blocks(users)
        if len(blocks) == 1:  # all of the list, in its order
            return function(blocks[0][1], x)
        result = np.empty((n, *shape))
        for listed, block in blocks:
            result[listed] = function(block, x[listed])
        return result

    def _of_all(self, function: Callable[[Block], Array]) -> Array:
        result = np.empty(self.n_users)
        for positions, block in self.stacks:
            result[positions] = function(block)
        return result


def build_problem(config: ProblemConfig, names: Sequence[str], features: Sequence[Array], targets: Sequence[Array]) -> ConvexProblem:
    """The losses of a host's users.

    features: (m_i, p) for each user. targets: (m_i,) for each user, ignored by the distance losses. Raises `ConfigError` for users without
    rows, numbers that are not finite, labels outside the loss's domain, or arrays of the wrong shape. `check` tells whether the
    losses have minimisers.
    """
    if not names:
        raise ConfigError("the host has 0 users, it needs at least one")
    if len(set(names)) != len(names):
        twice = next(name for name in names if list(names).count(name) > 1)
        raise ConfigError(f"user {twice!r} is listed twice, names must differ")
    loss = None if config.is_distance else resolve_row_loss(config)
    read, labels = _read(loss, names, features, targets)
    n_rows = np.array([len(a) for a in features], dtype=np.int64)
    if isinstance(loss, Poisson):
        for name, y in zip(names, targets, strict=True):
            loss.check_limit(np.asarray(y, dtype=np.float64), name)
    return ConvexProblem(config, tuple(names), n_rows, read[0].shape[1], loss, read, labels)


def _pieces(n_rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges of users with about PIECE_ROWS rows together, which limits the memory for padding."""
    first, held = 0, 0
    for position, rows in enumerate(n_rows):
        if held and held + rows > PIECE_ROWS:
            yield first, position
            first, held = position, 0
        held += rows
    if first < len(n_rows):
        yield first, len(n_rows)


def _read(
    loss: RowLoss | None, names: Sequence[str], features: Sequence[Array], targets: Sequence[Array], width: int | None = None
) -> tuple[list[Array], list[Array]]:
    """The users' features and targets, checked. With `loss` None the problem is a distance, which ignores targets.

    With a `width` (the p of an existing problem) users may have no rows; `stack_rows` puts them in no stack. Raises `ConfigError`, naming
    the first user with an array of the wrong shape, a number that is not finite, or a target outside the loss's domain.
    """
    for what, given in (("features", features), ("targets", targets)):
        if len(given) != len(names) and not (loss is None and what == "targets"):
            raise ConfigError(f"{what} are given for {len(given)} users, wanted {len(names)}: one array for each user")
    read = read_features(names, features, width)
    if loss is None:
        return read, [np.zeros(len(a)) for a in read]
    labels = read_targets(names, targets, read)
    for name, y in zip(names, labels, strict=True):
        if loss.is_classifier:
            check_labels(y, name)
        loss.check_targets(y, name)
    return read, labels


def _make_block(config: ProblemConfig, loss: RowLoss | None, stack: Stack, l2: float) -> Block:
    """The losses of one stack's users. `l2` is c; it is separate from the config because evaluation uses 0."""
    return distance_block(stack, config, l2) if loss is None else margin_block(stack, loss, config, l2)
