"""What the steps of methods carry, in words."""

from __future__ import annotations

from collections.abc import Iterable

# Methods declare them with their messages.
STEPS = {
    "control": "hello, heartbeats, books, the envelopes of tasks and replies",
    "standardize": "sums of features, and the constants",
    "describe": "constants of the losses",
    "evaluate": "final models, and how their users judge them",
    "model": "models where users are on their own",
    "query": "a cluster's model",
    "gradient": "value and gradient there",
    "hessian": "second derivatives there",
    "parameters": "probabilities, weights and step sizes",
    "within-average": "users' models, and their cluster's average",
    "between-average": "clusters' sums, and the average of all",
    "within-anchor": "users' anchors, and their average",
    "between-anchor": "the same between clusters",
    "trace": "values of the objective",
    "gap": "how far from the optimum the stage has ended",
    "models": "final models, where they are collected",
    "statistics": "sums of squares and products",
    "moments": "each user's moments, for the start",
    "representation": "the representation, there and back",
    "start": "the first shared tensors, from one user",
    "shared": "the shared tensors, to the users drawn and back",
    "variate": "control variates: that of the server, and how far those of the users drawn have moved",
    "coins": "how many local steps and aggregations the common coin has shown",
    "pull": "where relations pull the models of the users drawn, and these models back",
    "loss": "losses of local updates",
    "evaluation": "what is judged, and how users judge it",
    "delivery": "the final shared tensors",
    "head": "heads: that of all users, or the order to train new ones, which stay where they are",
    "S0": "the start",
    "S1": "who is drawn",
    "S5": "users' models",
    "S6": "users' pair variables",
    "S7": "all models to all users",
    "S10": "pairs' duals",
    "balance": "rho, while it may change",
    "S7+S10": "one vector to each user, in place of both",
}


def said(steps: Iterable[str], *, paper: bool = False) -> str:
    """One sentence on these steps, in order of appearance; with `paper` only on those whose names are no words."""
    listed = [step for step in dict.fromkeys(steps) if not paper or step == "control" or step[1:2].isdigit()]
    return "; ".join(f"{step}: {STEPS[step]}" for step in listed if step in STEPS)
