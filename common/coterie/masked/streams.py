"""Key streams over integers modulo 2^64, and the keys they come from.

The modules of this folder are imported by every member, `cryptography` (9 MB) only by those that mask.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Octets = NDArray[np.uint8]

SEED_BYTES = 16
_KEY_BYTES = 16
_BLOCK = 1 << 14  # words of a stream at a time, which stay in the processor's cache
_ZEROS = bytes(8 * _BLOCK)
_DOMAIN = b"coterie masked sums 1"


def bound(*parts: bytes | str | int) -> bytes:
    """The parts as one byte string. Different parts give different strings."""
    listed = [part if isinstance(part, bytes) else str(part).encode() for part in parts]
    return b"".join(len(part).to_bytes(8, "little") + part for part in (_DOMAIN, *listed))


def derived(secret: bytes, n_bytes: int, *about: bytes | str | int) -> bytes:
    """`n_bytes` of HKDF-SHA256 from a secret, for one purpose."""
    from cryptography.hazmat.primitives.hashes import SHA256  # noqa: PLC0415
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF  # noqa: PLC0415

    return HKDF(SHA256(), n_bytes, salt=None, info=bound(*about)).derive(secret)


def commitment(seed: bytes) -> bytes:
    """A hash of a seed (16 bytes), which says whether a seed that was put together is the right one."""
    return hashlib.sha256(bound("commitment", seed)).digest()[:SEED_BYTES]


def octets_of(words: Words) -> memoryview:
    """The bytes of words, without a copy."""
    return words.reshape(-1).view(np.uint8).data


def add_streams(values: Words, added: Sequence[bytes], taken: Sequence[bytes]) -> None:
    """Adds to `values` (n,), in place and modulo 2^64, the key streams of the seeds `added`, and takes away those of `taken`.

    The stream is AES-128 in counter mode from 0, since the key of a seed encrypts nothing else. Processors with AES make it the fastest.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes  # noqa: PLC0415

    signed = [(seed, np.add) for seed in added] + [(seed, np.subtract) for seed in taken]
    ciphers = [
        (Cipher(algorithms.AES128(derived(seed, _KEY_BYTES, "stream")), modes.CTR(bytes(16))).encryptor(), operation)
        for seed, operation in signed
    ]
    stream = np.empty(min(_BLOCK, values.size) + 2, dtype=np.uint64)  # the cipher wants room for one more block of its own, but for a byte
    room = octets_of(stream)
    zeros = memoryview(_ZEROS)
    for start in range(0, values.size, _BLOCK):
        part = values[start : start + _BLOCK]
        for cipher, operation in ciphers:
            cipher.update_into(zeros[: part.nbytes], room)
            operation(part, stream[: part.size], out=part)
