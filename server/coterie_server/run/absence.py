"""Which methods can go on without some users: what `federation.on_loss: skip` and `late: skip` ask before they leave anybody out.

Every server half says in `needs_everyone` why nobody can be left out of a stage with these settings, "" where somebody can; what that
means is said in its module's docstring. Who is left out of which exchange is the hub's decision.
"""

from __future__ import annotations

from collections.abc import Sequence

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie_server.interface.half import server_half
from coterie_server.interface.stages import Stage


def why_everyone(stage: Stage) -> str:
    """Why a stage needs every user in every round, "" where it does not."""
    why = server_half(stage.method).needs_everyone
    return why if isinstance(why, str) else why(stage.config)


def check_absence(experiment: Experiment, stages: Sequence[Stage]) -> None:
    """ConfigError when the users of lost hosts are to be left out, but the method or a stage after it needs every user.

    References and the stage that the method starts from come before: a host that is lost there ends the run as with `stop`.
    """
    if experiment.federation.on_loss != "skip":
        return
    name = experiment.method.name
    first = next(place for place, stage in enumerate(stages) if stage.method == name)
    for stage in stages[first:]:
        if why := why_everyone(stage):
            whose = f"method {name!r}" if stage.method == name else f"stage {stage.name!r} after method {name!r}"
            raise ConfigError(f"federation.on_loss is 'skip', but {whose} needs every user: {why}; want on_loss 'wait' or 'stop'")
