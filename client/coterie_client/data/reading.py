"""What reading gives: the users, and notes on what was left out, dropped or converted, so that nothing is done in silence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coterie_client.data.notes import Note
from coterie_client.data.users import UserData


@dataclass(frozen=True)
class Reading:
    """Users with their rows, in natural order of names, and what is to be said about them."""

    users: Sequence[UserData]
    notes: tuple[Note, ...] = ()
