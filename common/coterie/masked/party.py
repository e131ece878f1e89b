"""A host's part in masked sums (Bonawitz et al., CCS 2017), without I/O.

Steps: `advertise` gives the host's public key of a stage, once. `meet` takes the keys of all hosts. `masked` gives the terms of one
exchange under masks; where hosts may be lost, with shares of its seeds for each neighbour. `unmask` receives whose terms are in the sum,
and gives shares of the seeds that do not cancel.

All that a host draws is derived from one secret of the stage and from the number of the exchange. So a repeated request is answered by the
same bytes, and what is revealed of one exchange says nothing of others. The host writes into its log before it answers, and the log
outlives it: no key stream ever covers two different terms, and no exchange is unmasked for two different sets of survivors.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from coterie.errors import ProtocolError, RunError
from coterie.masked.frames import (
    TAG_BYTES,
    Advert,
    Contribution,
    Revealed,
    Setting,
    Survivors,
    check_of,
    rows_of,
    signed_text,
)
from coterie.masked.roster import Roster, Rules, Verifier
from coterie.masked.sharing import SHARE_BYTES, split
from coterie.masked.streams import SEED_BYTES, Words, add_streams, bound, commitment, derived, octets_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

_SECRET_BYTES = 64  # of a stage: 32 of the X25519 key, 32 from which all else comes

# (text) -> the certificate in PEM and the signature by its key.
Signer = Callable[[bytes], tuple[bytes, bytes]]


class Log(Protocol):
    """What a host must not forget: entries of JSON values. They are secret."""

    def entries(self) -> Iterable[Mapping[str, Any]]:
        """Those of earlier processes, in order."""

    def append(self, entry: Mapping[str, Any]) -> None:
        """Returns once the entry would survive a power failure. RunError when it cannot be kept."""


class Party:
    def __init__(
        self,
        run: str,
        name: str,
        rules: Rules,
        log: Log,
        signer: Signer | None = None,
        verifier: Verifier | None = None,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """`signer` and `verifier` are there where the run has TLS. RunError where the log is of another run, or cannot be read."""
        self._run, self._name, self._rules, self._log = run, name, rules, log
        self._signer, self._verifier, self._draw = signer, verifier, draw
        self._secrets: dict[str, bytes] = {}
        self._rosters: dict[str, Roster] = {}
        self._contents: dict[int, tuple[str, tuple[int, ...], str]] = {}  # exchange -> stage, hosts asked, digest of the terms
        self._survivors: dict[int, tuple[int, ...]] = {}
        self._until = 0  # exchanges up to this one are over
        self._met: dict[str, _Met] = {}
        try:
            for entry in log.entries():
                self._recall(entry)
        except (KeyError, ValueError, TypeError) as error:
            raise RunError(f"what host {name!r} has kept of masked sums cannot be read ({type(error).__name__})") from None

    def _recall(self, entry: Mapping[str, Any]) -> None:
        if entry["run"] != self._run:
            raise RunError(f"what host {self._name!r} has kept of masked sums belongs to run {entry['run']}, wanted {self._run}")
        if "secret" in entry:
            self._secrets[entry["stage"]] = bytes.fromhex(entry["secret"])
        elif "publics" in entry:
            publics = tuple(bytes.fromhex(text) for text in entry["publics"])
            self._rosters[entry["stage"]] = Roster(self._run, entry["stage"], tuple(entry["names"]), publics)
        elif "content" in entry:
            self._contents[entry["exchange"]] = entry["stage"], tuple(entry["among"]), entry["content"]
        elif "survivors" in entry:
            self._survivors[entry["exchange"]] = tuple(entry["survivors"])
        else:
            self._forget(entry["until"])

    def _keep(self, entry: Mapping[str, Any]) -> None:
        """First to the disk, then to this object: an answer follows only what would survive."""
        kept = {"run": self._run, **entry}
        self._log.append(kept)
        self._recall(kept)

    def advertise(self, stage: str) -> Advert:
        """The host's public key of a stage, the same whenever it is asked."""
        if stage not in self._secrets:
            self._keep({"stage": stage, "secret": self._draw(_SECRET_BYTES).hex()})
        public = _agreement_key(self._secrets[stage]).public_key().public_bytes_raw()
        certificate, signature = (b"", b"") if self._signer is None else self._signer(signed_text(self._run, stage, self._name, public))
        return Advert(self._name, public, certificate, signature)

    def meet(self, stage: str, adverts: Sequence[Advert]) -> None:
        """Takes the keys of all hosts of a stage, its own included. ProtocolError for too few, not signed, or other ones than before."""
        roster = Roster.of(self._run, stage, adverts)
        roster.check_size(self._rules)
        if stage not in self._secrets:
            raise ProtocolError(f"keys of stage {stage} came before host {self._name!r} had one")
        if (known := self._rosters.get(stage)) is not None:
            if known != roster:
                raise ProtocolError(f"the keys of stage {stage} are not those that came before")
            return
        own = _agreement_key(self._secrets[stage]).public_key().public_bytes_raw()
        if dict(zip(roster.names, roster.publics, strict=True)).get(self._name) != own:
            raise ProtocolError(f"the keys of stage {stage} do not have that of host {self._name!r}")
        if self._verifier is not None:
            for advert in adverts:
                self._verifier(advert, signed_text(self._run, stage, advert.name, advert.public))
        self._keep({"stage": stage, "names": list(roster.names), "publics": [public.hex() for public in roster.publics]})

    def masked(self, stage: str, exchange: int, among: Sequence[int], values: Words) -> Contribution:
        """The terms (n,) of one exchange under masks; `among` are the places of the hosts that are asked. `values` become the masked ones.

        ProtocolError for too few hosts, and where other terms were masked for this exchange before.
        """
        met = self._met_in(stage)
        setting = met.roster.setting(exchange, among, self._rules)
        if met.place not in setting.among:
            raise ProtocolError(f"a masked sum is asked of host {self._name!r}, but not for it")
        if exchange <= self._until:
            raise ProtocolError(f"terms of exchange {exchange} are asked again, but it is over")
        content = met.content(setting, values)
        if (known := self._contents.get(exchange)) is None:
            self._keep({"stage": stage, "exchange": exchange, "among": list(setting.among), "content": content})
        elif known[:2] != (stage, setting.among) or not hmac.compare_digest(known[2], content):
            raise ProtocolError(f"exchange {exchange} was answered with other terms before: the coordinator has gone another way")
        return met.contribution(setting, values)

    def unmask(self, exchange: int, survivors: Survivors) -> Revealed:
        """Shares of what does not cancel. ProtocolError for too few survivors, and for others than were named for this exchange before."""
        if exchange <= self._until or exchange not in self._contents:
            raise ProtocolError(f"host {self._name!r} is asked to unmask exchange {exchange}, which it has not answered or which is over")
        stage, among, _ = self._contents[exchange]
        met = self._met_in(stage)
        setting = met.roster.setting(exchange, among, self._rules)
        if not setting.recovers:
            raise ProtocolError(f"host {self._name!r} is asked to unmask exchange {exchange}, but no host may be lost in this run")
        places = survivors.places
        if list(places) != sorted(set(places)) or not set(places) <= set(among) or met.place not in places:
            raise ProtocolError(f"the survivors of exchange {exchange} are not hosts that were asked, ascending, this one included")
        if len(places) < setting.at_least:
            raise ProtocolError(f"exchange {exchange} has {len(places)} survivors, wanted at least {setting.at_least}")
        if self._survivors.get(exchange, places) != places:
            raise ProtocolError(f"exchange {exchange} was unmasked for other survivors before")
        revealed = met.revealed(setting, survivors)
        if exchange not in self._survivors:
            self._keep({"exchange": exchange, "survivors": list(places)})
        return revealed

    def n_sealed_bytes(self, exchange: int) -> int:
        """How long the shares are that hosts seal for each other in an exchange that was masked. ProtocolError in another one."""
        if exchange not in self._contents:
            raise ProtocolError(f"host {self._name!r} is asked to unmask exchange {exchange}, which it has not answered or which is over")
        stage, among, _ = self._contents[exchange]
        met = self._met_in(stage)
        return met.roster.setting(exchange, among, self._rules).n_sealed_bytes(met.place)

    def over(self, exchange: int) -> None:
        """The parent will never ask again for exchanges up to this one, and is refused if it does."""
        if any(number <= exchange for number in self._contents):
            self._keep({"until": exchange})

    def _forget(self, until: int) -> None:
        self._until = max(self._until, until)
        self._contents = {number: kept for number, kept in self._contents.items() if number > self._until}
        self._survivors = {number: kept for number, kept in self._survivors.items() if number > self._until}

    def _met_in(self, stage: str) -> _Met:
        if stage not in self._rosters or stage not in self._secrets:
            raise ProtocolError(f"host {self._name!r} has no keys of stage {stage}: its state of masked sums is lost, or they never came")
        if stage not in self._met:
            self._met = {stage: _Met(self._rosters[stage], self._name, self._secrets[stage])}  # of the latest stage alone
        return self._met[stage]


