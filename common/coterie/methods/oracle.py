"""`oracle`: one model for each cluster of a known partition; also refits clusters that another stage has found."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED


class Config(Settings):
    """Partition, tolerance, and which derivatives to use."""

    name: Literal["oracle"] = "oracle"
    partition: Literal["known", "found"] = "known"  # the users' cluster labels, or the clusters of the stage it starts from
    tolerance: PositiveFloat = 1e-10
    newton_up_to: PositiveInt = 64


METHOD = Method(config=Config, is_reference=True, room="consensus", reveals=(SOLVED,))
