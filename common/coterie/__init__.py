"""Coterie: personalized federated learning over gRPC, with every byte of communication accounted for.

    import coterie
    result = coterie.run("ellipses")
    comparison = coterie.compare("hsb", ["pdmm", "ditto", "local"], output="runs/compared")
    run = coterie.load_run("runs/my")

These names are the Python interface. The rest of this package is shared by coordinator, aggregator and client host, and imports none of
them. So names of other packages are imported on first use; the stub beside this file has their types.
"""

import importlib
from typing import Any

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError
from coterie.extras import left_out

__version__ = "0.1.0"

# Name: the module that has it.
FETCHED = {
    "Comparison": "coterie_deploy.studies.compare.api",
    "Experiment": "coterie.experiment.config",
    "Result": "coterie_deploy.engines.api",
    "Run": "coterie_deploy.read.loading",
    "SumOfNorms": "coterie_server.maths.sum_of_norms",
    "compare": "coterie_deploy.studies.compare.api",
    "load_experiment": "coterie_deploy.engines.api",
    "load_run": "coterie_deploy.read.loading",
    "run": "coterie_deploy.engines.api",
    "sum_of_norms": "coterie_server.maths.sum_of_norms",
    "user_source": "coterie_client.data.sources",
}

__all__ = ["ConfigError", "CoterieError", "ProtocolError", "RunError", "__version__", *FETCHED]  # noqa: PLE0604 - all are texts


def __getattr__(name: str) -> Any:
    if name not in FETCHED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(FETCHED[name]), name)
    except ModuleNotFoundError as error:
        raise ImportError(left_out(f"coterie.{name}", error.name), name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *FETCHED})
