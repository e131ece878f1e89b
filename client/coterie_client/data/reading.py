"""The result of reading data: users, with notes on everything that was left out, dropped or converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie_client.data.notes import Note
from coterie_client.data.users import UserData


@dataclass(frozen=True)
class Reading:
    """Users with their rows, in natural order of names, and notes on them."""

    users: Sequence[UserData]
    notes: tuple[Note, ...] = ()
