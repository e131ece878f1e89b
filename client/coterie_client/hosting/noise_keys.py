"""The keys of a host's noise: one for each task, from a key that the host keeps and from all that it has been asked so far.

Noise protects rows only if it is drawn once for what is sent, and never serves two different replies: their difference would be exact. So
the key of a task depends on the whole history of tasks, and on the rows. A host that repeats its tasks after a crash draws the same noise,
and its replies have the same bits. Where the history, the rows or what the owner has accepted are others, the noise is independent.

A host that has lost its key would answer again what it has answered, with other noise. Its parent says which tasks it has answered before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.draws.secret import Secret, digest, kept_key
from coterie.errors import RunError
from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile
from coterie.v1 import session_pb2
from coterie.wire.messages import Message, Rows
from coterie_client.data import UserData


class NoiseKeys:
    """The key for the task at hand is `secret`; `history` is what a snapshot keeps."""

    def __init__(self, secret: Secret, history: bytes, *, is_new: bool, path: Path | None = None) -> None:
        self._root, self.history, self._path = secret, history, path
        self._is_new, self._is_lost = is_new, False

    @classmethod
    def of(
        cls, experiment: Experiment, run_id: str, users: Sequence[UserData], store: SnapshotFile | None, history: bytes | None
    ) -> NoiseKeys:
        """Those of a host with these users, whose snapshot has a history. The key is in a file before any noise is drawn.

        RunError if the key of a snapshot is missing.
        """
        path = None if store is None else store.folder / f"{store.name}.key"
        rows = digest(*(part for user in users for part in (user.name.encode(), _bits(user.features), _bits(user.target))))
        is_new = path is None or not path.exists()
        key = kept_key(path, has_begun=history is not None)
        return cls(Secret(key).child(run_id, rows, consent_hash(experiment)), history or b"", is_new=is_new, path=path)

    def forget(self) -> None:
        """Removes the key from the disk: the run has finished, and no task is asked again. Where the disk refuses, it stays."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink()

    def saw(self, task: session_pb2.Task, messages: Sequence[Message]) -> None:
        """Adds a task to the history, before it is worked on: the messages from which halves compute their answers.

        RunError for a task that was answered with a key that is lost.
        """
        self._is_lost = self._is_lost or bool(task.replay and self._is_new)
        if self._is_lost:
            said = "this host has answered tasks of this run, but its state folder with the key of the noise is gone"
            raise RunError(f"{said}: answers with other noise would spend more than epsilon says, so start a new run", Finding("J5"))
        parts = [self.history, f"{task.seq} {task.round} {task.stage} {task.stage_json}".encode()]
        for message in messages:
            users = message.users if isinstance(message, Rows) else None
            parts += [message.kind.encode(), b"all" if users is None else _bits(users)]
            parts += [_bits(getattr(message, name)) for name, _ in message.specs]
        self.history = digest(*parts)

    @property
    def secret(self) -> Secret:
        """The key for the task that was seen last."""
        return self._root.child(self.history)


def _bits(array: Any) -> bytes:
    found = np.ascontiguousarray(array)
    return f"{found.dtype.str}{found.shape}".encode() + found.tobytes()
