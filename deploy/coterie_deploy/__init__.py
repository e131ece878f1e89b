"""How roles are started: command line, local launcher, experiments, and the Python entry point `run`.

    from coterie_deploy import run
    result = run("ellipses")
    result.metrics[result.final_stage]

Importing this imports neither side; `run` does when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie_deploy.engines.api import Result, run

__all__ = ["Result", "run"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module("coterie_deploy.engines.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
