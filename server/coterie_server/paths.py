"""The stages of `pdmm`: the global model to start from, one stage for each penalty, and with `refit` one model for each cluster found.

A decreasing path costs the fewest rounds: each stage goes on from the iterate of the one before, duals included. Held-out rows choose: the
refit starts from the penalty whose models have the smallest held-out loss. It is a stage of `oracle`, so the ledger shows what it costs.
"""

from __future__ import annotations

from coterie.config import Experiment
from coterie.methods import oracle, pdmm
from coterie_server.plan import REFERENCE_STOP, Stage, reference


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
        listed.append(Stage(solved[-1], config.name, hyper, experiment.stop, start))
    if config.refit:
        listed.append(Stage("refit", "oracle", oracle.Config(partition="found"), REFERENCE_STOP, tuple(solved)))
    return listed


__all__ = ["stages"]
