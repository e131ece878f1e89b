"""A stage of a run: one run of one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.experiment.config import Experiment, StopRule
from coterie.registry import method

# The reference methods end by themselves; this bounds what a wrong gradient could cost.
REFERENCE_STOP = StopRule(rounds=500)


@dataclass(frozen=True)
class Stage:
    """One run of one method.

    It starts from the outcome of the stage named in `start`; of several, from the one with the smallest held-out loss.
    """

    name: str
    method: str
    config: Any
    stop: StopRule
    start: tuple[str, ...] = ()
    is_result: bool = False  # whether its models may be the run's: of several, held-out rows choose
    along: float | None = None  # where it stands on a path of stages, such as a penalty
    refits: str = ""  # the stage whose clusters get models of their own in this one


def reference(name: str) -> Stage:
    """The stage of a reference method, with the settings it has by default."""
    return Stage(name, name, method(name).config(), REFERENCE_STOP)


def single_stage(config: Any, experiment: Experiment) -> Sequence[Stage]:
    """What most methods are: one stage of their own."""
    return [Stage(config.name, config.name, config, experiment.stop, is_result=True)]
