"""`fedbabu`: Oh, Kim and Yun (2022), FedBABU: toward enhanced representation for federated image classification, Algorithm 1.

The head is random, the same for all, and fixed as long as the federation trains: in each round the users drawn update the body alone, and
the server averages the bodies by rows,

    theta_i <- SGD(f_i(theta, head_0), tau epochs);   theta <- sum_i (n_i / n) theta_i

so the body is learnt under one criterion for all users, and the head never travels. Afterwards each user fine-tunes its head, or all of
its model, as in the paper's evaluation (`fine_tune`, `fine_tune_epochs`).
"""

from __future__ import annotations

from typing import Any, Literal

from coterie.plugin import JointTraining, LocalTraining


class Config(JointTraining):
    """Hyper-parameters: those of local training; tau is `epochs`."""

    name: Literal["fedbabu"] = "fedbabu"
    fine_tune: tuple[Literal["head", "all"], ...] = ("head", "all")

    def phases(self) -> list[dict[str, Any]]:
        """The body alone: the learning rate of the head is 0."""
        return [{**phase, "part": "representation"} for phase in super().phases()]


METHOD = LocalTraining(config=Config, sharing="representation")
