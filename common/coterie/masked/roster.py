"""The hosts of a stage and their public keys, which all of them must know alike."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from coterie.errors import ProtocolError
from coterie.masked import graph
from coterie.masked.frames import PUBLIC_BYTES, Advert, Setting
from coterie.masked.streams import bound

# Raises ProtocolError unless the advert's signature and certificate hold for the text.
Verifier = Callable[[Advert, bytes], None]


@dataclass(frozen=True)
class Rules:
    """What the experiment says of masked sums."""

    fraction: float = 2 / 3  #: of the hosts, how many must be left in an exchange; more than a half
    recovers: bool = False  #: whether hosts may be lost
    fewest: int | None = None  #: how many hosts a total must be of, at least 2; None: `fraction` of all hosts
    hosts: int = 2  #: how many hosts the roster of a stage must have, at least 2

    def __post_init__(self) -> None:
        if not 0.5 < self.fraction <= 1.0:
            raise ValueError(f"the fraction of hosts is {self.fraction:g}, wanted more than 0.5 and at most 1")
        if self.fewest is not None and self.fewest < 2:
            raise ValueError(f"totals may be of {self.fewest} hosts, wanted at least 2")


@dataclass(frozen=True)
class Roster:
    """In the order of names. A host's place is its number there, from 0."""

    run: str
    stage: str
    names: tuple[str, ...]
    publics: tuple[bytes, ...]  #: of 32 bytes

    @staticmethod
    def of(run: str, stage: str, adverts: Sequence[Advert]) -> Roster:
        """ProtocolError for fewer than two hosts, names that are not in order or come twice, and keys that are none or come twice."""
        names, publics = tuple(advert.name for advert in adverts), tuple(advert.public for advert in adverts)
        if len(names) < 2:
            raise ProtocolError(f"{len(names)} hosts are to mask their sums, wanted at least two")
        if list(names) != sorted(set(names)):
            raise ProtocolError("the hosts that mask their sums are not in the order of their names, each once")
        if len(set(publics)) < len(publics) or any(len(public) != PUBLIC_BYTES for public in publics):
            raise ProtocolError(f"the hosts that mask their sums have no keys of {PUBLIC_BYTES} bytes, each another one")
        return Roster(run, stage, names, publics)

    @cached_property
    def digest(self) -> bytes:
        parts = [part for pair in zip(self.names, self.publics, strict=True) for part in pair]
        return hashlib.sha256(bound("roster", self.run, self.stage, *parts)).digest()

    def check_size(self, rules: Rules) -> None:
        """ProtocolError for fewer hosts than the experiment says: among few, a parent and one host that helps it could see the others."""
        if len(self.names) < rules.hosts:
            raise ProtocolError(f"{len(self.names)} hosts are to mask their sums, wanted the experiment's {rules.hosts}")

    def fewest(self, rules: Rules) -> int:
        """How many hosts a total must be of."""
        return rules.fewest or graph.least(len(self.names), rules.fraction)

    def setting(self, exchange: int, among: Sequence[int], rules: Rules) -> Setting:
        """ProtocolError unless `among` are enough of the hosts, ascending."""
        places, n = tuple(among), len(self.names)
        at_least = self.fewest(rules)
        if list(places) != sorted(set(places)) or not places or places[0] < 0 or places[-1] >= n:
            raise ProtocolError(f"a masked sum is asked of hosts that are not places among {n}, ascending, each once")
        if len(places) < at_least:
            raise ProtocolError(f"a masked sum is asked of {len(places)} hosts, wanted at least {at_least} of {n}")
        found = _graph(self.digest, places, rules.fraction)
        thresholds = {place: graph.least(len(listed) + 1, rules.fraction) for place, listed in found.items()}
        return Setting(exchange, places, found, thresholds, max(at_least, graph.least(len(places), rules.fraction)), rules.recovers)


@lru_cache(maxsize=64)
def _graph(digest: bytes, places: tuple[int, ...], fraction: float) -> dict[int, tuple[int, ...]]:
    return graph.neighbours(places, digest, fraction)
