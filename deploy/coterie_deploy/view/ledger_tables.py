"""What `coterie ledger` answers when asked for a part of the ledger, a grouping or a format: totals of groups, or the rows themselves.

Not here: the page of a whole run (`books`), and what the totals mean (`coterie_server.record.query`).
"""

from __future__ import annotations

import contextlib
import csv
import functools
import importlib
import io
import itertools
import json
import re
import sqlite3
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.errors import ConfigError, RunError
from coterie.record.files import written_whole
from coterie_deploy.read.steps import steps_said
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, size, table
from coterie_server.record import summary
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
from coterie_server.record.rundb import BETWEEN, DIRECT, WITHIN, read_run

FORMATS = ("table", "csv", "jsonl", "parquet")
DEFAULT_KEYS = ("step", "direction", "scope")
_SCOPES = {scope.removesuffix("-cluster"): scope for scope in (DIRECT, WITHIN, BETWEEN)}
_SORTS = {measure.removesuffix("_bytes"): measure for measure in MEASURES}
_ROUNDS = re.compile(r"(\d{0,9})(:?)(\d{0,9})")
_HEADS = {"direction": "way"}
# Columns of numbers: those that a narrow terminal has room for first, and how they stand beside each other.
_BY_WORTH = ("wire", "share", "vectors", "formula", "payload", "message", "scalars", "frames")
_IN_ORDER = ("vectors", "formula", "scalars", "frames", "payload", "message", "wire", "share")
_MAX_LINES = 400  # of a table
_NARROW = 76  # columns below which columns stand closer
_FEWEST = 1  # column of numbers that is shown, however little room there is
_BATCH_ROWS = 20_000  # of a Parquet file, at once in memory


@dataclass(frozen=True)
class Wanted:
    """The options of the command, as given."""

    by: str | None = None
    rounds: str | None = None
    members: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()
    scopes: tuple[str, ...] = ()
    clusters: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    stage: str | None = None
    until: str | None = None
    sort: str | None = None
    format: str | None = None
    output: Path | None = None
    repeats: bool = False
    total: bool = False

    @property
    def is_more_than_a_page(self) -> bool:
        """Whether anything but a stage, or all together, is asked for."""
        return replace(self, stage=None, total=False) != Wanted()


# ---- from options to a query


def query_of(wanted: Wanted) -> Query:
    """What is asked for, all but the goal of `until`. ConfigError for what cannot be read."""
    first, last = _rounds_of(wanted.rounds)
    keys = _keys_of(wanted.by)
    if wanted.total and "stage" in keys:
        raise ConfigError("--total is all stages together, want --by without stage")
    return Query(
        keys,
        (wanted.stage,) if wanted.stage is not None else (),
        first,
        last,
        wanted.steps,
        wanted.directions,
        tuple(_SCOPES.get(scope, scope) for scope in wanted.scopes),
        wanted.clusters,
        wanted.links,
        wanted.members,
        useful=not wanted.repeats,
    )


def _keys_of(text: str | None) -> tuple[str, ...]:
    """KEY,KEY."""
    keys = () if text is None else tuple(key.strip() for key in text.split(","))
    wrong = next((key for key in keys if key not in KEYS), None)
    if wrong is not None:
        raise ConfigError(f"--by has the key {wrong!r}, want some of {', '.join(KEYS)}, with commas between them")
    return keys


def _rounds_of(text: str | None) -> tuple[int | None, int | None]:
    """7, 100:200, 100: or :200, both ends included."""
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


def _sort_of(text: str | None) -> str | None:
    """The measure to sort by."""
    measure = None if text is None else _SORTS.get(text, text)
    if measure is not None and measure not in MEASURES:
        raise ConfigError(f"--sort is {text!r}, want one of {', '.join(_SORTS)}")
    return measure


def _format_of(wanted: Wanted) -> str:
    """As given, or by the end of the file's name."""
    ending = wanted.output.suffix.removeprefix(".").lower() if wanted.output is not None else ""
    chosen = wanted.format or (ending if ending in FORMATS else FORMATS[0])
    if chosen not in FORMATS:
        raise ConfigError(f"--format is {chosen!r}, want one of {', '.join(FORMATS)}")
    if chosen == "parquet" and wanted.output is None:
        raise ConfigError("--format parquet is no text to print, want --output FILE")
    return chosen


