"""Checks of what a server half returns, before the engine records or delivers it: one sentence names method and field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from coterie.errors import RunError
from coterie.families.prepare import FEW_CELLS, FEW_ROWS
from coterie_server.interface.half import UNCONVERGED, Facts, Outcome
from coterie_server.interface.stages import Stage

EPSILON = "epsilon"  # the figure of what the rounds so far have spent
RESIDUALS = ("primal_residual", "dual_residual")  # the figures that `stop.residual` reads


def check_figures(where: str, figures: Mapping[str, object]) -> None:
    """RunError unless each figure is one number. `where` names what returned them: "`round` of 'pdmm'"."""
    for name, value in figures.items():
        if np.ndim(value) or not isinstance(value, int | float | np.number | np.bool_ | np.ndarray):  # type: ignore[arg-type]
            found = f"of shape {value.shape}" if isinstance(value, np.ndarray) else f"of type {type(value).__name__}"
            raise RunError(f"{where} returned the figure {name!r} {found}, want one number")


def check_outcome(method: str, outcome: object, n_users: int, d: int | None) -> Outcome:
    """The outcome. RunError unless its arrays have a row for each user; `d` is the length of a model, None where there is no fixed one."""
    where = f"`finish` of {method!r}"
    if not isinstance(outcome, Outcome):
        raise RunError(f"{where} returned a value of type {type(outcome).__name__}, want an Outcome")
    check_figures(where, outcome.figures)
    rows = "one row for each user, also for users whose host is lost"
    _check_shape(f"{where} returned models", outcome.models, (n_users,) if d is None else (n_users, d), rows)
    _check_shape(f"{where} returned labels", outcome.labels, (n_users,), "one number for each user")
    n_ties = np.size(outcome.ties.get("weight", ()))
    for name in ("first", "second", "weight") if outcome.ties else ():
        _check_shape(f"{where} returned ties[{name!r}]", outcome.ties.get(name, ()), (n_ties,), "one number for each tie")
    for name, values in outcome.by_user.items():
        _check_shape(f"{where} returned by_user[{name!r}]", values, (n_users,), "one number for each user, NaN where it has none")
    return outcome


def closing(given: Mapping[str, float], rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The closing figures of a stage, with the objective and the epsilon of its last round, if any. What is not known is left out."""
    last = {name: rounds[-1][name] for name in ("objective", EPSILON) if rounds and name in rounds[-1]}
    return {name: value for name, value in {**last, **given}.items() if not np.isnan(value)}


def warnings(stage: Stage, ended: str, figures: Sequence[Mapping[str, float]]) -> list[str]:
    """Sentences for local problems that ended unconverged, and for a residual that was to stop the stage and that no round had."""
    stop, said = stage.stop, []
    if short := [row[UNCONVERGED] for row in figures if row.get(UNCONVERGED, 0.0) > 0.0]:
        who, where = f"up to {max(short):.0f} users" if max(short) > 1.0 else "a user", f"{len(figures)} rounds of stage {stage.name!r}"
        said.append(f"in {len(short)} of {where} the local problem of {who} ended before its tolerance")
    is_asked_for = "residual" in stop.model_fields_set and stop.residual is not None  # the default is for methods that have residuals
    has_some = any(name in row for row in figures for name in RESIDUALS)
    if is_asked_for and not has_some and ended == f"{stop.rounds} rounds":
        said.append(f"stop.residual is set, and {stage.method!r} gives no primal_residual, so the stage did not stop by it")
    return said


def few_rows(facts: Facts) -> tuple[str, int] | None:
    """A sentence, and of how many users, where sums that were sent show single rows."""
    if facts.n_fewest is None:
        return None
    few, does = (FEW_ROWS, "standardize is true") if facts.scale is not None else (FEW_CELLS, "missing cells get a common mean")
    n_users = int((facts.n_fewest < few).sum())
    if not n_users:
        return None
    who = "1 user has" if n_users == 1 else f"{n_users} users have"
    what = f"fewer than {few} training rows" + (" with a value of some feature" if facts.fill is not None else "")
    text = f"{who} {what}, and {does}: whoever reads the sums they sent knows the features of a single row exactly"
    if few == FEW_ROWS:
        text += ", and of two rows both values of each feature, though not which belong together"
    return text, n_users


def _check_shape(what: str, found: object, wanted: tuple[int, ...], why: str) -> None:
    if found is None:
        return
    if not isinstance(found, np.ndarray):
        raise RunError(f"{what} of type {type(found).__name__}, want an array of shape {wanted}: {why}")
    if found.shape[: len(wanted)] != wanted or (len(wanted) == 2 and found.ndim != 2):
        raise RunError(f"{what} of shape {found.shape}, want {wanted}: {why}")
