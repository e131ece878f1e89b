"""The common part of a method: one value `METHOD` in `coterie/methods/NAME.py`. Its halves are `SERVER` and `CLIENT` or `UPDATE`.

Generic code reads these fields and never looks up names in a module, so the type checker finds misspelt ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from coterie.experiment.reveals import Reveal
    from coterie.experiment.settings import Settings

Kind = Literal["convex", "network"]  # kind of the users' models
CONVEX: Final[frozenset[Kind]] = frozenset({"convex"})
NETWORK: Final[frozenset[Kind]] = frozenset({"network"})
ANY_MODEL = CONVEX | NETWORK


@dataclass(frozen=True)
class Meaningless:
    """Keys of a method without meaning for one kind of models, and the reason: a clause that follows "but"."""

    keys: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A method, or steps of every run: anything that has its own messages."""

    reveals: tuple[Reveal, ...]  # who learns what from its messages


@dataclass(frozen=True, kw_only=True)
class Method(Room):
    """A method. Its name is the default of `config.name`."""

    config: type[Settings]
    models: frozenset[Kind] = CONVEX  # supported kinds
    room: str = ""  # the family whose halves it uses, if it has none of its own
    users_need_minimisers: bool = True  # on convex problems: whether users without a unique minimiser of their own loss are refused
    needs_sizes: bool = False  # whether the server needs the users' numbers of rows, also on convex problems
    convex_defaults: Mapping[str, Any] = field(default_factory=dict)  # other defaults on a convex problem
    meaningless: Mapping[Kind, Meaningless] = field(default_factory=dict)
    own_sense: tuple[str, ...] = ()  # inherited keys that a comparison does not copy from another method

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)
