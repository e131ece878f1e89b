"""The parent's part in one masked sum, without I/O."""

from __future__ import annotations

import numpy as np

from coterie.errors import ProtocolError, RunError
from coterie.masked.frames import (
    Contribution,
    Revealed,
    Setting,
    Survivors,
    check_of,
    check_shape,
    commitments_shape,
    sealed_shape,
)
from coterie.masked.party import sharers
from coterie.masked.roster import Roster
from coterie.masked.sharing import SHARE_BYTES, joined
from coterie.masked.streams import Words, add_streams, commitment

_MODULUS = 1 << 64


def check_form(name: str, setting: Setting, place: int, came: Contribution) -> None:
    """ProtocolError unless host `name` has sent as many commitments and shares as it was asked for."""
    check_shape(f"the commitments of host {name!r}", came.commitments, commitments_shape(setting, place))
    check_shape(f"the sealed shares of host {name!r}", came.sealed, sealed_shape(setting, place))


class Gathering:
    """Adds up the hosts' contributions as they come, then takes away what does not cancel."""

    def __init__(self, roster: Roster, setting: Setting, size: int) -> None:
        """Of `size` terms of each host."""
        self._roster, self._setting = roster, setting
        self._total = np.zeros(size, dtype=np.uint64)
        self._check = 0  # of what the total must be before masks are taken off
        self._commitments: dict[int, dict[int, bytes]] = {}  # by place and other place; of a host's own seed: by its place twice
        self._sealed: dict[int, dict[int, bytes]] = {}
        self._shares: dict[tuple[int, int], dict[int, bytes]] = {}  # of a seed, as for commitments: by place of the holder, from 1
        self._survivors: tuple[int, ...] | None = None
        self._revealed: set[int] = set()

    def check_shares(self, place: int, came: Revealed) -> None:
        """ProtocolError unless there are as many shares as asked for."""
        name, senders = self._roster.names[place], sharers(self._setting, place, self.survivors)
        n_pairs = sum(len(self._lost_neighbours(sender)) for sender in senders)
        check_shape(f"the shares of host {name!r}", came.own, (len(senders), SHARE_BYTES))
        check_shape(f"the shares of host {name!r} for lost hosts", came.pairs, (n_pairs, SHARE_BYTES))

    def add(self, place: int, came: Contribution) -> None:
        """ProtocolError for a contribution that was not asked for, came twice, or is damaged, and where hosts do not agree on a seed."""
        setting, name = self._setting, self._roster.names[place]
        if place not in setting.among or place in self._commitments or self._survivors is not None:
            raise ProtocolError(f"host {name!r} sent terms that it was not asked for, or twice")
        if came.values.shape != self._total.shape or came.values.dtype != np.uint64:
            raise ProtocolError(f"host {name!r} sent {came.values.shape} of {came.values.dtype}, wanted {self._total.shape} of uint64")
        check_form(name, setting, place, came)
        others = setting.neighbours[place]
        committed = dict(zip([place, *others] if setting.recovers else others, map(bytes, came.commitments), strict=True))
        for other in others:
            if other in self._commitments and self._commitments[other][place] != committed[other]:
                raise ProtocolError(f"hosts {name!r} and {self._roster.names[other]!r} do not agree on their mask")
        self._commitments[place] = committed
        if setting.recovers:
            self._sealed[place] = dict(zip(others, map(bytes, came.sealed), strict=True))
        np.add(self._total, came.values, out=self._total)
        self._check = (self._check + came.check) % _MODULUS

    @property
    def survivors(self) -> tuple[int, ...]:
        """The places whose terms are in the sum: no more are taken. RunError below the threshold, or where somebody may not be missing."""
        if self._survivors is None:
            found = tuple(sorted(self._commitments))
            wanted = self._setting.at_least if self._setting.recovers else len(self._setting.among)
            if len(found) < wanted:
                raise RunError(f"{len(found)} of {len(self._setting.among)} hosts sent terms of a masked sum, wanted at least {wanted}")
            self._survivors = found
        return self._survivors

    def request(self, place: int) -> Survivors:
        """What a survivor is asked."""
        senders = [sender for sender in sharers(self._setting, place, self.survivors) if sender != place]
        return Survivors(self.survivors, {sender: self._sealed[sender][place] for sender in senders})

    def reveal(self, place: int, came: Revealed) -> None:
        """ProtocolError for shares that were not asked for, come twice, or have another form."""
        name = self._roster.names[place]
        if place not in self.survivors or place in self._revealed:
            raise ProtocolError(f"host {name!r} sent shares of masks that it was not asked for, or twice")
        senders = sharers(self._setting, place, self.survivors)
        pairs = [(sender, other) for sender in senders for other in self._lost_neighbours(sender)]
        self.check_shares(place, came)
        self._revealed.add(place)
        for sender, share in zip(senders, came.own, strict=True):
            self._shares.setdefault((sender, sender), {})[place + 1] = bytes(share)
        for pair, share in zip(pairs, came.pairs, strict=True):
            self._shares.setdefault(pair, {})[place + 1] = bytes(share)

    def _lost_neighbours(self, place: int) -> list[int]:
        return [other for other in self._setting.neighbours[place] if other not in self.survivors]

    def total(self) -> Words:
        """The sum (n,) of the survivors' terms modulo 2^64. RunError with too few shares, ProtocolError with wrong ones. Call it once."""
        survivors = self.survivors
        if check_of(self._total) != self._check:
            raise ProtocolError("the terms of some host were damaged on their way: their sum is not that of what the hosts have sent")
        if self._setting.recovers:
            own = [self._seed(place, place) for place in survivors]
            pairs = [(place, other) for place in survivors for other in self._lost_neighbours(place)]
            # A host adds the stream of a pair where its place is the lower one.
            add_streams(
                self._total,
                [self._seed(*pair) for pair in pairs if pair[0] > pair[1]],
                own + [self._seed(*pair) for pair in pairs if pair[0] < pair[1]],
            )
        return self._total

    def _seed(self, place: int, other: int) -> bytes:
        shares, wanted, name = self._shares.get((place, other), {}), self._setting.thresholds[place], self._roster.names[place]
        if len(shares) < wanted:
            raise RunError(f"{len(shares)} hosts are left that can take off a mask of host {name!r}, wanted at least {wanted}")
        seed = joined(shares, wanted)
        if commitment(seed) != self._commitments[place][other]:
            raise ProtocolError(f"shares of a mask of host {name!r} are wrong: a host has not sent what it was given")
        return seed
