"""What the client halves for known clusters share: what users tell of their models for the objective and at the end."""

from __future__ import annotations

from collections.abc import Sequence

from coterie.arrays import Array, Indices
from coterie.families.cluster_messages import ClusterMessages
from coterie.wire.messages import Message
from coterie_client.families.evaluation import judged
from coterie_client.families.gaps import gaps
from coterie_client.interface.half import Inbox, Local


def told(inbox: Inbox, messages: ClusterMessages, local: Local, models: Array, gamma: Array, place: Indices) -> Sequence[Message]:
    """The answer about the users' models (n, d), with gamma and the place (n,) of their clusters. TypeError for others."""
    if messages.ask_state in inbox:
        return [messages.user_state(local.problem.value(models), models)]
    if (sent := inbox.get(messages.gap_centre)) is not None:
        return [messages.user_gap(*gaps(local.problem, models, gamma, sent.centre[place]))]
    if messages.judge in inbox:
        return [messages.judgement(local.problem.value(models), *judged(models, local))]
    if messages.collect in inbox:
        return [messages.final_models(models)]
    raise TypeError(f"no step of this method for {list(inbox.messages)}")
