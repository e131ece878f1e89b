"""Rules of others for `federation.robust`: a package's, or one in a file beside the experiment. Hosts do not run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.draws.streams import normal, stream
from coterie.errors import ConfigError
from coterie.experiment import plugins
from coterie.findings import Finding
from coterie.user_code import user_code

_FAULT = Finding("L4", place=plugins.PLACES["rule"])
_ORDER = np.array([3, 0, 6, 1, 5, 2, 4])  # of seven made-up answers
_D = 5

Flags = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class RobustRule:
    """A rule of your own, as `federation.robust.rule` names it: what stands in for the mean of users' answers.

    NEAREST = RobustRule(centre=nearest)
    """

    #: Given answers (k, d) in the order of members, f of which may lie (0 <= 2 f < k), and the model (d,) that training began with, 0 with
    #: known clusters: the centre (d,), and whose answers do not count in it (k,). k may be 1. All numbers are finite, up to 1e140.
    centre: Callable[[Array, int, Array], tuple[Array, Flags]]


def centre_by(name: str, rows: Array, f: int, before: Array) -> tuple[Array, Flags]:
    """The centre (d,) of answers (k, d) by the rule of this name, and whom it leaves out (k,). ConfigError where it returns others."""
    rule, (k, d) = plugins.loaded("rule", name, RobustRule), rows.shape
    with user_code(f"rule {name!r}", _FAULT, ConfigError):
        centre, out = rule.centre(rows, f, before)
    values, left = np.asarray(centre), np.asarray(out)
    for what, part, shape, dtype in (("a centre", values, (d,), np.float64), ("who is left out", left, (k,), np.bool_)):
        if part.shape != shape or part.dtype != dtype:
            wanted = f"{np.dtype(dtype)} of {shape}"
            raise ConfigError(f"rule {name!r} returns as {what} {part.dtype} of shape {part.shape}, want {wanted}", _FAULT)
    if (bad := values[~np.isfinite(values)]).size:
        raise ConfigError(f"rule {name!r} returns {bad[0]} in a centre of finite answers, want finite numbers", _FAULT)
    return values, left


def check(name: str) -> None:
    """Tries a rule on a few made-up answers before a run relies on it. ConfigError, also for one that depends on the order of answers."""
    rows = normal(stream(0, "rule"), _ORDER.size * _D).reshape(-1, _D)
    centre_by(name, rows[:1].copy(), 0, np.zeros(_D))
    values, left = centre_by(name, rows.copy(), 2, np.zeros(_D))
    again, also = centre_by(name, rows[_ORDER], 2, np.zeros(_D))
    if not (np.allclose(values, again, rtol=1e-6, atol=1e-9) and np.array_equal(left[_ORDER], also)):
        raise ConfigError(f"rule {name!r} gives another centre of the same answers in another order, want the same", _FAULT)
