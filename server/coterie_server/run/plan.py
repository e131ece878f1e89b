"""From an experiment to its stages: references, a start, the method itself (a stage for each point of a path or grid), a refit.

All stages run on the same joined federation, one after the other, each with its own part of the ledger. A method that needs several stages
says so with `stages` of its server half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from coterie.experiment.config import Experiment
from coterie.families.grid import Grid
from coterie_server.interface.half import server_half
from coterie_server.interface.stages import Stage, reference


def stages_of(experiment: Experiment) -> list[Stage]:
    """All stages of an experiment, in order, each name once: a reference may also be the start of the method, or the method itself."""
    references = [reference(name) for name in experiment.references]
    listed: dict[str, Stage] = {}
    for stage in (*references, *_method_stages(experiment)):
        listed[stage.name] = stage
    return list(listed.values())


def _method_stages(experiment: Experiment) -> Sequence[Stage]:
    config = experiment.method
    if isinstance(config, Grid) and config.grid is not None:
        return _grid_stages(config, experiment)
    return _stages_of_config(config, experiment)


def _stages_of_config(config: Any, experiment: Experiment) -> Sequence[Stage]:
    return server_half(config.name).stages(config, experiment)


def _grid_stages(config: Grid, experiment: Experiment) -> list[Stage]:
    """The method's stage for each point, in order and named after it, each from the second on starting from the one before."""
    listed: list[Stage] = []
    for name, point in config.points():
        (stage,) = _stages_of_config(point, experiment)
        before = tuple(stage.name for stage in listed[-1:])
        listed.append(replace(stage, name=name, start=before or stage.start))
    return listed
