"""Problems of sums of norms, and their minima by CVXPY with Clarabel.

Usage:  python -m tests.sums_of_norms    (writes tests/fixtures/sums_of_norms.json; needs the extra `bench`)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from coterie.arrays import Array, Indices

FIXTURE = Path(__file__).parent / "fixtures" / "sums_of_norms.json"


@dataclass(frozen=True)
class Case:
    """One problem."""

    points: Array  # (n, d)
    pairs: Indices  # (m, 2)
    weights: Array  # (m,)
    hessians: Array  # (n, d, d)
    lam: float

    def objective(self, x: Array) -> float:
        """The value at x (n, d)."""
        away = x - self.points
        lengths = np.linalg.norm(x[self.pairs[:, 0]] - x[self.pairs[:, 1]], axis=1)
        return float(np.einsum("ni,nij,nj->", away, self.hessians, away) / 2 + self.lam * (self.weights * lengths).sum())


def groups(n: int, d: int, seed: int) -> Array:
    """Points (n, d) around four centres."""
    random = np.random.default_rng(seed)
    return np.asarray(4 * random.normal(size=(4, d))[np.arange(n) % 4] + random.normal(size=(n, d)))


def case(n: int, d: int, share: float, lam: float, *, least_squares: bool, seed: int) -> Case:
    """Points around four centres and a share of all pairs, with random weights and Hessians, or with all equal."""
    random = np.random.default_rng(seed)
    pairs = np.stack(np.triu_indices(n, 1), axis=1)
    pairs = pairs[random.random(len(pairs)) < share]
    weights = random.uniform(0.2, 2.0, len(pairs)) if share < 1 else np.ones(len(pairs))
    rows = random.normal(size=(n, 2 * d, d))
    hessians = np.einsum("nmi,nmj->nij", rows, rows) / (2 * d) if least_squares else np.broadcast_to(np.eye(d), (n, d, d))
    return Case(groups(n, d, seed), pairs, weights, hessians, lam)


CASES = {
    "two users": case(2, 3, 1.0, 0.3, least_squares=False, seed=1),
    "ten users, all pairs": case(10, 2, 1.0, 0.2, least_squares=False, seed=2),
    "ten users, all fused": case(10, 2, 1.0, 5.0, least_squares=True, seed=3),
    "40 users, some pairs": case(40, 3, 0.2, 0.3, least_squares=False, seed=4),
    "40 users, least squares": case(40, 3, 0.2, 0.2, least_squares=True, seed=5),
    "one coordinate": case(60, 1, 0.1, 0.1, least_squares=True, seed=6),
    "200 users": case(200, 2, 0.05, 0.2, least_squares=False, seed=7),
    "200 users, least squares": case(200, 4, 0.05, 0.15, least_squares=True, seed=8),
}


def solve(case: Case) -> float:
    """The minimum by CVXPY."""
    import cvxpy as cp

    n, d = case.points.shape
    x = cp.Variable((n, d))
    roots = np.linalg.cholesky(case.hessians)
    away = [cp.sum_squares(roots[i].T @ (x[i] - case.points[i])) for i in range(n)]
    lengths = cp.norm(x[case.pairs[:, 0]] - x[case.pairs[:, 1]], axis=1)
    problem = cp.Problem(cp.Minimize(cp.sum(cp.hstack(away)) / 2 + case.lam * (case.weights @ lengths)))
    problem.solve(solver="CLARABEL", tol_gap_rel=1e-11, tol_gap_abs=1e-11, tol_feas=1e-11)
    return case.objective(x.value)


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps({name: solve(case) for name, case in CASES.items()}, indent=1) + "\n", encoding="utf-8")
