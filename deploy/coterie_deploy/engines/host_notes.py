"""What the hosts of a run on this machine note about their data, each sentence once: several hosts may read the same file.

A host in this process has its notes; one in a process of its own has written them to its log before it joins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie_deploy.engines.hosts import LOG, AggregatorProcess, HostProcess, Launched
from coterie_deploy.telemetry.logs import NOTE
from coterie_server.record.rundb import OnEvent

_MAX_BYTES = 1 << 20  # of a log that are looked at: notes come first


class HostNotes:
    """Call it with each event of the run, which it passes on: when a host joins, its notes are there."""

    def __init__(self, say: Callable[[str], None] | None, further: OnEvent | None) -> None:
        self._say = say
        self._further = further
        self._said: set[str] = set()
        self._logs: dict[str, list[Path]] = {}

    def of(self, sentences: Iterable[str]) -> None:
        """Says those that are new."""
        for sentence in sentences:
            if sentence not in self._said and self._say is not None:
                self._say(sentence)
            self._said.add(sentence)

    def watch(self, processes: Sequence[Launched]) -> None:
        """The run has these processes; an aggregator joins when its hosts have."""
        for process in processes:
            hosts: Sequence[HostProcess] = process.hosts if isinstance(process, AggregatorProcess) else [process]
            self._logs[process.name] = [host.folder / LOG for host in hosts]

    def __call__(self, kind: str, text: str, data: Mapping[str, Any]) -> None:
        """An event."""
        if kind == "join":
            for log in self._logs.pop(str(data.get("host")), ()):
                self.of(notes_in(log))
        if self._further is not None:
            self._further(kind, text, data)


def notes_in(log: Path) -> list[str]:
    """The notes in a host's log; none where it cannot be read."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        lines = file.read(_MAX_BYTES).decode("utf-8", "replace").split("\n")
        return [line.removeprefix(NOTE) for line in lines if line.startswith(NOTE)]
    return []
