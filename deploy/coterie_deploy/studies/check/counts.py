"""Checks of an undisturbed run: that it ends, and that its ledger is true."""

from __future__ import annotations

import numpy as np

from coterie_deploy.read.verify import CONTROL, Verdict, verdict_on
from coterie_deploy.studies.check.results import arrays_in
from coterie_deploy.studies.check.trial import Failed, Trial
from coterie_server.record import summary
from coterie_server.record.rundb import read_run


def runs(trial: Trial) -> str:
    """The run ends, and what it leaves are numbers."""
    finished = trial.calm.finished
    outcome = finished.outcomes[finished.final_stage]
    if not (any(True for _ in arrays_in([outcome.models, outcome.shared])) or outcome.by_user or outcome.figures):
        raise Failed(f"stage {finished.final_stage!r} has left nothing: neither models, nor shared tensors, nor figures")
    for _, array in arrays_in([outcome.models]):
        if not np.isfinite(array).all():
            raise Failed(f"stage {finished.final_stage!r} has left models that are not finite")
    return ""


def closed_form(trial: Trial) -> str:
    """Every step that moves vectors or scalars has a closed form, and it holds."""
    verdict = verdict_on(trial.calm.folder)
    check_counts(verdict)
    with read_run(trial.calm.folder) as connection:
        rows = [row for row in summary.traffic(connection) if row.step != CONTROL]
    if not any(row.expected or row.expected_scalars for row in rows):
        raise Failed("no step has a closed form of vectors or scalars")
    return ""


def check_counts(verdict: Verdict, where: str = "") -> None:
    """Failed unless what was measured is what the formulas say; `where` begins the sentence."""
    begin = f"{where}: " if where else ""
    judged = [one for listed in verdict.judged.values() for one in listed]
    if verdict.differences:
        raise Failed(f"{begin}{' '.join(verdict.differences[:3])}")
    if without := [one.note for one in judged if not one.has_form]:
        raise Failed(f"{begin}{without[0]}")


def books(trial: Trial) -> str:
    """Sender and receiver agree."""
    check_books(verdict_on(trial.calm.folder))
    return ""


def check_books(verdict: Verdict) -> None:
    """Failed unless every message is in both books with the same counts."""
    if not verdict.books.agree:
        raise Failed("; ".join(verdict.books.differences[:3]) or "the books of sender and receiver differ")
    if verdict.books.absent:
        raise Failed(f"no book came from {', '.join(sorted(verdict.books.absent))}")
    if not verdict.books.n_agreed:
        raise Failed("the books are empty")
