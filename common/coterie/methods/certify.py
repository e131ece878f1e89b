"""`certify`: for which penalties does a partition of the users solve convex clustering (3) exactly? See `coterie_server.maths.certificate`.

Group models are sent to the users, which return value, gradient and Hessian there, in messages of `coterie.families.consensus`. The facts
of `coterie.families.prepare` come first, the evaluation of the final models last. No message carries rows, but the replies of a user with
few rows can reveal them: see `coterie_client.families.consensus`.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from coterie.experiment.columns import Name
from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED


class Config(Settings):
    """Which partition, how precisely, and the penalty at which the conditions of Theorems 1 and 2 are evaluated."""

    name: Literal["certify"] = "certify"
    #: The clusters to certify. known: the users' labels. found: those of the stage that it starts from.
    partition: Literal["known", "found"] = "known"
    labels: dict[Name, Name] | None = None  #: The cluster of each user, by name, instead of `partition`.
    tolerance: Annotated[float, Field(ge=1e-8, le=0.5)] = 1e-3  #: Relative tolerance of both ends of the interval of penalties.
    #: Penalty LAM at which the conditions of Theorems 1 and 2 are evaluated. Absent: the middle of the interval.
    at: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one_partition(self) -> Self:
        if self.labels is not None and self.partition == "found":
            raise ValueError("partition is found and labels are given, want one of the two")
        return self


METHOD = Method(config=Config, stands_alone=False, room="consensus", reveals=(SOLVED,))
