"""`coterie ledger`: the traffic of a run next to its closed form, and whether the books of coordinator and hosts agree."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from coterie_deploy.read.cautions import cautions_of
from coterie_deploy.read.sentences import steps_said
from coterie_deploy.terminal.tables import count, is_narrow, is_tiny, say, say_left_out, size, table_of
from coterie_server.record import summary
from coterie_server.record.compressed import Saving, savings
from coterie_server.record.query import SESSION, SESSION_NAME, stage_namer
from coterie_server.record.rundb import read_run
from coterie_server.record.summary import Books, Traffic
from coterie_server.run.coordinator import is_held

MAX_STAGES = 5  # shown one by one, including the session
_MAX_COMPARED = 100_000  # rows of the ledger; of more, the comparison takes seconds
_NOT_COMPARED = "The books are large: coterie ledger --verify says whether those of the hosts agree."
SHORT_NOTES = "vectors beside the closed form; wire = message + 5 bytes for each gRPC frame"
SAVED_NOTES = "numbers: their payload; without: what it would have been; fewer: beside numbers and messages with scales and places"
NOTES = (
    "A vector is one model of d numbers. payload: the numbers; message: protobuf; wire: message and 5 bytes for each gRPC frame. "
    "closed form: the vectors that the method's own formula gives, or scalars where there are no vectors; ± the standard deviation of a "
    "mean over random coins."
)


def print_ledger(folder: Path, stage: str | None, console: Console, *, total: bool = False) -> None:
    """Totals by stage, step, direction and scope, or of all stages together; repeated and late traffic separately.

    Of many stages only the final one, unless another is asked for. ConfigError for an unknown run or stage.
    """
    with read_run(folder) as connection:
        only = None if stage is None else SESSION if stage == SESSION_NAME else summary.stage_named(connection, stage).number
        useful, repeats = summary.traffic(connection), summary.traffic(connection, repeats=True)
        (n_rows,) = connection.execute("SELECT COALESCE(MAX(rowid), 0) FROM ledger_rows").fetchone()
        books = summary.reconcile(connection) if n_rows <= _MAX_COMPARED else None
        facts = summary.facts(connection)
        cautions, printed = cautions_of(connection), summary.printed(connection)
        name, saved = stage_namer(connection), savings(connection) if only is None else []
        numbers = sorted({row.stage for row in useful}, key=lambda number: (number == SESSION, number))
        chosen = [] if total else numbers if only is None else [only]
        if only is None and len(chosen) > MAX_STAGES:
            chosen = [summary.final_stage(connection).number]
    say(console, title_of(folder, facts), style="bold")
    console.print()
    narrow, tiny = is_narrow(console), is_tiny(console)

    def show(title: str, rows: Sequence[Traffic], note: str = "") -> None:
        console.print(traffic_table(title, rows, narrow=narrow, tiny=tiny))
        say(console, note, style="dim")
        console.print()

    for number in (number for number in numbers if number in chosen):
        counts = ", ".join(f"{count(vectors)} vectors {direction}" for direction, vectors in printed.get(number, {}).items())
        title = f"{SESSION_NAME} (hello, heartbeats, books)" if number == SESSION else f"stage {name(number)}"
        show(title, [row for row in useful if row.stage == number], counts and f"the paper's own count, an upper bound: {counts}")
    if only is None:
        show("all stages", summary.by_step(useful))
    if only is None and chosen and len(chosen) < len(numbers):
        n_stages = len([number for number in numbers if number != SESSION])
        # Not by the console, which would wrap what is to be copied.
        print(f"all {n_stages} stages: coterie ledger {folder} --by stage,step,direction", file=console.file)
        print(f"one of them: coterie ledger {folder} --stage {name(numbers[0])}", file=console.file)
        console.print()
    if saved:
        console.print(savings_table(saved, narrow=narrow, tiny=tiny))
        say(console, SAVED_NOTES, style="dim")
        say_left_out(console, ["closed form", "scales", "places", *(["without"] if tiny else [])] if narrow else [])
        console.print()
    if repeated := [row for row in repeats if only is None or row.stage == only]:
        show("apart: sent again, late or repeated", summary.by_step(repeated))
    say_left_out(console, traffic_left_out(useful, narrow=narrow, tiny=tiny))
    say(console, NOTES, steps_said((row.step for row in useful if only is None or row.stage == only), facts), style="dim")
    say(console, *cautions, style="yellow")
    say(console, *([_NOT_COMPARED] if books is None else book_sentences(books, is_finished=facts.get("status") == "finished")))


def status_of(folder: Path, facts: Mapping[str, str]) -> str:
    """The status of a run; a killed run did not record that it stopped."""
    status = facts.get("status", "?")
    return "stopped, can be resumed" if status == "running" and not is_held(folder) else status


def title_of(folder: Path, facts: Mapping[str, str], before_status: str = ", ") -> str:
    return f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}{before_status}{status_of(folder, facts)}"


def traffic_table(title: str, rows: Sequence[Traffic], *, narrow: bool, tiny: bool = False) -> Table:
    """One line for each step and direction, and their total; `tiny`: of the numbers only the vectors and the bytes on the wire."""
    with_scope = len({row.scope for row in rows if row.scope}) > 1
    narrow = narrow or with_scope
    whole = summary.total(rows)
    if any(row.vectors and row.expected is None for row in rows):
        whole = replace(whole, expected=None)  # it would not be comparable
    shown = (*rows, whole)
    columns = {
        "step": [row.step for row in shown],
        "way": [row.direction for row in shown],
        "scope": [row.scope.removesuffix("-cluster") for row in shown] if with_scope else None,
        "vectors": [count(row.vectors) for row in shown],
        "formula" if narrow else "closed form": None if tiny else [closed_form(row, narrow=narrow) for row in shown],
        "scalars": None if narrow or tiny else [count(row.scalars) for row in shown],
        "payload": None if tiny else [size(row.payload_bytes) for row in shown],
        "message": None if tiny else [size(row.message_bytes) for row in shown],
        "wire": [size(row.wire_bytes) for row in shown],
    }
    return table_of(title, columns, n_text=3 if with_scope else 2, last=1, gap=1 if narrow else 2)


def savings_table(saved: Sequence[Saving], *, narrow: bool, tiny: bool = False) -> Table:
    """One line for each step and direction that was compressed; `tiny`: how many bytes, and how many times fewer."""
    columns = {
        "step": [one.step for one in saved],
        "way": [one.direction for one in saved],
        "numbers": [size(one.values) for one in saved],
        "closed form": None if narrow else ["-" if one.expected is None else size(one.expected) for one in saved],
        "scales": None if narrow else [size(one.scales) for one in saved],
        "places": None if narrow else [size(one.places) for one in saved],
        "without": None if tiny else [size(one.plain) for one in saved],
        "fewer": [f"{one.ratio:.1f} times" for one in saved],
    }
    return table_of("compressed, in all stages", columns, n_text=2, gap=1 if narrow else 2)


def saved_sentences(saved: Sequence[Saving]) -> list[str]:
    """What compression has saved, in a sentence for each step and direction."""
    said = []
    for one in saved:
        what = f"compressed: {one.step} {one.direction} is {size(one.values + one.aside)} instead of {size(one.plain)}"
        said.append(f"{what}, {one.ratio:.1f} times fewer" if one.ratio > 1 else f"{what}: vectors are too short to gain from it")
    return said


def traffic_left_out(rows: Sequence[Traffic], *, narrow: bool, tiny: bool = False) -> list[str]:
    """The columns that `traffic_table` has no room for."""
    with_scope = len({row.scope for row in rows if row.scope}) > 1
    return ["closed form", "scalars", "payload", "message"] if tiny else ["scalars"] if narrow or with_scope else []


def closed_form(row: Traffic, *, narrow: bool) -> str:
    """In vectors, with the standard deviation of a mean over random coins; in scalars for steps without vectors, if there is room."""
    if row.expected is None:
        return "-" if row.expected_scalars is None or narrow else f"{count(row.expected_scalars)} scalars"
    return f"{row.expected:,.0f} ±{row.spread:,.0f}" if row.spread else count(row.expected)


def book_sentences(books: Books, *, is_finished: bool) -> list[str]:
    said = []
    if books.n_agreed:
        said.append(f"The hosts' own books agree with the coordinator's in {count(books.n_agreed)} rows, to the byte.")
    for alone, whose in (
        (books.lost_by_host, "the coordinator's alone: {!r} lost its process or stream, and its notes."),
        (books.lost_by_parent, "those of {!r} alone: the coordinator was killed before it wrote them."),
        (books.lost_on_the_way, "those of {!r} alone: replies on their way when its stream was lost."),
    ):
        said += [f"{count(n_rows)} rows are {whose.format(host)}" for host, n_rows in alone.items()]
    left_out = [host for host in books.absent if host in books.left_out] if is_finished else []
    if left_out:
        book, it = ("book", "it") if len(left_out) == 1 else ("books", "them")
        said.append(f"The {book} of {', '.join(left_out)} did not arrive: the run has gone on without {it}.")
    if absent := [host for host in books.absent if host not in left_out]:
        why = "did not arrive" if is_finished else "arrive when the run finishes"
        said.append(f"The books of {', '.join(absent)} {why}.")
    if books.n_differences:
        said.append(f"THE BOOKS DIFFER in {count(books.n_differences)} rows, for example {books.differences[0]}.")
    return said or ["Nothing has been booked yet."]
