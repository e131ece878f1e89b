"""Convex clustering by PDMM: hyper-parameters and messages.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1, on the problem

    minimize  Phi(x) = sum_i f_i(x_i) + LAM sum_{i<j} |x_i - x_j|      (unordered pairs, no 1/N)

The paper writes lambda = LAM/(2N) in (3), LAM/2 in (14) and LAM in its updates (16)-(17); `Config` accepts all three.

Messages carry the paper's steps. In placement `paper` users keep z_ij and mu^_ij, and S5, S6, S7, S10 are as printed. Only S7 differs: it
goes to all users, since those inside S_P need each other's models too. At full participation both z_ij and z_ji are sent up, and both mu_ij
and mu_ji down, as printed, although the second half is redundant: it is minus the first. In placement `lean`, which is not in the paper,
the server keeps everything about pairs and sends each user the one vector that (16) needs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from coterie.arrays import Array, Indices
from coterie.errors import ConfigError
from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.consensus import SOLVED
from coterie.wire.messages import Broadcast, Positions, Rows, Scalars, Vectors, declare

Fraction = Annotated[float, Field(gt=0, le=1)]
Blocks = tuple[Annotated[int, Field(ge=0)], ...]

_PENALTIES = ("penalty", "lambda_eq3", "lambda_eq14", "path")
_COUNTS = ("primal_fraction", "s_p", "dual_fraction", "s_d")
# Added to the bound of `least_nu`, which is sharp: on it the iterates neither shrink nor grow.
_NU_MARGIN = 0.01
# From this share of the blocks in a round on, random and recorded rounds must satisfy `least_nu` too. By experiment (quadratics, N of 3 to
# 20, tau = .8): nu = 0 diverges from .7 on and converges at .5, and at .9 the least nu that converges has grown to `least_nu`.
NEARLY_FULL = 0.7
_SPARSE_ENOUGH = 0.5
# (1 + sqrt 5)/2: below it alternating directions are proven to converge, with eta >= rho.
_GOLDEN = 1.6180


@dataclass(frozen=True)
class Constants:
    """The constants of (16)-(19) for a known number of users and known losses."""

    rho: float  # weight of the quadratic term, per unordered pair
    eta: float  # eta_i, with B_i(u, v) = |u - v|^2 / 2; eta_ij is 0
    nu: float
    tau: float

    @property
    def eta_over_rho(self) -> float:
        """0 without a weight, where there is no penalty to damp."""
        return self.eta / self.rho if self.rho else 0.0

    def at(self, rho: float) -> Constants:
        """The same with another rho, and with eta in the same ratio to it."""
        return self if rho == self.rho else replace(self, rho=rho, eta=self.eta_over_rho * rho)


def least_nu(n: int, tau: float, eta_over_rho: float = 0.0) -> float:
    """The least nu with which full participation in Jacobi order is stable for every convex quadratic f_i.

    It is tau/2 + (1 - e)/(2N - 1 + e), e = eta/rho. From there on the spectral radius of the linear iteration is at most 1, both if all z
    are zero and if none is. It is sharp for losses without curvature. The linearized x-update acts like a larger eta, so the bound holds
    there too.
    """
    return tau / 2 + (1 - eta_over_rho) / (2 * n - 1 + eta_over_rho)


class Config(Settings):
    """Hyper-parameters. Exactly one of `penalty`, `lambda_eq3`, `lambda_eq14`, `path`."""

    name: Literal["pdmm"] = "pdmm"
    penalty: PositiveFloat | None = None  # LAM
    lambda_eq3: PositiveFloat | None = None  # lambda of (3): LAM = 2 N lambda
    lambda_eq14: PositiveFloat | None = None  # lambda of (14): LAM = 2 lambda
    path: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None  # decreasing LAMs, one stage each: see `stages`

    placement: Literal["lean", "paper"] = "lean"
    # jacobi: S3 uses x^t, as printed. z_after_x: S3 uses x^{t+1}, about half the rounds. None: z_after_x if possible.
    order: Literal["jacobi", "z_after_x"] | None = None
    # paired draws (i,j) and (j,i) together (the halved form of section IV). uniform draws ordered pairs as printed. In placement paper its
    # limit depends on the draws; in placement lean x sees both orders, (15) in full, which has no such bias. recorded replays `schedule`.
    sampling: Literal["full", "paired", "uniform", "recorded"] = "full"
    primal_fraction: Fraction | None = None  # S_P / N^2
    s_p: PositiveInt | None = None  # S_P
    dual: Literal["aligned", "independent"] = "aligned"  # aligned: S_D is the pairs whose z was just updated
    dual_fraction: Fraction | None = None  # S_D / (N (N-1)); with neither this nor s_d the primal fraction
    s_d: PositiveInt | None = None  # S_D
    schedule: tuple[tuple[Blocks, Blocks, Blocks], ...] | None = None  # per round: x blocks, z pairs, mu pairs, numbered i N + j

    x_update: Literal["exact", "linearized"] = "exact"
    steps: Literal["recommended", "wang"] = "recommended"  # for those of rho, eta, nu, tau that are None
    # None: an estimate from the losses, which is a hundred times too large, or more, for a small LAM or a varying curvature. So rho changes
    # while one residual is much larger (`coterie_server.methods.pdmm.balance`), up to round `balance_rounds`. A number is fixed.
    rho: PositiveFloat | None = None
    balance_rounds: Annotated[int, Field(ge=0)] = 1000  # rounds of a stage after which rho is fixed; 0: the estimate is kept
    eta: Annotated[float, Field(ge=0)] | None = None
    nu: Annotated[float, Field(ge=0, lt=1)] | None = None
    tau: PositiveFloat | None = None

    # anderson: the server extrapolates v and mu from the last `anderson_memory` rounds, and keeps two vectors of their length for each: the
    # same limit in fewer rounds. Only for full rounds in placement lean with z after x and the exact x-update.
    acceleration: Literal["none", "anderson"] = "none"
    anderson_memory: Annotated[int, Field(ge=1, le=100)] = 5

    start: Literal["zero", "global"] = "global"  # global: the solution of (1), from a stage of its own
    cluster_tolerance: Annotated[float, Field(ge=0)] = 1e-4  # relative to the largest size of each coefficient among the users
    persistence: PositiveInt | None = None  # consecutive updates with z = 0 that join two users; None: 1 when full, else 3
    refit: bool = False  # a last stage with one model for each found cluster
    evaluate_every: Annotated[int, Field(ge=0)] = 1  # rounds between objective values; 0: never

    @model_validator(mode="after")
    def _penalty_is_given_once(self) -> Config:
        given = [name for name in _PENALTIES if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"the penalty is given by {' and '.join(given) or 'nothing'}, want exactly one of {', '.join(_PENALTIES)}")
        if self.path is not None and any(b >= a for a, b in zip(self.path, self.path[1:], strict=False)):
            raise ValueError(f"path is {list(self.path)}, want strictly decreasing penalties")
        return self

    @model_validator(mode="after")
    def _schedule_names_a_block_once(self) -> Config:
        for number, blocks in enumerate(self.schedule or (), 1):
            for kind, listed in zip(("x", "z", "mu"), blocks, strict=True):
                twice = [block for block, count in Counter(listed).items() if count > 1]
                if twice:
                    raise ValueError(f"round {number} of the schedule names {kind} block {twice[0]} twice, want each block once")
        return self

    @model_validator(mode="after")
    def _choices_fit(self) -> Config:
        given = [name for name in _COUNTS if getattr(self, name) is not None]
        if self.sampling in ("full", "recorded") and (given or self.dual == "independent"):
            raise ValueError(f"sampling is {self.sampling}, which draws nothing: {', '.join(given) or 'dual: independent'} has no meaning")
        if self.sampling in ("paired", "uniform") and (self.primal_fraction is None) == (self.s_p is None):
            raise ValueError(f"sampling is {self.sampling}, want exactly one of primal_fraction and s_p")
        if self.dual == "aligned" and (self.dual_fraction is not None or self.s_d is not None):
            raise ValueError("dual is aligned, so S_D follows from the draw: dual_fraction and s_d need dual: independent")
        if self.dual_fraction is not None and self.s_d is not None:
            raise ValueError("dual_fraction and s_d are both given, want at most one")
        if (self.schedule is None) == (self.sampling == "recorded"):
            raise ValueError(f"sampling is {self.sampling}: a schedule belongs to sampling: recorded, which needs one")
        if self.order == "z_after_x" and self.sampling != "full":
            raise ValueError(f"order is z_after_x with sampling {self.sampling}, want sampling: full, or order: jacobi")
        if self.steps == "wang" and (self.order == "z_after_x" or self.nu is not None or self.tau is not None):
            raise ValueError("steps is wang, which sets nu and tau of the jacobi order: leave out order: z_after_x, nu and tau")
        return self

    @model_validator(mode="after")
    def _acceleration_has_all_it_extrapolates(self) -> Config:
        wanted = {"placement": "lean", "sampling": "full", "order": "z_after_x", "x_update": "exact", "nu": "0"}
        found = {
            "placement": self.placement,
            "sampling": self.sampling,
            "order": "z_after_x" if self.z_after_x() else "jacobi",
            "x_update": self.x_update,
            "nu": str(self.nu or 0),
        }
        other = [f"{name} is {found[name]}, want {value}" for name, value in wanted.items() if found[name] != value]
        if self.acceleration != "none" and other:
            raise ValueError(f"acceleration is {self.acceleration}, which is for v and mu of whole rounds: {'; '.join(other)}")
        return self

    def stages(self) -> tuple[Config, ...]:
        """One config per penalty of the path. Each stage starts from the result of the one before."""
        if self.path is None:
            return (self,)
        return tuple(self.model_copy(update={"path": None, "penalty": penalty}) for penalty in self.path)

    def lam(self, n: int) -> float:
        """LAM for n users. Raises ConfigError for a path of several penalties."""
        if self.path is not None and len(self.path) > 1:
            raise ConfigError(f"path has {len(self.path)} penalties, want one per stage: run the stages of the path one after the other")
        if self.lambda_eq3 is not None:
            return 2 * n * self.lambda_eq3
        if self.lambda_eq14 is not None:
            return 2 * self.lambda_eq14
        return self.penalty if self.penalty is not None else (self.path or (0.0,))[0]

    def z_after_x(self) -> bool:
        """Whether S3 uses x^{t+1}."""
        if self.order is None:
            return self.sampling == "full" and self.steps == "recommended"
        return self.order == "z_after_x"

    def is_balanced(self) -> bool:
        """Whether rho may change: it is not given, and no given value depends on it."""
        return self.rho is None and self.eta is None and self.balance_rounds > 0 and self.sampling == "full"

    def primal_blocks(self, n: int) -> int:
        """S_P of N^2. Raises ConfigError if it is larger."""
        wanted = self.s_p if self.s_p is not None else max(1, round((self.primal_fraction or 1.0) * n * n))
        if wanted > n * n:
            raise ConfigError(f"s_p is {wanted}, want at most N^2 = {n * n} for {n} users")
        return wanted

    def dual_blocks(self, n: int) -> int:
        """S_D of N(N-1), for an independent draw. Raises ConfigError if it is larger."""
        total = n * (n - 1)
        fraction = self.dual_fraction if self.dual_fraction is not None else self.primal_blocks(n) / n**2
        wanted = self.s_d if self.s_d is not None else max(1, round(fraction * total))
        if wanted > total:
            raise ConfigError(f"s_d is {wanted}, want at most N(N-1) = {total} for {n} users")
        return wanted

    def steps_for(self, n: int, mean_smoothness: float | None) -> Constants:
        """The constants for n users; the default rho needs the mean smoothness constant Lbar of the f_i.

        Defaults: rho = 3 Lbar/(N-1), times 5/3 when paired with S_P <= N^2/10; tau = .8, nu = .51 or more if `least_nu` needs it for few
        users. With an independent dual draw, and with the printed uniform draw, tau = .45 min(1, theta/phi), theta = S_P/N^2, phi =
        S_D/(N(N-1)). With z after x tau = 1.6, nu = 0, eta = rho.

        `wang`: tau = K/(K~(2J-K)), nu = 1 - 1/K~, J = N^2, K = S_P, K~ = min(K, 3). It is proven if every round updates all duals, as full
        participation does, and a cautious choice otherwise. Raises ConfigError when a needed number is missing and for a tau or nu that
        diverges. `unproven` lists what is allowed without a proof.
        """
        if n < 2:
            raise ConfigError(f"there is {n} user, want at least 2: pdmm couples pairs of users")
        if self.rho is None and mean_smoothness is None:
            raise ConfigError("rho is not given and no smoothness constants are known, want one of the two")
        sampled = self.sampling in ("paired", "uniform")
        theta = self.primal_blocks(n) / n**2 if sampled else 1.0
        sparse = self.sampling == "paired" and theta <= 0.1
        rho = self.rho if self.rho is not None else 3 * (mean_smoothness or 0.0) / (n - 1) * (5 / 3 if sparse else 1.0)
        eta = self.eta if self.eta is not None else (rho if self.z_after_x() else 0.0)
        tau, nu = self._tau_nu(n, theta, eta / rho if rho else 0.0)
        steps = Constants(rho, eta, nu, tau)
        self._check_stability(n, steps)
        return steps

    def share(self, n: int) -> float:
        """The share of the N^2 blocks that a round updates; for a schedule, its mean."""
        if self.schedule is not None:
            return sum(len(x) + len(z) for x, z, _ in self.schedule) / max(1, len(self.schedule)) / n**2
        return self.primal_blocks(n) / n**2 if self.sampling != "full" else 1.0

    def unproven(self, n: int, steps: Constants) -> tuple[str, ...]:
        """A sentence for each allowed setting with which the limit may be wrong, or may not be reached."""
        found = []
        if self.sampling == "uniform" and self.placement == "paper":
            found.append(
                "sampling uniform in placement paper is biased: (16) as printed sees a pair from one side only, and the limit depends "
                "on the draws; sampling: paired has no such bias"
            )
        if self.z_after_x() and steps.eta < steps.rho:
            found.append(f"eta is {steps.eta:.4g} with z after x: convergence is proven for eta of at least rho = {steps.rho:.4g} only")
        enough = least_nu(n, steps.tau, steps.eta_over_rho)
        if not self.z_after_x() and _SPARSE_ENOUGH < self.share(n) < NEARLY_FULL and steps.nu < enough:
            found.append(
                f"nu is {steps.nu:.4g} and a round updates {self.share(n):.0%} of the blocks: stable for certain from {enough:.4g} on only"
            )
        return tuple(found)

    def _check_stability(self, n: int, steps: Constants) -> None:
        if self.z_after_x():
            if steps.tau >= _GOLDEN:
                raise ConfigError(f"tau is {steps.tau}, want less than (1 + sqrt 5)/2 = 1.618 with z after x: above it nothing is proven")
            return
        if self.share(n) < NEARLY_FULL:  # if fewer blocks move at once, less damping suffices
            return
        if steps.nu < (enough := least_nu(n, steps.tau, steps.eta_over_rho)):
            term = "(1-e)/(2N-1+e), e = eta/rho," if steps.eta else "1/(2N-1)"
            part = "" if self.sampling == "full" else f", with {self.share(n):.0%} of the blocks in a round"
            raise ConfigError(f"nu is {steps.nu}, want at least tau/2 + {term} = {enough:.4g} for {n} users in jacobi order{part}")

    def _tau_nu(self, n: int, theta: float, eta_over_rho: float) -> tuple[float, float]:
        if self.steps == "wang":
            blocks = self.primal_blocks(n) if self.sampling != "full" else n * n
            few = min(blocks, 3)
            return blocks / (few * (2 * n * n - blocks)), 1 - 1 / few
        phi = self.dual_blocks(n) / (n * (n - 1)) if self.dual == "independent" else theta
        careful = self.dual == "independent" or self.sampling == "uniform"
        default = 1.6 if self.z_after_x() else 0.45 * min(1.0, theta / phi) if careful else 0.8
        tau = self.tau if self.tau is not None else default
        if self.nu is not None:
            return tau, self.nu
        return tau, 0.0 if self.z_after_x() else max(0.51, min(least_nu(n, tau, eta_over_rho) + _NU_MARGIN, 0.99))


@declare(method="pdmm", step="S0")
@dataclass(frozen=True)
class StartModels(Broadcast):
    """S0, the initialization: x_j^0 of all users j in member order, or one row for all ("y^(0)")."""

    x: Annotated[Array, Vectors("models", "d")]


@declare(method="pdmm", step="S0")
@dataclass(frozen=True)
class OwnStart(Rows):
    """S0 in placement lean, where users need only their own model."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="balance")
