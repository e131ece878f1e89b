"""Convex losses of a host's users, vectorised over users with different numbers of rows; numpy only."""

from coterie_client.problems.convex import ConvexProblem, build_problem
from coterie_client.problems.losses import Huber, LeastSquares, Logistic, RowLoss, SquaredHinge
from coterie_client.problems.problem import Problem
from coterie_client.problems.resolve import resolve_row_loss

__all__ = [
    "ConvexProblem",
    "Huber",
    "LeastSquares",
    "Logistic",
    "Problem",
    "RowLoss",
    "SquaredHinge",
    "build_problem",
    "resolve_row_loss",
]
