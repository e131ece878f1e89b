"""PDMM's default rho beside the best constant one, on data of many shapes: rounds to residuals of 1e-5, where `stop.residual` ends a run.

Both residuals have to be small, so neither a tiny rho (which hides the dual one) nor a huge one (which hides the primal one) looks good.
The penalties are shares of about the least LAM that joins all users. The grid of rho goes by factors of about three, from a thousandth of
the least rho that the default has (its estimate or its end) to a thousand times the largest. A rho that takes as many rounds as the best
so far is given up. With `--within 20` each rho gets a twentieth of the default's rounds only: enough to see whether any is 20 times better.

`--sizes` says how many of the sizes are taken, from the smallest on. What is found is exact: numbers of rounds, which every run repeats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from tests.benchmarks import record
from tests.benchmarks.record import Figure
from tests.papers.pdmm_federation import Data, Run

TOLERANCE = 1e-5
LOSSES = ("squared_hinge", "poisson", "logistic", "huber", "least_squares")
SIZES = ((4, 30, 2), (10, 8, 3), (20, 20, 6), (40, 10, 3), (60, 15, 10))  # users, rows of each, features
SCALES = (("alike", False), ("mixed", False), ("mixed", True))  # of the features; whether they are standardised
SHARES = (0.003, 0.03, 0.3, 1.0)  # of the penalty that joins everybody
WANTED = 20  # times the rounds of the best constant rho, which the default never takes
_MARGIN = 3.0  # powers of ten that the grid goes beyond the default's least and largest rho
_AT_MOST = 40_000  # rounds; the slowest of the cases takes 14,431


class Shape(Data):
    """Users in three groups, whose rows come from their own models."""

    def __init__(self, loss: str, size: tuple[int, int, int], scales: str, is_standardized: bool) -> None:
        self.config = ProblemConfig(loss=loss, l2=1e-3)
        (n, m, d), random = size, np.random.default_rng([0, *size])
        centres, features = random.normal(size=(3, d)), random.normal(size=(n, m, d))
        models = centres[np.arange(n) % 3] + 0.1 * random.normal(size=(n, d))
        margins = np.einsum("nmd,nd->nm", features, models) / np.sqrt(d) - 0.5
        if loss in ("squared_hinge", "logistic"):
            targets = np.where(margins + 0.5 * random.normal(size=margins.shape) > 0, 1.0, -1.0)
            targets[:, :2] = 1.0, -1.0
        elif loss == "poisson":
            targets = random.poisson(np.exp(np.clip(margins, -5, 3))).astype(float)
        else:
            targets = margins + 0.3 * random.standard_t(3, size=margins.shape)
        if scales == "mixed":
            features = features * np.logspace(-1, 2, d) + np.linspace(0, 30, d)
        if is_standardized:
            features = (features - features.mean(axis=(0, 1))) / features.std(axis=(0, 1))
        self._set(features, targets)
        pooled = build_problem(self.config, ["all"], [features.reshape(-1, d)], [targets.reshape(-1)])
        nothing = np.zeros((1, self.d))
        self.global_models = np.tile(pooled.argmin(nothing, 0.0, nothing), (n, 1))
        steepest = np.linalg.norm(self.problem.gradient(self.global_models), axis=1).max()
        self.joining = 2 * float(steepest) / (n - 1)


def residual(run: Run) -> float:
    """What `stop.residual` is held to."""
    return float(max(run.figures[-1][name] for name in ("primal_residual", "dual_residual")))


def rounds(data: Data, penalty: float, at_most: int, **method: Any) -> tuple[int, Run]:
    """Rounds to residuals of TOLERANCE, `at_most` + 1 where they are not reached."""
    run = Run(data, penalty=penalty, evaluate_every=0, **method)
    for number in range(1, at_most + 1):
        if residual(run.round()) <= TOLERANCE:
            return number, run
    return at_most + 1, run


def grid(run: Run) -> list[float]:
    """Constant rho by factors of about three, those near the end of the run first: mostly the best, so that the others end sooner."""
    start, end = np.log10(run.method.steps.rho), np.log10(run.state.rho)
    powers = np.arange(np.floor(2 * (min(start, end) - end - _MARGIN)), np.ceil(2 * (max(start, end) - end + _MARGIN)) + 1) / 2
    return [float(10 ** (end + power)) for power in sorted(powers, key=abs)]


def compared(data: Data, penalty: float, within: float = 1.0, **method: Any) -> tuple[int, int | None, float, float]:
    """Rounds with the default and with the best constant rho; the rho that the default ends with, and the best one.

    Each constant rho gets a `within`th of the default's rounds. Where none ends by then, the best is None and nan: the ratio is less than
    `within`. Raises ValueError where the default does not reach the tolerance.
    """
    default, run = rounds(data, penalty, _AT_MOST, **method)
    if default > _AT_MOST:
        raise ValueError(f"the default rho has residuals of {residual(run):.1e} after {_AT_MOST} rounds, want {TOLERANCE:.0e}")
    best, best_rho, at_most = None, float("nan"), int(default / within)
    for rho in grid(run):
        found, _ = rounds(data, penalty, at_most, rho=rho)
        if found <= at_most:
            best, best_rho, at_most = found, rho, found - 1
    return default, best, run.state.rho, best_rho


def shapes(losses: Sequence[str], sizes: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[str, Data, float]]:
    """A name, the data and the penalty of each case."""
    for loss in losses:
        for size in sizes:
            for scales, is_standardized in SCALES:
                data = Shape(loss, size, scales, is_standardized)
                name = f"{loss:14}{' x '.join(map(str, size)):12} {scales}{', standardised' if is_standardized else ''}"
                yield from ((f"{name:48}{share:6g}", data, share * data.joining) for share in SHARES)


def figures(losses: Sequence[str] = LOSSES, sizes: int = len(SIZES), within: float = 1.0) -> Iterator[Figure]:
    """Rounds of each case, and the worst ratio of each loss and size, and of all."""
    worst: dict[str, float] = {}
    for name, data, penalty in shapes(losses, SIZES[:sizes]):
        default, best, _, _ = compared(data, penalty, within)
        case = " ".join(name.split())
        yield Figure(case, "rounds", [default], exact=True)
        if best is not None:
            yield Figure(f"{case}, best constant rho", "rounds", [best], None)
        # Where none of the constant rho ends within its share of the rounds, the ratio is below `within`.
        worst[name[:26]] = max(within if best is None else default / best, worst.get(name[:26], 0.0))
    for name, ratio in worst.items():
        yield Figure(f"{' '.join(name.split())}, worst of the best constant rho", "times", [ratio], wanted=WANTED, exact=True)
    yield Figure("all, worst of the best constant rho", "times", [max(worst.values())], wanted=WANTED, exact=True)


if __name__ == "__main__":
    record.main(figures)
