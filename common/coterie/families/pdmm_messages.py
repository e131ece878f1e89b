"""Convex clustering by PDMM: its messages, which carry the steps of Algorithm 1 of Armacki, Bajovic, Jakovetic and Kar (2022).

`coterie.methods.pdmm` says in which placement each of them travels.
"""

from __future__ import annotations

from typing import Annotated

from coterie.arrays import Array, Indices
from coterie.wire.messages import Broadcast, Positions, Rows, Scalars, Vectors, declare


@declare(method="pdmm", step="S0")
class StartModels(Broadcast):
    """S0, the initialization: x_j^0 of all users j in member order, or one row for all ("y^(0)")."""

    x: Annotated[Array, Vectors("models", "d")]


@declare(method="pdmm", step="S0")
class OwnStart(Rows):
    """S0 in placement lean, where users need only their own model."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="ties")
class Degrees(Rows):
    """With a graph, the sum of the weights of a user's ties, until it has answered once."""

    degree: Annotated[Array, Scalars("rows")]


@declare(method="pdmm", step="balance")
class Weight(Broadcast):
    """The rho of this round, if it may differ from the stage's first one. It is sent each round, since a host may have missed some."""

    rho: Annotated[Array, Scalars(1)]


@declare(method="pdmm", step="balance")
class OwnWeights(Rows):
    """The rho that each of these users' vectors was made with, where rounds are arrivals."""

    rho: Annotated[Array, Scalars("rows")]


@declare(method="pdmm", step="S1")
class AllBlocks(Broadcast):
    """S1 at full participation: every x_i is to be updated, and every z_ij."""


@declare(method="pdmm", step="S1")
class ChosenModels(Rows):
    """S1: the owners i of the chosen x_i."""


@declare(method="pdmm", step="S1")
class ChosenSplits(Rows):
    """S1: owner i and partner j of each chosen z_ij."""

    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S5")
class UpdatedModels(Rows):
    """S5: user i sends x_i^{t+1}."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="x_update")
class Excesses(Rows):
    """With x_i^{t+1} from few rows at a time: its gradient norm over the tolerance, above 1 where the epochs did not suffice."""

    excess: Annotated[Array, Scalars("rows")]


@declare(method="pdmm", step="S6")
class UpdatedSplits(Rows):
    """S6: user i sends z_ij^{t+1}. When drawn in pairs, only the user with i < j sends, and z_ji = -z_ij."""

    z: Annotated[Array, Vectors("rows", "d")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S6")
class AllSplits(Rows):
    """S6 at full participation: user i sends z_ij^{t+1} for its N-1 partners j in member order, including j < i, as printed."""

    z: Annotated[Array, Vectors("rows", "partners", "d")]


@declare(method="pdmm", step="S7")
class BroadcastModels(Broadcast):
    """S7: the updated x_j^{t+1}, to all users; `members` is empty when all N are sent."""

    x: Annotated[Array, Vectors("models", "d")]
    members: Annotated[Indices, Positions("named")]


@declare(method="pdmm", step="S10")
class Duals(Rows):
    """S10: mu_ij^{t+1} to user i, for the pairs in S_D."""

    mu: Annotated[Array, Vectors("rows", "d")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S10")
class AllDuals(Rows):
    """S10 at full participation: mu_ij^{t+1} to user i, for its N-1 partners j in member order."""

    mu: Annotated[Array, Vectors("rows", "partners", "d")]


@declare(method="pdmm", step="S7+S10")
class Aggregates(Rows):
    """Placement lean, instead of S7 and S10: v_i = rho sum_{j!=i} (x_j + z_ij) + eta x_i - sum_{j!=i} mu^_ij.

    With a graph, v_i = sum_j w_ij (rho (x_j + z_ij) - m^_ij) + eta degree(i) x_i.
    """

    v: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="evaluate")
class ValuesWanted(Broadcast):
    """Asks every user for its loss after this round."""


@declare(method="pdmm", step="evaluate")
class OwnValuesWanted(Rows):
    """Asks these users for their loss at the model that they return, where rounds are arrivals."""


@declare(method="pdmm", step="evaluate")
class Values(Rows):
    """f_i(x_i^{t+1}), for the objective: the only number about its rows that a user sends besides models. `evaluate_every: 0` omits it."""

    f: Annotated[Array, Scalars("rows")]
