"""`coterie check`: whether a method, or a compressor, keeps what Coterie promises of all of them.

It is for methods what scikit-learn's `check_estimator` is for estimators: a table of named checks, each on runs of a small federation. The
tests run the same table on our own methods.
"""

import contextlib
import json
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from coterie.compress.numbers import compressor
from coterie.errors import ConfigError, CoterieError
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.overrides import apply_overrides
from coterie.text.quoting import quoted
from coterie.text.suggestions import suggestion
from coterie_deploy.studies.check.federations import CASES, Case, cases_of, compressed
from coterie_deploy.studies.check.table import CHECKS, COMPRESSOR_CHECKS, Check, needed
from coterie_deploy.studies.check.trial import Failed, NotApplicable, Trial

State = Literal["passed", "failed", "not applicable"]


@dataclass(frozen=True)
class Checked:
    """The verdict of one check."""

    check: Check
    state: State
    reason: str = ""  # what has failed, why it is not applicable, or what else there is to say
    seconds: float = 0.0


def check_method(
    method: str | Experiment,
    *,
    data: Path | None = None,
    only: Sequence[str] = (),
    seed: int = 0,
    changes: Sequence[str] = (),
    output: Path | None = None,
    on_check: Callable[[Check], None] | None = None,
    on_verdict: Callable[[Checked], None] | None = None,
) -> list[Checked]:
    """Checks a method on a small federation that suits it, or on that of an experiment, whose data paths start in `data`.

    `only` are names of checks, `seed` draws who is killed and when, `changes` are of the form "method.penalty=0.05". The runs are kept in
    `output`. `on_check` receives each check before it starts, `on_verdict` its verdict after it. No event loop may be running. ConfigError
    for an unknown method or check, and for an experiment that is wrong.
    """
    case, wanted = next(iter(cases_of(method).values())) if isinstance(method, str) else case_on(method, data), chosen(only)
    with _folder(output) as folder:
        try:
            trial = Trial(replace(case, changes=(*case.changes, *changes)), folder, seed)
        except ConfigError as error:
            if method in CASES or not isinstance(method, str) or changes:
                raise
            no_settings = "the small federation has no settings for it: give them with --set method.KEY=VALUE"
            raise ConfigError(f"{error}; {no_settings}, or in checked_with of its METHOD, or a federation with --experiment") from error
        return _judged(trial, wanted, CHECKS, on_check, on_verdict)


def check_compressor(
    name: str,
    *,
    only: Sequence[str] = (),
    seed: int = 0,
    changes: Sequence[str] = (),
    output: Path | None = None,
    on_check: Callable[[Check], None] | None = None,
    on_verdict: Callable[[Checked], None] | None = None,
) -> list[Checked]:
    """Checks a compressor, of a package or as module:NAME, on rows and on a small federation. The arguments are those of `check_method`.

    ConfigError for one that cannot be imported, and for an unknown check.
    """
    wanted = chosen(only, COMPRESSOR_CHECKS)
    with _folder(output) as folder:
        trial = Trial(replace(compressed(name), changes=changes), folder, seed)
        compressor(name)  # can be imported
        return _judged(trial, wanted, COMPRESSOR_CHECKS, on_check, on_verdict)


def case_on(experiment: Experiment, data: Path | None = None) -> Case:
    """The federation of an experiment."""
    content = json.loads(experiment_to_json(experiment))
    return Case(lambda _, changes: experiment_from(apply_overrides(content, changes)), data)


def chosen(only: Sequence[str], table: Sequence[Check] = CHECKS) -> list[Check]:
    """The checks of these names, in the order of the table; all of them for none. ConfigError for an unknown one."""
    known = [check.name for check in table]
    for name in only:
        if name not in known:
            raise ConfigError(f"the check {quoted(name)} is unknown, want one of {', '.join(known)}{suggestion(name, known)}")
    return [check for check in table if not only or check.name in only]


def verdict(check: Check, trial: Trial) -> Checked:
    """Runs one check. Whatever is raised is a failure."""
    started = time.monotonic()
    state: State = "passed"
    try:
        reason = check.run(trial)
    except NotApplicable as why:
        state, reason = "not applicable", str(why)
    except (Failed, CoterieError) as why:
        state, reason = "failed", str(why)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        state, reason = "failed", f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
    return Checked(check, state, reason, time.monotonic() - started)


def _judged(
    trial: Trial,
    wanted: Sequence[Check],
    table: Sequence[Check],
    on_check: Callable[[Check], None] | None,
    on_verdict: Callable[[Checked], None] | None,
) -> list[Checked]:
    found = []
    for one in _verdicts(trial, wanted, table, on_check):
        found.append(one)
        if on_verdict is not None:
            on_verdict(one)
    return found


def _verdicts(trial: Trial, wanted: Sequence[Check], table: Sequence[Check], on_check: Callable[[Check], None] | None) -> Iterator[Checked]:
    """A check is not run if it builds on one that has failed, since it would fail for the same reason."""
    broken: set[str] = set()
    for check in wanted:
        if blamed := [name for name in needed(check, table) if name in broken]:
            yield Checked(check, "not applicable", f"it builds on {blamed[0]!r}, which has failed")
            continue
        if on_check is not None:
            on_check(check)
        found = verdict(check, trial)
        if found.state == "failed":
            broken.add(check.name)
        yield found


@contextlib.contextmanager
def _folder(output: Path | None) -> Iterator[Path]:
    if output is not None:
        if output.exists() and any(output.iterdir()):
            raise ConfigError(f"the folder {output} is not empty: choose another one with --output")
        yield output
        return
    with tempfile.TemporaryDirectory(prefix="coterie-check-") as folder:
        yield Path(folder)


__all__ = ["CHECKS", "COMPRESSOR_CHECKS", "Check", "Checked", "case_on", "check_compressor", "check_method", "chosen", "verdict"]
