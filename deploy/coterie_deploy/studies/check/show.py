"""What `coterie check method` prints: a line for each check, and a sentence for each that has failed or has more to say."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.check import CHECKS, Check, check_method
from coterie_deploy.studies.check.federations import cases_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import counted, duration, table

_STYLES = {"passed": "dim", "failed": "red", "not applicable": "dim"}


@dataclass(frozen=True)
class Asked:
    """What the command line says."""

    method: str
    experiment: str | None = None  # a file or a shipped name, instead of a small federation
    only: Sequence[str] = ()
    seed: int = 0
    changes: Sequence[str] = ()
    data: Path | None = None
    output: Path | None = None


def list_checks(console: Console) -> None:
    """The checks, and what each proves."""
    built = table("Checks of a method", ["check", "what it proves"], [[check.name, check.proves] for check in CHECKS], n_text=2)
    built.columns[0].no_wrap = True
    console.print(built)


def check_here(asked: Asked, out: Console, err: Console) -> bool:
    """Checks the method and prints the verdicts: whether none has failed. ConfigError for an unknown method, check or experiment."""
    if asked.experiment is None:
        rows = list(cases_of(asked.method))
        where = f"the small federation {rows[0]!r}"
        subject: str | Experiment = asked.method
    else:
        experiment = load(asked.experiment)
        if experiment.method.name != asked.method:
            raise ConfigError(f"the experiment {asked.experiment} has method {experiment.method.name!r}, want {asked.method!r}")
        rows, where, subject = [], f"the experiment {experiment.name!r}", experiment
    with _told(err) as on_check:
        found = check_method(
            subject, data=asked.data, only=asked.only, seed=asked.seed, changes=asked.changes, output=asked.output, on_check=on_check
        )
    lines = [[one.check.name, one.state, duration(one.seconds)] for one in found]
    title = f"Method {asked.method!r} on {where}"
    out.print(Text(printable(title), style="bold"))
    out.print()
    out.print(table("", ["check", "result", "time"], lines, n_text=2))
    out.print()
    for one in found:
        if one.reason and one.state != "failed":
            out.print(Text(printable(f"{one.check.name}: {one.reason}"), style=_STYLES[one.state]))
    for one in found:
        if one.state == "failed":
            out.print(Text(printable(f"{one.check.name} HAS FAILED: {one.reason}"), style=_STYLES[one.state]))
            out.print(Text(f"  {one.check.proves}"))
    if rows[1:]:
        out.print(Text(f"There are other small federations for it: {', '.join(rows[1:])}."))
    n_failed = sum(one.state == "failed" for one in found)
    n_passed = sum(one.state == "passed" for one in found)
    said = f"{counted(n_failed, 'check')} failed, " if n_failed else ""
    out.print(Text(f"{said}{counted(n_passed, 'check')} passed, {len(found) - n_failed - n_passed} not applicable."))
    return not n_failed


@contextlib.contextmanager
def _told(console: Console) -> Iterator[Callable[[Check], None] | None]:
    """A terminal hears which check is under way."""
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield lambda check: status.update(f"{check.name} ...")
