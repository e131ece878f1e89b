"""`coterie ledger` for a part of the ledger, a grouping or a format: totals of groups, or the rows themselves.

`read.ledger_page` prints the page of a whole run; `coterie_server.record.query` explains the totals.
"""

import contextlib
import csv
import functools
import io
import itertools
import json
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from coterie.errors import ConfigError, RunError
from coterie.experiment.config import experiment_from
from coterie.extras import needed
from coterie.record.files import written_whole
from coterie_deploy.read.report import own_stage
from coterie_deploy.read.sentences import steps_said
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import NARROW, count, counted, say, size, table
from coterie_server.record import summary
from coterie_server.record.curves import GAP, curves, goal_from, reached, why_not_reached, with_figure_of
from coterie_server.record.query import (
    KEYS,
    MEASURES,
    ROW_COLUMNS,
    Group,
    Query,
    closed_forms,
    grand_total,
    has_shares,
    numbered_totals,
    rows,
    stage_namer,
)
from coterie_server.record.rundb import BETWEEN, DIRECT, PEERS, WITHIN, read_run
from coterie_server.record.summary import StageSummary

FORMATS = ("table", "csv", "jsonl", "parquet")
DEFAULT_KEYS = ("step", "direction", "scope")
_SCOPES = {scope.removesuffix("-cluster"): scope for scope in (DIRECT, WITHIN, BETWEEN, PEERS)}
_SORTS = {measure.removesuffix("_bytes"): measure for measure in MEASURES}
_ROUNDS = re.compile(r"(\d{0,9})(:?)(\d{0,9})")
# Columns of numbers: those that a narrow terminal keeps longest come first.
_BY_WORTH = ("wire", "share", "vectors", "formula", "payload", "message", "scalars", "frames")
_MAX_LINES = 400  # of a table
_BATCH_ROWS = 20_000  # of a Parquet file, at once in memory


@dataclass(frozen=True)
class Wanted:
    """The options of the command, as given. `limits`: the steps, directions, scopes, clusters, links or members that are asked for."""

    limits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    by: str | None = None
    rounds: str | None = None
    stage: str | None = None
    until: str | None = None
    sort: str | None = None
    format: str | None = None
    output: Path | None = None
    repeats: bool = False
    total: bool = False

    @property
    def is_more_than_a_page(self) -> bool:
        """Whether other options than a stage, or all stages together, are given."""
        return replace(self, stage=None, total=False) != Wanted()


# ---- from options to a query


def query_of(wanted: Wanted) -> Query:
    """The query without the goal of `until`. ConfigError for options that cannot be read."""
    first, last = _rounds_of(wanted.rounds)
    keys = () if wanted.by is None else tuple(key.strip() for key in wanted.by.split(","))
    for wrong in (key for key in keys if key not in KEYS):
        raise ConfigError(f"--by has the key {wrong!r}, want some of {', '.join(KEYS)}, with commas between them")
    if wanted.total and "stage" in keys:
        raise ConfigError("--total is all stages together, want --by without stage")
    limits = {f"{what}s": tuple(_SCOPES.get(value, value) for value in values) for what, values in wanted.limits.items()}
    limits["users"] = limits.pop("members", ())
    stages = () if wanted.stage is None else (wanted.stage,)
    return Query(keys, stages, first, last, useful=not wanted.repeats, **limits)


def _rounds_of(text: str | None) -> tuple[int | None, int | None]:
    """The first and the last round of 7, 100:200, 100: or :200."""
    found = _ROUNDS.fullmatch((text or ":").strip())
    first, last = (int(end) if end else None for end in (found[1], found[3])) if found else (None, None)
    if found and not found[2]:
        last = first
    is_empty = text is not None and first is None and last is None
    if first is not None and last is not None and first > last:
        raise ConfigError(f"--rounds is {text!r}, from {first} on but only up to {last}, want the smaller first: {last}:{first}")
    if found is None or is_empty:
        raise ConfigError(f"--rounds is {text!r}, want a round such as 7, or a range such as 100:200, 100: or :200")
    return first, last


