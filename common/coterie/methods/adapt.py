"""`adapt`: new users join a finished run. They receive the shared tensors once, and train the private ones.

Collins et al. (2021), section 1: "the client only needs to learn a head". A round is an epoch, after which users evaluate their models.
`coterie adapt` makes such a run from a finished one.
"""

from typing import Any, Literal

from coterie.experiment.model import Sharing
from coterie.experiment.reveals import Reveal
from coterie.families.partial import LOCAL_UPDATE, Epochs, LocalTraining, Training


class Config(Training):
    """Hyper-parameters; the finished run decides which tensors are shared."""

    name: Literal["adapt"] = "adapt"
    shared: Sharing = "representation"  #: The part of the model that new users receive, as in the finished run. They train the rest.
    epochs: Epochs = 1  #: Passes over a new user's rows in a round.
    #: Parts that users fine-tune at the end, for accuracies besides that of the model as it is.
    fine_tune: tuple[Literal["head", "all"], ...] = ()

    def phases(self) -> list[dict[str, Any]]:
        """Only the private tensors. If all were shared, the head of the user's own copy."""
        if self.shared == "head":
            return [self.phase("representation", epochs=self.epochs)]
        head = self.phase("head", epochs=self.epochs)
        # Private statistics are computed from the new user's rows, by steps of length 0.
        return [self.phase("representation", epochs=self.epochs, lr=0.0), head] if self.batch_norm == "private" else [head]

    def client_options(self) -> dict[str, Any]:
        """Tensors are split as in the finished run. If all were shared, the head becomes private."""
        return {**super().client_options(), "sharing": "representation" if self.shared == "all" else self.shared, "delivers": self.shared}


METHOD = LocalTraining(
    config=Config,
    stands_alone=False,
    sums=frozenset(),
    sharing="none",
    reveals=(
        Reveal(
            "its mean training loss: nothing else after the fetch but scores",
            "how well the model fits each user",
            ("partial/delivery", "partial/head", "partial/loss"),
        ),
        LOCAL_UPDATE[1],
    ),
)
