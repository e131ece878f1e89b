"""The loss that users of a convex experiment minimise, as both sides read it in the configuration.

Only the client computes it, in `coterie_client.problems`. The coordinator never sees the data.
"""

from functools import partial
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from coterie.experiment.plugins import check_known
from coterie.experiment.settings import Settings

MARGIN_LOSSES: Final = ("squared_hinge", "logistic", "least_squares", "huber", "poisson")
DISTANCE_LOSSES: Final = ("squared_distance", "huber_distance")
QUADRATIC_LOSSES: Final = ("least_squares", "squared_distance")
NETWORK_LOSSES: Final = ("cross_entropy",)  # networks also take least_squares
UNTOLD: Final = "metric"  # if only the code of the loss knows
METRICS: Final = ("accuracy", "squared_error", "deviance", UNTOLD)
LOSSES: Final = (*MARGIN_LOSSES, *DISTANCE_LOSSES, *NETWORK_LOSSES)


class ProblemConfig(Settings):
    """The loss f_i of each user i, over its own rows r = 1..m_i.

    For all but the two distance losses

        f_i(x) = (1/m_i or 1) sum_r phi(s_r, y_r) + c/2 |w|^2,     x = [w, b],  s_r = <w, a_r> - b,

    the convention of Armacki, Bajovic, Jakovetic and Kar (2022), section V: the intercept enters with a minus sign
    (a column of -1 beside the features, for every loss) and is never penalised. Without `intercept`, x = w.

    For the distance losses a user's rows are points: no target, no intercept, and
    f_i(x) = (1/m_i or 1) sum_r h(|x - a_r|) + c/2 |x|^2, with h(t) = t^2/2 or the Huber function of t.

    The `poisson` loss is phi = exp(s) - y s for counts y = 0, 1, 2, ... of mean exp(s). The curvature exp(s) has no bound, and
    methods whose step sizes come from the smoothness need one: from s = `log_mean_limit` on, exp goes on as its parabola, with the
    curvature exp(`log_mean_limit`). A limit just above the log of the largest count leaves the fit a Poisson regression and the
    steps as long as can be; counts above exp(`log_mean_limit`) are refused. Held-out rows are judged by their mean deviance.
    """

    #: The loss: squared_hinge, logistic, least_squares, huber, poisson, squared_distance, huber_distance, cross_entropy, or one of your
    #: own.
    loss: Annotated[str, AfterValidator(partial(check_known, "loss", built_in=LOSSES))]
    #: Factor c of the penalty c/2 |w|^2 on the weights, without the intercept. Above 0 it gives every user a unique minimiser.
    l2: NonNegativeFloat = 0.0
    huber_delta: PositiveFloat = 1.0  #: Residual at which the Huber loss turns from quadratic to linear, in units of the target.
    #: poisson: log of the mean beyond which the loss goes on as a parabola. Step sizes shrink with exp of it, so set it just above the log
    #: of the largest count.
    log_mean_limit: Annotated[float, Field(ge=0, le=50)] = 5.0
    intercept: bool = True  #: Whether models have an intercept. It enters with a minus sign and is not penalised.
    #: mean: a user's loss is the mean over its rows. sum: it is the sum, so users with many rows count more.
    reduction: Literal["mean", "sum"] = "mean"

    @property
    def is_distance(self) -> bool:
        """Whether rows are points to be close to, without targets."""
        return self.loss in DISTANCE_LOSSES

    @property
    def is_quadratic(self) -> bool:
        """Whether second derivatives are the same everywhere."""
        return self.loss in QUADRATIC_LOSSES

    @property
    def is_own(self) -> bool:
        """Whether the loss is code of a package, or beside the experiment. With a model, it is a network's loss."""
        return self.loss not in LOSSES

    @property
    def is_for_networks(self) -> bool:
        """Whether the loss is a network's, for labels 0, 1, 2, ..."""
        return self.loss in NETWORK_LOSSES

    @property
    def metric(self) -> str:
        """The metric for held-out rows, besides the loss."""
        if self.loss in ("cross_entropy", "logistic", "squared_hinge"):
            return "accuracy"
        if self.loss == "poisson":
            return "deviance"
        return UNTOLD if self.is_own else "squared_error"

    @property
    def has_intercept(self) -> bool:
        """Whether the last entry of x is an intercept."""
        return self.intercept and not self.is_distance
