"""Sums of users' answers, whose terms a method half does not see: `Federation.total`.

With `exact_sums: true` hosts add up their users, aggregators their hosts and the parent its members, in fixed point (see
`coterie.wire.fixed_point`). One vector goes up instead of one for each user. Otherwise users' answers are added in member order.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.errors import RunError
from coterie.findings import Finding
from coterie.wire.fixed_point import Form, form_of, largest, read, sums_of
from coterie.wire.messages import AskTotal, Message, PerCluster, Rows, summed, words_of
from coterie.wire.precision import Precision
from coterie_server.interface.wanted import Wanted

if TYPE_CHECKING:
    from coterie_server.interface.half import Replies

R = TypeVar("R", bound=Rows | PerCluster)
Exchange = Callable[..., "Awaitable[Replies]"]


@dataclass(frozen=True)
class Sum:
    """What is summed: a kind of messages that is declared with `total=True`."""

    kind: type[Rows | PerCluster]
    weights: Indices | None = None  #: (n,) whole numbers from 0, by which the members' answers are multiplied; None: 1
    groups: Indices | None = None  #: (n,) numbers from 0: each group has a sum of its own; None: one group of all
    #: By field, what the absolute value of a number does not exceed, if known; by default 2^40, and 2^16 for parameters of networks.
    bounds: Mapping[str, float] = field(default_factory=dict)
    extents: Mapping[str, int] = field(default_factory=dict)  #: of the axes of its arrays, by name; others are not checked
    form: Form | None = None  #: how numbers are written, where the noise of hosts decides it; None: as bounds and weights allow
    #: A total weight that numbers are written for, so that their rounding does not depend on who is asked; None: that of those asked.
    capacity: int | None = None

    def weight_of(self, users: Indices) -> int:
        """The total weight of these members, at least 1."""
        return max(1, users.size if self.weights is None else int(self.weights[users].sum()))

    def forms(self, asked: Indices, precision: Precision) -> dict[str, Form]:
        """How each field is written. RunError for weights or bounds that no form fits."""
        if self.form is not None:
            return {name: self.form for name, _ in self.kind.specs}
        try:
            weight = self.weight_of(asked)
            if self.capacity is not None:
                if weight > self.capacity:
                    raise ValueError(f"a total weight of {weight:,}, want at most {self.capacity:,}")
                weight = self.capacity
            return {name: form_of(spec, weight, precision, self.bounds.get(name)) for name, spec in summed(self.kind)}
        except ValueError as error:
            raise RunError(f"no exact sum of {self.kind.kind}: {error}") from error

    @property
    def n_groups(self) -> int:
        return 1 if self.groups is None else int(self.groups.max(initial=-1)) + 1

    def group_of(self, users: Indices) -> Indices:
        """The groups of these members."""
        return np.zeros(users.size, dtype=np.int64) if self.groups is None else self.groups[users]


class Totals:
    """The sums of one exchange, and its other replies."""

    def __init__(self, replies: Replies, found: Mapping[type[Message], Message], weights: Mapping[type[Message], Array], rounding: float):
        self.replies = replies  #: of kinds that are not summed, and who has answered
        self.rounding = rounding  #: how far rounding may have moved a weighted mean; 0 for sums of floating-point numbers
        self._found, self._weights = found, weights

    def __getitem__(self, cls: type[R]) -> R:
        """The sums of this kind: row r is that of group r, zeros where no user of it has answered. RunError when nobody has."""
        if cls not in self._found:
            raise RunError(f"no member answered with {cls.kind}, which the method waits for")
        return self._found[cls]  # type: ignore[return-value]

    def get(self, cls: type[R]) -> R | None:
        """The same; None when nobody has answered with it."""
        return self._found.get(cls)  # type: ignore[return-value]

    def mean(self, cls: type[R]) -> R:
        """The sums divided by the weights of those who have answered; NaN for groups without any."""
        sums, weights = self[cls], self._weights[cls]
        with np.errstate(invalid="ignore", divide="ignore"):
            means = {name: getattr(sums, name) / weights.reshape(-1, *(1,) * (getattr(sums, name).ndim - 1)) for name, _ in cls.specs}
        return cls(**means)


async def total(
    exchange: Exchange,
    messages: Sequence[Message],
    of: Sequence[Sum],
    to: Indices | None,
    wanted: Sequence[Wanted],
    n_members: int,
    precision: Precision,
    *,
    is_exact: bool,
) -> Totals:
    """See `Federation.total`. `exchange` is that of the federation."""
    if undeclared := [one.kind for one in of if one.kind.total is None]:
        raise TypeError(f"{undeclared[0].kind} has no sum: declare it with total=True")
    asked = np.arange(n_members) if to is None else to
    if not is_exact:
        terms = [Wanted(one.kind, to, one.extents) for one in of if issubclass(one.kind, Rows)]  # an aggregator's are not checked
        replies = await exchange(*messages, to=to, wanted=[*wanted, *terms])
        return _added_up(replies, of, asked, n_members)
    forms = [one.forms(asked, precision) for one in of]
    named = None if asked.size == n_members else asked  # messages of everyone need not name their users
    asks = [_ask(one, form, asked, named) for one, form in zip(of, forms, strict=True)]
    sums = [_wanted(one, form, named, n_members) for one, form in zip(of, forms, strict=True)]
    replies = await exchange(*messages, *asks, to=to, wanted=[*wanted, *sums])
    found: dict[type[Message], Message] = {}
    for one, form in zip(of, forms, strict=True):
        assert one.kind.total is not None  # noqa: S101 - see above
        if (came := replies.get(one.kind.total)) is not None:
            columns = {name: _spread(came.groups, _number(getattr(came, name), form[name]), one) for name in form}
            found[one.kind] = _made(one.kind, columns)
    floats = [form[name].error for one, form in zip(of, forms, strict=True) for name, spec in one.kind.specs if spec.is_float]
    return Totals(replies, found, _weights(of, replies.awaited(asked)), max(floats, default=0.0))


def _ask(one: Sum, forms: Mapping[str, Form], asked: Indices, users: Indices | None) -> Message:
    none = np.zeros((asked.size, 0), dtype=np.int64)
    weight = none if one.weights is None else one.weights[asked, None]
    group = none if one.groups is None else one.groups[asked, None]
    assert one.kind.ask_total is not None  # noqa: S101 - see `total`
    return one.kind.ask_total(weight, group, np.array(list(forms.values()), dtype=np.int64), users=users)


def _wanted(one: Sum, forms: Mapping[str, Form], to: Indices | None, n_members: int) -> Wanted:
    words = {words_of(name): form.words for name, form in forms.items()}
    assert one.kind.total is not None  # noqa: S101 - see `total`
    return Wanted(one.kind.total, to, {**one.extents, **words}, groups=one.group_of(np.arange(n_members)))


def passed_on(ask: AskTotal, n_members: int) -> Wanted:
    """What an aggregator wants of its hosts where its parent asks it for sums."""
    assert ask.of.total is not None  # noqa: S101 - it has been asked for
    groups = np.zeros(n_members, dtype=np.int64)
    if ask.group.shape[1]:
        groups[slice(None) if ask.users is None else ask.users] = ask.group[:, 0]
    words = {words_of(name): Form(*row).words for (name, _), row in zip(summed(ask.of), ask.form.tolist(), strict=True)}
    return Wanted(ask.of.total, ask.users, words, groups=groups)


def of_clusters(answers: Sequence[Message], asks: Sequence[AskTotal]) -> list[Message]:
    """An aggregator's answers for its clusters, with a `Total` instead of the kinds that are asked for in sums.

    RunError for a number out of the range of its sum.
    """
    found = {type(answer): answer for answer in answers}
    kept = [answer for answer in answers if type(answer) not in {ask.of for ask in asks}]
    return [*kept, *(_total_of(found[ask.of], ask) for ask in asks if ask.of in found)]


def _total_of(answer: Message, ask: AskTotal) -> Message:
    columns: dict[str, Indices] = {}
    for (name, _), row in zip(summed(ask.of), ask.form.tolist(), strict=True):
        rows, form = getattr(answer, name), Form(*row)
        if not np.isfinite(rows).all() or largest(rows) > 2.0**form.bound:
            said = f"{ask.of.kind}.{name} of a cluster is {largest(rows):.3g}, wanted at most 2^{form.bound} in an exact sum"
            raise RunError(
                f"{said}: want exact_sums: false, a smaller step, or features of a smaller scale",
                Finding("M4", form.bound, "model", "exact_sums"),
            )
        _, columns[name] = sums_of(rows, None, np.zeros(len(rows), dtype=np.int64), form)
    assert ask.of.total is not None  # noqa: S101 - it has been asked for
    return ask.of.total(groups=np.zeros(1, dtype=np.int64), **columns)


def _made(kind: type[Rows | PerCluster], columns: Mapping[str, NDArray[Any]]) -> Message:
    """The sums as a message of their kind. Those over clusters belong to none of them."""
    return kind(clusters=np.full(1, -1), **columns) if issubclass(kind, PerCluster) else kind(**columns)


def _number(sums: Indices, form: Form) -> NDArray[Any]:
    return read(sums, form) if form.bits or form.low else sums[:, 0]


def _spread(groups: Indices, rows: NDArray[Any], one: Sum) -> NDArray[Any]:
    """A row for each group, with zeros for those that have none."""
    if groups.size == one.n_groups:
        return rows
    whole = np.zeros((one.n_groups, *rows.shape[1:]), dtype=rows.dtype)
    whole[groups] = rows
    return whole


def _weights(of: Sequence[Sum], answered: Indices) -> dict[type[Message], Array]:
    """By kind, the total weight (n_groups,) of those who have answered."""
    ones = np.ones(answered.size)
    found: dict[type[Message], Array] = {}
    for one in of:
        weights = ones if one.weights is None else one.weights[answered].astype(np.float64)
        found[one.kind] = np.bincount(one.group_of(answered), weights, minlength=one.n_groups).astype(np.float64)
    return found


def _added_up(replies: Replies, of: Sequence[Sum], asked: Indices, n_members: int) -> Totals:
    """Sums of floating-point numbers, added in member order."""
    found: dict[type[Message], Message] = {}
    for one in of:
        if issubclass(one.kind, PerCluster):
            if (came := replies.get(one.kind)) is not None:
                found[one.kind] = _made(one.kind, {name: getattr(came, name).sum(axis=0)[None] for name, _ in summed(one.kind)})
            continue
        if one.kind.carries_weights:
            listed: Sequence[Rows] = replies.in_runs(one.kind) if replies.awaited(asked).size else ()
        else:
            listed = [message for message in (replies.get(one.kind),) if message is not None]
        columns: dict[str, NDArray[Any]] = {}
        for message in listed:
            users = np.arange(n_members) if message.users is None else message.users
            for name, _ in one.kind.specs:
                rows = getattr(message, name)
                if one.weights is not None:
                    rows = rows * one.weights[users].reshape(-1, *(1,) * (rows.ndim - 1))
                dtype = np.int64 if rows.dtype.kind == "i" else np.float64
                np.add.at(columns.setdefault(name, np.zeros((one.n_groups, *rows.shape[1:]), dtype)), one.group_of(users), rows)
        if columns:
            found[one.kind] = one.kind(**columns)
    return Totals(replies, found, _weights(of, replies.awaited(asked)), 0.0)