@dataclass(frozen=True)
class Weight(Broadcast):
    """The rho of this round, if it may differ from the stage's first one. It is sent each round, since a host may have missed some."""

    rho: Annotated[Array, Scalars(1)]


@declare(method="pdmm", step="S1")
@dataclass(frozen=True)
class AllBlocks(Broadcast):
    """S1 at full participation: every x_i is to be updated, and every z_ij."""


@declare(method="pdmm", step="S1")
@dataclass(frozen=True)
class ChosenModels(Rows):
    """S1: the owners i of the chosen x_i."""


@declare(method="pdmm", step="S1")
@dataclass(frozen=True)
class ChosenSplits(Rows):
    """S1: owner i and partner j of each chosen z_ij."""

    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S5")
@dataclass(frozen=True)
class UpdatedModels(Rows):
    """S5: user i sends x_i^{t+1}."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="S6")
@dataclass(frozen=True)
class UpdatedSplits(Rows):
    """S6: user i sends z_ij^{t+1}. When drawn in pairs, only the user with i < j sends, and z_ji = -z_ij."""

    z: Annotated[Array, Vectors("rows", "d")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S6")
@dataclass(frozen=True)
class AllSplits(Rows):
    """S6 at full participation: user i sends z_ij^{t+1} for its N-1 partners j in member order, including j < i, as printed."""

    z: Annotated[Array, Vectors("rows", "partners", "d")]


@declare(method="pdmm", step="S7")
@dataclass(frozen=True)
class BroadcastModels(Broadcast):
    """S7: the updated x_j^{t+1}, to all users; `members` is empty when all N are sent."""

    x: Annotated[Array, Vectors("models", "d")]
    members: Annotated[Indices, Positions("named")]


@declare(method="pdmm", step="S10")
@dataclass(frozen=True)
class Duals(Rows):
    """S10: mu_ij^{t+1} to user i, for the pairs in S_D."""

    mu: Annotated[Array, Vectors("rows", "d")]
    partner: Annotated[Indices, Positions("rows")]


@declare(method="pdmm", step="S10")
@dataclass(frozen=True)
class AllDuals(Rows):
    """S10 at full participation: mu_ij^{t+1} to user i, for its N-1 partners j in member order."""

    mu: Annotated[Array, Vectors("rows", "partners", "d")]


@declare(method="pdmm", step="S7+S10")
@dataclass(frozen=True)
class Aggregates(Rows):
    """Placement lean, instead of S7 and S10: v_i = rho sum_{j!=i} (x_j + z_ij) + eta x_i - sum_{j!=i} mu^_ij."""

    v: Annotated[Array, Vectors("rows", "d")]


@declare(method="pdmm", step="evaluate")
@dataclass(frozen=True)
class ValuesWanted(Broadcast):
    """Asks every user for its loss after this round."""


@declare(method="pdmm", step="evaluate")
@dataclass(frozen=True)
class Values(Rows):
    """f_i(x_i^{t+1}), for the objective: the only number about its rows that a user sends besides models. `evaluate_every: 0` omits it."""

    f: Annotated[Array, Scalars("rows")]


_TRAJECTORY = "the whole trajectory of the user's model, hence gradients of its loss at these models"
_ROUND = ("pdmm/S0", "pdmm/balance", "pdmm/S1", "pdmm/S5", "pdmm/S6", "pdmm/S7", "pdmm/S10", "pdmm/S7+S10")

METHOD = Method(
    config=Config,
    alternatives=(frozenset(_PENALTIES),),
    cluster_rule=lambda config: f"joined by zeros of z, or equal within {config.cluster_tolerance:g} of each coefficient's size",
    steps={
        "S0": "the start",
        "S1": "who is drawn",
        "S5": "users' models",
        "S6": "users' pair variables",
        "S7": "all models to all users",
        "S10": "pairs' duals",
        "S7+S10": "one vector to each user, in place of both",
        "balance": "rho, while it may change",
        "evaluate": "final models, and how their users judge them",
    },
    reveals=(
        replace(SOLVED, needs={"start": "global"}),
        Reveal("x_i, each round", _TRAJECTORY, _ROUND, needs={"placement": "lean"}),
        Reveal("x_i to the server, the z of pairs among users through it", _TRAJECTORY, _ROUND, needs={"placement": "paper"}),
        Reveal("the value of its loss at x_i", "how well the model fits the user's rows", ("pdmm/evaluate",), unless={"evaluate_every": 0}),
        replace(SOLVED, needs={"refit": True}),
    ),
)
