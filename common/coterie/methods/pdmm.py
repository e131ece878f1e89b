"""Convex clustering by PDMM: hyper-parameters and messages.

Armacki, Bajovic, Jakovetic and Kar (2022), Algorithm 1, on the problem

    minimize  Phi(x) = sum_i f_i(x_i) + LAM sum_{i<j} |x_i - x_j|      (unordered pairs, no 1/N)

The paper writes lambda = LAM/(2N) in (3), LAM/2 in (14) and LAM in its updates (16)-(17); `Config` accepts all three.

Messages carry the paper's steps. In placement `paper` users keep z_ij and mu^_ij, and S5, S6, S7, S10 are as printed. Only S7 differs: it
goes to all users, since those inside S_P need each other's models too. At full participation both z_ij and z_ji are sent up, and both mu_ij
and mu_ji down, as printed, although the second half is redundant: it is minus the first. In placement `lean`, which is not in the paper,
the server keeps everything about pairs and sends each user the one vector that (16) needs.

With a `graph`, which is not in the paper either, the sum is over its edges, with LAM w_ij instead of LAM and rho w_ij in that of rho.
Then z_ij and m_ij = mu_ij / w_ij follow (17) to (19) as they stand, and a user's weight in (16) is (rho + eta) times its degree sum_j w_ij.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from coterie.errors import ConfigError
from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families import pdmm_messages as pdmm_messages  # noqa: PLC0414 - the method declares them
from coterie.families.consensus import SOLVED
from coterie.families.pdmm_steps import Constants as Constants  # noqa: PLC0414 - a word of this module too
from coterie.families.pdmm_steps import StochasticUpdate, least_nu
from coterie.families.ties import OWN_MODELS, Extent, Graph, said

Fraction = Annotated[float, Field(gt=0, le=1)]
Blocks = tuple[Annotated[int, Field(ge=0)], ...]

_PENALTIES = ("penalty", "lambda_eq3", "lambda_eq14", "path")
_COUNTS = ("primal_fraction", "s_p", "dual_fraction", "s_d")
# With `sampling: arrival`: the greatest age of an answer in updates, and the over-relaxation of pairs, which converges for any below 2.
_STALENESS = 200
_RELAXATION = 1.6
# Added to the bound of `least_nu`, which is sharp: on it the iterates neither shrink nor grow.
_NU_MARGIN = 0.01
# From this share of the blocks in a round on, random and recorded rounds must satisfy `least_nu` too. By experiment (quadratics, N of 3 to
# 20, tau = .8): nu = 0 diverges from .7 on and converges at .5, and at .9 the least nu that converges has grown to `least_nu`.
NEARLY_FULL = 0.7
_SPARSE_ENOUGH = 0.5
# (1 + sqrt 5)/2: below it alternating directions are proven to converge, with eta >= rho.
_GOLDEN = 1.6180


class Config(Settings):
    """Hyper-parameters. Exactly one of `penalty`, `lambda_eq3`, `lambda_eq14`, `path`."""

    name: Literal["pdmm"] = "pdmm"
    #: Penalty LAM on the distance of each pair of models. Larger means fewer clusters. Give exactly one of the first four keys.
    penalty: PositiveFloat | None = None
    lambda_eq3: PositiveFloat | None = None  #: The penalty as lambda of the paper's (3): LAM = 2 N lambda.
    lambda_eq14: PositiveFloat | None = None  #: The penalty as lambda of the paper's (14): LAM = 2 lambda.
    #: Decreasing penalties LAM, one stage each, which starts from the one before. Held-out rows choose the best.
    path: Annotated[tuple[PositiveFloat, ...], Field(min_length=1)] | None = None
    #: Who is tied to whom: complete, {neighbours: 15, phi: 2}, {pairs: [[u0, u1, 1.0]]} or {file: pairs.csv}. complete: all
    #: pairs, with weight 1. The others want placement: lean, and sampling: full, paired or arrival.
    graph: Graph = "complete"

    #: lean: the server keeps all pair variables, and sends each user one vector a round. paper: users keep them, as in Algorithm 1.
    placement: Literal["lean", "paper"] = "lean"
    #: jacobi: S3 uses x of the round before, as printed. z_after_x: it uses the new x, and needs about half the rounds. Absent: z_after_x
    #: if possible.
    order: Literal["jacobi", "z_after_x"] | None = None
    #: full: all pairs in each round. paired: draws (i, j) and (j, i) together. uniform: draws ordered pairs as printed, which is biased in
    #: placement paper. recorded: replays `schedule`. arrival: a round updates with whoever has answered, and no host waits for others.
    sampling: Literal["full", "paired", "uniform", "recorded", "arrival"] = "full"
    #: With arrival: how many updates old an answer may become before the server waits for it. 0: it waits for all. Absent: 200.
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    #: With arrival: arrivals that are drawn from the seed instead of those of the clock. For each user named, the mean time of a task, in
    #: those of the other users.
    delays: dict[str, Annotated[int, Field(ge=1, le=10_000)]] | None = None
    #: Share of the N^2 blocks that a round of paired or uniform draws updates. Less is less traffic, and more rounds.
    primal_fraction: Fraction | None = None
    s_p: PositiveInt | None = None  #: Number of blocks S_P instead of `primal_fraction`.
    #: aligned: duals of the pairs whose z was just updated. independent: duals of pairs drawn anew.
    dual: Literal["aligned", "independent"] = "aligned"
    #: Share of the N (N-1) duals that a round updates, with dual: independent. Absent: as `primal_fraction`.
    dual_fraction: Fraction | None = None
    s_d: PositiveInt | None = None  #: Number of duals S_D instead of `dual_fraction`.
    #: Recorded draws to replay: for each round the x blocks, z pairs and mu pairs, numbered i N + j.
    schedule: tuple[tuple[Blocks, Blocks, Blocks], ...] | None = None

    #: exact: users minimise their part by Newton's method. linearized: they take one gradient step, and the run takes more rounds.
    #: {name: svrg, batch_size: 256, epochs: 20}, or saga: they minimise it from few rows at a time, for users with many rows.
    x_update: Literal["exact", "linearized"] | StochasticUpdate = "exact"
    #: Rule for those of rho, eta, nu and tau that are absent. wang: the constants of the proof, which are slower.
    steps: Literal["recommended", "wang"] = "recommended"
    #: Weight of the quadratic term of a pair. Absent: an estimate from the losses, which changes while one residual is much larger. A
    #: number stays fixed.
    rho: PositiveFloat | None = None
    balance_rounds: Annotated[int, Field(ge=0)] = 1000  #: Round of a stage after which rho is fixed. 0: the estimate is kept.
    #: Weight of the term that keeps a new x near the old one, times the sum of a user's weights with a graph. Absent: by `steps`.
    eta: Annotated[float, Field(ge=0)] | None = None
    nu: Annotated[float, Field(ge=0, lt=1)] | None = None  #: Damping of the duals. Absent: by `steps`.
    #: Step size of the duals. Absent: by `steps`. With arrival it is the relaxation of pairs, below 2.
    tau: PositiveFloat | None = None

    #: anderson: the server extrapolates from the last rounds. The limit is the same in fewer rounds, and the server keeps more. Wants full
    #: rounds, lean, z after x and exact.
    acceleration: Literal["none", "anderson"] = "none"
    #: Rounds from which `anderson` extrapolates. The server keeps two vectors for each pair and round.
    anderson_memory: Annotated[int, Field(ge=1, le=100)] = 5
    #: Asks only users whose answer the server cannot foretell from earlier ones, up to this part of the residual, such as 0.1. The limit is
    #: the same with far less traffic. Wants full rounds, lean, z after x and exact, without acceleration. Absent: all are asked.
    forecast: Annotated[float, Field(gt=0, le=1)] | None = None

    #: zero: all models start at 0. global: they start at one model for all, from a stage of its own.
    start: Literal["zero", "global"] = "global"
    #: Users are in one cluster if each coefficient agrees within this share of its largest size among the users.
    cluster_tolerance: Annotated[float, Field(ge=0)] = 1e-4
    persistence: PositiveInt | None = None  #: Updates in a row with z = 0 that join two users. Absent: 1 with sampling: full, else 3.
    refit: bool = False  #: Whether a last stage fits one model for each found cluster.
    #: Rounds between two values of the objective, which cost one number per user. 0: never.
    evaluate_every: Annotated[int, Field(ge=0)] = 1

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
        if self.sampling in ("full", "recorded", "arrival") and (given or self.dual == "independent"):
            raise ValueError(f"sampling is {self.sampling}, which draws nothing: {', '.join(given) or 'dual: independent'} has no meaning")
        if self.sampling in ("paired", "uniform") and (self.primal_fraction is None) == (self.s_p is None):
            raise ValueError(f"sampling is {self.sampling}, want exactly one of primal_fraction and s_p")
        if self.dual == "aligned" and (self.dual_fraction is not None or self.s_d is not None):
            raise ValueError("dual is aligned, so S_D follows from the draw: dual_fraction and s_d need dual: independent")
        if self.dual_fraction is not None and self.s_d is not None:
            raise ValueError("dual_fraction and s_d are both given, want at most one")
        if (self.schedule is None) == (self.sampling == "recorded"):
            raise ValueError(f"sampling is {self.sampling}: a schedule belongs to sampling: recorded, which needs one")
        if self.order == "z_after_x" and self.sampling not in ("full", "arrival"):
            raise ValueError(f"order is z_after_x with sampling {self.sampling}, want sampling: full, or order: jacobi")
        if self.steps == "wang" and (self.order == "z_after_x" or self.nu is not None or self.tau is not None):
            raise ValueError("steps is wang, which sets nu and tau of the jacobi order: leave out order: z_after_x, nu and tau")
        return self

    @model_validator(mode="after")
    def _graph_has_its_placement(self) -> Config:
        if self.graph != "complete" and (self.placement != "lean" or self.sampling not in ("full", "paired", "arrival")):
            found = f"placement {self.placement} and sampling {self.sampling}"
            raise ValueError(f"the graph is not complete, which wants placement lean and sampling full, paired or arrival, and has {found}")
        return self

    @model_validator(mode="after")
    def _arrivals_have_what_they_need(self) -> Config:
        if self.sampling != "arrival":
            if given := [name for name in ("max_staleness", "delays") if getattr(self, name) is not None]:
                raise ValueError(f"{given[0]} is given with sampling {self.sampling}, which has a round for all: want sampling: arrival")
            return self
        wanted = {"placement": "lean", "steps": "recommended", "order": None, "nu": None, "eta": None, "persistence": None}
        other = [f"{name} is {getattr(self, name)}" for name, value in wanted.items() if getattr(self, name) != value]
        if self.x_update != "exact":
            other.append(f"x_update is {self.x_update if self.stochastic is None else self.stochastic.name}")
        if other:
            raise ValueError(f"sampling is arrival, which has exact answers in placement lean and constants of its own: {', '.join(other)}")
        if self.tau is not None and self.tau >= 2:
            raise ValueError(f"tau is {self.tau} with sampling arrival, want less than 2")
        return self

    @model_validator(mode="after")
    def _stochastic_updates_are_lean(self) -> Config:
        if self.stochastic is not None and self.placement != "lean":
            raise ValueError(f"x_update is {self.stochastic.name} in placement {self.placement}, want placement: lean")
        return self

    @model_validator(mode="after")
    def _acceleration_has_all_it_extrapolates(self) -> Config:
        wanted = {"placement": "lean", "sampling": "full", "order": "z_after_x", "x_update": "exact", "nu": "0"}
        found = {name: str(getattr(self, name) or 0) for name in wanted}
        found["x_update"] = str(self.x_update) if self.stochastic is None else self.stochastic.name
        found["order"] = "z_after_x" if self.z_after_x() else "jacobi"
        other = [f"{name} is {found[name]}, want {value}" for name, value in wanted.items() if found[name] != value]
        if self.acceleration != "none" and other:
            raise ValueError(f"acceleration is {self.acceleration}, which is for v and mu of whole rounds: {'; '.join(other)}")
        return self

    @model_validator(mode="after")
    def _forecasts_are_of_exact_answers(self) -> Config:
        wanted = {"placement": "lean", "sampling": "full", "order": "z_after_x", "x_update": "exact", "acceleration": "none"}
        found = {name: str(getattr(self, name)) for name in wanted}
        found["x_update"] = str(self.x_update) if self.stochastic is None else self.stochastic.name
        found["order"] = "z_after_x" if self.z_after_x() else "jacobi"
        other = [f"{name} is {found[name]}, want {value}" for name, value in wanted.items() if found[name] != value]
        if self.forecast is not None and other:
            raise ValueError(f"forecast is {self.forecast:g}, which foretells exact answers of whole rounds: {'; '.join(other)}")
        return self

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

    @property
    def stochastic(self) -> StochasticUpdate | None:
        """The x-update, where it is made from few rows at a time."""
        return self.x_update if isinstance(self.x_update, StochasticUpdate) else None

    def staleness(self) -> int:
        """How many updates old an answer may become."""
        return _STALENESS if self.max_staleness is None else self.max_staleness

    def is_balanced(self) -> bool:
        """Whether rho may change: it is not given, and no given value depends on it."""
        return self.rho is None and self.eta is None and self.balance_rounds > 0 and self.sampling in ("full", "arrival")

    def primal_blocks(self, extent: Extent) -> int:
        """S_P of N^2, or of the users and ordered pairs of a graph. Raises ConfigError if it is larger."""
        wanted = self.s_p if self.s_p is not None else max(1, round((self.primal_fraction or 1.0) * extent.blocks))
        if wanted > extent.blocks:
            all_of = "N^2" if extent.is_complete else "N + 2|E|"
            raise ConfigError(f"s_p is {wanted}, want at most {all_of} = {extent.blocks} for {extent.n} users")
        return wanted

    def dual_blocks(self, extent: Extent) -> int:
        """S_D of N(N-1), or of the ordered pairs of a graph, for an independent draw. Raises ConfigError if it is larger."""
        fraction = self.dual_fraction if self.dual_fraction is not None else self.primal_blocks(extent) / extent.blocks
        wanted = self.s_d if self.s_d is not None else max(1, round(fraction * extent.duals))
        if wanted > extent.duals:
            all_of = "N(N-1)" if extent.is_complete else "2|E|"
            raise ConfigError(f"s_d is {wanted}, want at most {all_of} = {extent.duals} for {extent.n} users")
        return wanted

    def steps_for(self, extent: Extent, mean_smoothness: float | None) -> Constants:
        """The constants for a graph; the default rho needs the mean smoothness constant Lbar of the f_i.

        Defaults: rho = 3 Lbar/(N-1), with the mean degree of a graph for N-1; times 5/3 when paired with S_P <= N^2/10; tau = .8, nu = .51,
        or more if `least_nu` needs it for few users or a graph. With an independent dual draw, and with the printed uniform draw, tau = .45
        min(1, theta/phi), theta = S_P/N^2, phi = S_D/(N(N-1)). With z after x tau = 1.6, nu = 0, eta = rho.

        `wang`: tau = K/(K~(2J-K)), nu = 1 - 1/K~, J = N^2, K = S_P, K~ = min(K, 3). It is proven if every round updates all duals, as full
        participation does, and a cautious choice otherwise. With arrivals tau = 1.6 relaxes pairs, and eta = (N-1) rho, or rho on a graph.
        Raises ConfigError when a needed number is missing and for a tau or nu that diverges. `unproven` lists what is allowed without a
        proof.
        """
        if extent.n < 2:
            raise ConfigError(f"there is {extent.n} user, want at least 2: pdmm couples pairs of users")
        if self.rho is None and mean_smoothness is None:
            raise ConfigError("rho is not given and no smoothness constants are known, want one of the two")
        sampled = self.sampling in ("paired", "uniform")
        theta = self.primal_blocks(extent) / extent.blocks if sampled else 1.0
        sparse = self.sampling == "paired" and theta <= 0.1
        rho = self.rho if self.rho is not None else 3 * (mean_smoothness or 0.0) / extent.degree * (5 / 3 if sparse else 1.0)
        eta = self.eta if self.eta is not None else (rho if self.z_after_x() else 0.0)
        if self.sampling == "arrival":  # a pair has a copy of each of its two models
            return Constants(rho, rho * (extent.n - 1 if extent.is_complete else 1), 0.0, self.tau or _RELAXATION)
        tau, nu = self._tau_nu(extent, theta, eta / rho if rho else 0.0)
        steps = Constants(rho, eta, nu, tau)
        self._check_stability(extent, steps)
        return steps

    def share(self, extent: Extent) -> float:
        """The share of the blocks that a round updates; for a schedule, its mean."""
        if self.schedule is not None:
            return sum(len(x) + len(z) for x, z, _ in self.schedule) / max(1, len(self.schedule)) / extent.blocks
        return self.primal_blocks(extent) / extent.blocks if self.sampling != "full" else 1.0

    def unproven(self, extent: Extent, steps: Constants) -> tuple[str, ...]:
        """A sentence for each allowed setting with which the limit may be wrong, or may not be reached."""
        found = list[str]()
        if self.sampling == "arrival":
            return ()
        if self.sampling == "uniform" and self.placement == "paper":
            found.append(
                "sampling uniform in placement paper is biased: (16) as printed sees a pair from one side only, and the limit depends "
                "on the draws; sampling: paired has no such bias"
            )
        if self.z_after_x() and steps.eta < steps.rho:
            found.append(f"eta is {steps.eta:.4g} with z after x: convergence is proven for eta of at least rho = {steps.rho:.4g} only")
        enough = least_nu(extent, steps.tau, steps.eta_over_rho)
        if not self.z_after_x() and _SPARSE_ENOUGH < self.share(extent) < NEARLY_FULL and steps.nu < enough:
            found.append(
                f"nu is {steps.nu:.4g} and a round updates {self.share(extent):.0%} of the blocks: "
                f"stable for certain from {enough:.4g} on only"
            )
        return tuple(found)

    def _check_stability(self, extent: Extent, steps: Constants) -> None:
        if self.z_after_x():
            if steps.tau >= _GOLDEN:
                raise ConfigError(f"tau is {steps.tau}, want less than (1 + sqrt 5)/2 = 1.618 with z after x: above it nothing is proven")
            return
        if self.share(extent) < NEARLY_FULL:  # if fewer blocks move at once, less damping suffices
            return
        if steps.nu < (enough := least_nu(extent, steps.tau, steps.eta_over_rho)):
            least = "2N-1" if extent.is_complete else "3"
            term = f"(1-e)/({least}+e), e = eta/rho," if steps.eta else f"1/({least})"
            part = "" if self.sampling == "full" else f", with {self.share(extent):.0%} of the blocks in a round"
            raise ConfigError(f"nu is {steps.nu}, want at least tau/2 + {term} = {enough:.4g} for {extent.n} users in jacobi order{part}")

    def _tau_nu(self, extent: Extent, theta: float, eta_over_rho: float) -> tuple[float, float]:
        if self.steps == "wang":
            blocks = self.primal_blocks(extent) if self.sampling != "full" else extent.blocks
            few = min(blocks, 3)
            return blocks / (few * (2 * extent.blocks - blocks)), 1 - 1 / few
        phi = self.dual_blocks(extent) / extent.duals if self.dual == "independent" else theta
        careful = self.dual == "independent" or self.sampling == "uniform"
        default = 1.6 if self.z_after_x() else 0.45 * min(1.0, theta / phi) if careful else 0.8
        tau = self.tau if self.tau is not None else default
        if self.nu is not None:
            return tau, self.nu
        return tau, 0.0 if self.z_after_x() else max(0.51, min(least_nu(extent, tau, eta_over_rho) + _NU_MARGIN, 0.99))


_TRAJECTORY = "the whole trajectory of the user's model, hence gradients of its loss at these models"
_ROUND = ("pdmm/S0", "pdmm/ties", "pdmm/balance", "pdmm/S1", "pdmm/S5", "pdmm/x_update", "pdmm/S6", "pdmm/S7", "pdmm/S10", "pdmm/S7+S10")

METHOD = Method(
    config=Config,
    continues="users and server go on with numbers that the other has sent",
    unprotected="its server keeps a model of each user, round after round, which only noise of each user's own could hide",
    no_rule=lambda *_: "no models are averaged: its penalties bound how far one user pulls another",
    alternatives=(frozenset(_PENALTIES),),
    tries="path",
    adapts="rho",
    facts=lambda config: frozenset({"smoothness"} if config.rho is None else ()),  # of the default rho
    intervals=lambda config: "groups" if config is not None and config.refit else "",  # of the refits; a penalised stage has no refit
    ties=lambda config: said(config.graph),
    cluster_rule=lambda config: f"joined by zeros of z, or equal within {config.cluster_tolerance:g} of each coefficient's size",
    steps={
        "S0": "the start",
        "S1": "who is drawn",
        "S5": "users' models",
        "S6": "users' pair variables",
        "S7": "all models to all users",
        "S10": "pairs' duals",
        "ties": "the sum of a user's weights",
        "S7+S10": "one vector to each user, in place of both",
        "balance": "rho, while it may change",
        "x_update": "how far x-updates from few rows came",
        "evaluate": "final models, and how their users judge them",
    },
    reveals=(
        OWN_MODELS,
        replace(SOLVED, needs={"start": "global"}),
        Reveal("x_i, each round", _TRAJECTORY, _ROUND, needs={"placement": "lean"}),
        Reveal("x_i to the server, the z of pairs among users through it", _TRAJECTORY, _ROUND, needs={"placement": "paper"}),
        Reveal("the value of its loss at x_i", "how well the model fits the user's rows", ("pdmm/evaluate",), unless={"evaluate_every": 0}),
        replace(SOLVED, needs={"refit": True}),
    ),
)