def _until(connection: sqlite3.Connection, query: Query, text: str) -> tuple[Query, str]:
    """The query up to the round in which a stage has reached a goal, and a sentence on it. RunError when it never has."""
    from coterie_server.record import summary  # noqa: PLC0415 - only here, and slow to import
    from coterie_server.record.curves import GAP, curves, goal_from, reached, why_not_reached, with_figure_of  # noqa: PLC0415

    goal = goal_from(text)
    stage = summary.stage_named(connection, str(query.stages[0])) if query.stages else summary.goal_stage(connection)
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


# ---- what is asked for


@dataclass(frozen=True)
class _Answer:
    """Groups with names of stages, the formula of each where there is one, and their total."""

    keys: tuple[str, ...]
    groups: Sequence[Group]
    forms: Sequence[float | None]
    total: Group
    total_form: float | None


def _answer(connection: sqlite3.Connection, query: Query, sort: str | None) -> _Answer:
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
    return _Answer(query.by, groups, of_each, total, total_form)


def print_part(folder: Path, wanted: Wanted, console: Console) -> None:
    """The groups asked for as a table or as data, or the rows of the ledger as data.

    ConfigError for what the run does not have, RunError for a goal that was not reached.
    """
    how, sort, query = _format_of(wanted), _sort_of(wanted.sort), query_of(wanted)
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
        answer = _answer(connection, query, sort)
        if how != "table":
            _write(how, wanted.output, (*query.by, *MEASURES, "closed_form"), _lines(answer))
            return
        head = f"{_run_of(connection, folder)}: {_described(wanted)}"
        notes = _notes(answer, summary.facts(connection), has_shares=has_shares(connection, query))
        what_there_is = "" if answer.groups else _what_there_is(connection, query)
    if wanted.output is None:
        _print(answer, sort, [head, said], notes, console, what_there_is)
        return
    with written_whole(wanted.output) as file, _text_of(file) as text:
        _print(answer, sort, [head, said], notes, Console(file=text, width=console.width), what_there_is)


def _run_of(connection: sqlite3.Connection, folder: Path) -> str:
    """Which run it is."""
    facts = dict(connection.execute("SELECT key, value FROM run WHERE key IN ('name', 'run_id')"))
    return f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}"


def _lines(answer: _Answer) -> Iterator[tuple[Any, ...]]:
    for group, form in zip(answer.groups, answer.forms, strict=True):
        yield (*group.keys, *(getattr(group, measure) for measure in MEASURES), form)


# ---- as a table


def _print(answer: _Answer, sort: str | None, above: Sequence[str], notes: Sequence[str], console: Console, what_there_is: str) -> None:
    for sentence, style in zip(above, ("bold", ""), strict=True):
        if sentence:
            console.print(Text(printable(sentence), style=style))
    console.print()
    if not answer.groups:
        console.print(Text(printable(f"There is no such traffic.{what_there_is}")))
        return
    shown = _table(answer, sort, console.width)
    console.print(shown)
    if len(answer.groups) > _MAX_LINES:
        console.print(f"and {counted(len(answer.groups) - _MAX_LINES, 'line')} more, counted in the total: --format csv has them all")
    console.print()
    heads = ["wire = message + 5 bytes for each gRPC frame", "share of the wire bytes of this table"]
    heads += ["formula: vectors by the method's closed form"] if any(column.header == "formula" for column in shown.columns) else []
    for note in ("; ".join(heads), *notes):
        console.print(Text(note, style="dim"))


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


def _notes(answer: _Answer, facts: Mapping[str, str], *, has_shares: bool) -> list[str]:
    notes = ["Users share the bytes of their host equally; the vectors of a broadcast count for each."] if has_shares else []
    if "step" in answer.keys:
        notes.append(steps_said((group.keys[answer.keys.index("step")] for group in answer.groups), facts, paper=True))
    return [note for note in notes if note]


