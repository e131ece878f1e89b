"""Masked sums: the total is the plain sum whoever is lost, a curious parent sees uniform bits, and nothing is used twice."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from coterie.errors import CoterieError, ProtocolError, RunError
from coterie.masked import graph, party, streams
from coterie.masked.frames import Advert, Survivors
from coterie.masked.gathering import Gathering
from coterie.masked.graph import degree, least, neighbours
from coterie.masked.party import Party
from coterie.masked.roster import Roster, Rules
from coterie.masked.sharing import PRIME, joined, split
from coterie.masked.streams import Words, add_streams, commitment
from tests.masking import RUN, STAGE, Memory, drawing, met, parties, total_of

RECOVERING = Rules(2 / 3, recovers=True)


def terms_of(n: int, size: int, seed: int = 0) -> dict[int, Words]:
    rng = np.random.default_rng(seed)
    return {place: rng.integers(0, 2**64, size, dtype=np.uint64) for place in range(n)}


def plain(terms: Mapping[int, Words], without: Collection[int] = ()) -> Words:
    return np.sum([values for place, values in terms.items() if place not in without], axis=0, dtype=np.uint64)


# ---- the total


@settings(max_examples=60)
@given(st.data())
def test_the_total_is_the_plain_sum_whoever_is_lost_at_any_step_or_it_is_refused(data: st.DataObject) -> None:
    n = data.draw(st.integers(2, 7))
    rules = Rules(data.draw(st.sampled_from([0.51, 2 / 3, 0.8, 1.0])), recovers=True)
    some = st.sets(st.integers(0, n - 1), max_size=2)
    never_asked, lost, silent = data.draw(some) - {0}, data.draw(some), data.draw(some)
    terms = {place: values for place, values in terms_of(n, data.draw(st.integers(0, 40)), n).items() if place not in never_asked}
    hosts = parties(n, rules)
    roster = met(hosts)
    left = set(terms) - lost
    n_opened = len(left - silent)
    is_enough = len(left) >= least(n, rules.fraction) and (n_opened >= least(len(terms), rules.fraction))
    if is_enough:
        assert np.array_equal(total_of(hosts, roster, rules, terms, lost=lost, silent=silent), plain(terms, lost))
    else:
        with pytest.raises((RunError, ProtocolError), match="wanted at least"):
            total_of(hosts, roster, rules, terms, lost=lost, silent=silent)


@given(st.integers(2, 6), st.integers(0, 40_000), st.integers(0, 2**32))
@settings(max_examples=15)
def test_where_nobody_may_be_lost_the_masks_cancel_without_another_message(n: int, size: int, seed: int) -> None:
    rules = Rules()
    hosts = parties(n, rules)
    roster, terms = met(hosts), terms_of(n, size, seed)
    assert np.array_equal(total_of(hosts, roster, rules, terms), plain(terms))
    with pytest.raises(RunError, match=f"{n - 1} of {n} hosts sent terms of a masked sum, wanted at least {n}"):
        total_of(hosts, roster, rules, terms, exchange=2, lost=[0])
    with pytest.raises(ProtocolError, match="no host may be lost"):
        hosts[0].unmask(1, Survivors(tuple(range(n)), {}))


def test_hosts_that_share_masks_with_some_neighbours_alone_have_the_plain_sum_as_total(monkeypatch: pytest.MonkeyPatch) -> None:
    n, lost = 30, {3, 17, 29}
    monkeypatch.setattr(graph, "degree", lambda n, _: min(8, n - 1))
    hosts = parties(n, RECOVERING)
    roster, terms = met(hosts), terms_of(n, 3)
    assert roster.setting(1, range(n), RECOVERING).thresholds[0] == least(9, RECOVERING.fraction) == 6
    assert np.array_equal(total_of(hosts, roster, RECOVERING, terms, lost=lost), plain(terms, lost))


def test_a_ring_gives_each_place_equally_many_neighbours_both_ways_and_depends_on_the_seed() -> None:
    places = list(range(5, 205))
    found = neighbours(places, b"a", 2 / 3)
    assert {len(listed) for listed in found.values()} == {degree(200, 2 / 3)}
    assert all(place in found[other] for place, listed in found.items() for other in listed)
    assert found != neighbours(places, b"b", 2 / 3)


def test_few_hosts_are_all_neighbours_and_more_than_half_must_always_be_left() -> None:
    assert neighbours([2, 5, 9], b"", 2 / 3) == {2: (5, 9), 5: (2, 9), 9: (2, 5)}
    assert [least(n, 2 / 3) for n in (2, 3, 6, 9, 20)] == [2, 2, 4, 6, 14]
    assert [least(n, 0.51) for n in (2, 3, 4, 10)] == [2, 2, 3, 6]
    with pytest.raises(ValueError, match=r"the fraction of hosts is 0\.5, wanted more than 0\.5"):
        Rules(0.5)


# ---- shares


@given(st.binary(min_size=16, max_size=16), st.integers(1, 6), st.integers(0, 4), st.randoms())
def test_any_threshold_of_shares_gives_the_seed_and_fewer_are_refused(
    seed: bytes, threshold: int, more: int, chance: random.Random
) -> None:
    places = chance.sample(range(1, 40), threshold + more)
    shares = dict(zip(places, split(seed, threshold, places, b"key"), strict=True))
    chosen = {place: shares[place] for place in chance.sample(places, threshold)}
    assert joined(chosen, threshold) == seed
    del chosen[next(iter(chosen))]
    with pytest.raises(ProtocolError, match=f"{threshold - 1} shares of a mask are there, wanted {threshold}"):
        joined(chosen, threshold)


def test_seeds_are_shared_among_more_hosts_than_one_call_of_hkdf_has_coefficients_for(monkeypatch: pytest.MonkeyPatch) -> None:
    places, seed = range(1, 402), bytes(range(16))
    shares = dict(zip(places, split(seed, 400, places, b"key"), strict=True))
    assert joined(dict(list(shares.items())[1:]), 400) == seed
    with pytest.raises(ProtocolError, match="do not fit together"):  # a lower degree would fit
        joined(dict(list(shares.items())[:399]), 399)
    drawn: list[bytes] = []
    monkeypatch.setattr("coterie.masked.sharing.derived", lambda *of: drawn.append(streams.derived(*of)) or drawn[-1])
    split(seed, 400, places, b"key")
    assert len({*(piece[:32] for piece in drawn)}) == len(drawn) == 4


def test_fewer_shares_than_the_threshold_fit_every_seed() -> None:
    shares = dict(zip([1, 2], split(bytes(16), 3, [1, 2], b"key"), strict=True))
    for guessed in (0, 1, 2**127):
        # The third share that would make this seed: there always is one.
        at_zero = {0: guessed, **{place: int.from_bytes(share, "little") for place, share in shares.items()}}
        third = 0
        for place, value in at_zero.items():
            weight = 1
            for other in at_zero:
                if other != place:
                    weight = weight * (3 - other) * pow(place - other, -1, PRIME) % PRIME
            third = (third + value * weight) % PRIME
        assert joined({**shares, 3: third.to_bytes(17, "little")}, 3) == guessed.to_bytes(16, "little")


# ---- a curious parent


def bits_are_uniform(values: Words) -> bool:
    """Whether the octets' counts are those of uniform ones: a chance of 1e-9 to be wrong."""
    counts = np.bincount(values.view(np.uint8), minlength=256)
    expected = values.nbytes / 256
    return bool(np.sum((counts - expected) ** 2) / expected < chi2.isf(1e-9, 255))


