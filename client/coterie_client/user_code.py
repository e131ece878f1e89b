"""Code of the host's owner or of the experiment: a loss, a model, a data source. What it raises may say anything, so it stays here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from coterie.errors import CoterieError, RunError, default_finding
from coterie.findings import Finding


@contextlib.contextmanager
def user_code(what: str, finding: Finding, family: type[CoterieError] = RunError) -> Iterator[None]:
    """Whatever code of others raises in the block is an error of this family, with its text and, as the cause, its traceback.

    Errors of ours that say nothing for others say the finding too.
    """
    try:
        with default_finding(finding):
            yield
    except CoterieError:
        raise
    except Exception as error:
        raise family(f"{what} has raised {type(error).__name__}: {error}", finding) from error


__all__ = ["user_code"]
