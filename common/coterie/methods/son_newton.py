"""Convex clustering by proximal Newton steps: the server solves the coupled problem, and users answer with a quadratic.

    minimize  F(x) = sum_i f_i(x_i) + LAM sum_{(i,j) in E} w_ij |x_i - x_j|

Lee, Sun and Saunders (2014), Algorithm 1, proximal Newton-type methods for minimising a composite function f + h, here with f = sum_i f_i
and h the sum of norms:

    step 3   choose H_k                          each user sends f_i, its gradient and its Hessian at its x_i, or the server
                                                 approximates the Hessians from the gradients
    step 4   solve the subproblem for a search direction        the server alone, with `coterie_server.maths.ssnal`
    step 5   select t_k with a backtracking line search         the full step first; each shorter one costs a round
    step 6   update x_{k+1} = x_k + t_k Delta x_k

The subproblem's dual z is feasible, and its next residual sum_j z_ij + grad f_i is known once users have answered. So a stage ends on the
duality gap of the quadratic model at the new point, which is the exact gap where losses are quadratic. Then one answer suffices.
"""

from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.consensus import PROVED, SOLVED
from coterie.families.ties import OWN_MODELS, Graph, said


class Config(Settings):
    """Exactly one of `penalty` and `path`."""

    name: Literal["son_newton"] = "son_newton"
    penalty: PositiveFloat | None = None  #: Penalty LAM on the distance of each pair of tied models. Larger means fewer clusters.
    #: Decreasing penalties LAM, one stage each, which starts from the one before. Held-out rows choose the best.
    path: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    #: Who is tied to whom: complete, {neighbours: 15, phi: 2}, {pairs: [[u0, u1, 1.0]]} or {file: pairs.csv}. complete: all
    #: pairs, with weight 1.
    graph: Graph = "complete"
    #: exact: users send second derivatives. bfgs: they send gradients alone, and the server approximates the rest.
    hessian: Literal["exact", "bfgs"] = "exact"
    #: A stage ends when the duality gap of the quadratic model is at most this share of the objective.
    tolerance: PositiveFloat = 1e-10
    #: Whether users prove the solution at the end of each stage, with one more exchange: the figure `certified_gap`.
    certificate: bool = False
    refit: bool = False  #: Whether a last stage fits one model for each found cluster.

    @model_validator(mode="after")
    def _penalty_is_given_once(self) -> Self:
        if (self.penalty is None) == (self.path is None):
            given = "penalty and path" if self.penalty is not None else "nothing"
            raise ValueError(f"the penalty is given by {given}, want exactly one of penalty and path")
        if self.path is not None and any(b >= a for a, b in zip(self.path, self.path[1:], strict=False)):
            raise ValueError(f"path is {list(self.path)}, want strictly decreasing penalties")
        return self


METHOD = Method(
    config=Config,
    room="consensus",
    no_rule=lambda *_: "no models are averaged: its penalties bound how far one user pulls another",
    alternatives=(frozenset({"penalty", "path"}),),
    tries="path",
    intervals=lambda config: "groups" if config is not None and config.refit else "",  # of the refits
    cluster_rule=lambda _: "joined by ties that are exactly zero at the solution",
    ties=lambda config: said(config.graph),
    facts=lambda config: frozenset({"smoothness"} if config.hessian == "bfgs" else ()),  # of the first approximations
    reveals=(
        OWN_MODELS,
        replace(SOLVED, needs={"hessian": "exact"}),
        Reveal(
            "value and gradient at given models",
            "of one row the row itself; of few rows, with as many gradients as features, the rows up to rotation",
            ("consensus/query", "consensus/gradient"),
            needs={"hessian": "bfgs"},
        ),
        replace(SOLVED, needs={"hessian": "bfgs", "refit": True}),
        PROVED,
    ),
)