def residual_of(victim: int, frame: Words, helpers: Sequence[Party], exchange: int, opened: Sequence[bytes] = ()) -> Words:
    """The frame of a host without all masks that the states of helpers, and seeds that were opened, can take off."""
    values = frame.copy()
    for helper in helpers:
        state = helper._met_in(STAGE)
        seed = state._seed(exchange, victim)
        add_streams(values, *(([], [seed]) if victim < state.place else ([seed], [])))
    for seed in opened:
        add_streams(values, [], [seed])
    return values


def frames_of(n: int, rules: Rules, size: int = 8192) -> tuple[list[Party], Gathering, dict[int, Words]]:
    """All frames of an exchange in which every term is 0."""
    hosts = parties(n, rules)
    roster = met(hosts)
    among = tuple(range(n))
    gathering = Gathering(roster, roster.setting(1, among, rules), size)
    return hosts, gathering, {place: hosts[place].masked(STAGE, 1, among, np.zeros(size, dtype=np.uint64)).values for place in among}


def without_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(party, "add_streams", lambda *_: None)


@pytest.mark.parametrize("is_masked", [True, False])
def test_every_frame_and_all_states_but_two_hosts_leave_uniform_bits(monkeypatch: pytest.MonkeyPatch, *, is_masked: bool) -> None:
    if not is_masked:
        without_masks(monkeypatch)
    hosts, _, frames = frames_of(6, Rules(5 / 6))  # the parent and t - 1 = 4 hosts against two
    seen = residual_of(0, frames[0], hosts[2:], 1)
    if is_masked:
        assert bits_are_uniform(seen)
        # Power: with the last seed too, the terms are there.
        assert not residual_of(0, frames[0], hosts[1:], 1).any()
        assert not (seen + residual_of(1, frames[1], hosts[2:], 1)).any()  # the sum of the two is theirs to know
    else:
        assert not bits_are_uniform(frames[0])


