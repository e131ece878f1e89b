"""What coordinator, aggregator and client host must agree on: configuration, messages, codec, random streams, ledger.

Imports neither `coterie_server` nor `coterie_client`. What reads runs belongs to a room that may: `load_run` and `Run` are fetched from
`coterie_deploy.read.loading` when they are first asked for, and are typed in the stub beside this file.
"""

import importlib
from typing import Any

from coterie.errors import ConfigError, CoterieError, ProtocolError, RunError

__version__ = "0.1.0"

__all__ = ["ConfigError", "CoterieError", "ProtocolError", "Run", "RunError", "__version__", "load_run"]

_LOADING = ("Run", "load_run")


def __getattr__(name: str) -> Any:
    if name not in _LOADING:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module("coterie_deploy.read.loading"), name)
    except ModuleNotFoundError as error:
        sentence = f"coterie.{name} needs {error.name}, which is not installed here (images leave out what their role does not need)"
        raise ImportError(sentence, name=error.name) from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_LOADING})
