"""`coterie ledger --verify`: does what was sent agree with what arrived, and what was measured with the closed form?

Exact counts must be equal. A mean over random coins is judged by the coins that were drawn, where these are known, and else must be within
`MAX_DEVIATIONS` standard deviations. A run that has not finished is judged by what there is: the stages that have ended, and the rows that
both ends have brought; that its books have yet to arrive is no difference.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coterie_deploy.read.ledger_page import book_sentences, status_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import count, counted, table
from coterie_server.record import summary
from coterie_server.record.rundb import WITHIN, read_run
from coterie_server.record.summary import Books, StageSummary, Traffic

MAX_DEVIATIONS = 4.0
CONTROL = "control"  # envelopes and sessions: no method decides how many bytes they have
_MAX_SENTENCES = 20


@dataclass(frozen=True)
class Judged:
    """One step of one stage: `difference` is a sentence, "" where measured and closed form agree; `note` what else there is to say."""

    row: Traffic
    has_form: bool
    difference: str = ""
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What there is to say of a run's ledger."""

    state: str
    is_finished: bool
    books: Books
    stages: Sequence[StageSummary]
    judged: Mapping[int, Sequence[Judged]]  # by stage, of those that have ended
    notes: Sequence[str]

    @property
    def differences(self) -> list[str]:
        """All sentences on closed forms that do not hold."""
        return [one.difference for listed in self.judged.values() for one in listed if one.difference]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs, and in a finished run no book is missing but of hosts that it has left out."""
        is_missed = self.is_finished and not self.books.left_out.issuperset(self.books.absent)
        return self.books.agree and not self.differences and not is_missed


def print_verification(folder: Path, console: Console) -> bool:
    """Says what agrees and what does not, and whether all does. ConfigError for a folder that is no run."""
    verdict = verdict_on(folder)
    console.print(Text(printable(verdict.state), style="bold"))
    console.print()
    if any(verdict.judged.values()):
        console.print(_table(verdict))
        console.print()
    for sentence in (*_book_sentences(verdict), *verdict.notes):
        console.print(Text(printable(sentence)))
    notes = [one.note for listed in verdict.judged.values() for one in listed if one.note]
    for sentence in notes[:_MAX_SENTENCES]:
        console.print(Text(printable(sentence), style="dim"))
    for sentence in verdict.differences[:_MAX_SENTENCES]:
        console.print(Text(printable(sentence), style="red"))
    if (n_left := len(verdict.differences) - _MAX_SENTENCES) > 0:
        console.print(Text(f"and {n_left} more", style="red"))
    if verdict.agrees:
        is_whole = verdict.is_finished and not verdict.books.absent
        console.print(Text("Everything agrees." if is_whole else "What there is agrees."))
    else:
        console.print(Text("THE LEDGER DOES NOT AGREE.", style="bold red"))
    return verdict.agrees


def verdict_on(folder: Path) -> Verdict:
    """Reconciles sender with receiver, and measured with closed form. ConfigError for a folder that is no run."""
    with read_run(folder) as connection:
        facts, stages = summary.facts(connection), summary.stages(connection)
        books, rows = summary.reconcile(connection), summary.traffic(connection)
        is_judgeable = "spread" in {name for _, name, *_ in connection.execute("PRAGMA table_info(expected)")}
        strange = _strange_clusters(connection, facts)
    ended = {stage.number: stage.name for stage in stages if stage.outcome}
    judged = (
        {number: [_judge(row, name, strange) for row in _steps(rows, number)] for number, name in ended.items()} if is_judgeable else {}
    )
    notes = [f"Stage {stage.name!r} has not ended: its closed form is not known yet." for stage in stages if not stage.outcome]
    if not is_judgeable:
        notes.append("The closed forms of this run are of an older version, which does not say which are means: they are not judged.")
    state = f"{facts.get('name', folder.name)}, run {facts.get('run_id', '?')}, {status_of(folder, facts)}"
    return Verdict(state, facts.get("status") == "finished", books, stages, judged, notes)


def _steps(rows: Sequence[Traffic], stage: int) -> list[Traffic]:
    """The steps of a stage that move vectors or scalars, or should."""
    return [
        row
        for row in rows
        if row.stage == stage and row.step != CONTROL and (row.vectors or row.scalars or row.expected or row.drawn or row.expected_scalars)
    ]


def _strange_clusters(connection: sqlite3.Connection, facts: Mapping[str, str]) -> str:
    """The aggregators that have another number of hosts than the experiment says, as a sentence; "" for none."""
    rules = json.loads(facts.get("experiment", "{}")).get("federation", {})
    wanted = rules.get("hosts_per_cluster", 1)
    hosts: dict[str, int] = {}
    for (link,) in connection.execute("SELECT DISTINCT link FROM ledger WHERE scope = ?", (WITHIN,)):
        aggregator = str(link).partition("/")[0]
        hosts[aggregator] = hosts.get(aggregator, 0) + 1
    other = [f"{name!r} has {counted(n, 'host')}" for name, n in hosts.items() if n != wanted]
    return f"aggregator {other[0]}, federation.hosts_per_cluster is {wanted}" if other else ""


def _judge(row: Traffic, stage: str, strange: str) -> Judged:
    where = f"Stage {stage!r}, step {row.step} {row.direction}{f' ({row.scope})' if row.scope != 'direct' else ''}"
    if row.expected is None and row.expected_scalars is None:
        return Judged(row, has_form=False, note=f"{where}: {_moved(row)}, no closed form.")
    vectors, note = _judge_vectors(row)
    found = [sentence for sentence in (vectors, _judge_scalars(row)) if sentence]
    if found and strange and row.scope == WITHIN and row.direction == "down":
        return Judged(row, has_form=False, note=f"{where}: {'; '.join(found)}; not judged, since {strange}.")
    said = f"{where}: {'; '.join(found)}." if found else ""
    return Judged(row, has_form=True, difference=said, note=f"{where}: {note}." if note else "")


def _moved(row: Traffic) -> str:
    return f"{count(row.vectors)} vectors" if row.vectors else f"{count(row.scalars)} scalars"


def _judge_vectors(row: Traffic) -> tuple[str, str]:
    """What is wrong, and what else there is to say."""
    if row.expected is None:
        return "", ""
    if row.drawn is None and not row.spread:
        return _difference(row.vectors, row.expected, "vectors", "closed form"), ""
    mean = f"{count(round(row.expected))} ± {count(round(row.spread))} over all coins"
    if row.drawn is not None:
        wrong = _difference(row.vectors, row.drawn, "vectors", "for the coins that were drawn")
        return wrong, "" if wrong else f"{count(row.vectors)} vectors, as for the coins that were drawn; {mean}"
    deviations = (row.vectors - row.expected) / row.spread
    said = f"{count(row.vectors)} vectors, {mean}: {deviations:+.1f} standard deviations"
    return (f"{said}, want at most {MAX_DEVIATIONS:g}", "") if abs(deviations) > MAX_DEVIATIONS else ("", said)


def _judge_scalars(row: Traffic) -> str:
    return "" if row.expected_scalars is None else _difference(row.scalars, row.expected_scalars, "scalars", "closed form")


def _difference(measured: float, wanted: float, what: str, name: str) -> str:
    if abs(measured - wanted) < 0.5:
        return ""
    by = f"{count(abs(measured - wanted))} too {'many' if measured > wanted else 'few'}"
    return f"{count(measured)} {what}, {name} {count(wanted)}: {by}"


def _table(verdict: Verdict) -> object:
    """For each stage, how many of its steps agree with their closed form."""
    lines = []
    for stage in verdict.stages:
        listed = verdict.judged.get(stage.number, ())
        n_wrong, n_without = sum(bool(one.difference) for one in listed), sum(not one.has_form for one in listed)
        lines.append([stage.name, *map(count, (len(listed) - n_wrong - n_without, n_wrong, n_without))])
    return table("steps and their closed forms", ["stage", "agree", "differ", "none"], lines)


def _book_sentences(verdict: Verdict) -> list[str]:
    """Whether sender and receiver agree, with all examples of where they do not."""
    said = book_sentences(verdict.books, is_finished=verdict.is_finished)
    said += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in verdict.books.differences[1:]]
    if n_rows := sum(verdict.books.not_brought.values()):
        said.append(f"{count(n_rows)} rows are the parents' alone so far: books arrive when the run finishes.")
    return said


__all__ = ["MAX_DEVIATIONS", "Judged", "Verdict", "print_verification", "verdict_on"]
