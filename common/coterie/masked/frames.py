"""What hosts and their parent say to each other for a masked sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from coterie.errors import ProtocolError
from coterie.masked.sharing import SHARE_BYTES
from coterie.masked.streams import SEED_BYTES, Octets, Words, bound

TAG_BYTES = 16  # of a sealed text
PUBLIC_BYTES = 32


@dataclass(frozen=True)
class Advert:
    """A host's public key for one stage."""

    name: str
    public: bytes  #: 32 bytes of X25519
    certificate: bytes = b""  #: PEM, where the run has TLS
    signature: bytes = b""  #: by the key of the certificate, of `signed_text`


def signed_text(run: str, stage: str, name: str, public: bytes) -> bytes:
    """What a host signs: its key, and what the key is for."""
    return bound("advert", run, stage, name, public)


@dataclass(frozen=True)
class Setting:
    """What all hosts of an exchange must know alike."""

    exchange: int
    among: tuple[int, ...]  #: places in the roster of the hosts that are asked, ascending
    neighbours: Mapping[int, tuple[int, ...]]  #: of each place
    thresholds: Mapping[int, int]  #: how many shares open a seed of each place
    at_least: int  #: how many hosts must be left
    recovers: bool  #: whether hosts may be lost

    def n_commitments(self, place: int) -> int:
        return len(self.neighbours[place]) + self.recovers

    def n_sealed_bytes(self, place: int) -> int:
        return SHARE_BYTES * (1 + len(self.neighbours[place])) + TAG_BYTES


@dataclass(frozen=True)
class Contribution:
    """Step `masked`: a host's terms under its masks."""

    values: Words  #: (n,)
    check: int  #: the sum of the values modulo 2^64, against accidents: such sums add up as the values do
    commitments: Octets  #: (m, 16) of the seeds with each neighbour; where hosts may be lost, first that of the host's own seed
    sealed: Octets  #: (m, b) the shares for each neighbour, which it alone can read; no rows where nobody may be lost


@dataclass(frozen=True)
class Survivors:
    """Step `unmask`, down: whose terms are in the sum, and the shares that they have sealed for this host."""

    places: tuple[int, ...]
    sealed: Mapping[int, bytes]  #: by place of the sender


@dataclass(frozen=True)
class Revealed:
    """Step `unmask`, up: shares of the seeds that are in the sum and do not cancel."""

    own: Octets  #: (a, 17) of the host's own seeds, for each survivor that shares with the host, itself included
    pairs: Octets  #: (b, 17) of the seeds of pairs: for each of these survivors, with each lost neighbour of it


def check_of(values: Words) -> int:
    """Their sum modulo 2^64."""
    return int(values.sum(dtype=np.uint64))


def rows_of(pieces: Sequence[bytes], width: int) -> Octets:
    return np.frombuffer(b"".join(pieces), dtype=np.uint8).reshape(len(pieces), width)


def check_shape(what: str, array: Octets, shape: tuple[int, int]) -> None:
    """ProtocolError unless the array has this shape and consists of octets."""
    if array.shape != shape or array.dtype != np.uint8:
        raise ProtocolError(f"{what} have shape {array.shape} and type {array.dtype}, wanted {shape} octets")


def commitments_shape(setting: Setting, place: int) -> tuple[int, int]:
    return setting.n_commitments(place), SEED_BYTES


def sealed_shape(setting: Setting, place: int) -> tuple[int, int]:
    return (len(setting.neighbours[place]) if setting.recovers else 0), setting.n_sealed_bytes(place)
