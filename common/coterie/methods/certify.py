"""`certify`: for which penalties does a partition of the users solve convex clustering (3) exactly? See `coterie_server.maths.certificate`.

Group models are sent to the users, which return value, gradient and Hessian there, in messages of `coterie.families.consensus`. The facts
of `coterie.families.prepare` come first, the evaluation of the final models last. No message carries rows, but the replies of a user with
few rows can reveal them: see `coterie_client.families.consensus`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED


class Config(Settings):
    """Which partition, how precisely, and the penalty at which the conditions of Theorems 1 and 2 are evaluated."""

    name: Literal["certify"] = "certify"
    # The users' cluster labels, or the clusters of the stage it starts from; `labels`, by user name, replace both.
    partition: Literal["known", "found"] = "known"
    labels: dict[Name, Name] | None = None
    tolerance: Annotated[float, Field(ge=1e-8, le=0.5)] = 1e-3  # of both ends, relative
    at: PositiveFloat | None = None  # LAM; None: the middle of the interval

    @model_validator(mode="after")
    def _one_partition(self) -> Self:
        if self.labels is not None and self.partition == "found":
            raise ValueError("partition is found and labels are given, want one of the two")
        return self


METHOD = Method(config=Config, stands_alone=False, room="consensus", reveals=(SOLVED,))
