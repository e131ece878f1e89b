"""Server half of `ditto`: partial sharing, with the tensors that its configuration shares."""

from __future__ import annotations

from coterie_server.families.partial import build, needs_everyone

FLAT_ONLY = True  # it knows no clusters

__all__ = ["FLAT_ONLY", "build", "needs_everyone"]