@pytest.mark.parametrize("has_own_seed", [True, False])
def test_a_late_frame_is_uniform_although_all_its_pairs_were_opened(monkeypatch: pytest.MonkeyPatch, *, has_own_seed: bool) -> None:
    if not has_own_seed:  # a build that masks with pairs alone
        real = streams.add_streams
        monkeypatch.setattr(party, "add_streams", lambda values, added, taken: real(values, added[1:], taken))
    hosts, _, frames = frames_of(5, RECOVERING)
    late = residual_of(0, frames[0], hosts[1:], 1)  # the parent said that host 0 was lost, and all others opened their seed with it
    assert bits_are_uniform(late) == has_own_seed


def test_fewer_shares_than_the_threshold_do_not_open_a_seed_and_the_threshold_does() -> None:
    rules = Rules(0.8, recovers=True)
    hosts, gathering, _ = frames_of(5, rules)
    setting = gathering._setting
    shares = {place + 1: hosts[0]._met_in(STAGE)._shares(setting)[i][0] for i, place in enumerate((1, 2, 3, 4))}
    wanted = commitment(hosts[0]._met_in(STAGE)._own_seed(1))
    assert setting.thresholds[0] == 4
    assert commitment(joined(shares, 4)) == wanted
    few = dict(list(shares.items())[:3])
    for guess in range(50):
        with contextlib.suppress(ProtocolError):  # no seed at all
            assert commitment(joined({**few, 5: guess.to_bytes(17, "little")}, 4)) != wanted


def test_what_is_opened_of_one_exchange_says_nothing_of_another() -> None:
    hosts = parties(3, RECOVERING)
    met(hosts)
    state = hosts[0]._met_in(STAGE)
    seeds = {state._seed(exchange, other) for exchange in range(50) for other in (1, 2)} | {state._own_seed(e) for e in range(50)}
    assert len(seeds) == 150
    assert state._seed(7, 1) == hosts[1]._met_in(STAGE)._seed(7, 0)


# ---- a coordinator that asks twice


def asked_once(survivors: Sequence[int], n: int = 4, rules: Rules = RECOVERING) -> tuple[list[Party], Gathering, Survivors]:
    hosts = parties(n, rules)
    roster, among = met(hosts), tuple(range(n))
    gathering = Gathering(roster, roster.setting(1, among, rules), 2)
    for place in among:
        came = hosts[place].masked(STAGE, 1, among, np.arange(2, dtype=np.uint64))
        if place in survivors:
            gathering.add(place, came)
    return hosts, gathering, gathering.request(survivors[0])


def restarted(host: Party) -> Party:
    return Party(RUN, host._name, host._rules, host._log)


