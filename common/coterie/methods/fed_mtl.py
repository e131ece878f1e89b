"""`fed_mtl`: mean-regularised multi-task learning, of Evgeniou and Pontil (2004), regularized multi-task learning, by local updates.

Every user has a model w_i of its own, held near the mean of all, sum_i f_i(w_i) + mu/2 sum_i ||w_i - wbar||^2. The server sends wbar^t, and
the users drawn train, from where they were, and return their models, of which wbar^{t+1} is the mean:

    w_i <- w_i - eta (grad f_i(w_i) + mu (w_i - wbar^t))

It is the mean-regularised case of Smith, Chiang, Sanjabi and Talwalkar (2017), federated multi-task learning: relations between users are
not learnt. Deviations: stochastic gradients of networks, where the paper has a convex problem in one place; wbar is the mean of the users
drawn last, and stays while they train. Users' models travel, as the means need them. The pull is part of what momentum remembers.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat

from coterie.methods.partial import JointTraining
from coterie.registry import ANY_MODEL, Kind


class Config(JointTraining):
    """Hyper-parameters."""

    models: ClassVar[frozenset[Kind]] = ANY_MODEL
    update: ClassVar[str | None] = "fed_mtl"
    is_personal: ClassVar[bool] = True

    name: Literal["fed_mtl"] = "fed_mtl"
    mu: NonNegativeFloat = 0.1  # 0: local training
    average: Literal["rows", "plain"] = "plain"

    def settings(self) -> dict[str, Any]:
        """The weight of the pull."""
        return {"mu": self.mu}