def _table(answer: _Answer, sort: str | None, width: int) -> Table:
    """As many columns of numbers as there is room for."""
    names = [[_cell(key, value) for key, value in zip(answer.keys, group.keys, strict=True)] for group in answer.groups[:_MAX_LINES]]
    names.append(["total", *[""] * (len(answer.keys) - 1)])
    groups = [*answer.groups[:_MAX_LINES], answer.total]
    forms = [*answer.forms[:_MAX_LINES], answer.total_form]
    whole = answer.total.wire_bytes
    columns: dict[str, list[str]] = {
        "vectors": [count(group.vectors) for group in groups],
        "formula": [count(form) for form in forms],
        "scalars": [count(group.scalars) for group in groups],
        "frames": [count(group.frames) for group in groups],
        "payload": [size(group.payload_bytes) for group in groups],
        "message": [size(group.message_bytes) for group in groups],
        "wire": [size(group.wire_bytes) for group in groups],
        "share": [f"{100 * group.wire_bytes / whole:.1f}%" if whole else "-" for group in groups],
    }
    if all(form is None for form in forms):
        del columns["formula"]
    heads = [_HEADS.get(key, key) for key in answer.keys]
    taken = sum(max(map(len, [head, *cells])) for head, cells in zip(heads, zip(*names, strict=True), strict=True))
    shown: list[str] = []
    gap = 2 if width >= _NARROW else 1
    taken += gap * (len(heads) - 1)
    for name in sorted((name for name in _BY_WORTH if name in columns), key=lambda name: _SORTS.get(name) != sort):
        taken += gap + max(map(len, [name, *columns[name]]))
        if taken > width and len(shown) >= _FEWEST:
            break
        shown.append(name)
    chosen = [name for name in _IN_ORDER if name in shown]
    lines = [[*cells, *(columns[name][place] for name in chosen)] for place, cells in enumerate(names)]
    return table("", [*heads, *chosen], lines, n_text=len(heads), last=1, gap=gap)


def _cell(key: str, value: Any) -> str:
    text = printable(str(value))
    return text.removesuffix("-cluster") if key == "scope" else text or "-"


def _described(wanted: Wanted) -> str:
    """The part of the ledger, in words."""
    listed: Mapping[str, Sequence[str]] = {
        "stage": (wanted.stage,) if wanted.stage else (),
        "step": wanted.steps,
        "direction": wanted.directions,
        "scope": wanted.scopes,
        "cluster": wanted.clusters,
        "link": wanted.links,
        "member": wanted.members,
        "rounds": (wanted.rounds,) if wanted.rounds else (),
        "until": (wanted.until,) if wanted.until else (),
    }
    parts = [f"{what} {' or '.join(values)}" for what, values in listed.items() if values]
    parts += ["what was sent again, late or repeated"] if wanted.repeats else []
    return ", ".join(parts) or "all traffic"


# ---- as data


def _write(how: str, output: Path | None, columns: Sequence[str], lines: Iterator[tuple[Any, ...]]) -> None:
    """To a file, written whole or not at all, or to standard output."""
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
    """The file as text, left open."""
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    yield text
    text.detach()  # with all that was written


def write_lines(how: str, file: IO[str], columns: Sequence[str], lines: Iterable[tuple[Any, ...]]) -> None:
    """As csv or jsonl. In csv users are a JSON array, since their names may have commas; "" where a row has no value."""
    if how == "jsonl":
        file.writelines(f"{json.dumps(dict(zip(columns, line, strict=True)), ensure_ascii=False)}\n" for line in lines)
        return
    as_text = functools.lru_cache(lambda users: json.dumps(users, ensure_ascii=False))  # few sets of users are in many rows
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([as_text(cell) if isinstance(cell, tuple) else cell for cell in line] for line in lines)


def _pyarrow() -> tuple[Any, Any]:
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError("--format parquet needs pyarrow, which is not installed, want `pip install 'coterie[frames]'`") from None


def _write_parquet(file: IO[bytes], columns: Sequence[str], lines: Iterator[tuple[Any, ...]]) -> None:
    """Batch by batch; text columns are dictionaries."""
    pyarrow, parquet = _pyarrow()
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
