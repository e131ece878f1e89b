"""The stable interface for authors of methods, losses, models, data sources and partition rules: only these names are guaranteed to stay.

    from coterie.plugin import NetworkLoss

A name is imported from its module on first use, so a plug-in for hosts imports nothing of the server. The stub beside this file has the
types.
"""

import importlib
from collections.abc import Mapping
from typing import Any, Final

# Name: the module that has it.
FETCHED: Final[Mapping[str, str]] = {
    # everybody
    "Array": "coterie.arrays",
    "ConfigError": "coterie.errors",
    "RunError": "coterie.errors",
    "Settings": "coterie.experiment.settings",
    "Stream": "coterie.draws.streams",
    "normal": "coterie.draws.streams",
    # methods
    "Reveal": "coterie.experiment.reveals",
    "Method": "coterie.experiment.method",
    "JointTraining": "coterie.families.partial",
    "LocalTraining": "coterie.families.partial",
    "Training": "coterie.families.partial",
    "Optimizer": "coterie.families.partial",
    # their local updates
    "LocalUpdate": "coterie_client.interface.local_update",
    "Context": "coterie_client.interface.local_update",
    "Moved": "coterie_client.interface.local_update",
    "Received": "coterie_client.interface.local_update",
    "own_model": "coterie_client.interface.local_update",
    "judge_own": "coterie_client.interface.local_update",
    "pulled": "coterie_client.interface.local_update",
    "Fitted": "coterie_client.learning",
    "Phase": "coterie_client.learning",
    "Tensors": "coterie_client.learning",
    # rules of their phases: gradients elsewhere than at the parameters
    "Gradient": "coterie_client.learning",
    "Gradients": "coterie_client.learning",
    "Numbers": "coterie_client.learning",
    "Slope": "coterie_client.learning",
    "evaluated": "coterie_client.learning",
    # methods with messages of their own
    "Broadcast": "coterie.wire.messages",
    "Indices": "coterie.arrays",
    "Message": "coterie.wire.messages",
    "Positions": "coterie.wire.messages",
    "Rows": "coterie.wire.messages",
    "Scalars": "coterie.wire.messages",
    "Vectors": "coterie.wire.messages",
    "declare": "coterie.wire.messages",
    "Counts": "coterie_server.interface.half",
    "Federation": "coterie_server.interface.half",
    "Outcome": "coterie_server.interface.half",
    "Replies": "coterie_server.interface.half",
    "ServerHalf": "coterie_server.interface.half",
    "Setting": "coterie_server.interface.half",
    "StageHalf": "coterie_server.interface.half",
    "Wanted": "coterie_server.interface.wanted",
    "ClientHalf": "coterie_client.interface.half",
    "Inbox": "coterie_client.interface.half",
    "Local": "coterie_client.interface.half",
    # losses
    "RowLoss": "coterie_client.problems.losses",
    "NetworkLoss": "coterie_client.nets.losses",
    # data sources
    "DataSource": "coterie_client.data.sources",
    "LabelledRows": "coterie_client.data.sources",
    "SourceRequest": "coterie_client.data.sources",
    "User": "coterie_client.data.sources",
    # partition rules
    "PartitionRequest": "coterie_client.data.rules",
    "PartitionRule": "coterie_client.data.rules",
}
__all__ = sorted(FETCHED)  # noqa: PLE0605 - the stub has them one by one


def __getattr__(name: str) -> Any:
    if name not in FETCHED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(FETCHED[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