def _agreement_key(secret: bytes) -> X25519PrivateKey:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey  # noqa: PLC0415

    return X25519PrivateKey.from_private_bytes(secret[:32])


class _Met:
    """What a host derives from its secret and the keys of the others. Equal requests give equal bytes."""

    def __init__(self, roster: Roster, name: str, secret: bytes) -> None:
        self.roster, self.place = roster, roster.names.index(name)
        self._root = derived(secret[32:], 32, "root", roster.digest)
        self._key = _agreement_key(secret)
        self._pairs: dict[int, bytes] = {}

    def _pair(self, other: int) -> bytes:
        """The secret with another host."""
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey  # noqa: PLC0415

        if other not in self._pairs:
            try:
                shared = self._key.exchange(X25519PublicKey.from_public_bytes(self.roster.publics[other]))
            except ValueError:
                raise ProtocolError(f"the key of host {self.roster.names[other]!r} is none of X25519") from None
            ends = sorted((self.place, other))
            self._pairs[other] = derived(shared, 32, "pair", self.roster.digest, *ends)
        return self._pairs[other]

    def _seed(self, exchange: int, other: int) -> bytes:
        return derived(self._pair(other), SEED_BYTES, "seed", exchange)

    def _own_seed(self, exchange: int) -> bytes:
        return derived(self._root, SEED_BYTES, "own", exchange)

    def _cipher(self, sender: int, receiver: int, exchange: int) -> tuple[ChaCha20Poly1305, bytes, bytes]:
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305  # noqa: PLC0415

        other = receiver if sender == self.place else sender
        key = derived(self._pair(other), 32, "sealed", exchange, sender, receiver)
        return ChaCha20Poly1305(key), bytes(12), bound(exchange, sender, receiver)

    def content(self, setting: Setting, values: Words) -> str:
        """A keyed digest of the terms and the hosts of an exchange; its key is used for this exchange alone."""
        from cryptography.hazmat.primitives.poly1305 import Poly1305  # noqa: PLC0415

        digest = Poly1305(derived(self._root, 32, "content", setting.exchange))
        digest.update(bound(*setting.among, values.size))
        digest.update(octets_of(values))
        return digest.finalize().hex()

    def _shares(self, setting: Setting) -> list[list[bytes]]:
        """For each neighbour, and last for the host itself: the share of its own seed, and of its seed with each neighbour."""
        exchange, others = setting.exchange, setting.neighbours[self.place]
        seeds = [("own", self._own_seed(exchange)), *((str(other), self._seed(exchange, other)) for other in others)]
        places = [other + 1 for other in (*others, self.place)]
        by_seed = [
            split(seed, setting.thresholds[self.place], places, derived(self._root, 32, "shares", exchange, whose)) for whose, seed in seeds
        ]
        return [list(shares) for shares in zip(*by_seed, strict=True)]

    def contribution(self, setting: Setting, values: Words) -> Contribution:
        exchange, others = setting.exchange, setting.neighbours[self.place]
        seeds = {other: self._seed(exchange, other) for other in others}
        own = [self._own_seed(exchange)] if setting.recovers else []
        added = [seed for other, seed in seeds.items() if other > self.place]
        add_streams(values, own + added, [seed for other, seed in seeds.items() if other < self.place])
        commitments = rows_of([commitment(seed) for seed in (*own, *seeds.values())], SEED_BYTES)
        sealed = []
        if setting.recovers:
            for other, shares in zip(others, self._shares(setting)[:-1], strict=True):
                cipher, nonce, about = self._cipher(self.place, other, exchange)
                sealed.append(cipher.encrypt(nonce, b"".join(shares), about))
        return Contribution(values, check_of(values), commitments, rows_of(sealed, setting.n_sealed_bytes(self.place)))

    def revealed(self, setting: Setting, survivors: Survivors) -> Revealed:
        left = set(survivors.places)
        own: list[bytes] = []
        pairs: list[bytes] = []
        for sender in sharers(setting, self.place, survivors.places):
            shares = self._shares(setting)[-1] if sender == self.place else self._opened(setting, sender, survivors.sealed.get(sender, b""))
            own.append(shares[0])
            pairs += [share for other, share in zip(setting.neighbours[sender], shares[1:], strict=True) if other not in left]
        return Revealed(rows_of(own, SHARE_BYTES), rows_of(pairs, SHARE_BYTES))

    def _opened(self, setting: Setting, sender: int, sealed: bytes) -> list[bytes]:
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415

        cipher, nonce, about = self._cipher(sender, self.place, setting.exchange)
        name = self.roster.names[sender]
        try:
            opened = cipher.decrypt(nonce, sealed, about)
        except InvalidTag:
            raise ProtocolError(f"what host {name!r} has sealed for host {self.roster.names[self.place]!r} cannot be opened") from None
        if len(opened) != setting.n_sealed_bytes(sender) - TAG_BYTES:
            raise ProtocolError(f"host {name!r} has sealed {len(opened)} bytes, wanted {setting.n_sealed_bytes(sender) - TAG_BYTES}")
        return [opened[start : start + SHARE_BYTES] for start in range(0, len(opened), SHARE_BYTES)]


def sharers(setting: Setting, place: int, survivors: Sequence[int]) -> list[int]:
    """The survivors whose shares a host has: its neighbours and itself, ascending."""
    return sorted(set(survivors) & {place, *setting.neighbours[place]})
