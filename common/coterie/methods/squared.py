"""`squared`, problem (4): the squared distances between models are penalized.

    (4) times N:  sum_i f_i(x_i) + GAM sum_{i<j} |x_i - x_j|^2,   gamma of (4) = GAM / (2N)

Since sum_{i<j} |x_i - x_j|^2 = N sum_i |x_i - mean|^2, the models are the proximal points x_i(y) of the minimizer y of sum_i min_x [f_i(x)
+ GAM N |x - y|^2]: a single group on the users' Moreau envelopes.
"""

from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from coterie.experiment.method import CONVEX, Method
from coterie.families.consensus import OWN_MODEL, SOLVED
from coterie.families.grid import Grid


class Config(Grid):
    name: Literal["squared"] = "squared"
    penalty: PositiveFloat | None = None  #: Penalty GAM on the squared distance of each pair of models. Give this or `gamma_eq4`.
    gamma_eq4: PositiveFloat | None = None  #: The penalty as gamma of (4): GAM = 2 N gamma.
    tolerance: PositiveFloat = 1e-10  #: Tolerance of the norm of the gradient, relative to 1 + its first value.
    #: The most dimensions with Newton's method. Above, users send no Hessians, and rounds are cheaper and more.
    newton_up_to: PositiveInt = 64

    @model_validator(mode="after")
    def _one_penalty(self) -> Self:
        if (self.penalty is None) == (self.gamma_eq4 is None):
            raise ValueError("want exactly one of penalty (GAM) and gamma_eq4 (gamma in (4) = GAM / (2N))")
        return self

    def gam(self, n_users: int) -> float:
        return self.penalty if self.penalty is not None else 2 * n_users * (self.gamma_eq4 or 0.0)


METHOD = Method(
    config=Config,
    alternatives=(frozenset({"penalty", "gamma_eq4"}),),
    room="consensus",
    sums=CONVEX,
    reveals=(SOLVED, OWN_MODEL),
    unprotected="its users send models of their own at the end",
)
