"""The path of convex clustering on 1,000 half-moon points, after Touw, Groenen and Terada (2022): time, gap and clusters at each penalty.

Their graph: 15 neighbours, weights that fall with phi = 2. As many penalties as they take, 551, in units of the radius over the sum of
weights; but from 0 to where the two moons are left, in equal ratios. Theirs end at 110, where 45 clusters are left here. In a run each user
sends its point once, and the server solves the whole path. So this is `coterie.sum_of_norms` alone, without a federation.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import process_time

import numpy as np
from rich.console import Console

from coterie.arrays import Array, Indices
from coterie_deploy.studies.plots import HEIGHT, Axis, Point, curves
from coterie_deploy.studies.reproduce.study import Study, Work, seeds_of
from coterie_deploy.terminal.tables import table
from coterie_deploy.view.charts import Spec
from coterie_server.maths import graphs
from coterie_server.maths.clusters import adjusted_rand
from coterie_server.maths.sum_of_norms import SumOfNorms, sum_of_norms

N_POINTS, NEIGHBOURS, PHI, NOISE = 1000, 15, 2.0, 0.05
PENALTIES = (0.0, *np.geomspace(0.2, 25_000, 550).tolist())
GAP = 1e-6  # relative, at each penalty
# Seconds of a path of 551 penalties as the papers print them, each on a computer of its own.
PRINTED = {"CCMM, to a looser tolerance": 0.56, "SSNAL": 126.0, "AMA": 4307.0}


@dataclass(frozen=True)
class Row:
    """One penalty of a seed's path."""

    seed: int
    penalty: float  # in the paper's units
    clusters: int
    rand: float  # adjusted Rand index against the two moons
    gap: float  # relative duality gap
    steps: int  # of Newton
    seconds: float  # of CPU time, from the solution before


def half_moons(n: int, noise: float, seed: int) -> tuple[Array, Indices]:
    """Points (n, 2) of two half circles that reach into each other, and their halves (n,)."""
    moon = np.arange(n) % 2
    angle = np.pi * (np.arange(n) // 2) / (n // 2 - 1)
    away = np.where(moon == 0, 1.0, -1.0)[:, None]
    points = np.array([[1.0, 0.5]]) * moon[:, None] + away * np.column_stack([np.cos(angle), np.sin(angle)])
    return points + noise * np.random.default_rng(seed).normal(size=(n, 2)), moon


def rows_of_seed(seed: int, work: Work) -> list[Row]:
    """The rows of a seed. Raises RunError when the folder cannot be written, or a penalty keeps a larger gap."""
    said = f"seed {seed}: {len(PENALTIES)} penalties on {N_POINTS:,} half-moon points"
    also = repr((seed, N_POINTS, NEIGHBOURS, PHI, NOISE, PENALTIES, GAP))
    return work.rows(f"half-moons-seed{seed}", said, [], Row, _measured, seed, also=also)


def _measured(seed: int) -> list[Row]:
    points, moons = half_moons(N_POINTS, NOISE, seed)
    graph = graphs.nearest(points, NEIGHBOURS, PHI)
    weights = np.stack([graph.first, graph.second], axis=1), graph.weights
    unit = float(np.linalg.norm(points - points.mean(axis=0)) / graph.weights.sum())
    rows: list[Row] = []
    found: SumOfNorms | None = None
    for penalty in PENALTIES:
        started = process_time()
        found = sum_of_norms(points, weights, penalty * unit, tolerance=GAP, start=found)
        seconds, clusters = process_time() - started, int(found.clusters.max()) + 1
        rows.append(Row(seed, penalty, clusters, adjusted_rand(found.clusters, moons), found.gap, found.iterations, seconds))
    return rows


def _show(rows: Sequence[Row], console: Console) -> None:
    at = {penalty: [row for row in rows if row.penalty == penalty] for penalty in sorted({row.penalty for row in rows})}

    def mean(listed: Sequence[Row], of: Callable[[Row], float]) -> float:
        return float(np.mean([of(row) for row in listed]))

    best = max(at, key=lambda penalty: mean(at[penalty], lambda row: row.rand))
    chosen = sorted({*list(at)[:: max(1, len(at) // 11)], best})
    lines = [
        (f"{penalty:.4g}", f"{mean(listed, lambda row: row.clusters):.1f}", f"{mean(listed, lambda row: row.rand):.3f}",
         f"{max(row.gap for row in listed):.0e}", f"{1000 * mean(listed, lambda row: row.seconds):.0f} ms")
        for penalty, listed in at.items() if penalty in chosen
    ]  # fmt: skip
    columns = ("penalty", "clusters", "adjusted Rand index", "largest gap", "CPU time")
    console.print(table(f"{len(at)} penalties, {seeds_of(rows)}; some of them, and that with the best index", columns, lines))
    n_seeds = len({row.seed for row in rows})
    whole, largest = sum(row.seconds for row in rows) / n_seeds, max(row.gap for row in rows)
    said = f"the whole path: {whole:.1f} s of CPU time and {sum(row.steps for row in rows) / n_seeds:,.0f} Newton steps"
    console.print(f"{said}, a gap of at most {largest:.0e} everywhere")
    console.print("as printed, on other computers: " + ", ".join(f"{name} {seconds:g} s" for name, seconds in PRINTED.items()))


def _chart(rows: Sequence[Row]) -> Spec:
    drawn: tuple[tuple[str, Axis, Callable[[Row], float]], ...] = (
        ("adjusted Rand index", Axis("adjusted Rand index"), lambda row: row.rand),
        ("clusters", Axis("clusters", is_log=True), lambda row: float(row.clusters)),
        ("CPU time", Axis("milliseconds of CPU time"), lambda row: 1000 * row.seconds),
        ("gap", Axis("relative duality gap", is_log=True, low=1e-10), lambda row: max(row.gap, 1e-16)),
    )
    x = Axis("penalty", is_log=True)
    specs = [curves(_points(rows, name, of), x, y, bands=True, height=HEIGHT // 2) for name, y, of in drawn]
    for spec in specs:
        spec["layer"][0]["encoding"]["color"]["legend"] = None  # one curve, which the axis names
    return {"$schema": specs[0]["$schema"], "vconcat": specs}


def _points(rows: Sequence[Row], name: str, of: Callable[[Row], float]) -> list[Point]:
    """The mean over the seeds at each penalty, from the smallest to the largest."""
    values: dict[float, list[float]] = {}
    for row in rows:
        values.setdefault(row.penalty, []).append(of(row))
    return [Point(name, penalty, float(np.mean(found)), min(found), max(found)) for penalty, found in sorted(values.items()) if penalty > 0]


STUDIES = {"convex-clustering-scaling": Study(rows_of_seed, _show, _chart)}
