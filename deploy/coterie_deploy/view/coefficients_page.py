"""`coterie coefficients`: the coefficients of a run's models as a table, CSV or JSON lines."""

from __future__ import annotations

import io
import json
import math
import os
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table as RichTable

from coterie_deploy.read.coefficients import Asked, Coefficient, Table, Variances
from coterie_deploy.read.loading import load_run
from coterie_deploy.read.tabular import csv_text, write_text
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, figure, is_narrow, say_left_out, table

Form = Literal["table", "csv", "jsonl"]
_UNLIMITED = 10_000  # columns of a table in a file
_WIDE = 100  # columns from which the clusters of users have room


def print_coefficients(folder: Path, stage: str | None, asked: Asked, form: Form, output: Path | None, console: Console) -> None:
    """Prints or writes them. ConfigError for an unknown stage, user or cluster; RunError if the file cannot be written.

    In a file or a pipe nothing is wrapped or left out, unless COLUMNS says how wide it is.
    """
    found = load_run(folder).coefficient_table(stage, asked)
    if output is None and form == "table" and (console.is_terminal or "COLUMNS" in os.environ):
        _print_table(found, console)
        return
    if form == "table":
        page = Console(file=io.StringIO(), width=_UNLIMITED, highlight=False)
        _print_table(found, page)
        text = page.file.getvalue()  # type: ignore[attr-defined]
    else:
        text = _csv(found) if form == "csv" else "".join(f"{json.dumps(asdict(row))}\n" for row in found.rows)
    if output is None:
        console.file.write(text)
    else:
        write_text(output, text)


def _csv(found: Table) -> str:
    header = [field.name for field in fields(Coefficient)]
    return csv_text(header, ([_cell(value) for value in astuple(row)] for row in found.rows))


def _cell(value: object) -> str:
    return "" if value is None else repr(value) if isinstance(value, float) else str(value)


def _print_table(found: Table, console: Console) -> None:
    is_small = is_narrow(console)
    has_errors = bool(found.errors)
    has_clusters = console.width >= _WIDE and any(row.cluster for row in found.rows)
    columns = ["model", *(["cluster"] if has_clusters else []), "coefficient", "estimate"]
    if has_errors:
        columns += ["std. error", *([] if is_small else [f"low {100 * found.level:g} %", f"high {100 * found.level:g} %"])]
    rows = []
    for row in found.rows:
        named = row.name if row.model == "everyone" else f"{row.model} {row.name}"
        cells = [named, *([row.cluster] if has_clusters else []), row.coefficient, figure(row.estimate)]
        if has_errors:
            cells += [figure(row.standard_error), *([] if is_small else [figure(row.low), figure(row.high)])]
        rows.append([printable(cell) for cell in [*cells, count(row.n_rows)]])
    kind = f", {found.errors} standard errors" if has_errors else ""
    console.print(table(f"Stage {found.stage}{kind}", [*columns, "rows"], rows, n_text=2 + has_clusters))
    left_out = ["cluster"] if any(row.cluster for row in found.rows) and not has_clusters else []
    say_left_out(console, [*left_out, *(["low", "high"] if has_errors and is_small else [])])
    if found.variances is not None:
        console.print()
        console.print(_variance_table(found.variances))
        console.print(f"{found.variances.units}.")
        for line in _suggested(found.variances):
            console.print(line)
    for note in found.notes:
        console.print(f"Note: {printable(note)}.")


def _variance_table(found: Variances) -> RichTable:
    rows = [
        [name, figure(getattr(found.reml, key)), figure(_root(getattr(found.reml, key))), figure(getattr(found.ml, key))]
        for name, key in (("cluster", "cluster"), ("user", "user"), ("error", "error"))
    ]
    return table("Variance components", ["effect", "REML", "std. dev.", "ML"], rows)


def _root(value: float) -> float:
    return math.sqrt(value) if value >= 0 else math.nan


def _suggested(found: Variances) -> list[str]:
    lines = []
    if found.icc_cluster is not None and found.icc_user is not None:
        lines.append(f"ICC: {figure(found.icc_cluster)} for rows of a cluster, {figure(found.icc_user)} for rows of a user")
    for key, used, suggested in (("gamma", found.gamma_used, found.gamma), ("lam", found.lam_used, found.lam)):
        span = f"{used[0]:.4g}" if f"{used[0]:.4g}" == f"{used[1]:.4g}" else f"{used[0]:.4g} to {used[1]:.4g}"
        lines.append(f"method.{key}: {span} in this run, {figure(suggested)} by REML")
    return lines
