"""The same convex clustering problem to the same relative gap: PDMM and son_newton over gRPC, start included, and CVXPY's conic solvers.

Their time: from the joined federation to the end of the run, books and shutdown included. Time of CVXPY: `solve`, once with
and once without its compilation. Medians of repetitions in turn, after one of each that does not count. Needs the extra `bench`.
"""

from __future__ import annotations

import sqlite3
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cvxpy as cp
import numpy as np
from scipy.sparse import csr_matrix

from coterie import run
from coterie.methods import son_newton
from coterie_client.data import load_users
from tests.benchmarks import record
from tests.benchmarks.bench_pdmm import experiment
from tests.benchmarks.record import Figure

GAP = 1e-6
OURS = {"pdmm": "PDMM", "son_newton": "son_newton"}
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


def ours_s(method: str, n_users: int, hosts: int, optimum: float) -> tuple[float, int]:
    """(seconds from the joined federation to the end, rounds) of the run that stops at the gap."""
    # From zero: with acceleration a stage of its own for the global model takes longer than the round or two that it saves.
    described = experiment(n_users, 5000, acceleration="anderson", evaluate_every=2)
    if method == "son_newton":
        described = described.model_copy(update={"method": son_newton.Config(penalty=described.method.penalty, tolerance=GAP)})
    stop = described.stop.model_copy(update={"objective_gap": GAP, "reference_objective": optimum})
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        result = run(described.model_copy(update={"stop": stop}), transport="grpc", hosts=hosts, output=output)
        connection = sqlite3.connect(output / "run.db")
        joined = connection.execute("SELECT max(at) FROM events WHERE kind = 'join'").fetchone()[0]
        ended = connection.execute("SELECT max(at) FROM events WHERE kind = 'finished'").fetchone()[0]
        connection.close()
        return ended - joined, len(result.history())


def figures(users: Sequence[int] = (60, 240), hosts: int = 1, repeats: int = 5) -> Iterator[Figure]:
    """For each number of users, d = 3."""
    for n_users in users:
        features, labels = rows(n_users)
        penalty = experiment(n_users, 1).method.penalty
        tight = {"tol_gap_rel": 1e-11, "tol_gap_abs": 1e-11, "tol_feas": 1e-11}
        optimum = objective(cvxpy_s("CLARABEL", tight, features, labels, penalty)[2], features, labels, penalty)
        chosen = {name: loosest(name, features, labels, penalty, optimum) for name in SOLVERS}
        ours: dict[str, list[float]] = {}
        theirs: dict[str, list[tuple[float, float]]] = {}
        rounds = {method: ours_s(method, n_users, hosts, optimum)[1] for method in OURS}
        for _ in range(repeats):
            for method in OURS:
                ours.setdefault(method, []).append(ours_s(method, n_users, hosts, optimum)[0])
            for name, (tolerances, _) in chosen.items():
                theirs.setdefault(name, []).append(cvxpy_s(name, tolerances, features, labels, penalty)[:2])
        for method, said in OURS.items():
            yield Figure(f"{n_users} users, {said} over gRPC", "s", ours[method])
            yield Figure(f"{n_users} users, {said} over gRPC", "rounds", [rounds[method]], exact=True)
        for name, (_, gap) in chosen.items():
            yield Figure(f"{n_users} users, {name} through CVXPY", "s", [whole for whole, _ in theirs[name]], None)
            yield Figure(f"{n_users} users, {name} alone", "s", [alone for _, alone in theirs[name]], None)
            yield Figure(f"{n_users} users, {name}, relative gap", "", [gap], None)
            for method, said in OURS.items():
                ratios = [whole / own for own, (whole, _) in zip(ours[method], theirs[name], strict=True)]
                yield Figure(f"{n_users} users, {said} faster than {name} through CVXPY", "times", ratios, "more")


if __name__ == "__main__":
    record.main(figures)
