"""Noise that hosts add before their sums are masked: the distributed discrete Gaussian mechanism of Kairouz, Liu and Steinke (2021).

Each host h shortens the change x_i of each of its users to the clip C, makes whole numbers of it, and adds noise y_h to their sum. The
masks let the coordinator see the total alone:

    T = sum_i k_i + sum_h y_h  modulo 2^64,   k_i = round(2^f clip(x_i; C')),   y_h ~ N_Z(0, s^2)^d                                      (1)

N_Z(0, s^2) is the discrete Gaussian: P(y) is proportional to exp(-y^2 / 2 s^2) for whole numbers y. One stands for 2^-f.

**Rounding.** Printed Algorithm 1 rounds at random, and again until the norm is small enough. Here rounding is to the nearest number, which
moves a vector of d numbers by at most sqrt(d) / 2. So C' leaves room for it:

    C' = C - 2^-f sqrt(d) / 2,   hence   |k_i| <= 2^f C' + sqrt(d) / 2 = 2^f C =: c                                                     (2)

The grid is so fine that C' is hardly less than C. So no rotation is needed either, which the paper has for grids of few bits.

**Sum of shares.** Let Y be the sum of N shares, and q the density of N_Z(0, N s^2). The sum of N_Z(0, a) and N_Z(0, b) has

    P(x) ~ sum_y exp(-y^2 / 2a - (x - y)^2 / 2b) = exp(-x^2 / 2(a + b)) sum_y exp(-(y - m)^2 / 2r)                                      (3)

with r = ab / (a + b) and m = xa / (a + b).
By Poisson's formula the last sum is sqrt(2 pi r) (1 + 2 sum_{j>0} exp(-2 pi^2 r j^2) cos(2 pi j m)). It depends on x by a factor between
1 - v and 1 + v alone, v = 2 w / (1 - w) with w = exp(-2 pi^2 r). Densities have the sum 1, so the logarithms of the two differ by at most
log((1 + v) / (1 - v)), which is at most 5 w for r >= 1/8. With a = k s^2 and b = s^2 it is r = s^2 k / (k + 1). So N - 1 additions give
|log P(Y = x) - log q(x)| <= tau / 2 for s >= 1/2, with

    tau = 10 sum_{k=1}^{N-1} exp(-2 pi^2 s^2 k / (k + 1))                                                                               (4)

**Divergences.** Where one user is there or not, T moves by a whole vector of length at most c. For such a vector D

    Renyi_a(Y || Y + D) <= a/2 (c / (sqrt(N) s) + tau sqrt(d))^2   for each order a >= 1  (proposition 14)                              (5)

So the mechanism is accounted as Gaussian noise of the multiplier z with 1/z = c / (sqrt(N) s) + tau sqrt(d), see `combined`. With
s from 2^20 on tau is below 10^-(10^12), and its part of (5) is lost in rounding.

**Who is in.** More than N shares are those of N hosts and further noise, which reveals no more. The sum modulo 2^64 is a function of the
sum. Of A hosts in a total, t who help the coordinator can take their shares off. Then A - t are left, and the multiplier is

    z sqrt((A - t) / N)                                                                                                                 (6)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array, Indices
from coterie.draws.discrete import discrete_gaussian
from coterie.draws.secret import SecretNumbers
from coterie.errors import ConfigError

_FINE: Final = 20  # s is from 2^20 to 2^21
_WIDTH: Final = 61  # bits of a total without its sign, and one to spare for the noise
_UNIT: Final = 2.0**-52


def tau(deviation: float, n_shares: int) -> float:
    """Equation (4)."""
    k = np.arange(1, n_shares)
    return 10.0 * float(np.exp(-2 * (np.pi * deviation) ** 2 * k / (k + 1)).sum())


def combined(length: float, deviation: float, n_shares: int, size: int) -> float:
    """z of equation (5), for vectors of `size` numbers of at most this length."""
    return 1 / (length / (math.sqrt(n_shares) * deviation) + tau(deviation, n_shares) * math.sqrt(size))


@dataclass(frozen=True)
class Shares:
    """Noise of `multiplier` clips in all, of which each of N hosts adds a share."""

    clip: float  #: C
    wanted: float  #: the multiplier
    n_hosts: int  #: N, the fewest hosts that a total is of

    @cached_property
    def bits(self) -> int:
        """f, with which s is from 2^20 to 2^21."""
        return _FINE - math.floor(math.log2(self._share))

    @property
    def _share(self) -> float:
        return self.wanted * self.clip / math.sqrt(self.n_hosts) * (1 + 8 * _UNIT)

    @cached_property
    def deviation(self) -> int:
        """s, a whole number that is no less than the wanted multiplier asks for."""
        return math.ceil(math.ldexp(self._share, self.bits))

    def multiplier(self, size: int) -> float:
        """z of equation (5), for vectors of `size` numbers. It is no less than `wanted`."""
        return combined(math.ldexp(self.clip, self.bits), self.deviation, self.n_hosts, size)

    def left(self, n_hosts: int, n_helping: int) -> float:
        """Equation (6): the multiplier in totals of so many hosts, for a coordinator that some of them help."""
        return self.wanted * math.sqrt(max(n_hosts - n_helping, 0) / self.n_hosts)

    def check(self, n_users: int, size: int) -> None:
        """ConfigError where totals of so many users' vectors of `size` numbers could leave 64 bits, or the grid is too coarse for them."""
        largest = math.ldexp(self.clip, self.bits)
        if n_users * largest >= 2.0**_WIDTH:
            said = f"privacy.where is 'hosts' with noise of {self.wanted:.3g} clips"
            least = n_users * math.sqrt(self.n_hosts) * 2.0 ** (_FINE + 1 - _WIDTH)
            raise ConfigError(f"{said}, too little for sums of {n_users:,} users in 64 bits: want at least {least:.3g} clips")
        if self.inner(size) < self.clip / 2:
            said = f"privacy.where is 'hosts' with noise of {self.wanted:.3g} clips"
            raise ConfigError(f"{said}, too much for {size:,} shared numbers: rounding would take half of the clip, want less noise")

    def inner(self, size: int) -> float:
        """C' of equation (2), less what rounding of floating-point numbers may add."""
        return (self.clip - math.ldexp(math.sqrt(size) / 2, -self.bits)) * (1 - (size + 16) * _UNIT)

    def whole(self, rows: NDArray[np.floating]) -> Indices:
        """(n, d) the vectors k_i of rows (n, d). A row whose length is no number counts as zero."""
        vectors = rows.astype(np.float64)
        inner = self.inner(rows.shape[1])
        with np.errstate(over="ignore", invalid="ignore"):
            lengths = np.sqrt(np.vecdot(vectors, vectors))
        vectors[~np.isfinite(lengths)] = 0.0
        vectors *= (inner / np.maximum(np.where(np.isfinite(lengths), lengths, 0.0), inner))[:, None]
        return np.rint(np.ldexp(vectors, self.bits)).astype(np.int64)

    def noise(self, numbers: SecretNumbers, size: int) -> Indices:
        """(d,) the share y_h of a host."""
        return discrete_gaussian(numbers, size, self.deviation)

    def read(self, total: Indices) -> Array:
        """The sum of changes and noise, from the total modulo 2^64 (...)."""
        return np.ldexp(total.astype(np.float64), -self.bits)
