"""Libraries that not everybody has: imported, or named in one sentence that says how to install them."""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

from coterie.errors import ConfigError
from coterie.findings import NO_RULE, Finding


def not_installed(needs: str, package: str, finding: Finding = NO_RULE) -> ConfigError:
    """The error of what "needs a library", as `needs` says."""
    return ConfigError(f"{needs}, which is not installed: pip install '{package}'", finding)


def left_out(what: str, module: str | None) -> str:
    """The sentence for a part of ours, or a library of a role, that is missing in the image of another role."""
    return f"{what} needs {module}, which is not installed here (images leave out what their role does not need)"


@contextlib.contextmanager
def extra(name: str, module: str, needs: str = "", *, package: str = "", finding: Finding = NO_RULE) -> Iterator[None]:
    """A block that imports a module of the extra `name`, or else of a package. ConfigError if it is missing, which `needs` begins."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != module:
            raise
        raise not_installed(needs or f"this command needs {module}", package or f"coterie[{name}]", finding) from None


def needed(module: str, name: str, needs: str = "", *, package: str = "", finding: Finding = NO_RULE) -> Any:
    """A module of the extra `name`, or else of a package. ConfigError if it is not installed."""
    with extra(name, module.partition(".")[0], needs, package=package, finding=finding):
        return importlib.import_module(module)
