"""A whole masked sum without a network: hosts, a parent, and whoever changes what passes between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.masked.frames import Advert
from coterie.masked.gathering import Gathering
from coterie.masked.party import Party
from coterie.masked.roster import Roster, Rules
from coterie.masked.streams import Words

RUN, STAGE = "run", "1"
Tamper = Callable[[str, int, Any], Any]  # (step, host, frame) -> frame


class Memory:
    """A log that outlives its party, as a file does."""

    def __init__(self) -> None:
        self.kept: list[Mapping[str, Any]] = []

    def entries(self) -> Sequence[Mapping[str, Any]]:
        return list(self.kept)

    def append(self, entry: Mapping[str, Any]) -> None:
        self.kept.append(dict(entry))


def untouched(step: str, host: int, frame: Any) -> Any:
    return frame


def drawing(seed: int) -> Callable[[int], bytes]:
    """Secrets that are the same in each run of a test."""
    return np.random.default_rng(seed).bytes


def parties(n: int, rules: Rules) -> list[Party]:
    return [Party(RUN, f"h{place:03}", rules, Memory(), draw=drawing(place)) for place in range(n)]


def met(hosts: Sequence[Party], tamper: Tamper = untouched) -> Roster:
    """The hosts after the exchange of keys, and the roster as their parent knows it."""
    adverts: list[Advert] = [tamper("advertise", place, host.advertise(STAGE)) for place, host in enumerate(hosts)]
    for place, host in enumerate(hosts):
        host.meet(STAGE, tamper("share", place, adverts))
    return Roster.of(RUN, STAGE, adverts)


def total_of(
    hosts: Sequence[Party],
    roster: Roster,
    rules: Rules,
    terms: Mapping[int, Words],
    *,
    exchange: int = 1,
    lost: Collection[int] = (),
    silent: Collection[int] = (),
    tamper: Tamper = untouched,
) -> Words:
    """The sum of the hosts of `terms`: those `lost` answer nothing, those `silent` do not take part in unmasking."""
    among = sorted(terms)
    gathering = Gathering(roster, roster.setting(exchange, among, rules), next(iter(terms.values())).size)
    for place in among:
        if place not in lost:
            gathering.add(place, tamper("masked", place, hosts[place].masked(STAGE, exchange, among, terms[place].copy())))
    if rules.recovers:
        for place in gathering.survivors:
            if place not in silent:
                asked = tamper("ask", place, gathering.request(place))
                gathering.reveal(place, tamper("unmask", place, hosts[place].unmask(exchange, asked)))
    else:
        assert gathering.survivors == tuple(among)
    return gathering.total()
