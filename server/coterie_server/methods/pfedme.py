"""Server half of `pfedme`: partial sharing whose average is mixed with what was there before (see `coterie.methods.pfedme`)."""

from __future__ import annotations

from dataclasses import replace

from coterie.methods.pfedme import Config
from coterie_server.families import partial
from coterie_server.families.partial import PartialSharing
from coterie_server.interface.half import Setting


def build(config: Config, setting: Setting) -> PartialSharing:
    """The server half for one stage."""
    return replace(partial.build(config, setting), beta=config.beta)


SERVER = replace(partial.SERVER, build=build)
