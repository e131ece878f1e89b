"""The replies that an exchange wants, so that a wrong reply is found when it comes, and its host named.

A method passes it as `wanted` to `Federation.exchange`. Without it, only the form of replies is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from coterie.arrays import Indices, distinct
from coterie.errors import ProtocolError
from coterie.wire.messages import Message, PerHost, Rows, Total
from coterie_server.interface.merge import check_senders

Check = Callable[[Any, Indices], None]


@dataclass(frozen=True)
class Wanted:
    """One row of this kind from each of these users; of a `Total`, one of each group that has users among these; of a
    `PerHost`, one from each host."""

    kind: type[Rows | PerHost | Total]  #: the class of the message
    users: Indices | None = None  #: members, sorted; None: all of them
    extents: Mapping[str, int] = field(default_factory=dict)  #: of the axes of its arrays, by name
    check: Check | None = None  #: of a message and its members: ProtocolError for values that cannot be right
    groups: Indices | None = None  #: of a `Total`: (n,) the groups of all members
    is_judged: bool = False  #: whether `federation.robust` judges its vectors, so that NaN and infinity there do not end the run


def check_wanted(messages: Sequence[Message], own: Indices, wanted: Sequence[Wanted]) -> None:
    """ProtocolError unless the messages of a host with these members are all that is wanted of them, and nothing else."""
    kinds = {one.kind for one in wanted}
    if (other := next((message for message in messages if type(message) not in kinds), None)) is not None:
        raise ProtocolError(f"it sent {other.kind}, which it was not asked for")
    for one in wanted:
        found = [message for message in messages if isinstance(message, one.kind)]
        if one.groups is not None:
            _check_groups(found, own if one.users is None else np.intersect1d(one.users, own), one)
        users = [own if isinstance(message, Total | PerHost) or message.users is None else message.users for message in found]
        if one.groups is None and (len(users) != 1 or users[0] is not own or one.users is not None):  # most exchanges bring all users once
            mine = own if one.users is None else np.intersect1d(one.users, own)
            check_senders(one.kind.kind, np.sort(np.concatenate([_NOBODY, *users])), mine)
        for message, members in zip(found, users, strict=True):
            for name, spec in message.specs:
                for axis, size in zip(spec.shape, getattr(message, name).shape, strict=True):
                    if (extent := one.extents.get(str(axis), size)) != size:
                        raise ProtocolError(f"{message.kind}.{name}: axis {axis!r} is {size}, wanted {extent}")
            if one.check is not None:
                one.check(message, members)


def _check_groups(found: Sequence[Message], users: Indices, one: Wanted) -> None:
    """ProtocolError unless there are the sums of exactly the groups of these members, once."""
    assert one.groups is not None  # noqa: S101 - of a `Total`
    wanted = distinct(one.groups[users])
    groups = [group for message in found if isinstance(message, Total) for group in message.groups.tolist()]
    if len(found) > 1 or groups != wanted.tolist():
        shown = f"groups {groups[:_MAX_SHOWN]}, wanted {wanted[:_MAX_SHOWN].tolist()}, {wanted.size} in all"
        raise ProtocolError(f"{one.kind.kind} came for {shown}")


_MAX_SHOWN = 4
_NOBODY: Indices = np.zeros(0, dtype=np.int64)
