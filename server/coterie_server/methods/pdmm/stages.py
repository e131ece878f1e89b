"""The stages of `pdmm`: the global model to start from, one stage for each penalty, and with `refit` one model for each cluster found.

A decreasing path costs the fewest rounds: each stage goes on from the iterate of the one before, duals included. Every penalty's
clusters are refitted, and held-out rows choose among all of these models: the penalty that is best as it is finds no clusters, and the
one that finds good clusters shrinks too much to be best as it is. A refit is a stage of `oracle`, so the ledger shows its cost.
"""

from __future__ import annotations

from coterie.experiment.config import Experiment
from coterie.methods import oracle, pdmm
from coterie_server.interface.stages import REFERENCE_STOP, Stage, reference


def stages(config: pdmm.Config, experiment: Experiment) -> list[Stage]:
    """All stages of `config`, in order: global with `start: global`; pdmm, or pdmm-LAM for each of a path; refit with `refit: true`.

    `experiment.stop` holds for each penalty on its own.
    """
    listed = [reference("global")] if config.start == "global" else []
    solved: list[str] = []
    for single in config.stages():
        # From the second penalty on, the start is the stage before, whatever the first one started from.
        hyper = single.model_copy(update={"refit": False, "start": "global" if solved else config.start})
        start = tuple(stage.name for stage in listed[-1:])
        solved.append(config.name if config.path is None else f"{config.name}-{single.penalty!r}")
        is_result = config.path is not None or not config.refit
        along = None if config.path is None else single.penalty
        listed.append(Stage(solved[-1], config.name, hyper, experiment.stop, start, is_result, along))
    if config.refit:
        found = oracle.Config(partition="found")
        for name in solved:
            refit = name.replace(config.name, "refit", 1)
            listed.append(Stage(refit, oracle.METHOD.name, found, REFERENCE_STOP, (name,), is_result=True, refits=name))
    return listed


__all__ = ["stages"]
