"""Server half of `pfedme`: partial sharing whose average is mixed with what was there before (see `coterie.methods.pfedme`)."""

from __future__ import annotations

from dataclasses import replace

from coterie.methods.pfedme import Config
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing, needs_everyone
from coterie_server.interface.half import Setting

FLAT_ONLY = True  # it knows no clusters

__all__ = ["FLAT_ONLY", "build", "needs_everyone"]


def build(config: Config, setting: Setting) -> PartialSharing:
    """The server half for one stage."""
    return replace(partial.build(config, setting), beta=config.beta)
