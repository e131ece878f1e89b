"""PDMM's default rho beside the best constant one, on data of many shapes: rounds to residuals of 1e-5, where `stop.residual` ends a run.

Both residuals have to be small, so neither a tiny rho (which hides the dual one) nor a huge one (which hides the primal one) looks good.
The penalties are shares of about the least LAM that joins all users. The grid of rho goes by factors of about three, around the estimate
that the default starts from and around the rho that it ends with; a rho that takes as many rounds as the best so far is given up.

Usage:  python -m tests.benchmarks.bench_rho [--losses poisson,huber] [--sizes 3]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from tests.papers.pdmm_federation import Data, Run

TOLERANCE = 1e-5
LOSSES = ("squared_hinge", "poisson", "logistic", "huber", "least_squares")
SIZES = ((4, 30, 2), (10, 8, 3), (20, 20, 6), (40, 10, 3), (60, 15, 10))  # users, rows of each, features
SCALES = (("alike", False), ("mixed", False), ("mixed", True))  # of the features; whether they are standardised
SHARES = (0.003, 0.03, 0.3, 1.0)  # of the penalty that joins everybody
_ALL = (0.0, -1.0, 1.0, -2.0, 2.0, -3.0, -4.0, -5.0)  # powers of ten times the estimate
_NEAR = (0.0, -0.5, 0.5, 1.0, -1.0)  # times where the default ends


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


def compared(data: Data, penalty: float, at_most: int = 5000, *, is_coarse: bool = False) -> tuple[int, int, float, float]:
    """Rounds with the default and with the best constant rho, at most as many; the rho that the default ends with, and the best one."""
    near, all_over = (_NEAR[::2], _ALL[1:6:2]) if is_coarse else (_NEAR, _ALL)
    default, run = rounds(data, penalty, at_most)
    estimate, end = run.method.steps.rho, run.state.rho
    best, best_rho = default, end
    # First near the end, which is mostly near the best: the others then end sooner.
    for rho in (*(end * 10**power for power in near), *(estimate * 10**power for power in all_over)):
        found, _ = rounds(data, penalty, best - 1, rho=rho)
        if found < best:
            best, best_rho = found, rho
    return default, best, end, best_rho


def shapes(losses: tuple[str, ...], sizes: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[str, Data, float]]:
    """A name, the data and the penalty of each case."""
    for loss in losses:
        for size in sizes:
            for scales, is_standardized in SCALES:
                data = Shape(loss, size, scales, is_standardized)
                name = f"{loss:14}{' x '.join(map(str, size)):12} {scales}{', standardised' if is_standardized else ''}"
                yield from ((f"{name:48}{share:6g}", data, share * data.joining) for share in SHARES)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--losses", default=",".join(LOSSES))
    parser.add_argument("--sizes", type=int, default=len(SIZES), help="how many of the sizes, from the smallest on")
    options = parser.parse_args()
    worst = 0.0
    print(f"{'loss, users x rows x features, penalty':54} default    best  ratio  rho at the end, best     s")
    for name, data, penalty in shapes(tuple(options.losses.split(",")), SIZES[: options.sizes]):
        started = time.perf_counter()
        default, best, end, best_rho = compared(data, penalty)
        worst = max(worst, default / best)
        print(
            f"{name:54} {default:7} {best:7} {default / best:6.1f}  {end:.2e} {best_rho:.2e} {time.perf_counter() - started:6.1f}",
            flush=True,
        )
    print(f"worst ratio {worst:.1f}   (wanted: less than 20)")


if __name__ == "__main__":
    main()
