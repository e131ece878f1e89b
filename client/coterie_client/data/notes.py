"""Notes on a host's data before the first round: rows left out, columns not used, columns that may be identifiers."""

from __future__ import annotations

from dataclasses import dataclass

from coterie.findings import Finding


@dataclass(frozen=True)
class Note:
    """The sentence goes to the host's own log, the finding to the coordinator."""

    sentence: str
    finding: Finding
