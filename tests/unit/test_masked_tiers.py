"""Masked sums in two tiers: the total of clusters' totals is the plain sum, and no kill of anybody uses a mask twice."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import CoterieError
from coterie.masked import party, streams
from coterie.masked.gathering import Gathering
from coterie.masked.graph import least
from coterie.masked.party import Party
from coterie.masked.roster import Roster, Rules
from coterie.masked.streams import Words
from tests.masking import RUN, STAGE, Memory, met, parties, total_of

AMONG = (0, 1, 2)  # aggregators, and the hosts of each
N_EXCHANGES = 4


@settings(max_examples=30)
@given(st.data())
def test_the_total_over_clusters_is_the_plain_sum_whichever_hosts_are_lost_inside(data: st.DataObject) -> None:
    within, between = Rules(2 / 3, recovers=True), Rules()
    sizes = data.draw(st.lists(st.integers(2, 5), min_size=2, max_size=4))
    rng = np.random.default_rng(len(sizes))
    totals: dict[int, Words] = {}
    wanted = np.zeros(3, dtype=np.uint64)
    for cluster, n in enumerate(sizes):
        terms = {place: rng.integers(0, 2**64, 3, dtype=np.uint64) for place in range(n)}
        lost = data.draw(st.sets(st.integers(0, n - 1), max_size=n - least(n, within.fraction)))
        hosts = parties(n, within)
        totals[cluster] = total_of(hosts, met(hosts), within, terms, lost=lost)
        wanted += np.sum([values for place, values in terms.items() if place not in lost], axis=0, dtype=np.uint64)
    aggregators = parties(len(sizes), between)
    assert np.array_equal(total_of(aggregators, met(aggregators), between, totals), wanted)


# ---- kills


class KilledError(Exception):
    pass


class Mortal(Memory):
    """A log whose process is killed before or behind one of the next entries. With `forgets` the disk loses terms."""

    def __init__(self, chance: random.Random, *, forgets: bool) -> None:
        super().__init__()
        self._chance, self._forgets = chance, forgets

    def append(self, entry: Mapping[str, Any]) -> None:
        dice = self._chance.random()
        if dice < 0.1:
            raise KilledError
        if not (self._forgets and "content" in entry):
            super().append(entry)
        if dice < 0.2:
            raise KilledError


class Member:
    """A party that is killed, comes back from its log, and does its work anew."""

    def __init__(self, name: str, chance: random.Random, draw: Any, *, forgets: bool) -> None:
        self.log, self._born = Mortal(chance, forgets=forgets), lambda: Party(RUN, name, Rules(), self.log, draw=draw)
        self.party, self.n_kills = self._born(), 0

    def does(self, work: Any) -> Any:
        while True:
            try:
                return work(self.party)
            except KilledError:
                self.party = self._born()
                self.n_kills += 1


class Life:
    """Three clusters of three hosts and their aggregators through some exchanges. An aggregator goes back to an earlier one at any time.

    What it says then must be what it has said. With `forgets` members forget their terms, and `goes_astray`: an aggregator that has gone
    back gets other answers from its hosts, as where one of them has lost its state.
    """

    def __init__(self, chance: random.Random, *, forgets: bool = False, goes_astray: bool = False) -> None:
        rng = np.random.default_rng(chance.randrange(2**32))
        self.chance, self.goes_astray = chance, goes_astray
        self.above = [Member(f"a{place}", chance, rng.bytes, forgets=forgets) for place in AMONG]
        self.below = [[Member(f"h{place}", chance, rng.bytes, forgets=forgets) for place in AMONG] for _ in AMONG]
        self.terms = rng.integers(0, 2**64, (N_EXCHANGES, 3, 3, 4), dtype=np.uint64)  # by exchange, cluster and host
        self.rosters = [self._met(members) for members in (self.above, *self.below)]
        self.covered: dict[tuple[str, int], bytes] = {}  # by member and exchange: what it has sent
        self.n_changed = 0  # how often a member has sent something else than before

    def _met(self, members: list[Member]) -> Roster:
        adverts = [member.does(lambda party: party.advertise(STAGE)) for member in members]
        for member in members:
            member.does(lambda party: party.meet(STAGE, adverts))
        return Roster.of(RUN, STAGE, adverts)

    def _sum(self, members: list[Member], roster: Roster, exchange: int, terms: Words, whose: str) -> Words:
        gathering = Gathering(roster, roster.setting(exchange, AMONG, Rules()), terms.shape[1])
        for place, member in enumerate(members):
            came = member.does(lambda party, own=terms[place]: party.masked(STAGE, exchange, AMONG, own.copy()))
            sent = came.values.tobytes()
            self.n_changed += self.covered.setdefault((f"{whose}{place}", exchange), sent) != sent
            gathering.add(place, came)
        assert gathering.survivors == AMONG
        return gathering.total()

    def violations(self) -> int:
        """How often a member has masked two different terms with one stream."""
        at, n_steps = 0, 0
        while at < N_EXCHANGES and n_steps < 20:
            n_steps += 1
            terms = self.terms[at].copy()
            terms[0, 0, 0] += np.uint64(self.goes_astray and self.chance.random() < 0.5)
            try:
                clusters = enumerate(self.below)
                totals = [self._sum(members, self.rosters[1 + c], at + 1, terms[c], f"h{c}") for c, members in clusters]
                total = self._sum(self.above, self.rosters[0], at + 1, np.array(totals), "a")
            except CoterieError:  # a member refuses other terms than before
                assert self.goes_astray
                continue
            assert self.goes_astray or np.array_equal(total, self.terms[at].sum(axis=(0, 1), dtype=np.uint64))
            at = self.chance.randrange(at + 1) if self.chance.random() < 0.4 else at + 1
        return self.n_changed

    @property
    def n_kills(self) -> int:
        return sum(member.n_kills for members in (self.above, *self.below) for member in members)


def lives(n: int, **how: Any) -> list[Life]:
    return [Life(random.Random(seed), **how) for seed in range(n)]  # noqa: S311 - a test's chance


def test_no_mask_is_used_twice_though_aggregators_and_hosts_are_killed_a_thousand_times() -> None:
    found = lives(60)
    assert sum(life.violations() for life in found) == 0
    assert sum(life.n_kills for life in found) > 1000
    assert sum(life.violations() for life in lives(20, goes_astray=True)) == 0


def test_the_same_lives_find_the_fault_of_members_that_forget() -> None:
    assert sum(life.violations() for life in lives(20, forgets=True, goes_astray=True)) > 0


def test_seeds_of_hosts_and_of_their_aggregators_have_nothing_in_common(monkeypatch: pytest.MonkeyPatch) -> None:
    used: dict[bytes, int] = {}
    real = streams.add_streams

    def added(values: Words, added: list[bytes], taken: list[bytes]) -> None:
        for seed in (*added, *taken):
            used[seed] = used.get(seed, 0) + 1
        real(values, added, taken)

    monkeypatch.setattr(party, "add_streams", added)
    (life,) = lives(1)
    for at in range(2):
        for cluster, members in enumerate(life.below):
            life._sum(members, life.rosters[1 + cluster], at + 1, life.terms[at, cluster], f"h{cluster}")
        life._sum(life.above, life.rosters[0], at + 1, life.terms[at, 0], "a")
    assert set(used.values()) == {2}  # the two ends of a pair
    assert len(used) == 2 * 4 * 3
