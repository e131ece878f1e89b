"""Finds hosts that return what they were sent, or the same model again: free-riders, and hosts that are stuck. Neither ends a run.

It looks at models of local training alone, which training on rows always changes. Answers of other methods may repeat when they have
converged, and sums of a host hide what each user has returned.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.wire.messages import Message, Rows
from coterie.wire.precision import Precision
from coterie_server.session.ports import Recorder

_WHY = "it may not train, or its steps are too short for the payload type"


class Echoes:
    """Compares checksums of each user's tensors with those that its host was sent, and with those that it returned before."""

    def __init__(self, recorder: Recorder, precision: Precision) -> None:
        self._recorder, self._precision = recorder, precision
        self._times: dict[tuple[str, str], int] = {}  # by host and what it did: in how many exchanges
        self._last: dict[tuple[str, str, int], tuple[int, int]] = {}  # by host, kind and position: checksums of what was sent and returned

    def look(self, sent: Sequence[Message], answers: Mapping[str, Sequence[Message]], round_number: int) -> None:
        """Looks at the answers to one exchange, by host; `users` of these are positions among the host's own."""
        given: dict[tuple[str, str], int] = {}
        for message in sent:
            if isinstance(message, Rows) and (weights := _weights_of(message)) is not None and weights.ndim == 1:
                given[message.method, message.step] = _checksum(self._precision.rounded_weights(weights))
        if not given:
            return
        for host, messages in answers.items():
            for message in messages:
                was_sent, weights = given.get((message.method, message.step)), _weights_of(message)
                if was_sent is not None and weights is not None and weights.ndim == 2 and weights.size:
                    self._compare(host, message, weights, was_sent, round_number)

    def _compare(self, host: str, message: Message, weights: NDArray[Any], was_sent: int, round_number: int) -> None:
        users = message.users if isinstance(message, Rows) and message.users is not None else np.arange(len(weights))
        n_echoes = n_stuck = 0
        for position, row in zip(users.tolist(), weights, strict=True):
            found, place = _checksum(row), (host, message.kind, position)
            before = self._last.get(place)
            n_echoes += found == was_sent
            n_stuck += found != was_sent and before is not None and before[1] == found and before[0] != was_sent
            self._last[place] = (was_sent, found)
        for n, what, kind in (
            (n_echoes, "exactly the tensors that it was sent", "echo"),
            (n_stuck, "the same tensors as for another task", "stuck"),
        ):
            if n:
                times = self._times[host, kind] = self._times.get((host, kind), 0) + 1
                if not times & (times - 1):  # 1, 2, 4, 8, ...
                    whose = f"{n} of its users" if n > 1 else "a user"
                    when = f"in round {round_number}" + (f", for the {times}th time" if times > 2 else "")
                    self._recorder.event("warning", f"host {host!r} returned for {whose} {what}, {when}: {_WHY}", host=host, users=n)


def _weights_of(message: Message) -> NDArray[Any] | None:
    return next((getattr(message, name) for name, spec in message.specs if spec.is_weights), None)


def _checksum(row: NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(row).data)
