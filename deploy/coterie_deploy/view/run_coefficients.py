"""The section about the coefficients of a run's models: a caterpillar plot each, ordered, in natural units."""

import sqlite3
from collections.abc import Sequence

import numpy as np

from coterie_deploy.read.coefficients import Asked, Coefficient, Table, coefficients, members_of
from coterie_deploy.read.models import stage_models
from coterie_deploy.read.report import Report
from coterie_deploy.terminal.tables import count, figure
from coterie_deploy.view import charts
from coterie_deploy.view.charts import Section
from coterie_deploy.view.charts_coefficients import caterpillar_chart

_MOST_COEFFICIENTS = 12
_SPREAD = ("mean", "sd", "min", "q1", "median", "q3", "max")


def coefficients_section(connection: sqlite3.Connection, report: Report) -> Section:
    """Of the models of the result's users, or of its clusters if these have one each; empty for a single model and very many features."""
    empty, stage = Section("coefficients", "Coefficients"), report.main
    if stage is None or report.experiment.problem.is_distance or report.experiment.model is not None:
        return empty
    if not (report.folder / "models" / f"{stage.name}.npz").is_file():
        return empty
    models = stage_models(report.folder, stage.name)
    if models.models is None or models.models.ndim != 2 or models.models.shape[1] > _MOST_COEFFICIENTS + 1:
        return empty
    found = coefficients(report.experiment, models, members_of(connection), Asked())
    kind = next((kind for kind in ("user", "cluster") if len({row.name for row in found.rows if row.model == kind}) > 1), None)
    if kind is None:
        return empty
    by_name: dict[str, list[Coefficient]] = {}
    for row in found.rows:
        if row.model == kind:
            by_name.setdefault(row.coefficient, []).append(row)
    common = {row.coefficient: row.estimate for row in found.rows if row.model == "everyone"}
    tabs = {}
    for number, (name, rows) in enumerate(by_name.items(), 1):
        tabs[name] = [caterpillar_chart(name, rows, kind, found.level, number, common.get(name))]
    said = [f"{what[:1].upper()}{what[1:]}." for what in found.notes]
    lines = [[name, count(len(rows)), *_spread_of([row.estimate for row in rows])] for name, rows in by_name.items()]
    tables = [charts.Table(f"Coefficients of stage {stage.name}", ("coefficient", f"{kind}s", *_SPREAD), lines), *_variances(found)]
    return Section("coefficients", "Coefficients", said, tabs, tables=tables)


def _variances(found: Table) -> list[charts.Table]:
    if found.variances is None:
        return []
    pairs = [("cluster", "cluster"), ("user", "user"), ("error", "error")]
    reml, ml = found.variances.reml, found.variances.ml
    lines = [[name, figure(getattr(reml, key)), figure(getattr(ml, key))] for name, key in pairs]
    return [charts.Table(f"Variance components. {found.variances.units}", ("effect", "REML", "ML"), lines)]


def _spread_of(values: Sequence[float]) -> list[str]:
    quartiles = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
    sd = float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")
    return [figure(float(value)) for value in (np.mean(values), sd, *quartiles)]
