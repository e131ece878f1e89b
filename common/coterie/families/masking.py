"""Messages of masked sums (`federation.sums: masked`), by which hosts hide their sums from the parent. See `coterie.masked`.

Once a stage every host sends a public key (`advertise`), and receives those of all (`share`). In each exchange it sends its sums under
masks, hashes of the masks, and shares of them for other hosts (`masked`). Where hosts may be lost, those that are left reveal what does not
cancel (`unmask`). Octets travel as whole numbers of 64 bits.

In a run with aggregators the hosts of a cluster do so towards their aggregator. The aggregators, which are "hosts" below, do so towards the
coordinator.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from coterie.errors import ProtocolError
from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.masked.frames import TAG_BYTES, Advert, Contribution, Revealed, Survivors
from coterie.masked.roster import Rules
from coterie.masked.sharing import SHARE_BYTES
from coterie.masked.streams import SEED_BYTES, Octets, Words
from coterie.wire.messages import Annotated, Broadcast, Indices, PerHost, Positions, declare

if TYPE_CHECKING:
    from coterie.experiment.config import Experiment

Role = Literal["host", "aggregator"]  # who masks sums

_WORD: Final = 8  # octets


def rules_of(experiment: Experiment, role: Role) -> Rules:
    """What an experiment says of masked sums, for hosts or for aggregators."""
    federation = experiment.federation
    of_cluster = federation.is_two_tier and role == "host"
    least = max(2, federation.hosts_per_cluster if of_cluster else federation.min_hosts or federation.hosts)
    return Rules(federation.threshold, "skip" in (federation.on_loss, federation.late), federation.min_summed, least)


@declare(method="masking", step="advertise")
class AskKey(Broadcast):
    """Asks every host for its public key of this stage."""


@declare(method="masking", step="advertise")
class HostKey(PerHost):
    """The parts of an `Advert`."""

    public: Annotated[Indices, Positions(4)]
    certificate: Annotated[Indices, Positions("of the certificate")]
    signature: Annotated[Indices, Positions("of the signature")]


@declare(method="masking", step="share")
class HostKeys(Broadcast):
    """The keys of all hosts, in the order of their names. `names` are octets in UTF-8, with an end of line between two."""

    names: Annotated[Indices, Positions("of the names")]
    publics: Annotated[Indices, Positions("hosts", 4)]
    n_certificates: Annotated[Indices, Positions("hosts")]
    certificates: Annotated[Indices, Positions("of the certificates")]
    n_signatures: Annotated[Indices, Positions("hosts")]
    signatures: Annotated[Indices, Positions("of the signatures")]


@declare(method="masking", step="masked")
class AskMasks(Broadcast):
    """Asks for masks over the sums of this exchange: the places of the hosts that are asked, and how many groups each sum has."""

    among: Annotated[Indices, Positions("hosts")]
    groups: Annotated[Indices, Positions("sums")]


@declare(method="masking", step="masked")
class Covered(PerHost):
    """A `Contribution`, but for its values: these are the sums."""

    check: Annotated[Indices, Positions(1)]
    commitments: Annotated[Indices, Positions("seeds", 2)]
    sealed: Annotated[Indices, Positions("neighbours", "of the shares")]


@declare(method="masking", step="unmask")
class AskUnmask(Broadcast):
    """`Survivors` of an exchange."""

    exchange: Annotated[Indices, Positions(1)]
    survivors: Annotated[Indices, Positions("survivors")]
    senders: Annotated[Indices, Positions("senders")]
    sealed: Annotated[Indices, Positions("senders", "of the shares")]


@declare(method="masking", step="unmask")
class Opened(PerHost):
    """`Revealed`."""

    own: Annotated[Indices, Positions("own", 3)]
    pairs: Annotated[Indices, Positions("pairs", 3)]


ROOM = Room(
    reveals=(
        Reveal(
            "for masked sums a public key in each stage, and in each exchange hashes of masks and shares that other hosts alone can read; "
            "where hosts may be lost, also masks with those that are",
            "nothing of the rows: how many hosts take part, and which are lost",
            ("masking",),
            needs={"masks_sums": True},
            title="masked sums (`federation.sums: masked`)",
        ),
    ),
    steps={
        "advertise": "public keys of the hosts, for masks",
        "share": "the keys of all hosts",
        "masked": "what belongs to masked sums, but for the sums",
        "unmask": "shares of masks that do not cancel",
    },
)


# ---- octets as whole numbers


def words_of(octets: Octets) -> Indices:
    """(k, m) whole numbers of (k, b) octets, filled with zeros to a multiple of eight."""
    filled = np.zeros((octets.shape[0], -(-octets.shape[1] // _WORD) * _WORD), dtype=np.uint8)
    filled[:, : octets.shape[1]] = octets
    return filled.view("<i8").astype(np.int64)


def octets_of(words: Indices, width: int) -> Octets:
    """The inverse. ProtocolError where there are not as many words as the width needs."""
    if words.shape[1] != -(-width // _WORD):
        raise ProtocolError(f"masks came in rows of {words.shape[1]} words, wanted {-(-width // _WORD)}")
    return np.ascontiguousarray(words.astype("<i8")).view(np.uint8).reshape(words.shape[0], words.shape[1] * _WORD)[:, :width]


def text_words(text: bytes) -> Indices:
    """The length of a text, and its octets in words."""
    octets = np.frombuffer(text, dtype=np.uint8)[None]
    return np.concatenate([[len(text)], words_of(octets)[0]]).astype(np.int64)


def text_of(words: Indices) -> bytes:
    """The inverse. ProtocolError for what is no such text."""
    n_bytes = int(words[0]) if words.size else -1
    if n_bytes < 0 or words.size != 1 - (-n_bytes // _WORD):
        raise ProtocolError("a text of masked sums has not the length that it claims")
    return octets_of(words[None, 1:], n_bytes).tobytes()


# ---- frames as messages


def key_message(advert: Advert) -> HostKey:
    public = words_of(np.frombuffer(advert.public, dtype=np.uint8)[None])[0]
    return HostKey(public, text_words(advert.certificate), text_words(advert.signature))


def advert_of(name: str, message: HostKey) -> Advert:
    return Advert(name, message.public.astype("<i8").tobytes(), text_of(message.certificate), text_of(message.signature))


def keys_message(adverts: Sequence[Advert]) -> HostKeys:
    return HostKeys(
        text_words("\n".join(advert.name for advert in adverts).encode()),
        np.concatenate([words_of(np.frombuffer(advert.public, dtype=np.uint8)[None]) for advert in adverts]),
        np.array([len(advert.certificate) for advert in adverts], dtype=np.int64),
        text_words(b"".join(advert.certificate for advert in adverts)),
        np.array([len(advert.signature) for advert in adverts], dtype=np.int64),
        text_words(b"".join(advert.signature for advert in adverts)),
    )


def adverts_of(message: HostKeys) -> list[Advert]:
    """ProtocolError for what are no keys of hosts."""
    try:
        names = text_of(message.names).decode().split("\n")
    except UnicodeDecodeError:
        raise ProtocolError("the names of the hosts that mask their sums are no text") from None
    if {len(names)} != {len(part) for part in (message.publics, message.n_certificates, message.n_signatures)}:
        raise ProtocolError(f"{len(names)} hosts are to mask their sums, but {len(message.publics)} keys came")
    certificates = _pieces(text_of(message.certificates), message.n_certificates)
    signatures = _pieces(text_of(message.signatures), message.n_signatures)
    publics = (row.astype("<i8").tobytes() for row in message.publics)
    return [Advert(*parts) for parts in zip(names, publics, certificates, signatures, strict=True)]


def _pieces(text: bytes, sizes: Indices) -> Iterator[bytes]:
    if (sizes < 0).any() or int(sizes.sum()) != len(text):
        raise ProtocolError("the keys of the hosts that mask their sums have not the lengths that they claim")
    ends = np.cumsum(sizes).tolist()
    return (text[end - size : end] for end, size in zip(ends, sizes.tolist(), strict=True))


def covered_message(contribution: Contribution) -> Covered:
    check = np.array([contribution.check], dtype=np.uint64).view(np.int64)
    return Covered(check, words_of(contribution.commitments), words_of(contribution.sealed))


def contribution_of(values: Words, message: Covered, n_sealed_bytes: int) -> Contribution:
    """ProtocolError for shares of another size."""
    return Contribution(
        values, int(message.check.view(np.uint64)[0]), octets_of(message.commitments, SEED_BYTES), octets_of(message.sealed, n_sealed_bytes)
    )


def unmask_message(exchange: int, survivors: Survivors) -> AskUnmask:
    senders = sorted(survivors.sealed)
    width = max((len(text) for text in survivors.sealed.values()), default=TAG_BYTES)
    octets = np.frombuffer(b"".join(survivors.sealed[sender] for sender in senders), dtype=np.uint8).reshape(len(senders), width)
    places = np.array(survivors.places, dtype=np.int64)
    return AskUnmask(np.array([exchange], dtype=np.int64), places, np.array(senders, dtype=np.int64), words_of(octets))


def survivors_of(message: AskUnmask, n_sealed_bytes: int) -> Survivors:
    """ProtocolError for shares of another size."""
    octets = octets_of(message.sealed, n_sealed_bytes) if message.senders.size else ()
    sealed = {sender: bytes(row) for sender, row in zip(message.senders.tolist(), octets, strict=True)}
    return Survivors(tuple(message.survivors.tolist()), sealed)


def opened_message(revealed: Revealed) -> Opened:
    return Opened(words_of(revealed.own), words_of(revealed.pairs))


def revealed_of(message: Opened) -> Revealed:
    return Revealed(octets_of(message.own, SHARE_BYTES), octets_of(message.pairs, SHARE_BYTES))
