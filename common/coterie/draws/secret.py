"""Secret random numbers: noise and samples that nobody can repeat or predict without a key.

The experiment's seed is known to all members, so what protects rows or users never comes from it. A key of 256 random bits comes from the
operating system, and numbers are the output of SHAKE-256 on the key and the names of their purpose. So the holder of the key can repeat
numbers after a crash, and numbers of different purposes are independent.

A normal number is half the sum of four quantiles of 53-bit uniform numbers, so that the gaps of floating-point numbers around one quantile
reveal little about what was added (Mironov, 2012; Holohan and Braghin, 2021).
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import RunError
from coterie.extras import needed

KEY_BYTES: Final = 32
_TERMS: Final = 4  # quantiles in a normal number


def new_key() -> bytes:
    """256 random bits of the operating system."""
    return secrets.token_bytes(KEY_BYTES)


def kept_key(path: Path | None, *, has_begun: bool = False) -> bytes:
    """The key in a file that its owner alone may read, or a new one that is written there first. None: a key that lives in memory.

    RunError if the file cannot be read or written, or is missing where work with its key `has_begun`: a new key would draw noise twice.
    """
    if path is None:
        return new_key()
    try:
        if path.exists():
            found = path.read_bytes()
            if len(found) != KEY_BYTES:
                raise RunError(f"the key of the noise in {path} has {len(found)} bytes, want {KEY_BYTES}")
            return found
        if has_begun:
            raise RunError(f"the key of the noise in {path} is missing: without it noise would be drawn twice, so start a new run")
        key, temporary = new_key(), path.with_name(f"{path.name}.tmp")
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise RunError(f"cannot keep the key of the noise in {path}: {error.strerror or error}") from None
    return key


def digest(*parts: bytes) -> bytes:
    """The SHA-256 of these parts and their lengths."""
    found = hashlib.sha256()
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


@dataclass(frozen=True)
class Secret:
    """A key, and what it may be used for."""

    key: bytes = field(repr=False)

    def child(self, *names: str | int | bytes) -> Secret:
        """The key for one purpose. Different names give independent keys."""
        return Secret(digest(self.key, *(name if isinstance(name, bytes) else str(name).encode() for name in names)))

    def numbers(self) -> SecretNumbers:
        """The random numbers of this key, from their beginning."""
        return SecretNumbers(self.key)


class SecretNumbers:
    """Random numbers in order: each is drawn once."""

    def __init__(self, key: bytes) -> None:
        self._key, self._n_drawn = key, 0

    def words(self, n: int) -> NDArray[np.uint64]:
        """(n,) numbers of 64 bits."""
        block = hashlib.shake_256(self._key + self._n_drawn.to_bytes(8, "big")).digest(8 * n)
        self._n_drawn += 1
        return np.frombuffer(block, dtype="<u8")

    def below(self, bound: int, n: int) -> NDArray[np.int64]:
        """(n,) whole numbers from 0 that are less than the bound, from 1 to 2^63, each as likely as the others."""
        found = self.words(n)
        top = np.uint64((1 << 64) - (1 << 64) % bound - 1)  # the remainders of those up to it are equally likely
        while (outside := np.flatnonzero(found > top)).size:
            found = found.copy()
            found[outside] = self.words(outside.size)
        return (found % np.uint64(bound)).astype(np.int64)

    def uniform(self, n: int) -> Array:
        """(n,) numbers between 0 and 1, neither of which occurs."""
        found: Array = ((self.words(n) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return found

    def normal(self, n: int) -> Array:
        """(n,) standard normal numbers."""
        quantiles = needed("scipy.special", "privacy", "normal noise is drawn with scipy").ndtri  # members without privacy have no scipy
        found: Array = quantiles(self.uniform(_TERMS * n)).reshape(_TERMS, n).sum(axis=0) / np.sqrt(_TERMS)
        return found

    def order(self, n: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
        """(n,) the numbers below n in random order."""
        return np.argsort(self.uniform(n), kind="stable")
