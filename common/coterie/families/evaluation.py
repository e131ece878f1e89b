"""Users evaluate the final models of a stage on training and held-out rows. The ledger books this separately, under "evaluate"."""

from typing import Any

from coterie.experiment.method import Room
from coterie.experiment.reveals import Reveal
from coterie.wire.messages import Annotated, Array, Indices, Positions, Rows, Scalars, Vectors, declare

# Whose models users judge, as the names of the figures begin: their own, or one that all have.
OWN, COMMON = "personal", "global"


@declare(method="evaluation", step="evaluate")
class FinalModels(Rows):
    """Each user's final model."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="evaluation", step="evaluate")
class Scores(Rows):
    """f_i at the model, infinite where training rows are protected; and the means of loss (without its l2 term) and metric over held-out
    rows, NaN for users without any.

    The metric is the accuracy of a classifier, the deviance of loss "poisson", else the squared error.
    """

    objective: Annotated[Array, Scalars("rows", allows="infinity")]
    test_loss: Annotated[Array, Scalars("rows", allows="nan")]
    test_metric: Annotated[Array, Scalars("rows", allows="nan")]
    n_test: Annotated[Indices, Positions("rows")]


def judged(*steps: str, **more: Any) -> Reveal:
    """What an evaluation reveals, for methods with their own messages for it."""
    return Reveal(
        "losses, metrics and counts, of some methods each round; `run.db` keeps figures per user",
        "how well a model fits each user",
        steps,
        title="evaluation (any method; `coterie tune` is runs that evaluate)",
        **more,
    )


ROOM = Room(
    reveals=(judged("evaluation", needs={"evaluate": True}, kind="convex"),),
    steps={"evaluate": "final models, and how their users judge them"},
)
