"""Named random streams: the only source of randomness in a run.

A stream is fixed by the run's seed and by names (its purpose, its owner, the round). The order of calls, the host and the process do not
matter, so a simulated and a distributed run draw the same numbers. NumPy guarantees the raw words of Philox, from which a `Stream` makes
its numbers. It does not guarantee the results of a `Generator`'s methods.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import NDArray

from coterie.arrays import Array, Indices

Words = NDArray[np.uint64]


class _Key(ISeedSequence):
    """Gives a generator its key; with `key=` numpy would first read random numbers of the system, which takes most of the time."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def generate_state(self, n_words: int, dtype: object = np.uint32) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
        """The key, for a generator that asks for two words of 64 bits."""
        assert (n_words, dtype) == (2, np.uint64)  # noqa: S101 - Philox's own request
        return np.frombuffer(self._key, dtype="<u8")


def philox(seed: int, purpose: str, *index: int | str) -> np.random.Philox:
    """The raw words of one stream. JSON separates the parts of its name, SHA-256 the streams."""
    digest = hashlib.sha256(json.dumps([seed, purpose, *index]).encode()).digest()
    return np.random.Philox(cast(np.random.SeedSequence, _Key(digest[:16])))  # it takes any ISeedSequence


def generator(seed: int, purpose: str, *, member: str = "", round_number: int = 0) -> np.random.Generator:
    """NumPy's generator of a named stream."""
    return np.random.Generator(philox(seed, purpose, member, round_number))


@dataclass(frozen=True)
class Stream:
    """A named stream of random numbers. Each call advances it."""

    words: np.random.Philox

    def uniform(self, n: int) -> Array:
        """(n,) numbers uniform in [0, 1), multiples of 2**-53."""
        return (self.words.random_raw(n) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def order(self, n: int) -> Indices:
        """(n,) a random permutation of 0..n-1."""
        return np.argsort(self.words.random_raw(n), kind="stable").astype(np.int64)


def stream(seed: int, purpose: str, *index: int | str) -> Stream:
    """The stream of the run's seed and of these names: the same numbers on every machine, whoever draws first.

        draws = stream(local.seed, "noise of mine", inbox.round, int(local.numbers[0]))
        noise = normal(draws, d)  # (d,)

    Names that differ in any part have independent streams, so a purpose of one's own does not disturb those of the engine. A user's number
    in the run (`Local.numbers`, `Setting.members.number_of`) does not depend on the user's host.
    """
    return Stream(philox(seed, purpose, *index))


_FEW, _MANY = 64, 24  # words, and owners: for more words or fewer owners, one stream after the other is faster


def orders(seed: int, purpose: str, owners: Sequence[str], indices: Sequence[tuple[int, ...]], counts: Indices) -> Sequence[Indices]:
    """For each owner with its index `stream(seed, purpose, owner, *index).order(count)`, for many at once."""
    longest = int(counts.max())
    if longest > _FEW or len(owners) < _MANY:
        listed = zip(owners, indices, counts.tolist(), strict=True)
        return [stream(seed, purpose, owner, *index).order(n) for owner, index, n in listed]
    begun = hashlib.sha256(json.dumps([seed, purpose])[:-1].encode())
    rests = {index: "".join(f", {number}" for number in index) + "]" for index in set(indices)}
    digests = bytearray()
    for owner, index in zip(owners, indices, strict=True):
        named = begun.copy()
        named.update(f", {json.dumps(owner)}{rests[index]}".encode())
        digests += named.digest()[:16]
    keys = np.frombuffer(digests, dtype="<u8").reshape(-1, 2)
    words = _first_words(keys, longest)
    words[np.arange(longest) >= counts[:, None]] = np.iinfo(np.uint64).max  # these come last, as the sorting is stable
    found = np.argsort(words, axis=1, kind="stable").astype(np.int64)
    return [order[:n] for order, n in zip(found, counts.tolist(), strict=True)]


_MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], dtype=np.uint64)
_BUMPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], dtype=np.uint64)
_HALF, _LOW = np.uint64(32), np.uint64(0xFFFFFFFF)


def _first_words(keys: Words, n: int) -> Words:
    """(k, n) the first raw words of `np.random.Philox` with these keys (k, 2): Philox4x64-10 of Salmon et al. (2011), counter from 1."""
    n_blocks = -(-n // 4)
    key = np.repeat(keys.T, n_blocks, axis=1)  # (2, k blocks)
    even = np.zeros_like(key)  # words 0 and 2 of the counter
    even[0] = np.tile(np.arange(1, n_blocks + 1, dtype=np.uint64), len(keys))
    odd = np.zeros_like(key)  # words 1 and 3
    with np.errstate(over="ignore"):
        for _ in range(10):
            even, odd = _high(even)[::-1] ^ odd ^ key, (_MULTIPLIERS * even)[::-1]
            key = key + _BUMPS
    words = np.stack([even[0], odd[0], even[1], odd[1]], axis=1)
    return words.reshape(len(keys), 4 * n_blocks)[:, :n]


def _high(numbers: Words) -> Words:
    """The upper 64 bits of the products with the multipliers."""
    high, low = numbers >> _HALF, numbers & _LOW
    by_high, by_low = _MULTIPLIERS >> _HALF, _MULTIPLIERS & _LOW
    middle = low * by_high + (low * by_low >> _HALF)
    found: Words = high * by_high + (middle >> _HALF) + (high * by_low + (middle & _LOW) >> _HALF)
    return found


def normal(draws: Stream, n: int) -> Array:
    """(n,) standard normal numbers, by Marsaglia's polar method: products of uniform numbers, and one logarithm."""
    kept = np.empty((0, 2))
    while 2 * len(kept) < n:
        square = 2.0 * draws.uniform(2 * max(n, 16)).reshape(-1, 2) - 1.0
        radius = np.square(square).sum(axis=1)
        kept = np.concatenate([kept, square[(radius > 0.0) & (radius < 1.0)]])
    radius = np.square(kept).sum(axis=1, keepdims=True)
    numbers: Array = (kept * np.sqrt(-2.0 * np.log(radius) / radius)).reshape(-1)[:n]
    return numbers
