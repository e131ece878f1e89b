"""The x-update of PDMM for one user with many rows: from few rows at a time, beside Newton's method. Seconds, and memory beyond the rows.

Each way has a process of its own, which makes the rows and then five updates. Their vectors follow each other as those of a run do, ever
nearer to a limit, and the weight q is about that of PDMM's default rho. Newton's method goes on to the rounding level, the others to a
hundredth of the gradient at their start; `away` is how far the last model then is from Newton's. Memory is the growth of the peak by the
updates: 0 where making the rows took more.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from coterie.draws.streams import stream
from coterie.experiment.problem import ProblemConfig
from coterie_client.problems import build_problem
from coterie_client.problems.stochastic import Rule, minimise, rows_of
from tests.benchmarks import record
from tests.benchmarks.record import Figure

UPDATES = 5
_PIECE = 10_000


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _update(way: str, loss: str, n_rows: int, n_features: int, batch: int, found: Any) -> None:
    random = np.random.default_rng(0)
    truth, features, targets = random.normal(size=n_features), np.empty((n_rows, n_features)), np.empty(n_rows)
    for first in range(0, n_rows, _PIECE):
        here = slice(first, min(n_rows, first + _PIECE))
        features[here] = random.normal(size=features[here].shape)
        margins = features[here] @ truth / np.sqrt(n_features) + 0.5 * random.normal(size=len(features[here]))
        targets[here] = np.where(margins > 0, 1.0, -1.0)
    problem = build_problem(ProblemConfig(loss=loss, l2=1e-3), ["one"], [features], [targets])
    before, q = _peak_mb(), 3.0  # about three times the smoothness of these losses
    x, seconds, excesses = np.zeros(problem.d), [], []
    for number in range(UPDATES):
        tilt = q * np.concatenate([truth, [0.0]]) * (1 - 0.3**number)
        start = time.perf_counter()
        if way == "newton":
            x = problem.argmin(tilt[None], q, x[None])[0]
        else:
            rule = Rule(way, batch, 20)  # type: ignore[arg-type]
            x, excess = minimise(rows_of(problem, 0), rule, tilt, q, x, partial(stream, 0, "bench", number))
            excesses.append(excess)
        seconds.append(time.perf_counter() - start)
    found.put((seconds, _peak_mb() - before, x, max(excesses, default=0.0)))


def figures(
    rows: int = 1_000_000, features: int = 50, batch: int = 256, losses: tuple[str, ...] = ("squared_hinge", "logistic")
) -> Iterator[Figure]:
    """The ways one after the other, each in a fresh process."""
    context = multiprocessing.get_context("spawn")
    for loss in losses:
        exact, newton_s = np.zeros(0), 0.0
        for way in ("newton", "svrg", "saga"):
            queue = context.Queue()
            process = context.Process(target=_update, args=(way, loss, rows, features, batch, queue))
            process.start()
            seconds, peak_mb, x, excess = queue.get(timeout=900)
            process.join()
            case, later = f"{loss}, {rows:,} x {features}, {way}", seconds[1:]
            yield Figure(f"{case}, first update", "s", [seconds[0]])
            yield Figure(f"{case}, later updates", "s", later)
            yield Figure(f"{case}, memory beyond the rows", "MB", [peak_mb])
            if way == "newton":
                exact, newton_s = x, float(np.median(later))
                continue
            yield Figure(f"{case}, Newton's time over it", "times", [newton_s / float(np.median(later))], "more")
            yield Figure(f"{case}, away from Newton's model", "relative", [float(np.linalg.norm(x - exact) / np.linalg.norm(exact))], None)
            yield Figure(f"{case}, worst gradient over its tolerance", "times", [excess], None)


if __name__ == "__main__":
    record.main(figures)