def _format_of(wanted: Wanted) -> str:
    ending = wanted.output.suffix.removeprefix(".").lower() if wanted.output is not None else ""
    chosen = wanted.format or (ending if ending in FORMATS else FORMATS[0])
    if chosen not in FORMATS:
        raise ConfigError(f"--format is {chosen!r}, want one of {', '.join(FORMATS)}")
    if chosen == "parquet" and wanted.output is None:
        raise ConfigError("--format parquet is no text to print, want --output FILE")
    return chosen


def _until(connection: sqlite3.Connection, query: Query, text: str) -> tuple[Query, str]:
    """The query up to the round in which a stage has reached a goal, and a sentence on it. RunError when it never has."""
    goal = goal_from(text)
    stage = summary.stage_named(connection, str(query.stages[0])) if query.stages else _goal_stage(connection)
    made = with_figure_of(goal, curves(connection, stage, with_bytes=False))
    number = reached(made, goal)
    if number is None:
        raise RunError(why_not_reached(made, goal))
    last = number if query.last_round is None else min(number, query.last_round)
    said = f"{goal} was reached in round {number} of {stage.rounds} of stage {stage.name}"
    n_known = int(np.isfinite(made.figures[goal.figure]).sum())
    said += f" ({goal.figure} is known in {n_known} of the rounds)" if n_known < stage.rounds else ""
    if goal.figure == GAP and not made.has_reference:
        said += "; gap: from the smallest objective of the stage itself, since stop.reference_objective is not given"
    if not stage.outcome:
        said += "; the stage has not ended" + ("" if made.has_reference or goal.figure != GAP else ": its objective may become smaller yet")
    elif number == stage.rounds:
        said += "; what ended the stage, its evaluation for one, is part of its last round"
    return replace(query, stages=(stage.number,), last_round=last), said


def _goal_stage(connection: sqlite3.Connection) -> StageSummary:
    """The stage that a goal is about: a refit reaches nothing on the way. ConfigError when none has begun."""
    main, frozen = summary.final_stage(connection), summary.facts(connection).get("experiment")
    with contextlib.suppress(ConfigError):  # an experiment that this version does not understand
        return own_stage(summary.stages(connection), main, experiment_from(json.loads(frozen or "{}"))) or main
    return main


# ---- what is asked for


_Line = tuple[Group, float | None]  # a group with the name of its stage, and its closed form if there is one


def _answer(connection: sqlite3.Connection, query: Query, sort: str | None) -> tuple[list[_Line], _Line]:
    """The lines of a query, and their total."""
    groups = numbered_totals(connection, query)
    forms = closed_forms(connection, query)
    with_traffic = {group.keys for group in groups}
    groups += [Group(keys) for keys, vectors in forms.items() if keys not in with_traffic and vectors]
    total = grand_total(connection, query, groups)
    if sort is not None:
        groups.sort(key=lambda group: -getattr(group, sort))
    of_each = [forms.get(group.keys) for group in groups]
    is_comparable = not any(form is None and group.vectors for group, form in zip(groups, of_each, strict=True))
    total_form = sum(form for form in of_each if form is not None) if is_comparable and any(of_each) else None
    if "stage" in query.by:
        place, name = query.by.index("stage"), stage_namer(connection)
        groups = [replace(group, keys=(*group.keys[:place], name(group.keys[place]), *group.keys[place + 1 :])) for group in groups]
    return [*zip(groups, of_each, strict=True)], (total, total_form)


