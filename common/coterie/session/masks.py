"""A member's masks over its sums, where the experiment wants them (`federation.sums: masked`). See `coterie.masked`.

Hosts mask their sums towards their parent, and aggregators the totals of their clusters towards the coordinator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coterie.errors import ProtocolError
from coterie.experiment.config import Experiment
from coterie.families import masking
from coterie.families.masking import AskKey, AskMasks, AskUnmask, HostKeys, Role
from coterie.findings import Finding
from coterie.masked.frames import Advert
from coterie.masked.party import Party
from coterie.record.secret_log import SecretLog
from coterie.record.snapshot import SnapshotFile
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie.wire.messages import AskTotal, Message, Total

ROOM = "masking"
_KEPT = 64  # exchanges that the log remembers before those that are over leave it
_REFUSED = Finding("C11")


class _Memory:
    """The log of a member without a state folder: its process is never restarted."""

    def entries(self) -> Sequence[Mapping[str, Any]]:
        return ()

    def append(self, entry: Mapping[str, Any]) -> None:
        """Nothing outlives the process."""

    def remove(self) -> None:
        """There is nothing."""


class Masks:
    def __init__(
        self, name: str, experiment: Experiment, run_id: str, store: SnapshotFile | None, tls: Tls | None, role: Role = "host"
    ) -> None:
        """With `store` the secrets are in a file of its folder. RunError where it belongs to another run."""
        self._log = _Memory() if store is None else SecretLog(store.folder / f"{store.name}.masks")
        self._party = Party(run_id, name, masking.rules_of(experiment, role), self._log, *_signing(tls, role))
        self._n_covered = 0

    def forget(self) -> None:
        """Removes the secrets: the run has finished, and no exchange is asked again."""
        self._log.remove()

    def answers(self, task: session_pb2.Task, messages: Sequence[Message], answers: Sequence[Message], until: int = 0) -> list[Message]:
        """The answers of a member, its sums under masks, with those to the messages of masked sums.

        Exchanges up to `until` may be forgotten: neither the parent nor a restart of the member from a snapshot comes back to them.

        ProtocolError where sums are asked for without masks, and for requests that would reveal more than a total.
        """
        try:
            return self._answers(task, messages, list(answers), until)
        except ProtocolError as error:
            error.finding = _REFUSED
            raise

    def _answers(self, task: session_pb2.Task, messages: Sequence[Message], listed: list[Message], until: int) -> list[Message]:
        stage = str(task.stage)
        self._n_covered += 1
        if self._n_covered % _KEPT == 0:
            self._party.over(until)
        asked = {type(message): message for message in messages}
        if isinstance(keys := asked.get(HostKeys), HostKeys):
            self._party.meet(stage, masking.adverts_of(keys))
        if AskKey in asked:
            listed.append(masking.key_message(self._party.advertise(stage)))
        masks, sums = asked.get(AskMasks), [ask for ask in messages if isinstance(ask, AskTotal)]
        if isinstance(masks, AskMasks):
            listed = self._covered(stage, task.seq, masks, sums, listed)
        elif sums or any(isinstance(answer, Total) for answer in listed):
            raise ProtocolError("the parent asks for sums without masks, but the experiment that this member serves masks them")
        if isinstance(request := asked.get(AskUnmask), AskUnmask):
            exchange = int(request.exchange[0])
            survivors = masking.survivors_of(request, self._party.n_sealed_bytes(exchange))
            listed.append(masking.opened_message(self._party.unmask(exchange, survivors)))
        return listed

    def _covered(self, stage: str, exchange: int, masks: AskMasks, asks: Sequence[AskTotal], answers: Sequence[Message]) -> list[Message]:
        if len(asks) != masks.groups.size:
            raise ProtocolError(f"the parent asks for masks over {masks.groups.size} sums, but for {len(asks)} sums")
        whole: dict[type[Message], Total] = {
            type(sums): _spread(sums, n) for sums, n in zip(_totals(answers, asks), masks.groups.tolist(), strict=True)
        }
        pieces = [getattr(sums, name) for sums in whole.values() for name, _ in sums.specs if name != "groups"]
        values = (pieces[0].reshape(-1) if len(pieces) == 1 else np.concatenate([piece.reshape(-1) for piece in pieces])).view(np.uint64)
        contribution = self._party.masked(stage, exchange, masks.among.tolist(), values)
        words, start = contribution.values.view(np.int64), 0
        for sums in tuple(whole.values()):
            columns: dict[str, Any] = {"groups": sums.groups}
            for name, _ in sums.specs:
                if name != "groups":
                    piece = getattr(sums, name)
                    columns[name] = words[start : start + piece.size].reshape(piece.shape)
                    start += piece.size
            whole[type(sums)] = type(sums)(**columns)
        listed = [whole.get(type(answer), answer) for answer in answers]
        return [*listed, masking.covered_message(contribution)]


def _totals(answers: Sequence[Message], asks: Sequence[AskTotal]) -> list[Total]:
    """The sums of a member in the order in which they are asked for."""
    found = {type(answer).of: answer for answer in answers if isinstance(answer, Total)}
    return [found[ask.of] for ask in asks]


def _spread(sums: Total, n_groups: int) -> Total:
    """With a row for each group: which groups a member has users of is not for the parent to see."""
    if not 0 < n_groups <= _MAX_GROUPS or (sums.groups.size and int(sums.groups[-1]) >= n_groups):
        raise ProtocolError(f"the parent asks for masks over {n_groups} groups of {sums.kind}, but for sums of others")
    if sums.groups.size == n_groups:
        return sums
    columns: dict[str, Any] = {"groups": np.arange(n_groups)}
    for name, _ in sums.specs:
        if name != "groups":
            rows = getattr(sums, name)
            columns[name] = np.zeros((n_groups, *rows.shape[1:]), dtype=np.int64)
            columns[name][sums.groups] = rows
    return type(sums)(**columns)


_MAX_GROUPS = 1 << 20


def _signing(tls: Tls | None, role: Role) -> tuple[Any, Any]:
    """How a member signs its key and checks those of others; without TLS neither."""
    if tls is None:
        return None, None
    from coterie.session.certified import check_signed, signer_of  # noqa: PLC0415 - few clients need it

    def verify(advert: Advert, text: bytes) -> None:
        check_signed(tls, role, advert.name, text, advert.certificate, advert.signature)

    return signer_of(tls), verify
