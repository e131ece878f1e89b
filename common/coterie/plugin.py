"""The stable interface for authors of plug-ins, from methods to compressors: only these names are guaranteed to stay.

    from coterie.plugin import NetworkLoss

A name is imported from its module on first use, so a plug-in for hosts imports nothing of the server. The stub beside this file has the
types.
"""

import importlib
from typing import Any, Final

_NAMES = {
    # everybody
    "coterie.arrays": ("Array", "Indices"),
    "coterie.errors": ("ConfigError", "RunError"),
    "coterie.experiment.settings": ("Settings",),
    "coterie.draws.streams": ("Stream", "normal", "stream"),
    # methods
    "coterie.experiment.reveals": ("Reveal",),
    "coterie.experiment.method": ("Method",),
    "coterie.families.partial": ("JointTraining", "LocalTraining", "Training", "Optimizer", "PlainSgd", "LOCAL_UPDATE"),
    # the server's part in local training, with messages and state of its own
    "coterie_server.families.partial": ("PartialSharing", "ServerUpdate", "SharedState"),
    # their local updates, and rules of their phases: gradients elsewhere than at the parameters
    "coterie_client.interface.local_update": ("LocalUpdate", "Context", "Fit", "Moved", "Received", "own_model", "judge_own", "pulled"),
    "coterie_client.learning": ("Fitted", "Phase", "Tensors", "Gradient", "Gradients", "Numbers", "Slope", "evaluated"),
    # methods with messages of their own
    "coterie.wire.messages": ("Broadcast", "Message", "Positions", "Rows", "Scalars", "Vectors", "Weights", "declare"),
    "coterie_server.interface.half": (
        "ABSENT",
        "UNASKED",
        "Counts",
        "Federation",
        "Outcome",
        "Replies",
        "ServerHalf",
        "Setting",
        "StageHalf",
        "Sum",
        "Totals",
    ),
    "coterie_server.interface.wanted": ("Wanted",),
    "coterie_client.interface.half": ("ClientHalf", "Inbox", "Local"),
    # losses
    "coterie_client.problems.losses": ("RowLoss",),
    "coterie_client.problems.convex": ("ConvexProblem",),
    "coterie_client.nets.losses": ("NetworkLoss",),
    # compressors
    "coterie.compress.numbers": ("Compressor",),
    "coterie.compress.draws": ("Draws",),
    # rules instead of a mean, where hosts may lie
    "coterie_server.families.own_rule": ("RobustRule",),
    # data sources and partition rules
    "coterie_client.data.sources": ("DataSource", "LabelledRows", "SourceRequest", "User", "PartitionRequest", "PartitionRule"),
}
FETCHED: Final = {name: module for module, names in _NAMES.items() for name in names}
__all__ = sorted(FETCHED)  # noqa: PLE0605 - the stub has them one by one


def __getattr__(name: str) -> Any:
    if name not in FETCHED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(FETCHED[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