def print_part(folder: Path, wanted: Wanted, console: Console) -> None:
    """The groups as a table or as data, or the rows as data. ConfigError for unknown values, RunError for a goal not reached."""
    how, sort, query = _format_of(wanted), wanted.sort and _SORTS.get(wanted.sort, wanted.sort), query_of(wanted)
    if sort is not None and sort not in MEASURES:
        raise ConfigError(f"--sort is {wanted.sort!r}, want one of {', '.join(_SORTS)}")
    is_of_rows = how != "table" and wanted.by is None
    if is_of_rows and sort is not None:
        raise ConfigError("--sort is for groups, want --by with it: rows come as they were booked")
    with read_run(folder) as connection:
        said = ""
        if wanted.until is not None:
            query, said = _until(connection, query, wanted.until)
        if is_of_rows:
            _write(how, wanted.output, ROW_COLUMNS, rows(connection, query))
            return
        query = replace(query, by=query.by or DEFAULT_KEYS)
        listed, total = _answer(connection, query, sort)
        if how != "table":
            lines = ((*group.keys, *(getattr(group, measure) for measure in MEASURES), form) for group, form in listed)
            _write(how, wanted.output, (*query.by, *MEASURES, "closed_form"), lines)
            return
        facts = summary.facts(connection)
        head = f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}: {_described(wanted)}"
        shares = "Users share the bytes of their host equally; the vectors of a broadcast count for each."
        notes = [shares] if has_shares(connection, query) else []
        if "step" in query.by:
            notes.append(steps_said((group.keys[query.by.index("step")] for group, _ in listed), facts, paper=True))
        what_there_is = "" if listed else _what_there_is(connection, query)
    with contextlib.ExitStack() as opened:
        if wanted.output is not None:
            text = opened.enter_context(_text_of(opened.enter_context(written_whole(wanted.output))))
            console = Console(file=text, width=console.width)
        say(console, head, style="bold")
        say(console, said)
        console.print()
        if not listed:
            say(console, f"There is no such traffic.{what_there_is}")
            return
        shown = _table(query.by, listed, total, sort, console.width)
        console.print(shown)
        if len(listed) > _MAX_LINES:
            console.print(f"and {counted(len(listed) - _MAX_LINES, 'line')} more, counted in the total: --format csv has them all")
        console.print()
        heads = ["wire = message + 5 bytes for each gRPC frame", "share of the wire bytes of this table"]
        heads += ["formula: vectors by the method's closed form"] if any(column.header == "formula" for column in shown.columns) else []
        say(console, "; ".join(heads), *notes, style="dim")


# ---- as a table


def _what_there_is(connection: sqlite3.Connection, query: Query) -> str:
    """The rounds, steps, ways and scopes of the stages and the kind of traffic that were asked for."""
    whole = Query(("round", "step", "direction", "scope"), query.stages, useful=query.useful)
    groups = numbered_totals(connection, whole)
    if not groups:
        return " There is no other of these stages either."
    numbers, *others = (list(dict.fromkeys(values)) for values in zip(*(group.keys for group in groups), strict=True))
    named = zip(("steps", "directions", "scopes"), others, strict=True)
    listed = "; ".join(f"{what} {', '.join(values)}" for what, values in named)
    return f" There are rounds {min(numbers)} to {max(numbers)}; {listed}."


def _table(keys: Sequence[str], listed: Sequence[_Line], total: _Line, sort: str | None, width: int) -> Table:
    """The table, with as many columns of numbers as fit."""
    names = [[_cell(key, value) for key, value in zip(keys, group.keys, strict=True)] for group, _ in listed[:_MAX_LINES]]
    names.append(["total", *[""] * (len(keys) - 1)])
    groups, forms = zip(*listed[:_MAX_LINES], total, strict=True)
    whole = total[0].wire_bytes
    columns = {"vectors": [count(group.vectors) for group in groups], "formula": [count(form) for form in forms]}
    columns |= {name: [count(getattr(group, name)) for group in groups] for name in ("scalars", "frames")}
    columns |= {name: [size(getattr(group, f"{name}_bytes")) for group in groups] for name in ("payload", "message", "wire")}
    columns["share"] = [f"{100 * group.wire_bytes / whole:.1f}%" if whole else "-" for group in groups]
    if all(form is None for form in forms):
        del columns["formula"]
    heads = ["way" if key == "direction" else key for key in keys]
    gap = 2 if width >= NARROW else 1
    taken = sum(max(map(len, [head, *cells])) for head, cells in zip(heads, zip(*names, strict=True), strict=True)) + gap * (len(heads) - 1)
    shown: list[str] = []
    for name in sorted((name for name in _BY_WORTH if name in columns), key=lambda name: _SORTS.get(name) != sort):
        taken += gap + max(map(len, [name, *columns[name]]))
        if taken > width and shown:  # there is always one
            break
        shown.append(name)
    chosen = [name for name in columns if name in shown]
    lines = [[*cells, *(columns[name][place] for name in chosen)] for place, cells in enumerate(names)]
    return table("", [*heads, *chosen], lines, n_text=len(heads), last=1, gap=gap)


