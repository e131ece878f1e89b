"""`oracle`: one model for each cluster of a known partition; also refits clusters that another stage has found."""

from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from coterie.experiment.method import CONVEX, Method
from coterie.experiment.privacy import UNITS
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED


class Config(Settings):
    name: Literal["oracle"] = "oracle"
    #: The clusters that get a model each. known: the users' labels. found: those of the stage that it starts from.
    partition: Literal["known", "found"] = "known"
    tolerance: PositiveFloat = 1e-10  #: Tolerance of the norm of the gradient, relative to 1 + its first value.
    #: The most dimensions with Newton's method. Above, users send no Hessians, and rounds are cheaper and more.
    newton_up_to: PositiveInt = 64


# It suffices that the rows of each cluster together have a minimiser.
METHOD = Method(
    config=Config,
    is_reference=True,
    room="consensus",
    sums=CONVEX,
    users_need_minimisers=False,
    protects=frozenset(UNITS),
    noises_sums=True,
    reveals=(SOLVED,),
    intervals=lambda _: "groups",
    one_model_for="cluster",
)