@pytest.mark.parametrize("restart", [False, True])
def test_another_set_of_survivors_is_refused_also_after_a_restart(*, restart: bool) -> None:
    hosts, _, request = asked_once([0, 1, 2])
    first = hosts[0].unmask(1, request)
    host = restarted(hosts[0]) if restart else hosts[0]
    again = host.unmask(1, request)
    assert np.array_equal(first.own, again.own)
    assert np.array_equal(first.pairs, again.pairs)
    # Both the own seed of host 3 and its seeds with others would be open.
    everyone = Survivors((0, 1, 2, 3), request.sealed)
    with pytest.raises(ProtocolError, match="exchange 1 was unmasked for other survivors before"):
        host.unmask(1, everyone)


@pytest.mark.parametrize("restart", [False, True])
def test_a_repeated_request_is_answered_by_the_same_bytes_and_other_terms_are_refused(*, restart: bool) -> None:
    hosts = parties(3, RECOVERING)
    met(hosts)
    terms = np.arange(5, dtype=np.uint64)
    first = hosts[0].masked(STAGE, 4, (0, 1, 2), terms.copy())
    host = restarted(hosts[0]) if restart else hosts[0]
    again = host.masked(STAGE, 4, (0, 1, 2), terms.copy())
    for field in dataclasses.fields(first):
        assert np.array_equal(getattr(first, field.name), getattr(again, field.name))
    for among, values in (((0, 1, 2), terms + np.uint64(1)), ((0, 1), terms)):
        with pytest.raises(ProtocolError, match="exchange 4 was answered with other terms before"):
            host.masked(STAGE, 4, among, values.copy())
    assert host.advertise(STAGE) == hosts[0].advertise(STAGE)


def test_what_is_over_is_not_answered_again_even_after_a_restart() -> None:
    hosts, _, request = asked_once([0, 1, 2])
    hosts[0].over(1)
    for host in (hosts[0], restarted(hosts[0])):
        with pytest.raises(ProtocolError, match="terms of exchange 1 are asked again, but it is over"):
            host.masked(STAGE, 1, (0, 1, 2, 3), np.arange(2, dtype=np.uint64))
        with pytest.raises(ProtocolError, match="unmask exchange 1, which it has not answered or which is over"):
            host.unmask(1, request)


@pytest.mark.parametrize(
    ("survivors", "said"),
    [
        ((0, 1), "exchange 1 has 2 survivors, wanted at least 3"),
        ((1, 2, 3), "this one included"),
        ((0, 1, 2, 4), "are not hosts that were asked"),
        ((0, 2, 1), "ascending"),
        ((0, 1, 1, 2), "ascending"),
    ],
)
def test_a_request_to_unmask_for_other_than_enough_hosts_that_were_asked_is_refused(survivors: tuple[int, ...], said: str) -> None:
    hosts, _, request = asked_once([0, 1, 2])
    with pytest.raises(ProtocolError, match=said):
        hosts[0].unmask(1, Survivors(survivors, request.sealed))


def test_masks_are_refused_for_too_few_hosts_and_before_keys_have_come() -> None:
    hosts = parties(6, RECOVERING)
    with pytest.raises(ProtocolError, match="has no keys of stage 1"):
        hosts[0].masked(STAGE, 1, (0, 1, 2, 3), np.zeros(1, dtype=np.uint64))
    met(hosts)
    with pytest.raises(ProtocolError, match="a masked sum is asked of 3 hosts, wanted at least 4 of 6"):
        hosts[0].masked(STAGE, 1, (0, 1, 2), np.zeros(1, dtype=np.uint64))
    with pytest.raises(ProtocolError, match="but not for it"):
        hosts[0].masked(STAGE, 1, (1, 2, 3, 4), np.zeros(1, dtype=np.uint64))


def test_other_keys_than_before_are_refused_and_so_are_keys_without_the_hosts_own() -> None:
    hosts, others = parties(3, RECOVERING), parties(4, RECOVERING)
    adverts = [host.advertise(STAGE) for host in hosts]
    forged = [adverts[0], Advert("h001", bytes(range(32))), adverts[2]]
    with pytest.raises(ProtocolError, match="do not have that of host 'h001'"):
        hosts[1].meet(STAGE, forged)
    hosts[0].meet(STAGE, adverts)
    for host in (hosts[0], restarted(hosts[0])):
        with pytest.raises(ProtocolError, match="the keys of stage 1 are not those that came before"):
            host.meet(STAGE, forged)
    with pytest.raises(ProtocolError, match="came before host 'h003' had one"):
        others[3].meet(STAGE, adverts)


