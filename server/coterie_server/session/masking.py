"""Masked sums (`federation.sums: masked`): the parent's part, on the exchanges of a hub. See `coterie.masked`.

Once a stage the hosts' keys are collected, which needs every host. A host receives them with the first sums that it is asked for. Where
nobody may be lost, the masks cancel in the exchange of the sums. Otherwise a second exchange asks the hosts that are left to take off what
does not cancel.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie.arrays import Indices, distinct
from coterie.errors import ProtocolError, RunError
from coterie.families import masking
from coterie.families.masking import AskKey, AskMasks, Covered, HostKey, Opened
from coterie.masked.frames import Advert, Setting
from coterie.masked.gathering import Gathering, check_form
from coterie.masked.roster import Roster
from coterie.masked.streams import Words
from coterie.wire.messages import AskTotal, Message, PerHost, Total
from coterie_server.interface.half import Replies
from coterie_server.interface.merge import Layout, merged, weights_of
from coterie_server.interface.wanted import Check, Wanted
from coterie_server.session.duty import Duty, Shared

_KEYS = "the keys of masked sums need every host"
_UNSIGNED = (
    "the {noun}s' keys of masked sums are not signed, since the run has no TLS: {parent} that changes them would see each {noun}'s sums"
)
_SMALLEST = 2  # hosts of a total
_STAGES = 2  # whose keys are kept: a checkpoint may be of the stage before


@dataclass(frozen=True)
class Collected:
    """The answers to an exchange by host."""

    answers: Mapping[str, Sequence[Message]]
    answered: Indices | None  #: see `Replies`
    unasked: Indices

    def replies(self, layout: Layout) -> Replies:
        """Those of all hosts together."""
        return Replies(merged(self.answers, layout), self.answered, weights_of(self.answers, layout), self.unasked)


Collect = Callable[..., Awaitable[Collected]]


@dataclass(frozen=True)
class _Known:
    """The keys of a stage."""

    seq: int  # the exchange in which they came
    adverts: tuple[Advert, ...]
    roster: Roster
    told: dict[str, int] = field(default_factory=dict)  # the hosts that have them, and since which exchange


class Masking(Duty):
    def __init__(self, shared: Shared, collect: Collect) -> None:
        super().__init__(shared)
        self._collect = collect
        self._known: dict[int, _Known] = {}  # by number of the stage, ascending

    async def exchange(self, *messages: Message, to: Indices | None = None, wanted: Sequence[Wanted] = ()) -> Replies:
        """As `Federation.exchange` with messages that ask for sums, of which only the total becomes known.

        RunError with too few hosts, ProtocolError where masks do not fit together.
        """
        if self._rules.is_two_tier and any(one.groups is None for one in wanted):
            raise RunError("a method wants other answers beside its masked sums, which aggregators do not pass on: want topology 'flat'")
        known = await self._keys()
        asks = [message for message in messages if isinstance(message, AskTotal)]
        kinds: dict[type[Message], int] = {one.kind: _n_groups(one) for ask in asks for one in wanted if one.kind is ask.of.total}
        among = self._places(known.roster, messages, to)
        rules = masking.rules_of(self._shared.experiment, self._rules.noun)
        exchange, fewest = self._state.seq + 1, known.roster.fewest(rules)
        if len(among) < fewest:
            said = (
                f"round {self._state.round} asks {len(among)} of {len(known.roster.names)} {self._rules.noun}s for masked sums, "
                f"wanted at least {fewest}"
            )
            raise RunError(f"{said}: draw more users (such as method.participation), or want a smaller federation.min_summed")
        self._check_groups(wanted, [known.roster.names[place] for place in among], fewest)
        setting = known.roster.setting(exchange, among, rules)
        masks = AskMasks(np.array(among, dtype=np.int64), np.array(list(kinds.values()), dtype=np.int64))
        keys, names = masking.keys_message(known.adverts), known.roster.names
        untold = {names[place]: keys for place in among if names[place] not in known.told}
        changed = [_whole(one, kinds[one.kind]) if one.kind in kinds else one for one in wanted]
        found = await self._collect([*messages, masks], to, [*changed, Wanted(Covered, check=self._has_form(setting, names))], own=untold)
        known.told.update({name: exchange for name in untold if self._roster.hosts[name].asked >= exchange})
        if not found.answers:
            return found.replies(self._roster.layout)
        gathering, first = self._gathered(known.roster, setting, found, list(kinds))
        if rules.recovers:
            self._check_groups(wanted, list(found.answers), fewest)
            await self._unmask(known.roster, setting, gathering)
        total = _split(gathering.total(), first)
        host = next(iter(found.answers))
        others = {name: [one for one in listed if not isinstance(one, Total | PerHost)] for name, listed in found.answers.items()}
        others[host] = [*others[host], *total]
        return replace(found, answers=others).replies(self._roster.layout)

    async def _keys(self) -> _Known:
        """The keys of this stage, which its first sums collect."""
        stage = self._state.stage
        if stage in self._known:
            return self._known[stage]
        participation = self._participation
        before = participation.needs_everyone, participation.may_skip
        participation.needs_everyone, participation.may_skip = before[0] or _KEYS, False
        try:
            found = await self._collect([AskKey()], None, [Wanted(HostKey)])
        finally:
            participation.needs_everyone, participation.may_skip = before
        keys = {name: one for name, listed in found.answers.items() for one in listed if isinstance(one, HostKey)}
        adverts = tuple(masking.advert_of(name, keys[name]) for name in sorted(keys))
        roster = Roster.of(self._roster.run_id, str(stage), adverts)
        if not all(advert.signature for advert in adverts):
            parent = "a coordinator" if self._roster.cluster is None else "an aggregator"
            self._journal.announce("warning", _UNSIGNED.format(noun=self._rules.noun, parent=parent))
        self._known[stage] = _Known(self._state.seq, adverts, roster)
        for old in list(self._known)[:-_STAGES]:
            del self._known[old]
        return self._known[stage]

    def _check_groups(self, wanted: Sequence[Wanted], hosts: Sequence[str], fewest: int) -> None:
        """RunError where the total of a group would be of fewer than `fewest` of these hosts."""
        layout, n_hosts = self._roster.layout, len(self._roster.hosts)
        own = np.sort(np.concatenate([layout.own[host] for host in hosts]))
        for one in wanted:
            if one.groups is None:
                continue
            users = own if one.users is None else np.intersect1d(one.users, own)
            n_of_group = np.bincount(distinct(one.groups[users] * n_hosts + layout.host_of[users]) // n_hosts)
            group = int(np.argmin(np.where(n_of_group > 0, n_of_group, n_hosts))) if n_of_group.size else 0
            if n_of_group.size and n_of_group[group] < fewest:
                nouns = f"{self._rules.noun}s"
                said = f"group {group} of {one.kind.method}/{one.kind.step} has users of {n_of_group[group]} of the {nouns} that are asked"
                hint = f"users of more {nouns} in it" + (", or a smaller federation.min_summed" if fewest > _SMALLEST else "")
                raise RunError(f"{said}, but the total of a group must be of at least {fewest} {nouns}: want {hint}")

    def _places(self, roster: Roster, messages: Sequence[Message], to: Indices | None) -> list[int]:
        place = {name: number for number, name in enumerate(roster.names)}
        return sorted(place[name] for name in self._roster.parts(messages, to))

    def _has_form(self, setting: Setting, names: Sequence[str]) -> Check:
        """Finds masks that cannot be right when they come, so that their host is at fault and not the run."""

        def check(message: Any, members: Indices) -> None:
            place = self._place_of(members, names)
            came = masking.contribution_of(np.zeros(0, dtype=np.uint64), message, setting.n_sealed_bytes(place))
            check_form(names[place], setting, place, came)

        return check

    def _place_of(self, members: Indices, names: Sequence[str]) -> int:
        """The place of the host of these members, which are all of its own."""
        layout = self._roster.layout
        return names.index(layout.hosts[layout.host_of[members[0]]])

    def _gathered(
        self, roster: Roster, setting: Setting, found: Collected, kinds: Sequence[type[Message]]
    ) -> tuple[Gathering, list[Total]]:
        place = {name: number for number, name in enumerate(roster.names)}
        gathering: Gathering | None = None
        first: list[Total] = []
        for name, listed in found.answers.items():
            sums = [one for kind in kinds for one in listed if isinstance(one, Total) and type(one) is kind]
            first = first or sums
            if [_shapes(one) for one in sums] != [_shapes(one) for one in first]:
                raise ProtocolError(f"host {name!r} sent sums of other shapes than host {next(iter(found.answers))!r}")
            values = _joined(sums)
            gathering = gathering or Gathering(roster, setting, values.size)
            (covered,) = (one for one in listed if isinstance(one, Covered))
            gathering.add(place[name], masking.contribution_of(values, covered, setting.n_sealed_bytes(place[name])))
        assert gathering is not None  # noqa: S101 - somebody has answered
        return gathering, first

    async def _unmask(self, roster: Roster, setting: Setting, gathering: Gathering) -> None:
        own = {roster.names[one]: masking.unmask_message(setting.exchange, gathering.request(one)) for one in gathering.survivors}

        def check(message: Any, members: Indices) -> None:
            gathering.check_shares(self._place_of(members, roster.names), masking.revealed_of(message))

        found = await self._collect((), self._roster.users_of(own), [Wanted(Opened, check=check)], own=own)
        for name, listed in found.answers.items():
            (opened,) = (one for one in listed if isinstance(one, Opened))
            gathering.reveal(roster.names.index(name), masking.revealed_of(opened))

    def memory(self, until: int) -> dict[str, Any]:
        """The keys as a snapshot tree, as they were after exchange `until`."""
        return {
            str(stage): {
                "seq": known.seq,
                "adverts": [[one.name, one.public, one.certificate, one.signature] for one in known.adverts],
                "told": {name: seq for name, seq in known.told.items() if seq <= until},
            }
            for stage, known in self._known.items()
            if known.seq <= until
        }

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Takes up the keys of an earlier attempt."""
        for stage, entry in tree.items():
            adverts = tuple(Advert(*parts) for parts in entry["adverts"])
            self._known[int(stage)] = _Known(entry["seq"], adverts, Roster.of(self._roster.run_id, stage, adverts), entry["told"])


