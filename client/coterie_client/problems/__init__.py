"""Convex losses of a host's users, vectorised over users with different numbers of rows; numpy only."""

from coterie_client.problems.convex import ConvexProblem, build_problem

__all__ = ["ConvexProblem", "build_problem"]