def _cell(key: str, value: Any) -> str:
    text = printable(str(value))
    return text.removesuffix("-cluster") if key == "scope" else text or "-"


def _described(wanted: Wanted) -> str:
    ranges = {"rounds": wanted.rounds, "until": wanted.until}
    parts = [f"stage {wanted.stage}"] if wanted.stage else []
    parts += [f"{what} {' or '.join(values)}" for what, values in wanted.limits.items()]
    parts += [f"{what} {text}" for what, text in ranges.items() if text]
    parts += ["sent again, late or repeated"] if wanted.repeats else []
    return ", ".join(parts) or "all traffic"


# ---- as data


def _write(how: str, output: Path | None, columns: Sequence[str], lines: Iterator[tuple[Any, ...]]) -> None:
    """Writes to a file, as a whole or not at all, or to standard output."""
    if output is None:
        write_lines(how, sys.stdout, columns, lines)
        return
    with written_whole(output) as file:
        if how == "parquet":
            _write_parquet(file, columns, lines)
        else:
            with _text_of(file) as text:
                write_lines(how, text, columns, lines)


@contextlib.contextmanager
def _text_of(file: IO[bytes]) -> Iterator[IO[str]]:
    """The file as text; it stays open."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    yield text
    text.detach()  # with all that was written


def write_lines(how: str, file: IO[str], columns: Sequence[str], lines: Iterable[Iterable[Any]], *, as_ascii: bool = False) -> None:
    """As csv or jsonl. In csv, users (whose names may have commas) and objects are JSON; "" where a row has no value."""
    as_json = functools.partial(json.dumps, ensure_ascii=as_ascii)
    if how == "jsonl":
        file.writelines(f"{as_json(dict(zip(columns, line, strict=True)))}\n" for line in lines)
        return
    of_users = functools.lru_cache(as_json)  # few sets of users are in many rows

    def text(cell: Any) -> Any:
        return of_users(cell) if isinstance(cell, tuple) else as_json(cell) if isinstance(cell, dict) else cell

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(text, line) for line in lines)


def _write_parquet(file: IO[bytes], columns: Sequence[str], lines: Iterator[tuple[Any, ...]]) -> None:
    """Batch by batch; text columns are dictionaries."""
    need = "--format parquet needs pyarrow"
    pyarrow, parquet = needed("pyarrow", "frames", need), needed("pyarrow.parquet", "frames", need)
    texts, numbers = {*KEYS} - {"round", "attempt"}, {*MEASURES, "closed_form"}
    are_rows = "users" in columns  # whose numbers are all integers

    def kind_of(column: str) -> Any:
        if column in texts:
            return pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        if column == "users":
            return pyarrow.list_(pyarrow.string())
        return pyarrow.float64() if column in numbers and not are_rows else pyarrow.int64()

    schema = pyarrow.schema([(column, kind_of(column)) for column in columns])
    with parquet.ParquetWriter(file, schema) as writer:
        while batch := list(itertools.islice(lines, _BATCH_ROWS)):
            arrays = [pyarrow.array(values, type=field.type) for field, values in zip(schema, zip(*batch, strict=True), strict=True)]
            writer.write_table(pyarrow.Table.from_arrays(arrays, schema=schema))
