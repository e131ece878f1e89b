"""Blocks to messages and back: S5, and for placement paper all other messages of PDMM's server half.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1. ProtocolError for answers that do not fit the task.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError
from coterie.families.pdmm_messages import (
    AllBlocks,
    AllDuals,
    AllSplits,
    BroadcastModels,
    ChosenModels,
    ChosenSplits,
    Degrees,
    Duals,
    Excesses,
    OwnStart,
    StartModels,
    UpdatedModels,
    UpdatedSplits,
    Values,
    ValuesWanted,
)
from coterie.wire.messages import Message
from coterie_server.interface.half import Replies
from coterie_server.interface.wanted import Wanted
from coterie_server.methods.pdmm import pairs

NOBODY = np.zeros(0, dtype=np.int64)


def start(x: Array | None, *, is_lean: bool) -> list[Message]:
    """S0: x^0 (n, d), one row when all are equal; nothing for zeros, where users start by themselves."""
    if x is None:
        return []
    if is_common(x):
        return [StartModels(x[:1])]
    return [OwnStart(x) if is_lean else StartModels(x)]


def is_common(x: Array) -> bool:
    """Whether all rows are the same model."""
    return bool((x == x[0]).all())


def degrees(layout: pairs.Layout, users: Indices) -> Message:
    """The weight of each of these users in (16)."""
    return Degrees(np.broadcast_to(layout.degree, (layout.n, 1))[users, 0], users=users)


def selection(layout: pairs.Layout, chosen: pairs.Chosen) -> list[Message]:
    """S1; a pair drawn as such is sent to both of its users."""
    if chosen.x is None or chosen.z is None:
        return [AllBlocks()]
    messages: list[Message] = []
    if chosen.x.size:
        messages.append(ChosenModels(users=chosen.x))
    if chosen.z.size:
        owner, partner, _, _ = layout.directed(chosen.z)
        messages.append(ChosenSplits(partner, users=owner))
    return messages


def models(x: Array, users: Indices | None) -> list[Message]:
    """S7: the models (n, d) of `users`, None for all."""
    if users is None:
        return [BroadcastModels(x, NOBODY)]
    return [BroadcastModels(x[users], users)] if users.size else []


def duals(layout: pairs.Layout, mu: Array, places: Indices | None) -> list[Message]:
    """S10: mu (d, m) at `places`, None for all, each to its owner; of a pair kept once, to both users with opposite signs."""
    if places is None:
        return [AllDuals(pairs.to_users(layout, mu))]
    if not places.size:
        return []
    owner, partner, place, sign = layout.directed(places)
    return [Duals(np.ascontiguousarray((mu[:, place] * sign).T), partner, users=owner)]


def wanted(users: Indices | None, d: int, extra: Sequence[Message], *, is_stochastic: bool) -> list[Wanted]:
    """S5 of placement lean: what `users` (None: all) return, and what everyone answers to `extra`."""
    excesses = [Wanted(Excesses, users)] if is_stochastic else []
    values = [Wanted(Values)] if any(isinstance(message, ValuesWanted) for message in extra) else []
    return [Wanted(UpdatedModels, users, {"d": d}), *excesses, *values]


def with_models(x: Array, users: Indices | None, replies: Replies) -> Array:
    """S5 and S4: x (n, d) with the rows that `users` sent, None for all."""
    if users is not None and not users.size:
        return x
    message = replies.get(UpdatedModels)
    if users is None and message is not None and message.users is None and message.x.shape == x.shape:
        return message.x
    wanted = np.arange(len(x)) if users is None else users
    senders = NOBODY if message is None else np.arange(len(x)) if message.users is None else message.users
    if message is None or message.x.shape != (len(wanted), x.shape[1]) or not np.array_equal(senders, wanted):
        raise ProtocolError(f"S5 brought the models of users {senders.tolist()}, wanted {wanted.tolist()} with {x.shape[1]} entries each")
    if users is None:  # who named them all
        return message.x
    new = x.copy()
    new[users] = message.x
    return new


def with_splits(layout: pairs.Layout, z: Array, places: Indices | None, replies: Replies) -> Array:
    """S6 and S4: z (d, m) with the vectors that the users sent for `places`, None for all."""
    if places is None:
        every = replies.get(AllSplits)
        wanted = (layout.n, layout.n - 1, len(z))
        if every is None or every.z.shape != wanted:
            raise ProtocolError(f"S6 brought splits of shape {None if every is None else every.z.shape}, wanted {wanted}")
        return pairs.from_users(layout, every.z)
    if not places.size:
        return z
    some = replies.get(UpdatedSplits)
    if some is None or some.users is None or some.z.shape[1] != len(z):
        raise ProtocolError(f"S6 brought no splits by owner and partner, wanted {places.size} of {len(z)} entries")
    found = layout.place(some.users, some.partner)
    order = np.argsort(found)
    if not np.array_equal(found[order], places):
        raise ProtocolError(f"S6 brought {found.size} splits that are not the {places.size} chosen ones")
    new = z.copy()
    new[:, places] = some.z[order].T
    return new
