"""After the evaluation of a stage: what users tell of the accuracy of its models (`coterie.families.inference`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ProtocolError
from coterie.families.inference import FittedModels, Moments
from coterie_server.interface.half import Federation, Outcome
from coterie_server.interface.wanted import Wanted
from coterie_server.record import closed_forms


async def with_moments(outcome: Outcome, federation: Federation) -> tuple[Outcome, closed_forms.Forms]:
    """The outcome with all users' sums, NaN and 0 rows for a user without an answer, and the closed form of what was sent."""
    assert outcome.models is not None  # noqa: S101 - the caller has checked
    n, d = outcome.models.shape
    extents = {"d": d, "h": d * (d + 1) // 2}
    replies = await federation.exchange(FittedModels(outcome.models), wanted=[Wanted(Moments, extents=extents, check=_has_rows)])
    everyone, told = np.arange(n), replies[Moments]
    answered = replies.awaited(everyone)
    moments = {name: _placed(getattr(told, name), answered, n) for name, _ in Moments.specs}
    forms = closed_forms.of_inference(n - replies.n_unasked(everyone), answered.size, d)
    return replace(outcome, moments=moments), forms


def _placed(rows: NDArray[np.generic], answered: Indices, n: int) -> NDArray[np.generic]:
    whole = np.full((n, *rows.shape[1:]), np.nan) if rows.dtype.kind == "f" else np.zeros((n, *rows.shape[1:]), dtype=rows.dtype)
    whole[answered] = rows
    return whole


def _has_rows(told: Moments, members: Indices) -> None:
    """ProtocolError for numbers of rows and sums of squares that cannot be."""
    if (told.n_rows < 1).any() or (told.residual < 0.0).any():
        place = int(np.argmax((told.n_rows < 1) | (told.residual < 0.0)))
        rows, squares = told.n_rows[place], told.residual[place]
        raise ProtocolError(f"member {members[place]} has {rows} rows and the residual {squares:g}, wanted a row and a sum of squares")