def _n_groups(one: Wanted) -> int:
    return 1 if one.groups is None else int(one.groups.max(initial=0)) + 1


def _whole(one: Wanted, n_groups: int) -> Wanted:
    """A row of every group from every host."""
    return replace(one, users=None, groups=None, extents={**one.extents, "groups": n_groups})


def _shapes(sums: Total) -> list[tuple[int, ...]]:
    return [getattr(sums, name).shape for name, _ in sums.specs]


def _columns(sums: Total) -> list[Indices]:
    return [getattr(sums, name) for name, _ in sums.specs if name != "groups"]


def _joined(listed: Sequence[Total]) -> Words:
    """All words of a host's sums, one after another."""
    pieces = [column.reshape(-1) for sums in listed for column in _columns(sums)]
    return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(np.uint64)


def _split(words: Words, like: Sequence[Total]) -> list[Total]:
    """The sums of these words, in the shapes of others."""
    found, start = [], 0
    for sums in like:
        columns: dict[str, Any] = {"groups": sums.groups}
        for name, _ in sums.specs:
            if name != "groups":
                shape = getattr(sums, name).shape
                size = getattr(sums, name).size
                columns[name] = words[start : start + size].view(np.int64).reshape(shape)
                start += size
        found.append(type(sums)(**columns))
    return found
