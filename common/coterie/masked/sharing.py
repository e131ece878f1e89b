"""Shamir's sharing of seeds (Shamir, Communications of the ACM, 1979): `threshold` shares give a seed, and fewer say nothing of it.

Shares are values of a polynomial over the integers modulo 2^130 - 5, whose coefficients come from a key. So a host that was killed makes
the same shares again, which a library with its own random numbers could not. The places of shares are public. Python's integers take a time
that depends on their size: who measures a host that closely is out of scope.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence

from coterie.errors import ProtocolError
from coterie.masked.streams import SEED_BYTES, derived

PRIME = 2**130 - 5
SHARE_BYTES = 17
_COEFFICIENT_BYTES = 32  # 126 bits more than the prime has, so that remainders are uniform
_AT_ONCE = 128  # coefficients: HKDF gives at most 255 of its hashes


def split(seed: bytes, threshold: int, places: Sequence[int], key: bytes) -> list[bytes]:
    """A share (17 bytes) of the seed (16 bytes) for each place (from 1); `key` decides the coefficients and must be used once."""
    starts = range(0, threshold - 1, _AT_ONCE)
    drawn = b"".join(derived(key, _COEFFICIENT_BYTES * min(_AT_ONCE, threshold - 1 - at), "coefficients", at) for at in starts)
    pieces = (drawn[start : start + _COEFFICIENT_BYTES] for start in range(0, len(drawn), _COEFFICIENT_BYTES))
    coefficients = [int.from_bytes(seed, "little"), *(int.from_bytes(piece, "little") % PRIME for piece in pieces)]
    values = (sum(map(operator.mul, coefficients, _powers(place, threshold))) % PRIME for place in places)
    return [value.to_bytes(SHARE_BYTES, "little") for value in values]


@functools.lru_cache(maxsize=4096)
def _powers(place: int, n: int) -> tuple[int, ...]:
    return tuple(pow(place, exponent, PRIME) for exponent in range(n))


@functools.lru_cache(maxsize=256)
def weights(places: tuple[int, ...]) -> list[int]:
    """Lagrange's weights at 0 of these places."""
    found = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * other % PRIME
                below = below * (other - place) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return found


def joined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The seed of shares by place, of which the first `threshold` are used. ProtocolError for too few, and for shares of no seed."""
    if len(shares) < threshold:
        raise ProtocolError(f"{len(shares)} shares of a mask are there, wanted {threshold}")
    used = dict(itertools.islice(sorted(shares.items()), threshold))
    values = (int.from_bytes(share, "little") for share in used.values())
    seed = sum(weight * value for weight, value in zip(weights(tuple(used)), values, strict=True)) % PRIME
    if seed >> (8 * SEED_BYTES):
        raise ProtocolError("the shares of a mask do not fit together")
    return seed.to_bytes(SEED_BYTES, "little")
