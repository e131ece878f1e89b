"""The interface of a client half: one value `CLIENT` in `coterie_client/methods/NAME.py` with two pure functions.

`init` makes the state of a host's users. `step` maps (state, messages, private data) to (new state, replies). It handles all users of the
host at once. Arithmetic is per user, so a user's numbers do not depend on the other users of its host. The state never leaves the host
unless a declared message carries it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.draws.secret import Secret
from coterie.errors import ProtocolError, RunError
from coterie.experiment.config import Experiment
from coterie.experiment.model import TensorInfo
from coterie.registry import is_method, method, typed_part
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_client.data import Fresh, UserData
from coterie_client.problems import ConvexProblem

if TYPE_CHECKING:
    from coterie_client.learning import Network, Tensors
    from coterie_client.learning.private import RowPrivacy, UserPrivacy

M = TypeVar("M", bound=Message)
S = TypeVar("S")


@dataclass(frozen=True)
class Local:
    """What a client half has access to: its users, their data and their losses."""

    seed: int  #: of the run
    names: tuple[str, ...]  #: of the host's users, in member order
    indices: Indices  #: (n_own,) their member indices at the parent, ascending
    n_members: int  #: of the parent
    precision: Precision  #: of payloads and models
    users: Sequence[UserData]  #: in the order of `names`, standardised if the run says so
    losses: ConvexProblem | None = None  #: of a convex experiment
    network: Network | None = None  #: of one with a network
    #: (position, round, m) -> m unseen rows (m, p) and targets (m,); None unless the data is generated and can be drawn anew
    fresh: Fresh | None = None
    #: (n_own,) their numbers in the whole run, ascending: the keys of their random streams
    numbers: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    #: (n_own,) the numbers of their known clusters in the whole run, -1 for none
    clusters: Indices = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    #: Clipping and noise of local steps, with `privacy.unit: row`.
    row_privacy: RowPrivacy | None = None
    #: Clipping of users' changes, whose sum gets the host's noise, with `privacy.where: hosts`.
    user_privacy: UserPrivacy | None = None

    @property
    def n_own(self) -> int:
        return len(self.names)

    @property
    def noised_rounds(self) -> int | None:
        """For how many rounds this host's noise is enough; None where it adds none."""
        privacy = self.row_privacy or self.user_privacy
        return None if privacy is None else privacy.rounds

    def returned(self, rows: NDArray[Any], before: NDArray[Any]) -> NDArray[Any]:
        """(k, size) what users return of their tensors: where hosts add noise to the sum, clipped changes of those `before`."""
        return rows if self.user_privacy is None else self.user_privacy.changes(rows, before)

    def check_scores(self, modes: Collection[int]) -> None:
        """ProtocolError for scores of models as they are (0), or fine-tuned, that would tell what the noise of sums is to hide."""
        if self.user_privacy is not None:
            self.user_privacy.check_scores(modes)

    @property
    def problem(self) -> ConvexProblem:
        """The convex losses. RunError in a run with a network, and before the rows' constants are agreed on."""
        if self.losses is None:
            why = "no constants of the features yet" if self.network is None else "a network"
            raise RunError(f"the run's users have {why}, wanted the loss of a convex problem")
        return self.losses


def check_rounds(local: Local, n_noised: int) -> None:
    """ProtocolError for one more answer with noise of the host than this noise is enough for."""
    if (most := local.noised_rounds) is not None and n_noised >= most:
        raise ProtocolError(f"the parent asks for round {n_noised + 1} with noise, which is enough for {most} rounds")


@dataclass(frozen=True)
class Inbox:
    """The messages of one task for one method. `users` of a `Rows` message are positions among the host's users; None: all."""

    stage: str  #: its name
    round: int  #: 0 at the start of a stage
    messages: Mapping[type[Message], Message]  #: by class
    secret: Secret | None = None  #: the key of what this task draws in secret, where hosts add noise

    def get(self, cls: type[M]) -> M | None:
        return self.messages.get(cls)  # type: ignore[return-value]

    def __getitem__(self, cls: type[M]) -> M:
        return self.messages[cls]  # type: ignore[return-value]

    def __contains__(self, cls: type[Message]) -> bool:
        return cls in self.messages


@dataclass(frozen=True, kw_only=True)
class ClientHalf(Generic[S]):
    """The client half of a method, or of steps of every run."""

    #: (options of the stage, local, state of an earlier stage or None) -> the state at the start of a stage.
    init: Callable[[Mapping[str, Any], Local, S | None], S]
    #: Handles one task. `users` of the returned messages are positions among the host's users; None: all.
    step: Callable[[S, Inbox, Local], tuple[S, Sequence[Message]]]
    #: (options, experiment, number of the parent's members) -> whether a parent may send these options, if they decide what is sent.
    allows: Callable[[Mapping[str, Any], Experiment, int], bool] = lambda *_: True
    #: Given the new state: work for the time until the next task, which the losses cache; None for nothing. It may be skipped, and no
    #: result depends on it.
    ahead: Callable[[S, Inbox, Local], Callable[[], None] | None] | None = None
    #: (state, position of a user, shared tensors of the finished run, all tensors of the model) -> the user's model, if the state holds
    #: private models. They outlive the run, so the state is saved at its end.
    model_of: Callable[[S, int, Tensors, Sequence[TensorInfo]], Tensors] | None = None
    changes_rows: bool = False  #: whether a new state changes the rows that all halves see
    #: The fields of the state that users never send: `coterie check method` searches what leaves a host for what they hold.
    private: Callable[[S], Sequence[str]] = lambda _: ()


def client_half(name: str) -> tuple[str, ClientHalf[Any]] | None:
    """The half that takes messages of this name, and its own name: that of a method or of its family. None if there is none."""
    family = method(name).room if is_method(name) else ""
    for room in (name, family):
        if (found := typed_part("coterie_client", room, "CLIENT", ClientHalf)) is not None:
            return room, found
    return None
