"""From an experiment to its stages: references, then those of the method, one for each point of its grid. Which need all users.

All stages run on the same joined federation, one after the other, each with its own part of the ledger. The server half of a method lists
its stages (`ServerHalf.stages`), and says in `needs_everyone` why no user can be left out of a stage, as `federation.on_loss: skip` and
`late: skip` do. The hub decides who is left out of which exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie.families.grid import Grid
from coterie_server.interface.half import server_half
from coterie_server.interface.stages import Stage, reference


def stages_of(experiment: Experiment) -> list[Stage]:
    """All stages of an experiment, in order, each name once: a reference may also be the start of the method, or the method itself."""
    references = [reference(name) for name in experiment.references]
    return list({stage.name: stage for stage in (*references, *_method_stages(experiment))}.values())


def _method_stages(experiment: Experiment) -> Sequence[Stage]:
    """Those of the method; with a grid, one for each point, named after it, which starts from the one before."""
    config, stages = experiment.method, server_half(experiment.method.name).stages
    if not isinstance(config, Grid) or config.grid is None:
        return stages(config, experiment)
    listed: list[Stage] = []
    for name, point in config.points():
        (stage,) = stages(point, experiment)
        before = tuple(stage.name for stage in listed[-1:])
        listed.append(replace(stage, name=name, start=before or stage.start))
    return listed


def why_everyone(stage: Stage) -> str:
    """Why a stage needs every user in every round, "" where it does not."""
    why = server_half(stage.method).needs_everyone
    return why if isinstance(why, str) else why(stage.config)


def check_absence(experiment: Experiment, stages: Sequence[Stage]) -> None:
    """ConfigError when the users of lost hosts are to be left out, but the method or a stage after it needs every user.

    In the stages before, references and starts, a lost host ends the run as with `stop`.
    """
    if experiment.federation.on_loss != "skip":
        return
    name = experiment.method.name
    first = next(place for place, stage in enumerate(stages) if stage.method == name)
    for stage in stages[first:]:
        if why := why_everyone(stage):
            whose = f"method {name!r}" if stage.method == name else f"stage {stage.name!r} after method {name!r}"
            raise ConfigError(f"federation.on_loss is 'skip', but {whose} needs every user: {why}; want on_loss 'wait' or 'stop'")
