"""The common part of a method: one value `METHOD` in `coterie/methods/NAME.py`. Its halves are `SERVER` and `CLIENT` or `UPDATE`.

Generic code reads these fields and never looks up names in a module, so the type checker finds misspelt ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from coterie.experiment.privacy import Privacy
    from coterie.experiment.reveals import Reveal
    from coterie.experiment.settings import Settings

Kind = Literal["convex", "network"]  # kind of the users' models
Intervals = Literal["", "groups", "nested"]
Fact = Literal["smoothness", "strong_convexity"]  # of a user's convex loss: L_i and mu_i, which take a decomposition to compute
CONVEX: Final[frozenset[Kind]] = frozenset({"convex"})
NETWORK: Final[frozenset[Kind]] = frozenset({"network"})
ANY_MODEL = CONVEX | NETWORK


@dataclass(frozen=True)
class Meaningless:
    """Keys of a method without meaning for one kind of models, and the reason: a clause that follows "but"."""

    keys: tuple[str, ...] = ()
    why: str = ""
    unless: Mapping[str, Any] = field(default_factory=dict)  #: values of other keys with which they have a meaning


@dataclass(frozen=True, kw_only=True)
class Room:
    """A method, or steps of every run: anything that has its own messages."""

    reveals: tuple[Reveal, ...] = ()  #: who learns what from its messages
    steps: Mapping[str, str] = field(default_factory=dict)  #: what the steps of its messages carry, in words


@dataclass(frozen=True, kw_only=True)
class Method(Room):
    """A method. Its name is the default of `config.name`."""

    config: type[Settings]  #: the keys of `method` in an experiment; the default of its `name` is the method's name
    models: frozenset[Kind] = CONVEX  #: supported kinds
    room: str = ""  #: the family whose halves it uses, if it has none of its own
    users_need_minimisers: bool = True  #: on convex problems: whether users without a unique minimiser of their own loss are refused
    #: Kinds of models for which its server half asks for sums alone (`federation.total`) with `exact_sums: true`. `Reveal.summed` says what
    #: a host then sends.
    sums: frozenset[Kind] = frozenset()
    needs_sizes: bool = False  #: whether the server needs the users' numbers of rows, also on convex problems
    #: Given the configuration: what the server must know of each user's convex loss before the first round. Users send nothing else.
    facts: Callable[[Any], frozenset[Fact]] = lambda _: frozenset()
    convex_defaults: Mapping[str, Any] = field(default_factory=dict)  #: other defaults on a convex problem
    meaningless: Mapping[Kind, Meaningless] = field(default_factory=dict)  #: keys that a kind of models refuses
    own_sense: tuple[str, ...] = ()  #: inherited keys that a comparison does not copy from another method
    tries: str = ""  #: the key that lists values for one run to try, of which held-out rows choose: what `coterie tune` does for others
    strengths: tuple[str, ...] = ()  #: keys that say how personal its models are: their best value depends on the data
    alternatives: tuple[frozenset[str], ...] = ()  #: sets of keys of which an experiment has one: the same value in different conventions
    problem: Mapping[str, Any] | None = None  #: the section `problem` of experiments without one
    #: What `coterie check method` sets in its small federation for this method, as --set does: "problem.reduction=sum".
    checked_with: tuple[str, ...] = ()
    has_known_clusters: bool = False  #: whether users bring their clusters, so that it finds none
    is_reference: bool = False  #: whether it may run beside another method, on the same federation
    #: Whose one model a stage leaves, where users share it: `predict` gives it to users that the run has not seen.
    one_model_for: Literal["", "everyone", "cluster"] = ""
    stands_alone: bool = True  #: whether its runs leave models of their own, and start from no other run
    cluster_rule: Callable[[Any], str] = lambda *_: ""  #: given the configuration: when users are in one cluster, as part of a sentence
    #: Given the configuration: which users are tied to each other, as a sentence without a stop; "" for methods without ties.
    ties: Callable[[Any], str] = lambda _: ""
    averages: Mapping[str, str] = field(default_factory=dict)  #: closing figures "X" that count averages, beside "X_expected"
    adapts: str = ""  #: the parameter that it changes on the way: the closing figures "X_first" and "X" are its first and its last value
    #: Given the configuration (None: the defaults): what standard errors of its models are, with `inference: true`. "groups": the users of
    #: a cluster (without clusters: each user) have one model, the minimiser of the sum of their losses. "nested": models of users in known
    #: clusters, shrunk to the cluster's and the common model. "": there are none, because the models are biased.
    intervals: Callable[[Any], Intervals] = lambda _: ""
    #: Given the configuration of a finished run: the section `method` for new users of that run. ConfigError if they cannot join; None if
    #: no run of the method leaves anything for them.
    adapted: Callable[[Any], Mapping[str, Any]] | None = None

    #: Given the configuration and the kind of models: why no rule of `federation.robust` can replace its means, and what a
    #: user who lies does then, as a clause; "" where one can.
    no_rule: Callable[[Any, Kind], str] = lambda *_: "the server uses more than a mean of them"
    #: Why its halves need what they have sent and received to be exact, as a clause: `federation.compress` may then lose nothing.
    continues: str = ""

    #: The units (`privacy.unit`) that it can protect by clipping and noise.
    protects: frozenset[Literal["row", "user"]] = frozenset()
    #: Given the section `privacy`: other defaults.
    private_defaults: Callable[[Privacy], Mapping[str, Any]] = lambda _: {}
    #: Given the configuration and the section: what sends numbers without noise, and what is wanted instead; "" for nothing.
    leaks: Callable[[Any, Privacy], str] = lambda *_: ""
    #: Whether noise goes to sums of gradients and Hessians, which `privacy.clip_hessian` bounds too.
    noises_sums: bool = False
    unprotected: str = "no mechanism is known to us that bounds what its messages tell"  #: why it cannot protect the others: a clause

    def fault(self, listed: Mapping[str, Any]) -> str:
        """What does not fit in the module of this method, given the names in it: the end of a sentence; "" for nothing."""
        del listed
        return ""

    @property
    def name(self) -> str:
        return str(self.config.model_fields["name"].default)


def shared_keys(keys: Iterable[str], own: Method, other: Method, kind: Kind) -> list[str]:
    """Those keys of the method `own` that mean the same to `other` on models of this kind: both have them from a class in common.

    Many methods have a penalty, each its own. A grid lists settings of its own method.
    """
    keys = list(keys)
    if own is other:
        return keys
    shared = [base for base in own.config.__mro__ if issubclass(other.config, base)]
    left_out = {"grid", *other.meaningless.get(kind, Meaningless()).keys, *other.own_sense}
    return [key for key in keys if key not in left_out and any(key in getattr(base, "model_fields", ()) for base in shared)]
