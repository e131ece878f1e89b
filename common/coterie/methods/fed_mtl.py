"""`fed_mtl`: multi-task learning. Every user has its own model w_i, and relations between users tie the models together.

    minimize over W = (w_1 .. w_n):  sum_i f_i(w_i) + mu/2 tr(W A W'),   A (n, n) symmetric, positive semidefinite

Evgeniou and Pontil (2004), regularized multi-task learning: A = I - 11'/n, the penalty mu/2 sum_i ||w_i - wbar||^2. Smith, Chiang, Sanjabi
and Talwalkar (2017), federated multi-task learning (MOCHA), (1): any A, given or learnt.

With convex problems, `relations: mean` is the first form. Rows of a matrix, or a file with them, give A, with users in the order of their
names. With `learned`, A = (Omega + eps I)^{-1}, and Omega is learnt together with W: it minimises the same objective over Omega >= 0 with
tr Omega = n. For eps = 0 this is n (W'W)^{1/2} / tr (W'W)^{1/2}, the closed form of Zhang and Yeung (2010) that MOCHA uses. The lines of
MOCHA's Algorithm 1, and what is done here:

    line 4, set sigma'         b_i = sigma A_ii, sigma = lambda_max(D^{-1/2} A D^{-1/2}), D = diag(A): the least such that A <= diag(b)
    line 7, solve (4)          w_i <- argmin_w f_i(w) + mu b_i/2 ||w - y_i||^2,   y_i = v_i - 1/b_i sum_j A_ij v_j
    lines 8-10, reduce         the server has W and A; a drawn user receives y_i and mu b_i, and returns w_i and the number f_i(w_i)
    line 11, update Omega      every `relations_every` rounds; until then relations are those of the mean

Deviations: the subproblem is primal, of a majoriser with the same separable shape, while MOCHA's is dual. It is solved exactly (theta = 0),
and stragglers may be left out of a round instead of solving less. V = W. If all users take part, V also includes a part of W's last move
(Beck and Teboulle, 2009), which is dropped if it would increase the objective. tr Omega is n and not 1, so that mu means the same as with
the mean. eps keeps A finite if the models span less than n directions, as d < n models always do. (2) of MOCHA also has lambda_2 ||W||^2:
`problem.l2` is 2 lambda_2.

With networks, and on convex problems with `solver: steps`, there are local updates, for the mean only. The server sends wbar^t. The drawn
users train from where they were, and return their models, whose mean is wbar^{t+1}:

    w_i <- w_i - eta (grad f_i(w_i) + mu (w_i - wbar^t))

Deviations: gradients are stochastic. wbar is the mean of the users drawn last, and is fixed while they train. Momentum includes the pull.

In both cases the server receives the users' models, as in MOCHA.
"""

from dataclasses import replace
from pathlib import PurePath
from typing import Annotated, Any, Literal, Self

