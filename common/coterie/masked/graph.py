"""Which hosts share masks: all of few, and of many each with its neighbours on a ring (Bell et al., CCS 2020, section 3)."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

from coterie.masked.streams import bound

# What the number of neighbours allows for: hosts that help the parent, and hosts that are lost in one exchange.
COLLUDING, LOST = 0.2, 0.05
_SECURITY, _FAILURE = 40, 30  # bits: an event that reveals a host, and one that ends an exchange


def least(n: int, fraction: float) -> int:
    """How many of n hosts must be left: at least `fraction` of them, more than half, and two."""
    return max(2, n // 2 + 1, math.ceil(fraction * n - 1e-9))


@functools.lru_cache(maxsize=64)
def degree(n: int, fraction: float) -> int:
    """The number of neighbours of each of n hosts: even, or n - 1.

    It is the smallest with three chances, of which Bell et al. show why they count. It is 2^-40 that enough neighbours of some host to
    reveal it help the parent. It is 2^-40 that the hosts that neither help it nor are lost fall apart. It is 2^-30 that too few neighbours
    of some host are left.
    """
    for k in range(2, n - 1, 2):
        wanted = least(k + 1, fraction)
        revealed = math.log2(n) + _log2_tail(n - 1, math.floor(COLLUDING * n), k, wanted)
        apart = math.log2(n) + k / 2 * math.log2(COLLUDING + LOST)
        too_few = math.log2(n) + _log2_tail(n - 1, math.ceil(LOST * n), k, k + 2 - wanted)
        if revealed <= -_SECURITY and apart <= -_SECURITY and too_few <= -_FAILURE:
            return k
    return n - 1


def _log2_tail(population: int, marked: int, drawn: int, at_least: int) -> float:
    """log2 of the chance that `at_least` of the drawn are marked, when they are drawn without putting back."""
    top = min(marked, drawn)
    if at_least > top:
        return -math.inf
    whole = _ln_choose(population, drawn)
    terms = [
        _ln_choose(marked, hit) + _ln_choose(population - marked, drawn - hit) - whole
        for hit in range(max(at_least, drawn - (population - marked)), top + 1)
    ]
    highest = max(terms)
    return (highest + math.log(sum(math.exp(term - highest) for term in terms))) / math.log(2)


def _ln_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def neighbours(places: Sequence[int], seed: bytes, fraction: float) -> dict[int, tuple[int, ...]]:
    """The neighbours of each place, ascending: of few all others, else those next to it on a ring in the order of hashes with `seed`."""
    n = len(places)
    k = degree(n, fraction)
    if k >= n - 1:
        return {place: tuple(other for other in sorted(places) if other != place) for place in sorted(places)}
    ring = sorted(places, key=lambda place: hashlib.sha256(bound("ring", seed, place)).digest())
    steps = [step for distance in range(1, k // 2 + 1) for step in (-distance, distance)]
    return {place: tuple(sorted(ring[(at + step) % n] for step in steps)) for at, place in enumerate(ring)}
