"""`global`, problem (1): one model for all users, by damped Newton (L-BFGS for large d) on sums of the users' replies."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from coterie.experiment.method import Method
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED


class Config(Settings):
    """Tolerance, and which derivatives to use."""

    name: Literal["global"] = "global"
    tolerance: PositiveFloat = 1e-10  # of the gradient norm, relative to 1 + its first value
    newton_up_to: PositiveInt = 64  # dimensions; above, users send no Hessians


# It suffices that all rows together have a minimiser.
METHOD = Method(config=Config, is_reference=True, room="consensus", users_need_minimisers=False, reveals=(SOLVED,))
