"""The same convex clustering problem to the same relative gap: PDMM over gRPC, its start included, and CVXPY with its conic solvers.

Time of PDMM: from the joined federation to the end of the run, books and shutdown included. Time of CVXPY: `solve`, once with
and once without its compilation. Medians of repetitions in turn, after one of each that does not count. Needs the extra `bench`.
Usage:  python -m tests.benchmarks.bench_cvxpy [--users 60 240] [--hosts 1] [--repeats 5]
"""

from __future__ import annotations

import argparse
import sqlite3
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import cvxpy as cp
import numpy as np
from scipy.sparse import csr_matrix

from coterie import run
from coterie_client.data import load_users
from tests.benchmarks.bench_pdmm import experiment

GAP = 1e-6
# Each solver's own tolerances, loosest first; the first that gives the gap counts.
SOLVERS: dict[str, list[dict[str, Any]]] = {
    "CLARABEL": [{"tol_gap_rel": t, "tol_gap_abs": t, "tol_feas": t} for t in (1e-5, 1e-6, 1e-7, 1e-8)],
    "SCS": [{"eps_rel": t, "eps_abs": t, "max_iters": 50_000} for t in (1e-4, 1e-5, 1e-6, 1e-7)],
}


def rows(n_users: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Features with the intercept's column (n, m, 3), labels (n, m)."""
    described = experiment(n_users, 1)
    users = load_users(described.data, described.seed, None)
    features = np.stack([np.column_stack([user.features, -np.ones(len(user.features))]) for user in users])
    return features, np.stack([user.target for user in users])


def objective(x: Any, features: Any, labels: Any, penalty: float) -> float:
    """Phi at x (n, 3)."""
    margins = np.maximum(0.0, 1.0 - labels * np.einsum("nmd,nd->nm", features, x))
    first, second = np.triu_indices(len(x), 1)
    distances = np.linalg.norm(x[first] - x[second], axis=1).sum()
    return float((margins**2).mean(axis=1).sum() + 1e-3 / 2 * (x[:, :2] ** 2).sum() + penalty * distances)


def problem(features: Any, labels: Any, penalty: float) -> tuple[cp.Problem, cp.Variable]:
    """Phi as CVXPY sees it: one norm per unordered pair."""
    n, m, d = features.shape
    x = cp.Variable((n, d))
    first, second = np.triu_indices(n, 1)
    n_pairs = len(first)
    ends = (np.ones(n_pairs), (np.arange(n_pairs), first)), (-np.ones(n_pairs), (np.arange(n_pairs), second))
    difference = sum(csr_matrix(end, shape=(n_pairs, n)) for end in ends)
    design = csr_matrix(
        (features.reshape(-1), (np.repeat(np.arange(n * m), d), (np.arange(n)[:, None] * d + np.tile(np.arange(d), m)).ravel()))
    )
    margins = 1 - cp.multiply(labels.ravel(), design @ cp.vec(x, order="C"))
    loss = cp.sum_squares(cp.pos(margins)) / m + 1e-3 / 2 * cp.sum_squares(x[:, :2])
    return cp.Problem(cp.Minimize(loss + penalty * cp.sum(cp.norm(difference @ x, axis=1)))), x


def cvxpy_s(name: str, tolerances: dict[str, Any], features: Any, labels: Any, penalty: float) -> tuple[float, float, Any]:
    """(seconds with compilation, seconds of the solver alone, models)."""
    described, x = problem(features, labels, penalty)
    started = time.perf_counter()
    described.solve(solver=name, **tolerances)
    return time.perf_counter() - started, float(described.solver_stats.solve_time or np.nan), x.value


def loosest(name: str, features: Any, labels: Any, penalty: float, optimum: float) -> tuple[dict[str, Any], float]:
    """The solver's loosest tolerances that give the gap, and the gap that they give."""
    for tolerances in SOLVERS[name]:
        _, _, x = cvxpy_s(name, tolerances, features, labels, penalty)
        gap = (objective(x, features, labels, penalty) - optimum) / optimum
        if gap <= GAP:
            break
    return tolerances, gap


def ours_s(n_users: int, hosts: int, optimum: float) -> tuple[float, int]:
    """(seconds from the joined federation to the end, rounds) of the run that stops at the gap."""
    # From zero: with acceleration a stage of its own for the global model takes longer than the round or two that it saves.
    described = experiment(n_users, 5000, acceleration="anderson", evaluate_every=2)
    stop = described.stop.model_copy(update={"objective_gap": GAP, "reference_objective": optimum})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        result = run(described.model_copy(update={"stop": stop}), transport="grpc", hosts=hosts, output=output)
        connection = sqlite3.connect(output / "run.db")
        joined = connection.execute("SELECT max(at) FROM events WHERE kind = 'join'").fetchone()[0]
        ended = connection.execute("SELECT max(at) FROM events WHERE kind = 'finished'").fetchone()[0]
        connection.close()
        return ended - joined, len(result.history())


def main() -> None:
    """Prints a table for each number of users."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--users", type=int, nargs="+", default=[60, 240])
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    for n_users in options.users:
        features, labels = rows(n_users)
        penalty = experiment(n_users, 1).method.penalty
        tight = {"tol_gap_rel": 1e-11, "tol_gap_abs": 1e-11, "tol_feas": 1e-11}
        optimum = objective(cvxpy_s("CLARABEL", tight, features, labels, penalty)[2], features, labels, penalty)
        chosen = {name: loosest(name, features, labels, penalty, optimum) for name in SOLVERS}
        ours_s(n_users, options.hosts, optimum)
        ours, theirs = [], {name: [] for name in SOLVERS}  # type: ignore[var-annotated]
        for _ in range(options.repeats):
            seconds, rounds = ours_s(n_users, options.hosts, optimum)
            ours.append(seconds)
            for name, (tolerances, _) in chosen.items():
                theirs[name].append(cvxpy_s(name, tolerances, features, labels, penalty)[:2])
        print(f"N = {n_users}, d = 3, LAM = {penalty:.4g}, relative gap {GAP:g}, medians of {options.repeats}")
        print(f"  PDMM over gRPC, {options.hosts} host(s): {median(ours):.3f} s ({min(ours):.3f} to {max(ours):.3f}), {rounds} rounds")
        for name, (_, gap) in chosen.items():
            whole, alone = (median(column) for column in zip(*theirs[name], strict=True))
            ratio = whole / median(ours)
            print(f"  CVXPY {name:9s} {whole:7.3f} s ({alone:.3f} s of it the solver), gap {gap:.1e}; PDMM is {ratio:.2f} times as fast")


if __name__ == "__main__":
    main()
