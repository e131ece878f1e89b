"""`l2gd`: Hanzely and Richtarik (2020), federated learning of a mixture of global and local models, Algorithm 1 (L2GD), with networks.

Every user has its own model x_i; they minimise 1/n sum_i f_i(x_i) + lambda/(2n) sum_i ||x_i - xbar||^2. In each iteration a common coin
shows 1 with probability p,

    coin 0: x_i <- x_i - alpha / (n (1 - p)) grad f_i(x_i);   coin 1: x_i <- (1 - a) x_i + a xbar,   a = alpha lambda / (n p)

Aggregations do not change xbar, so messages are only needed when the coin changes. A round is a run of zeros and the ones after it. The
server draws both lengths, which are geometric. The drawn users make this many local steps and return x_i. Given xbar, they make the m
aggregations at once, x_i <- xbar + (1 - a)^m (x_i - xbar), before they train again or evaluate.

The length of a local step, alpha / (n (1 - p)), is `optimizer.lr`, so a = lr lambda (1 - p) / p. lambda = 0 is local training, a = 1
federated averaging. Deviations: a local step is on one batch, or as long as `epochs` or `updates` say. Only the drawn users take part in a
round, and xbar is their mean. Users aggregate with it when they are drawn again, or at the end; a user that was never drawn does so once.
Momentum, if any, starts anew each round. Running statistics of batch norm, and counts, are aggregated like parameters.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import LOCAL_UPDATE, SHARED_UPDATE, JointTraining, LocalTraining, PlainSgd, Work
from coterie.wire.messages import Indices, Positions, Rows, declare


class Config(JointTraining):
    name: Literal["l2gd"] = "l2gd"
    penalty: NonNegativeFloat = 1.0  #: Weight lambda that pulls users' models to their mean. 0: local training.
    #: Probability of an aggregation. In the mean a round has 1/p local steps and 1/(1-p) aggregations.
    p: Annotated[float, Field(ge=1e-4, le=0.9999)] = 0.1
    optimizer: PlainSgd = PlainSgd()  #: Optimizer of the local steps.
    #: Weights of users in the mean. plain: equal, as in print. rows: by their numbers of training rows.
    average: Literal["rows", "plain"] = "plain"

    @model_validator(mode="after")
    def _does_not_step_past_the_mean(self) -> Self:
        if self.step_to_mean > 1:
            said = f"penalty, p and optimizer.lr give aggregations of a = lr penalty (1 - p) / p = {self.step_to_mean:g}: want at most 1"
            raise ValueError(said)
        return self

    @property
    def step_to_mean(self) -> float:
        """a: how far an aggregation moves a model towards the mean."""
        return self.optimizer.lr * self.penalty * (1 - self.p) / self.p

    def phases(self) -> list[dict[str, Any]]:
        """One local step."""
        return [self.phase("all", epochs=self.epochs, updates=1 if self.epochs is self.updates is None else self.updates)]

    @property
    def work(self) -> Work:
        """That of the 1/p local steps that a round has in the mean."""
        step = super().work
        return Work(step.passes / self.p, step.batches / self.p)

    def keys_for(self, work: Work) -> dict[str, Any] | None:
        """None: coins draw how long a local update is."""
        del work
        return None

    def settings(self) -> dict[str, Any]:
        """The share of the distance to the mean that one aggregation leaves."""
        return {"left": 1 - self.step_to_mean}


@declare(method="l2gd", step="coins")
class Coins(Rows):
    """How often the common coin shows 0, and then 1, before the next 0. Sent to the users of this round."""

    lengths: Annotated[Indices, Positions(2)]


METHOD = LocalTraining(
    config=Config,
    models=ANY_MODEL,
    is_personal=True,
    strengths=("penalty",),
    steps={"coins": "how many local steps and aggregations the common coin has shown"},
    reveals=(replace(SHARED_UPDATE, steps=(*SHARED_UPDATE.steps, "l2gd/coins")), *LOCAL_UPDATE[1:]),
)
