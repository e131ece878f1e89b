"""What compression has saved, by step: bytes of numbers, scales and places, and what the payload would have been."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import dataclass

from coterie.compress.link import Link
from coterie.experiment.config import experiment_from
from coterie.record.ledger import UP
from coterie.wire.messages import ASIDE, PACKED, has_rows, is_packable, kind_class, unpacked_kind

_KINDS = f"kind LIKE '%{PACKED}' OR kind LIKE '%{ASIDE}'"
_ROWS = f"""
SELECT step, direction, scope, kind, vectors, scalars, COALESCE(members, ''), COUNT(*), SUM(payload_bytes), SUM(message_bytes) FROM ledger
LEFT JOIN user_sets ON user_sets.id = user_set WHERE useful AND ({_KINDS}) GROUP BY step, direction, scope, kind, vectors, scalars, members
ORDER BY MIN(row)
"""  # noqa: S608 - constants of ours


@dataclass
class Saving:
    """Useful traffic of one step in one direction, in bytes.

    `aside` are messages with `scales` and `places`, of which these are the bytes of the arrays. `expected` is the closed form of `values`,
    None where lengths depend on the numbers. `plain` is the payload of the same messages without compression.
    """

    step: str
    direction: str
    scope: str
    values: int = 0
    aside: int = 0
    plain: int = 0
    expected: int | None = 0
    scales: int = 0
    places: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes than without compression."""
        return self.plain / max(1, self.values + self.aside)


def savings(connection: sqlite3.Connection) -> list[Saving]:
    """One for each step and direction with compressed messages, in order of first appearance. Empty for runs without compression."""
    frozen = connection.execute("SELECT value FROM run WHERE key = 'experiment'").fetchone()
    if frozen is None or json.loads(frozen[0]).get("federation", {}).get("compress") is None:
        return []
    experiment = experiment_from(json.loads(frozen[0]))
    model = connection.execute("SELECT value FROM run WHERE key = 'model'").fetchone() or ("",)
    rules = experiment.federation.compress
    found: dict[tuple[str, str, str], Saving] = {}
    for step, direction, scope, kind, vectors, scalars, members, times, payload, message in connection.execute(_ROWS):
        saving = found.setdefault((step, direction, scope), Saving(step, direction, scope))
        if (cls := unpacked_kind(kind_class(kind))) is None:
            saving.aside += message
            continue
        rule = None if rules is None else rules.up if direction == UP else rules.down
        if rule is None:
            continue
        saving.values += payload
        specs = [spec for _, spec in cls.specs if is_packable(spec)]
        # What is common to its users is sent once, and counts for each.
        n_sent = vectors if all(has_rows(spec) for spec in specs) else vectors // max(1, _n_of(members))
        link, d = Link.of(rule, experiment, lambda: model[0]), scalars // max(1, vectors)
        packing = link.weights if specs[0].is_weights else link.packing
        itemsize = (link.precision.weights if specs[0].is_weights else link.precision.dtype).itemsize
        saving.plain += times * n_sent * d * itemsize
        sizes, places = packing.sizes(n_sent, d), packing.places(n_sent, d)
        saving.places += times * places
        saving.scales += times * (sizes.aside - places)
        fixed = None if packing.deflates else times * sizes.values
        saving.expected = None if saving.expected is None or fixed is None else saving.expected + fixed
    return list(found.values())


def _n_of(members: str) -> int:
    """How many users a set has, such as 0-19,25; 1 for none."""
    ends = [part.partition("-")[::2] for part in members.split(",") if part]
    return sum(int(last or first) - int(first) + 1 for first, last in ends) or 1
