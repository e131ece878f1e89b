"""Server half of `pfedme`: partial sharing whose average is mixed with what was there before (see `coterie.methods.pfedme`)."""

from __future__ import annotations

from dataclasses import replace

from coterie.methods.pfedme import Config
from coterie_server.families import partial
from coterie_server.families.partial import State
from coterie_server.interface.half import Setting, StageHalf


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage."""
    return replace(partial.set_up(config, setting), beta=config.beta).as_half()


SERVER = replace(partial.SERVER, build=build)
