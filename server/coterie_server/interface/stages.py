"""A stage of a run: one run of one method."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coterie.experiment.config import Experiment, StopRule
from coterie.registry import method

# The reference methods end by themselves; this bounds the cost of a wrong gradient.
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
    beside: tuple[str, ...] = ()  # stages before it whose outcomes it may look at besides
    is_result: bool = False  # whether its models may be the run's; among several such stages, held-out rows decide
    along: float | None = None  # its place on a path of stages, such as a penalty
    refits: str = ""  # the stage whose clusters get models of their own in this one


def reference(name: str) -> Stage:
    """The stage of a reference method, with its default settings."""
    return Stage(name, name, method(name).config(), REFERENCE_STOP)


def single_stage(config: Any, experiment: Experiment) -> Sequence[Stage]:
    """The stages of most methods: one."""
    return [Stage(config.name, config.name, config, experiment.stop, is_result=True)]


def along_path(config: Any, experiment: Experiment, before: Sequence[Stage], refit: Any, **later: Any) -> list[Stage]:
    """The stages `before`, then one for each penalty of a method with a `penalty` or a decreasing `path`, each from the stage before it.

    From the second penalty on, `later` replaces settings. With `config.refit` one more stage for each penalty has the settings `refit`: it
    gives the clusters that were found models of their own.
    """
    listed, solved = list(before), list[str]()
    for penalty in config.path or (config.penalty,):
        single = config.model_copy(update={"path": None, "penalty": penalty, "refit": False, **(later if solved else {})})
        start = tuple(stage.name for stage in listed[-1:])
        solved.append(config.name if config.path is None else f"{config.name}-{penalty!r}")
        is_result, along = config.path is not None or not config.refit, None if config.path is None else penalty
        listed.append(Stage(solved[-1], config.name, single, experiment.stop, start, is_result=is_result, along=along))
    for name in solved if config.refit else ():
        named = name.replace(config.name, "refit", 1)
        listed.append(Stage(named, refit.name, refit, REFERENCE_STOP, (name,), is_result=True, refits=name))
    return listed
