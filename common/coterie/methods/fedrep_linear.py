"""`fedrep_linear`: Algorithm 2 of Collins, Hassani, Mokhtari and Shakkottai (2021), FedRep for linear regression.

Users share a representation B (d, k) and have heads w_i (k,); their losses are f_i(w, B) = 1/(2m) sum_j (y_j - w'B'x_j)^2 over m rows.

    start:     user i sends Z_i = (1/m) sum_j y_j^2 x_j x_j';  B^0 <- the k leading eigenvectors of their mean (method of moments)
    round t:   B^t goes to r n users;  w_i <- argmin_w f_i(w, B^t);  B_i <- B^t - eta grad_B f_i(w_i, B^t);  B^{t+1} <- the mean of the B_i

If the data is generated, each batch has m fresh rows. Otherwise rows are drawn from the user's own, or all of them are used. With heads
`gradient` the minimisation is `head_steps` gradient steps from the previous head: GD-GD (1) and 10GD-GD (10) of Figure 3. With heads
`shared` one head w is sent and averaged like B, and both take a gradient step: federated averaging on this model.

B' grad_B f_i = 0 at an exact head, so B'B never decreases and orthonormalisation is not needed; `orthonormalize` does it anyway. Z_i
reveals much about a user's rows: for a single row all but its sign.
"""

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.families.evaluation import judged
from coterie.wire.messages import Array, Broadcast, Indices, Positions, Rows, Scalars, Vectors, declare


class Config(Settings):
    name: Literal["fedrep_linear"] = "fedrep_linear"
    k: PositiveInt = 2  #: Dimension of the representation B.
    eta: PositiveFloat = 1.0  #: Step size of B.
    #: Share r of the n users that take part in a round: r n, rounded, at least one.
    participation: Annotated[float, Field(gt=0, le=1)] = 0.1
    users_per_round: PositiveInt | None = None  #: Number of users in a round, instead of `participation`.
    #: fresh: new rows in each round, which generated data makes and other data draws from the user's own. fixed: the same rows in each
    #: round.
    batch: Literal["fresh", "fixed"] = "fresh"
    batch_rows: PositiveInt | None = None  #: Rows m of a batch. Absent: as many as the user has.
    #: exact: heads minimise the loss. gradient: they take `head_steps` gradient steps. shared: all users have one head, which is averaged.
    heads: Literal["exact", "gradient", "shared"] = "exact"
    head_steps: PositiveInt = 1  #: Gradient steps of a head in a round, with heads: gradient.
    head_eta: PositiveFloat = 1.0  #: Step size of heads, with heads: gradient or shared.
    orthonormalize: bool = False  #: Whether the columns of B are made orthonormal after each round, by QR.
    #: moments: B starts from moments that users send. random: by seed. finished_run: B is that of another run and stays fixed (`coterie
    #: adapt`).
    start: Literal["moments", "random", "finished_run"] = "moments"

    def n_selected(self, n_users: int) -> int:
        """The number of users in a round."""
        return min(max(self.users_per_round or round(self.participation * n_users), 1), n_users)


@declare(method="fedrep_linear", step="moments")
class AskMoments(Broadcast):
    """Asks every user for Z_i."""


@declare(method="fedrep_linear", step="moments")
class Moments(Rows):
    """Z_i, the upper triangle row by row: d(d+1)/2 scalars."""

    z: Annotated[Array, Scalars("rows", "h")]


@declare(method="fedrep_linear", step="representation")
class Representation(Rows):
    """B^t, column by column, to the users of this round."""

    b: Annotated[Array, Vectors("k", "d")]


@declare(method="fedrep_linear", step="representation")
class UpdatedRepresentation(Rows):
    """B_i^{t+1} to the server."""

    b: Annotated[Array, Vectors("rows", "k", "d")]


@declare(method="fedrep_linear", step="head")
class SharedHead(Rows):
    """w, if all users have the same head."""

    w: Annotated[Array, Scalars("k", exact=False)]


@declare(method="fedrep_linear", step="head")
class UpdatedHead(Rows):
    """The user's w after its gradient step, if all users have the same head."""

    w: Annotated[Array, Scalars("rows", "k", exact=False)]


@declare(method="fedrep_linear", step="delivery", whole=True)
class FinalRepresentation(Rows):
    """B^T, to every user, which solves for its head on its own rows. A shared head comes with it instead."""

    b: Annotated[Array, Vectors("k", "d")]


@declare(method="fedrep_linear", step="evaluation")
class Scores(Rows):
    """Mean squared error of the user's model on its held-out rows, NaN without any, and the loss on its own."""

    loss: Annotated[Array, Scalars("rows", allows="infinity")]
    test_error: Annotated[Array, Scalars("rows", allows="nan")]
    n_test: Annotated[Indices, Positions("rows")]


METHOD = Method(
    config=Config,
    problem={"loss": "least_squares", "intercept": False},
    adapted=lambda config: {"name": config.name, "k": config.k, "start": "finished_run"},
    users_need_minimisers=False,  # they may have fewer rows than features
    steps={
        "moments": "each user's moments, for the start",
        "representation": "the representation, there and back",
        "head": "the head of all users",
        "delivery": "the final representation",
        "evaluation": "how users judge their models",
    },
    reveals=(
        Reveal(
            "Z_i = mean of y² xx', once",
            "weighted second moments: **of one row, all but its sign**",
            ("fedrep_linear/moments",),
            needs={"start": "moments"},
        ),
        Reveal(
            "B_i each round",
            "the update of a round; heads stay with their users",
            ("fedrep_linear/representation", "fedrep_linear/delivery"),
            unless={"start": "finished_run"},
        ),
        Reveal("the head w_i each round", "the user's part of the common head", ("fedrep_linear/head",), needs={"heads": "shared"}),
        Reveal("nothing but scores: it fetches B", "nothing more", ("fedrep_linear/delivery",), needs={"start": "finished_run"}),
        judged("fedrep_linear/evaluation"),
    ),
)
