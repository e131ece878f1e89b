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
    "Method": "coterie.experiment.method",
    "JointTraining": "coterie.families.partial",
    "LocalTraining": "coterie.families.partial",
    "Training": "coterie.families.partial",
    "LocalUpdate": "coterie_client.interface.local_update",
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
