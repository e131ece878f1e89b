"""What a method is to both sides: one value `METHOD` in `coterie/methods/NAME.py`. Its halves are `SERVER` and `CLIENT` or `UPDATE`.

Generic code reads these fields. It never looks for a name in a module, so a misspelt one is an error of the type checker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from coterie.experiment.reveals import Reveal
    from coterie.experiment.settings import Settings

Kind = Literal["convex", "network"]  # of users' models
CONVEX: Final[frozenset[Kind]] = frozenset({"convex"})
NETWORK: Final[frozenset[Kind]] = frozenset({"network"})
ANY_MODEL = CONVEX | NETWORK


@dataclass(frozen=True)
class Meaningless:
    """Keys of a method that mean nothing for one kind of models, and why: a sentence that follows "but"."""

    keys: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What has messages of its own: a method, or steps that are part of every run."""

    reveals: tuple[Reveal, ...]  # who learns what from its messages


@dataclass(frozen=True, kw_only=True)
class Method(Room):
    """A method. Its name is the default of `config.name`."""

    config: type[Settings]
    models: frozenset[Kind] = CONVEX  # what it is for
    room: str = ""  # the family whose halves it uses where it has none of its own
    users_need_minimisers: bool = True  # whether a user whose own loss has no unique minimiser is refused, of convex problems
    needs_sizes: bool = False  # whether the server has to know how many rows users have, of convex problems too
    convex_defaults: Mapping[str, Any] = field(default_factory=dict)  # settings that start from other values on a convex problem
    meaningless: Mapping[Kind, Meaningless] = field(default_factory=dict)
    own_sense: tuple[str, ...] = ()  # keys that a comparison does not take over from another method, though both inherit them

    @property
    def name(self) -> str:
        """The method's name."""
        return str(self.config.model_fields["name"].default)


__all__ = ["ANY_MODEL", "CONVEX", "NETWORK", "Kind", "Meaningless", "Method", "Room"]
