"""`coterie ledger --verify` compares sent with received messages, and the measured counts with the closed form.

Exact counts must be equal. Means over random coins are compared with the coins that were drawn, if these are known. Otherwise they must be
within `MAX_DEVIATIONS` standard deviations. Of an unfinished run, only ended stages and rows from both ends are compared: books that have
not arrived yet are no difference.
"""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from coterie_deploy.read.ledger_page import book_sentences, saved_sentences, title_of
from coterie_deploy.terminal.tables import count, counted, say, table
from coterie_server.record import summary
from coterie_server.record.compressed import Saving, savings
from coterie_server.record.rundb import WITHIN, read_run
from coterie_server.record.summary import Books, StageSummary, Traffic

MAX_DEVIATIONS = 4.0
CONTROL = "control"  # envelopes and sessions, whose bytes do not depend on the method
_MAX_SENTENCES = 20


@dataclass(frozen=True)
class Judged:
    """One step of one stage: `difference` is a sentence, "" if it agrees with the closed form; `note` is a remark."""

    row: Traffic
    has_form: bool
    difference: str = ""
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    state: str
    is_finished: bool
    books: Books
    stages: Sequence[StageSummary]
    judged: Mapping[int, Sequence[Judged]]  # by stage, of those that have ended
    notes: Sequence[str]
    savings: Sequence[Saving] = ()

    @property
    def differences(self) -> list[str]:
        """A sentence for each closed form that does not hold."""
        of_bytes = [
            f"Step {one.step} {one.direction}: {count(one.values)} bytes of compressed numbers, closed form {count(one.expected)}."
            for one in self.savings
            if one.expected is not None and one.values != one.expected
        ]
        return [*of_bytes, *(one.difference for listed in self.judged.values() for one in listed if one.difference)]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs, and a finished run misses no book except those of hosts that it left out."""
        is_missed = self.is_finished and not self.books.left_out.issuperset(self.books.absent)
        return self.books.agree and not self.differences and not is_missed


def print_verification(folder: Path, console: Console) -> bool:
    """Prints what agrees and what does not; whether everything agrees. ConfigError for a folder without a run."""
    verdict = verdict_on(folder)
    say(console, verdict.state, style="bold")
    console.print()
    if any(verdict.judged.values()):
        console.print(_table(verdict))
        console.print()
    say(console, *_book_sentences(verdict), *verdict.notes, *saved_sentences(verdict.savings))
    notes = [one.note for listed in verdict.judged.values() for one in listed if one.note]
    say(console, *notes[:_MAX_SENTENCES], style="dim")
    n_left = len(verdict.differences) - _MAX_SENTENCES
    say(console, *verdict.differences[:_MAX_SENTENCES], f"and {n_left} more" if n_left > 0 else "", style="red")
    if verdict.agrees:
        say(console, "Everything agrees." if verdict.is_finished and not verdict.books.absent else "What there is agrees.")
    else:
        say(console, "THE LEDGER DOES NOT AGREE.", style="bold red")
    return verdict.agrees


def verdict_on(folder: Path) -> Verdict:
    """Reconciles sender with receiver, and measured with closed form. ConfigError for a folder that is no run."""
    with read_run(folder) as connection:
        facts, stages = summary.facts(connection), summary.stages(connection)
        books, rows, saved = summary.reconcile(connection), summary.traffic(connection), savings(connection)
        is_judgeable = "spread" in {name for _, name, *_ in connection.execute("PRAGMA table_info(expected)")}
        strange = _strange_clusters(connection, facts)
        is_summed = bool(json.loads(facts.get("experiment", "{}")).get("exact_sums"))  # one vector of each host below an aggregator
    judged: dict[int, list[Judged]] = {}
    for stage in stages if is_judgeable else ():
        if stage.outcome:
            steps = (row for row in rows if row.stage == stage.number and row.step != CONTROL)
            moving = (row for row in steps if row.vectors or row.scalars or row.expected or row.drawn or row.expected_scalars)
            judged[stage.number] = [_judge(row, stage.name, strange, is_summed=is_summed) for row in moving]
    notes = [f"Stage {stage.name!r} has not ended: its closed form is not known yet." for stage in stages if not stage.outcome]
    if not is_judgeable:
        notes.append("The closed forms of this run are of an older version, which does not say which are means: they are not judged.")
    return Verdict(title_of(folder, facts), facts.get("status") == "finished", books, stages, judged, notes, saved)


def _strange_clusters(connection: sqlite3.Connection, facts: Mapping[str, str]) -> str:
    """A clause on an aggregator with another number of hosts than the experiment says; "" if there is none."""
    rules = json.loads(facts.get("experiment", "{}")).get("federation", {})
    wanted = rules.get("hosts_per_cluster", 1)
    hosts: dict[str, int] = {}
    for (link,) in connection.execute("SELECT DISTINCT link FROM ledger WHERE scope = ?", (WITHIN,)):
        aggregator = str(link).partition("/")[0]
        hosts[aggregator] = hosts.get(aggregator, 0) + 1
    other = [f"{name!r} has {counted(n, 'host')}" for name, n in hosts.items() if n != wanted]
    return f"aggregator {other[0]}, federation.hosts_per_cluster is {wanted}" if other else ""


def _judge(row: Traffic, stage: str, strange: str, *, is_summed: bool) -> Judged:
    where = f"Stage {stage!r}, step {row.step} {row.direction}{f' ({row.scope})' if row.scope != 'direct' else ''}"
    if row.expected is None and row.expected_scalars is None:
        moved = f"{count(row.vectors)} vectors" if row.vectors else f"{count(row.scalars)} scalars"
        return Judged(row, has_form=False, note=f"{where}: {moved}, no closed form.")
    vectors, note = ("", "") if row.expected is None else _judge_vectors(row, row.expected)
    scalars = "" if row.expected_scalars is None else _difference(row.scalars, row.expected_scalars, "scalars", "closed form")
    found = "; ".join(sentence for sentence in (vectors, scalars) if sentence)
    if found and strange and row.scope == WITHIN and (row.direction == "down" or is_summed):
        return Judged(row, has_form=False, note=f"{where}: {found}; not judged, since {strange}.")
    return Judged(row, has_form=True, difference=found and f"{where}: {found}.", note=note and f"{where}: {note}.")


def _judge_vectors(row: Traffic, expected: float) -> tuple[str, str]:
    if row.drawn is None and not row.spread:
        return _difference(row.vectors, expected, "vectors", "closed form"), ""
    mean = f"{count(round(expected))} ± {count(round(row.spread))} over all coins"
    if row.drawn is not None:
        wrong = _difference(row.vectors, row.drawn, "vectors", "for the coins that were drawn")
        return wrong, "" if wrong else f"{count(row.vectors)} vectors, as for the coins that were drawn; {mean}"
    deviations = (row.vectors - expected) / row.spread
    said = f"{count(row.vectors)} vectors, {mean}: {deviations:+.1f} standard deviations"
    return (f"{said}, want at most {MAX_DEVIATIONS:g}", "") if abs(deviations) > MAX_DEVIATIONS else ("", said)


def _difference(measured: float, wanted: float, what: str, name: str) -> str:
    if abs(measured - wanted) < 0.5:
        return ""
    by = f"{count(abs(measured - wanted))} too {'many' if measured > wanted else 'few'}"
    return f"{count(measured)} {what}, {name} {count(wanted)}: {by}"


def _table(verdict: Verdict) -> object:
    """The number of steps of each stage that agree with their closed form."""
    lines = []
    for stage in verdict.stages:
        listed = verdict.judged.get(stage.number, ())
        n_wrong, n_without = sum(bool(one.difference) for one in listed), sum(not one.has_form for one in listed)
        lines.append([stage.name, *map(count, (len(listed) - n_wrong - n_without, n_wrong, n_without))])
    return table("steps and their closed forms", ["stage", "agree", "differ", "none"], lines)


def _book_sentences(verdict: Verdict) -> list[str]:
    """Whether the books agree, with an example of each difference."""
    said = book_sentences(verdict.books, is_finished=verdict.is_finished)
    said += [f"{sentence[0].upper()}{sentence[1:]}." for sentence in verdict.books.differences[1:]]
    if n_rows := sum(verdict.books.not_brought.values()):
        said.append(f"{count(n_rows)} rows are the parents' alone so far: books arrive when the run finishes.")
    return said
