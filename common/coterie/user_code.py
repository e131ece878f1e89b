"""Runs code of the owner, of the experiment or of a package, whose errors may quote data and stay in the process."""

import contextlib
from collections.abc import Iterator

from coterie.errors import CoterieError, RunError, default_finding
from coterie.findings import Finding


@contextlib.contextmanager
def user_code(what: str, finding: Finding, family: type[CoterieError] = RunError) -> Iterator[None]:
    """Exceptions of foreign code in this block become errors of this family, with their text, and their traceback as cause.

    Errors of ours without a finding get this finding.
    """
    try:
        with default_finding(finding):
            yield
    except CoterieError:
        raise
    except Exception as error:
        raise family(f"{what} has raised {type(error).__name__}: {error}", finding) from error
