"""The constants of a PDMM iteration, and when it is stable."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pydantic import PositiveInt

from coterie.experiment.settings import Settings
from coterie.families.ties import Extent


class StochasticUpdate(Settings):
    """An x-update from few rows at a time."""

    #: svrg: rows' gradients are corrected by those at a snapshot. saga: by the latest of each row, one number a row.
    name: Literal["svrg", "saga"]
    batch_size: PositiveInt = 256  #: Rows of a step.
    #: The most epochs of an update: a pass over all of a user's rows, and steps. An update that ends unconverged is counted, and warned of.
    epochs: PositiveInt = 20


@dataclass(frozen=True)
class Constants:
    """The constants of (16)-(19) for a known number of users and known losses."""

    rho: float  # weight of the quadratic term, per unordered pair
    eta: float  # eta_i, with B_i(u, v) = |u - v|^2 / 2; times the degree of i with a graph; eta_ij is 0
    nu: float
    tau: float

    @property
    def eta_over_rho(self) -> float:
        """0 without a weight, where there is no penalty to damp."""
        return self.eta / self.rho if self.rho else 0.0

    def at(self, rho: float) -> Constants:
        """The same with another rho, and with eta in the same ratio to it."""
        return self if rho == self.rho else replace(self, rho=rho, eta=self.eta_over_rho * rho)


def least_nu(extent: Extent, tau: float, eta_over_rho: float = 0.0) -> float:
    """The least nu with which full participation in Jacobi order is stable for every convex quadratic f_i.

    It is tau/2 + (1 - e)/(2N - 1 + e), e = eta/rho. From there on the spectral radius of the linear iteration is at most 1, both if all z
    are zero and if none is. It is sharp for losses without curvature. The linearized x-update acts like a larger eta, so the bound holds
    there too. With s the least eigenvalue of the weights, each divided by the root of the product of its users' degrees, the fraction is
    -(s + e)/(2 - s + e). s is -1/(N - 1) of all pairs and at least -1 of any graph: then N = 2 gives the bound.
    """
    return tau / 2 + (1 - eta_over_rho) / (2 * (extent.n if extent.is_complete else 2) - 1 + eta_over_rho)