def test_a_log_of_another_run_is_refused() -> None:
    host = parties(1, RECOVERING)[0]
    host.advertise(STAGE)
    with pytest.raises(RunError, match="belongs to run run, wanted another"):
        Party("another", "h000", RECOVERING, host._log)


# ---- frames that were changed


def flipped(data: st.DataObject, frame: Any) -> Any:
    """A frame with one bit, one row or one place changed."""
    if isinstance(frame, list):  # of adverts
        place = data.draw(st.integers(0, len(frame) - 1))
        return [*frame[:place], flipped(data, frame[place]), *frame[place + 1 :]]
    names = [field.name for field in dataclasses.fields(frame) if field.name not in ("certificate", "signature")]  # these are for TLS
    name = data.draw(st.sampled_from(names))
    value = getattr(frame, name)
    if isinstance(value, np.ndarray):
        changed = value.copy()
        if not value.size or data.draw(st.booleans()):
            changed = np.concatenate([changed, changed[:1]]) if value.size else np.zeros((1, *value.shape[1:]), dtype=value.dtype)
        else:
            octets = changed.reshape(-1).view(np.uint8)
            octets[data.draw(st.integers(0, octets.size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif isinstance(value, bytes):
        place = data.draw(st.integers(0, len(value) - 1))
        changed = value[:place] + bytes([value[place] ^ 1 << data.draw(st.integers(0, 7))]) + value[place + 1 :]
    elif isinstance(value, str):
        changed = value + "x"
    elif isinstance(value, int):
        changed = value ^ 1 << data.draw(st.integers(0, 31))
    elif isinstance(value, tuple):
        changed = tuple(sorted({*value} ^ {data.draw(st.integers(0, 5))}))
    else:
        place = data.draw(st.sampled_from(sorted(value)))
        changed = {**value, place: value[place][::-1]} if data.draw(st.booleans()) else {k: v for k, v in value.items() if k != place}
    return dataclasses.replace(frame, **{name: changed})


@settings(max_examples=150)
@given(st.data())
def test_a_frame_that_was_changed_is_refused_or_changes_nothing(data: st.DataObject) -> None:
    n, lost = 5, {4}
    hosts, terms = parties(n, RECOVERING), terms_of(n, 4)
    at = data.draw(st.sampled_from(["advertise", "share", "masked", "ask", "unmask"])), data.draw(st.integers(0, 3))

    def tamper(step: str, host: int, frame: Any) -> Any:
        return flipped(data, frame) if (step, host) == at else frame

    try:
        total = total_of(hosts, met(hosts, tamper), RECOVERING, terms, lost=lost, tamper=tamper)
    except CoterieError:
        return
    assert np.array_equal(total, plain(terms, lost))


# ---- kills


class KilledError(Exception):
    pass


def lives(seed: int) -> random.Random:
    return random.Random(seed)  # noqa: S311 - a test's chance


class Mortal(Memory):
    """A log whose process is killed before or behind one of the next entries. With `forgets` the disk loses what was written last."""

    def __init__(self, chance: random.Random, *, forgets: bool) -> None:
        super().__init__()
        self._chance, self._forgets = chance, forgets

    def append(self, entry: Mapping[str, Any]) -> None:
        dice = self._chance.random()
        if dice < 0.15:
            raise KilledError
        if not (self._forgets and "secret" not in entry and "publics" not in entry):
            super().append(entry)
        if dice < 0.3:
            raise KilledError


def violations(chance: random.Random, used: list[tuple[bytes, ...]], *, forgets: bool) -> int:
    """How often, in one life of three hosts under kills and a hostile parent, a key stream or an exchange is used twice."""
    names = ["h000", "h001", "h002"]
    logs = [Mortal(chance, forgets=forgets) for _ in names]
    rng = np.random.default_rng(chance.randrange(2**32))

    def born(place: int) -> Party:
        return Party(RUN, names[place], RECOVERING, logs[place], draw=rng.bytes)

    hosts = [born(place) for place in range(3)]
    covered: dict[tuple[str, bytes], bytes] = {}  # by host and seed: what was sent under it
    exchange_of: dict[bytes, int] = {}
    opened: dict[tuple[str, int], tuple[int, ...]] = {}
    adverts: dict[int, Advert] = {}
    sealed: dict[int, dict[int, dict[int, bytes]]] = {}
    ready: set[int] = set()
    later = ["advertise", "meet", "over", *["masked"] * 6, *["unmask"] * 6]
    found = 0
    for _ in range(60):
        place = chance.randrange(3)
        host, exchange = hosts[place], chance.randrange(1, 4)
        used.clear()
        try:
            match chance.choice(["advertise"] if len(adverts) < 3 else ["meet"] if len(ready) < 3 else later):
                case "advertise":
                    advert = host.advertise(STAGE)
                    found += adverts.setdefault(place, advert) != advert
                case "meet" if len(adverts) == 3:
                    host.meet(STAGE, [adverts[one] for one in range(3)])
                    ready.add(place)
                case "masked":
                    among = chance.choice([(0, 1, 2)] * 3 + [(0, 1), (1, 2)])
                    came = host.masked(STAGE, exchange, among, rng.integers(0, 2, 2, dtype=np.uint64))
                    if chance.random() < 0.1:
                        raise KilledError  # before the answer is on its way
                    for seed in used[-1]:
                        found += covered.setdefault((names[place], seed), came.values.tobytes()) != came.values.tobytes()
                        found += exchange_of.setdefault(seed, exchange) != exchange
                    sealed.setdefault(exchange, {})[place] = dict(enumerate(map(bytes, came.sealed)))
                case "unmask":
                    survivors = chance.choice([(0, 1, 2), (0, 1), (1, 2), (0, 2)])
                    others = {
                        one: listed[sorted({0, 1, 2} - {one}).index(place)]
                        for one, listed in sealed.get(exchange, {}).items()
                        if one != place and sorted({0, 1, 2} - {one}).index(place) in listed
                    }
                    host.unmask(exchange, Survivors(survivors, others))
                    found += opened.setdefault((names[place], exchange), survivors) != survivors
                case "over":
                    host.over(exchange - 1)
        except CoterieError:
            pass
        except KilledError:
            hosts[place] = born(place)
    return found


def recording(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, ...]]:
    """The seeds of the streams of the latest request."""
    used: list[tuple[bytes, ...]] = []
    real = streams.add_streams

    def added(values: Words, added: Sequence[bytes], taken: Sequence[bytes]) -> None:
        used.append((*added, *taken))
        real(values, added, taken)

    monkeypatch.setattr(party, "add_streams", added)
    return used


def test_no_stream_and_no_exchange_is_used_twice_though_hosts_are_killed_a_thousand_times(monkeypatch: pytest.MonkeyPatch) -> None:
    used, kills = recording(monkeypatch), list[int]()
    monkeypatch.setattr(KilledError, "__init__", lambda _: kills.append(1))
    assert sum(violations(lives(seed), used, forgets=False) for seed in range(250)) == 0
    assert len(kills) > 1000


def test_the_same_lives_find_the_fault_of_a_host_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    used = recording(monkeypatch)
    assert sum(violations(lives(seed), used, forgets=True) for seed in range(20)) > 0


def test_keys_of_two_stages_and_two_runs_differ() -> None:
    host, other = Party(RUN, "a", RECOVERING, Memory()), Party("other", "a", RECOVERING, Memory())
    publics = {host.advertise("1").public, host.advertise("2").public, other.advertise("1").public}
    assert len(publics) == 3
    ends = [Party(RUN, name, RECOVERING, Memory(), draw=drawing(7 + place)) for place, name in enumerate("ab")]
    rosters = {}
    for stage in ("1", "2"):
        adverts = [end.advertise(stage) for end in ends]
        for end in ends:
            end.meet(stage, adverts)
        rosters[stage] = Roster.of(RUN, stage, adverts)
    assert ends[0]._met_in("1")._seed(1, 1) != ends[0]._met_in("2")._seed(1, 1)
