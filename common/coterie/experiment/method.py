"""The common part of a method: one value `METHOD` in `coterie/methods/NAME.py`. Its halves are `SERVER` and `CLIENT` or `UPDATE`.

Generic code reads these fields and never looks up names in a module, so the type checker finds misspelt ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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

    reveals: tuple[Reveal, ...] = ()  # who learns what from its messages
    steps: Mapping[str, str] = field(default_factory=dict)  # what the steps of its messages carry, in words


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
    alternatives: tuple[frozenset[str], ...] = ()  # sets of keys of which an experiment has one: the same value in different conventions
    problem: Mapping[str, Any] | None = None  # the section `problem` of experiments without one
    has_known_clusters: bool = False  # whether users bring their clusters, so that it finds none
    is_reference: bool = False  # whether it may run beside another method, on the same federation
    stands_alone: bool = True  # whether its runs leave models of their own, and start from no other run
    cluster_rule: Callable[[Any], str] = lambda *_: ""  # given the configuration: when users are in one cluster, as part of a sentence
    # Given the configuration of a finished run: the section `method` for new users of that run. ConfigError if they cannot join; None if no
    # run of the method leaves anything for them.
    adapted: Callable[[Any], Mapping[str, Any]] | None = None

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)
