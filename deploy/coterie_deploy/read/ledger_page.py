"""`coterie ledger`: the traffic of a run beside its closed form, and whether the coordinator's book and the hosts' agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie_deploy.read.cautions import cautions_of
from coterie_deploy.read.steps import steps_said
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, is_narrow, is_tiny, size, table
from coterie_server.record import summary
from coterie_server.record.query import SESSION, SESSION_NAME, stage_namer
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import Books, Traffic
from coterie_server.run.coordinator import is_held

MAX_STAGES = 5  # with traffic that are shown one by one, the session among them
_MAX_COMPARED = 100_000  # rows of the ledger; of more, the comparison takes seconds
_NOT_COMPARED = "The books are large: coterie ledger --verify says whether those of the hosts agree."
SHORT_NOTES = "vectors beside the closed form; wire = message + 5 bytes for each gRPC frame"
NOTES = (
    "A vector is one model of d numbers. payload: the numbers; message: protobuf; wire: message and 5 bytes for each gRPC frame. "
    "closed form: the vectors that the method's own formula gives, or scalars where there are no vectors; ± the standard deviation of a "
    "mean over random coins."
)


def print_ledger(folder: Path, stage: str | None, console: Console, *, total: bool = False) -> None:
    """Totals by stage, step, direction and scope, or of all stages alone; traffic that brought nothing apart.

    Of many stages only the final one, unless another is asked for. ConfigError for an unknown run or stage.
    """
    with read_run(folder) as connection:
        only = None if stage is None else SESSION if stage == SESSION_NAME else summary.stage_named(connection, stage).number
        useful, repeats = summary.traffic(connection), summary.traffic(connection, repeats=True)
        (n_rows,) = connection.execute("SELECT COALESCE(MAX(rowid), 0) FROM ledger_rows").fetchone()
        books = summary.reconcile(connection) if n_rows <= _MAX_COMPARED else None
        facts = summary.facts(connection)
        cautions, printed = cautions_of(connection), summary.printed(connection)
        name = stage_namer(connection)
        numbers = sorted({row.stage for row in useful}, key=lambda number: (number == SESSION, number))
        chosen = [] if total else numbers if only is None else [only]
        if only is None and len(chosen) > MAX_STAGES:
            chosen = [summary.final_stage(connection).number]
    state = f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}, {status_of(folder, facts)}"
    console.print(Text(printable(state), style="bold"))
    console.print()
    for number in numbers:
        if number in chosen:
            rows = [row for row in useful if row.stage == number]
            title = f"{SESSION_NAME} (hello, heartbeats, books)" if number == SESSION else f"stage {name(number)}"
            console.print(traffic_table(title, rows, narrow=is_narrow(console), tiny=is_tiny(console)))
            if counts := printed.get(number):
                said = ", ".join(f"{count(vectors)} vectors {direction}" for direction, vectors in counts.items())
                console.print(Text(f"the paper's own count, an upper bound: {said}", style="dim"))
            console.print()
    if only is None:
        console.print(traffic_table("all stages", summary.by_step(useful), narrow=is_narrow(console), tiny=is_tiny(console)))
        console.print()
    if only is None and chosen and len(chosen) < len(numbers):
        n_stages = len([number for number in numbers if number != SESSION])
        # Not by the console, which would wrap what is to be copied.
        print(f"all {n_stages} stages: coterie ledger {folder} --by stage,step,direction", file=console.file)
        print(f"one of them: coterie ledger {folder} --stage {name(numbers[0])}", file=console.file)
        console.print()
    repeated = [row for row in repeats if only is None or row.stage == only]
    if repeated:
        console.print(
            traffic_table(
                "apart: sent again, late or repeated", summary.by_step(repeated), narrow=is_narrow(console), tiny=is_tiny(console)
            )
        )
        console.print()
    console.print(Text(NOTES, style="dim"))
    console.print(Text(steps_said((row.step for row in useful if only is None or row.stage == only), facts), style="dim"))
    for caution in cautions:
        console.print(Text(caution, style="yellow"))
    for sentence in [_NOT_COMPARED] if books is None else book_sentences(books, is_finished=facts.get("status") == "finished"):
        console.print(Text(printable(sentence)))


def status_of(folder: Path, facts: Mapping[str, str]) -> str:
    """How a run stands; one that was killed had no time to say so."""
    status = facts.get("status", "?")
    return "stopped, can be resumed" if status == "running" and not is_held(folder) else status


def traffic_table(title: str, rows: Sequence[Traffic], *, narrow: bool, tiny: bool = False) -> Table:
    """One line for each step and direction, and their total; `tiny`: of the numbers only the vectors and what is on the wire."""
    scopes = {row.scope for row in rows if row.scope}
    with_scope = len(scopes) > 1
    narrow = narrow or with_scope
    lines = []
    whole = summary.total(rows)
    if any(row.vectors and row.expected is None for row in rows):
        whole = replace(whole, expected=None)  # it would not be comparable
    for row in (*rows, whole):
        names = [row.step, row.direction] + ([row.scope.removesuffix("-cluster")] if with_scope else [])
        numbers = [
            count(row.vectors),
            closed_form(row, narrow=narrow),
            size(row.payload_bytes),
            size(row.message_bytes),
            size(row.wire_bytes),
        ]
        if tiny:
            numbers = [numbers[0], numbers[-1]]
        elif not narrow:
            numbers.insert(2, count(row.scalars))
        lines.append([*names, *numbers])
    names = ["step", "way"] + (["scope"] if with_scope else [])
    columns = ["vectors", "formula"] if narrow else ["vectors", "closed form", "scalars"]
    columns = ["vectors", "wire"] if tiny else [*columns, "payload", "message", "wire"]
    return table(title, [*names, *columns], lines, n_text=len(names), last=1, gap=1 if narrow else 2)


def closed_form(row: Traffic, *, narrow: bool) -> str:
    """In vectors, a mean over random coins with its standard deviation; of a step without vectors in scalars, where there is room."""
    if row.expected is None:
        return "-" if row.expected_scalars is None or narrow else f"{count(row.expected_scalars)} scalars"
    return f"{row.expected:,.0f} ±{row.spread:,.0f}" if row.spread else count(row.expected)


def book_sentences(books: Books, *, is_finished: bool) -> list[str]:
    """Whether the two books agree, in words."""
    said = []
    if books.n_agreed:
        said.append(f"The hosts' own books agree with the coordinator's in {count(books.n_agreed)} rows, to the byte.")
    for host, n_rows in books.lost_by_host.items():
        said.append(f"{count(n_rows)} rows are the coordinator's alone: {host!r} lost its process or stream, and its notes.")
    for host, n_rows in books.lost_by_parent.items():
        said.append(f"{count(n_rows)} rows are those of {host!r} alone: the coordinator was killed before it wrote them.")
    for host, n_rows in books.lost_on_the_way.items():
        said.append(f"{count(n_rows)} rows are those of {host!r} alone: replies on their way when its stream was lost.")
    left_out = [host for host in books.absent if host in books.left_out] if is_finished else []
    if left_out:
        whose = f"The {'book' if len(left_out) == 1 else 'books'} of {', '.join(left_out)}"
        said.append(f"{whose} did not arrive: the run has gone on without {'it' if len(left_out) == 1 else 'them'}.")
    if absent := [host for host in books.absent if host not in left_out]:
        why = "did not arrive" if is_finished else "arrive when the run finishes"
        said.append(f"The books of {', '.join(absent)} {why}.")
    if books.n_differences:
        said.append(f"THE BOOKS DIFFER in {count(books.n_differences)} rows, for example {books.differences[0]}.")
    return said or ["Nothing has been booked yet."]
