"""`pfedme`: Dinh, Tran and Nguyen (2020), personalized federated learning with Moreau envelopes, Algorithm 1.

A user's personal model theta_i is the prox of its loss at the global model. In each local round, on one batch D:

    theta_i ~ argmin_theta f_i(theta; D) + lambda/2 ||theta - w_i||^2;   w_i <- w_i - eta lambda (w_i - theta_i)

and the server mixes, w^{t+1} = (1 - beta) w^t + beta mean_i w_i. Users keep and evaluate the theta_i of their last local round. A local
update has R local rounds, one per batch. eta is `optimizer.lr`. Momentum, if any, is that of w_i's steps; the paper has none.

Deviations: theta_i is K gradient steps from w_i, whatever their accuracy nu. Only the drawn users compute. Averages are weighted by rows by
default. Both models have the running statistics of batch norm that were collected at theta_i.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["pfedme"] = "pfedme"
    #: Weight lambda that pulls a personal model to the global one. Its product with `personal_lr` must be less than 2.
    penalty: PositiveFloat = 15.0
    personal_lr: PositiveFloat = 0.05  #: Step size of a personal model.
    personal_steps: Annotated[int, Field(ge=1, le=1000)] = 5  #: Gradient steps K of a personal model in a local round.
    #: How far the server moves the global model towards the users' mean: 1 takes the mean.
    beta: Annotated[float, Field(gt=0, le=10)] = 1.0

    @model_validator(mode="after")
    def _steps_do_not_run_away(self) -> Self:
        product = self.personal_lr * self.penalty
        if product >= 2:
            raise ValueError(
                f"personal_lr {self.personal_lr:g} times penalty {self.penalty:g} is {product:g}, want less than 2: "
                "longer steps lead away from the personal model"
            )
        return self

    @property
    def gradients(self) -> int:
        """Those of theta_i, from which w_i takes its step."""
        return self.personal_steps

    def settings(self) -> dict[str, Any]:
        return {"penalty": self.penalty, "rate": self.personal_lr, "n_steps": self.personal_steps}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True, strengths=("penalty",))
