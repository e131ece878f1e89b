"""The closed form of a stage's traffic: that of its method, plus the preparation and the evaluation.

Counts follow the ledger's rules: a broadcast counts once, a message for a cluster once for each host of the cluster. With aggregators a
broadcast of the coordinator is one message between clusters, and one inside each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie_server.interface.half import ABSENT, UNASKED, Expected, Facts, Key, Outcome, StageHalf
from coterie_server.record.rundb import BETWEEN, WITHIN

Forms = Mapping[Key, Expected]


def of_method(half: StageHalf[Any], figures: Sequence[Mapping[str, float]], outcome: Outcome) -> Forms:
    """The method's own, given the figures of all rounds; the last round also has the closing figures on users who were not reached."""
    closing = {name: value for name, value in outcome.figures.items() if name.endswith(("_at_start", "_at_end"))}
    rounds = [*figures[:-1], {**closing, **figures[-1]}] if figures else []
    vectors, scalars = half.expected_vectors(rounds), half.expected_scalars(rounds)
    spread, drawn = half.spread_of_vectors(rounds), half.drawn_vectors(rounds)
    keys = dict.fromkeys([*vectors, *scalars])
    return {key: Expected(vectors.get(key), spread.get(key, 0.0), drawn.get(key), scalars.get(key)) for key in keys}


def of_preparation(facts: Facts, n_aggregators: int) -> Forms:
    """The sums and constants of the features, and of every user L_i and mu_i where they were asked for. Counts and sizes are no scalars.

    A feature has two numbers with standardisation, and its sum alone where missing cells are only filled.
    """
    n_users = facts.n_rows.size
    told = {"smoothness": facts.smoothness, "convexity": facts.strong_convexity}
    described: dict[Key, Expected] = {(step, "up"): Expected(scalars=float(n_users)) for step, fact in told.items() if fact is not None}
    constants = [agreed for agreed in (facts.mean if facts.fill is None else facts.fill, facts.scale) if agreed is not None]
    if not constants:
        return described
    n_constants = float(sum(agreed.size for agreed in constants))
    n_told = 0 if facts.n_fewest is None else n_users  # with constants of an earlier run, nobody sends sums
    sums: dict[Key, Expected] = {("standardize", "up"): Expected(scalars=n_constants * n_told)}
    if not n_aggregators:
        return {**sums, ("standardize", "down"): Expected(scalars=n_constants), **described}
    sums["standardize", "down", BETWEEN] = Expected(scalars=n_constants)
    sums["standardize", "down", WITHIN] = Expected(scalars=n_constants * n_aggregators)
    return {**sums, **described}


def of_evaluation(outcome: Outcome) -> Forms:
    """The final models to their users, and three scalars of each user in return."""
    assert outcome.models is not None  # noqa: S101 - the engine has evaluated them
    n_users = len(outcome.models)
    n_sent, n_told = (n_users - outcome.figures.get(name, 0.0) for name in (UNASKED, ABSENT))
    return {("evaluate", "down"): Expected(vectors=n_sent), ("evaluate", "up"): Expected(scalars=3 * n_told)}


def of_inference(n_sent: int, n_told: int, d: int) -> Forms:
    """The final models to `n_sent` users; two triangles, a vector and a residual of `n_told`: (d + 1)^2 scalars of each."""
    told = Expected(vectors=float(n_told), scalars=float(n_told * (d + 1) ** 2))
    return {("inference", "down"): Expected(vectors=float(n_sent)), ("inference", "up"): told}


def together(*listed: Forms) -> Forms:
    """All of them; forms of the same step and direction are added."""
    found: dict[Key, Expected] = {}
    for forms in listed:
        for key, form in forms.items():
            found[key] = _sum(found[key], form) if key in found else form
    return found


def _sum(one: Expected, other: Expected) -> Expected:
    is_mean = one.drawn is not None or other.drawn is not None
    drawn = _plus(*(form.vectors if form.drawn is None else form.drawn for form in (one, other))) if is_mean else None
    return Expected(_plus(one.vectors, other.vectors), one.spread + other.spread, drawn, _plus(one.scalars, other.scalars))


def _plus(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else one + other
