"""Sums over a host's users, which leave the host instead of what each user has answered."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ProtocolError, RunError
from coterie.findings import Finding
from coterie.wire.fixed_point import Form, added, largest, sums_of
from coterie.wire.messages import AskTotal, Message, Rows, Total
from coterie_client.interface.half import Local

_KEY = "exact_sums"


Noised = Callable[[AskTotal, Sequence[Rows]], Total]


def with_totals(
    answers: Sequence[Message], asks: Sequence[AskTotal], local: Local, summed: Collection[str], noised: Noised | None = None
) -> list[Message]:
    """The answers of a half, with a `Total` instead of the messages of each kind that is asked for in sums.

    `noised` adds up where hosts add noise to their sums: there is one in an exchange, since its noise counts once.

    ProtocolError where sums are not those of the users who have answered, each once, and where a kind of the steps `summed` is not asked
    for in sums.
    RunError for a number out of the range of its sum.
    """
    kinds = {ask.of for ask in asks}
    kept: list[Message] = []
    for message in answers:
        if type(message) in kinds:
            continue
        if type(message).total is not None and f"{message.method}/{message.step}" in summed:
            said = f"the parent asks for {message.kind} of each user, but the experiment that this host serves sends sums alone"
            raise ProtocolError(said, Finding("C9"))
        kept.append(message)
    if noised is not None and len(asks) > 1:
        raise ProtocolError(f"the parent asks for {len(asks)} sums in one exchange, but the noise is enough for one", Finding("C9"))
    rows = [answer for answer in answers if isinstance(answer, Rows)]
    return [*kept, *(_total(ask, [found for found in rows if isinstance(found, ask.of)], local, noised) for ask in asks)]


def _total(ask: AskTotal, found: Sequence[Rows], local: Local, noised: Noised | None) -> Total:
    cls, everyone = ask.of, np.arange(local.n_own)
    asked = everyone if ask.users is None else ask.users
    owners = [everyone if message.users is None else message.users for message in found]
    if not found or not np.array_equal(np.sort(np.concatenate(owners)), asked):
        raise ProtocolError(f"the parent asks for sums of {cls.kind} over other users than those who answer")
    if np.unique(asked).size < asked.size:
        raise ProtocolError(f"the parent asks for sums of {cls.kind} in which a user counts more than once")
    if noised is not None:
        return noised(ask, found)
    if ask.form.shape[0] != len(cls.specs) or ask.weight.shape[1] > 1 or ask.group.shape[1] > 1 or (ask.weight < 0).any():
        raise ProtocolError(f"the parent asks for sums of {cls.kind} in a form that they do not have")
    forms = [_form_of(row, ask) for row in ask.form.tolist()]
    places = [np.searchsorted(asked, users) for users in owners]
    weights = [ask.weight[place, 0] if ask.weight.shape[1] else None for place in places]
    groups = [ask.group[place, 0] if ask.group.shape[1] else np.zeros(place.size, dtype=np.int64) for place in places]
    columns: dict[str, NDArray[Any]] = {}
    for (name, spec), form in zip(cls.specs, forms, strict=True):
        parts = []
        for message, users, weight, group in zip(found, owners, weights, groups, strict=True):
            rows = getattr(message, name)
            if largest(rows) > 2.0**form.bound:
                raise _out_of_range(message, name, rows, users, form, local, "model" if spec.is_weights else "loss")
            parts.append(sums_of(rows, weight, group, form))
        of_groups, columns[name] = added(parts)
    assert cls.total is not None  # noqa: S101 - it has been asked for
    return cls.total(groups=of_groups, **columns)


def _form_of(row: Sequence[int], ask: AskTotal) -> Form:
    """The form of a field. ProtocolError where a sum over this host's users alone could be too large for it."""
    form = Form(*row)
    n_users = ask.weight.shape[0]
    weight = sum(ask.weight[:, 0].tolist()) if ask.weight.shape[1] else n_users  # no int64, which could wrap
    fits = 0 <= form.bound < 1024 and 0 <= form.low <= 62 and abs(form.bits) <= 1000
    if not fits or max(weight, 1).bit_length() + max(form.bound + form.bits - form.low, form.low) > 63:
        raise ProtocolError(f"the parent asks for sums of {ask.of.kind} in a form that they do not fit into")
    return form


def _out_of_range(message: Rows, name: str, rows: NDArray[Any], users: NDArray[Any], form: Form, local: Local, role: Any) -> RunError:
    row = int(np.argmax(np.abs(rows).reshape(len(rows), -1).max(axis=1)))
    value, user = largest(rows[row]), local.names[users[row]]
    said = f"user {user!r} has {value:.3g} in {message.kind}.{name}, wanted at most 2^{form.bound} in an exact sum"
    return RunError(f"{said}: want {_KEY}: false, a smaller step, or features of a smaller scale", Finding("M4", form.bound, role, _KEY))