from pydantic import (
    FiniteFloat,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from coterie.experiment.method import ANY_MODEL, NETWORK, Meaningless
from coterie.experiment.privacy import Privacy
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, JointTraining, LocalTraining, leaks, private_defaults
from coterie.text.quoting import quoted
from coterie.wire.messages import Array, Rows, Scalars, Vectors, declare

Matrix = tuple[tuple[FiniteFloat, ...], ...]
_ROWS = TypeAdapter(Matrix)
_FILES = (".csv", ".npy")
# Settings for training and evaluating networks.
_OF_NETWORKS = (
    *("epochs", "updates", "batch_size", "optimizer", "average", "batch_norm"),
    *("evaluate_every", "evaluate_last", "fine_tune", "fine_tune_epochs"),
)


class Config(JointTraining):
    name: Literal["fed_mtl"] = "fed_mtl"
    mu: NonNegativeFloat = 0.1  #: Weight of the relations between users. 0: local training.
    #: Weights of users in the mean. plain: equal, as in print. rows: by their numbers of training rows.
    average: Literal["rows", "plain"] = "plain"
    #: The relations A, for convex problems: `mean`, `learned`, a file of the coordinator (.csv, .npy), or the rows of a matrix.
    relations: str | Matrix = "mean"
    #: On convex problems. exact: users minimise their loss and pull exactly. steps: they take steps on batches from where they were, as
    #: with networks, so that only the mean is a relation.
    solver: Literal["exact", "steps"] = "exact"
    #: Rounds between two updates of learned relations. An update takes O(n^3) on the server, so thousands of users want more rounds.
    relations_every: PositiveInt = 1
    relations_floor: PositiveFloat = 1.0  #: The eps that keeps learned relations finite. With a small one they take long to settle.

    @field_validator("relations", mode="before")
    @classmethod
    def _a_name_or_a_matrix(cls, value: Any) -> str | Matrix:
        if isinstance(value, str) and (value in ("mean", "learned") or PurePath(value).suffix in _FILES):
            return value
        try:
            return _ROWS.validate_python(value)
        except ValidationError:
            wanted = "mean, learned, a file whose name ends in .csv or .npy, or a matrix as a list of rows of numbers"
            raise ValueError(f"is {quoted(value)}, want {wanted}") from None

    @model_validator(mode="after")
    def _steps_know_the_mean(self) -> Self:
        if self.solver == "steps" and self.relations != "mean":
            raise ValueError(f"solver is 'steps', but relations is {quoted(str(self.relations))}: users who take steps know the mean alone")
        return self

    def settings(self) -> dict[str, Any]:
        return {"mu": self.mu}


@declare(method="fed_mtl", step="pull")
class Pull(Rows):
    """The target and weight of a user's relations: y_i and mu b_i."""

    y: Annotated[Array, Vectors("rows", "d")]
    weight: Annotated[Array, Scalars("rows")]


@declare(method="fed_mtl", step="pull")
class Pulled(Rows):
    """A user's model w_i, and f_i(w_i)."""

    w: Annotated[Array, Vectors("rows", "d")]
    value: Annotated[Array, Scalars("rows")]


def _leaks(config: Config, privacy: Privacy) -> str:
    if config.solver == "exact" and "solver" in config.model_fields_set:  # networks have no such key, and all their updates are steps
        return "method.solver is 'exact', but only steps on rows can be noised: want method.solver steps beside privacy"
    return leaks(config, privacy)


METHOD = LocalTraining(
    config=Config,
    continues="its multipliers are sums of differences of what was sent",
    models=ANY_MODEL,
    sums=NETWORK,
    is_personal=True,
    strengths=("mu",),
    protects=frozenset({"row"}),
    unprotected="its users return their own models, which a sum of noised changes does not replace",
    private_defaults=lambda privacy: {**private_defaults(privacy), "solver": "steps"},
    leaks=_leaks,
    no_rule=lambda config, kind: (
        "" if kind == "network" or config.solver == "steps" else "each user is pulled by its own mean of the others"
    ),
    convex_defaults={"participation": 1.0},
    meaningless={
        "network": Meaningless(("solver", "relations", "relations_every", "relations_floor"), "networks know the mean of all users alone"),
        "convex": Meaningless(_OF_NETWORKS, "users of a convex problem minimise their losses exactly", {"solver": "steps"}),
    },
    steps={"pull": "where relations pull the models of the users drawn, and these models back"},
    reveals=(
        *(replace(reveal, kind="network") for reveal in LOCAL_UPDATE),
        *(replace(reveal, kind="convex", needs={"solver": "steps"}) for reveal in LOCAL_UPDATE),
        Reveal(
            "w_i and its loss there, each round",
            "the user's model, which the server keeps (as MOCHA's does), and the gradient of its loss at each of them; what is sent down "
            "is a mean of models by relations: **who is related to one other user learns that user's model**",
            ("fed_mtl",),
            unless={"solver": "steps"},
            kind="convex",
        ),
    ),
)
