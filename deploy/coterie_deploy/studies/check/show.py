"""What `coterie check` prints: a line for each check, and a sentence for each that has failed or has more to say."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.registry import is_method
from coterie_deploy.read.shipped import load
from coterie_deploy.studies.check import CHECKS, COMPRESSOR_CHECKS, Check, Checked, check_compressor, check_method
from coterie_deploy.studies.check.federations import CASES, cases_of
from coterie_deploy.terminal.printable import printable
from coterie_deploy.terminal.tables import counted, duration, table


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


def list_checks(console: Console, of: str = "method") -> None:
    """Prints the checks of a method or compressor, and what each proves."""
    listed = CHECKS if of == "method" else COMPRESSOR_CHECKS
    built = table(f"Checks of a {of}", ["check", "what it proves"], [[check.name, check.proves] for check in listed], n_text=2)
    built.columns[0].no_wrap = True
    console.print(built)


def check_here(asked: Asked, out: Console, err: Console) -> bool:
    """Checks the method and prints the verdicts: whether none has failed. ConfigError for an unknown method, check or experiment."""
    subject = _here(asked.method) if asked.experiment is None else load(asked.experiment)
    rows = list(cases_of(subject)) if isinstance(subject, str) else []
    if not isinstance(subject, str) and subject.method.name != asked.method:
        raise ConfigError(f"the experiment {asked.experiment} has method {subject.method.name!r}, want {asked.method!r}")
    if not isinstance(subject, str):
        where = f"the experiment {subject.name!r}"
    else:
        where = "a small federation" if rows[0] == subject else f"the small federation {rows[0]!r}"
    _begin(out, f"Method {asked.method!r} on {where}")
    with _told(err) as on_check:
        found = check_method(
            subject,
            data=asked.data,
            only=asked.only,
            seed=asked.seed,
            changes=asked.changes,
            output=asked.output,
            on_check=on_check,
            on_verdict=lambda one: _say(out, one),
        )
    others = f"There are other small federations for it: {', '.join(rows[1:])}." if rows[1:] else ""
    return _conclude(out, found, others)


def check_compressor_here(
    name: str, only: Sequence[str], seed: int, changes: Sequence[str], output: Path | None, out: Console, err: Console
) -> bool:
    """Checks a compressor and prints the verdicts: whether none has failed. ConfigError for one that is not there, and an unknown check."""
    is_file = name.isidentifier() and Path(f"{name}.py").is_file()
    subject = f"{name}:COMPRESSOR" if is_file and not plugins.is_there("compressor", name) else name
    _begin(out, f"Compressor {name!r} on rows of numbers, and on a small federation")
    with _told(err) as on_check:
        found = check_compressor(
            subject, only=only, seed=seed, changes=changes, output=output, on_check=on_check, on_verdict=lambda one: _say(out, one)
        )
    return _conclude(out, found)


def _begin(out: Console, title: str) -> None:
    out.print(Text(printable(title), style="bold"))
    out.print()
    out.print(Text(_line("check", "result", "time"), style="dim"))


def _conclude(out: Console, found: Sequence[Checked], others: str = "") -> bool:
    """Prints the reasons and the counts: whether none has failed."""
    out.print()
    failed = [one for one in found if one.state == "failed"]
    for one in found:
        if one.reason and one not in failed:
            out.print(Text(printable(f"{one.check.name}: {one.reason}"), style="dim"))
    for one in failed:
        out.print(Text(printable(f"{one.check.name} HAS FAILED: {one.reason}"), style="red"))
        out.print(Text(f"  {one.check.proves}"))
    if others:
        out.print(Text(others))
    n_passed = sum(one.state == "passed" for one in found)
    said = f"{counted(len(failed), 'check')} failed, " if failed else ""
    out.print(Text(f"{said}{counted(n_passed, 'check')} passed, {len(found) - len(failed) - n_passed} not applicable."))
    return not failed


def _here(name: str) -> str:
    """The import path of a method whose module is in the folder of the command, as a package has it that is not installed yet."""
    is_file = name.isidentifier() and Path(f"{name}.py").is_file()
    return f"{name}:METHOD" if is_file and name not in CASES and not is_method(name) else name


def _say(out: Console, one: Checked) -> None:
    """A line for a finished check, which rich flushes at once: a whole table would be minutes away."""
    out.print(Text(_line(one.check.name, one.state, duration(one.seconds)), style="red" if one.state == "failed" else ""))


def _line(name: str, state: str, seconds: str) -> str:
    widths = max(len(check.name) for check in CHECKS), len("not applicable")
    return f"{name:<{widths[0]}}  {state:<{widths[1]}}  {seconds:>5}"


@contextlib.contextmanager
def _told(console: Console) -> Iterator[Callable[[Check], None] | None]:
    """A terminal shows the current check."""
    if not console.is_terminal:
        yield None
        return
    with console.status("") as status:
        yield lambda check: status.update(f"{check.name} ...")
