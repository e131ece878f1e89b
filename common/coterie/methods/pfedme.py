"""`pfedme`: Dinh, Tran and Nguyen (2020), personalized federated learning with Moreau envelopes, Algorithm 1.

A user's personal model theta_i is the prox of its loss at the global model. In each local round, on one batch D:

    theta_i ~ argmin_theta f_i(theta; D) + lambda/2 ||theta - w_i||^2;   w_i <- w_i - eta lambda (w_i - theta_i)

and the server mixes, w^{t+1} = (1 - beta) w^t + beta mean_i w_i. Users keep and evaluate the theta_i of their last local round. A local
update has R local rounds, one per batch. eta is `optimizer.lr`. Momentum, if any, is that of w_i's steps; the paper has none.

Deviations: theta_i is K gradient steps from w_i, whatever their accuracy nu. Only the drawn users compute. Averages are weighted by rows by
default. Both models have the running statistics of batch norm that were collected at theta_i.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from coterie.experiment.method import ANY_MODEL
from coterie.families.partial import JointTraining, LocalTraining


class Config(JointTraining):
    name: Literal["pfedme"] = "pfedme"
    penalty: PositiveFloat = 15.0  # lambda
    personal_lr: PositiveFloat = 0.05  # of theta's gradient steps
    personal_steps: Annotated[int, Field(ge=1, le=1000)] = 5  # K
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

    def settings(self) -> dict[str, Any]:
        return {"penalty": self.penalty, "rate": self.personal_lr, "n_steps": self.personal_steps}


METHOD = LocalTraining(config=Config, models=ANY_MODEL, is_personal=True)
