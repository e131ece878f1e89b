"""The command `coterie`: from its arguments to a role, and from an error to one sentence and an exit code.

0 done, 2 the command line, the experiment or its data is wrong, 3 the run cannot go on; 130 and 143: stopped by SIGINT or SIGTERM where
there is nothing to report. Anything else is a mistake of ours and shows its traceback.
"""

# ruff: noqa: PLC0415 - the environment comes first

from __future__ import annotations

import errno
import os
import sys
import traceback

_LEFT_OUT = ("coterie_server", "coterie_client", "scipy", "cryptography")  # of images for one role
_OF_USER_CODE = ("L1", "L2", "L3")
# One thread for each process: many would compete for the processors, and sums split over threads may differ in their last bits.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def main() -> None:
    """Runs the command and exits."""
    os.environ.update(dict.fromkeys(_THREADS, "1"))  # before numpy is imported
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters is said by us
    sys.exit(_run_to_the_last_line(sys.argv[1:]))


def _run_to_the_last_line(arguments: list[str]) -> int:
    """Whoever reads what is printed may stop reading, as `head` does: that is no error of theirs or ours."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich and click make SystemExit of it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 141
    return code


def _run(arguments: list[str]) -> int:
    import typer

    from coterie.errors import CoterieError, RunError
    from coterie_deploy.cli.commands import app
    from coterie_deploy.telemetry.logs import wants_json

    command = typer.main.get_command(app)
    try:
        code = command.main(arguments, prog_name="coterie", standalone_mode=False)
    except CoterieError as error:
        return _failed(str(error), error.exit_code, as_json=wants_json(arguments), trace=_trace(error))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LEFT_OUT:
            raise
        return _failed(f"this command needs {error.name}, which is not installed here (images leave out what their role does not need)", 2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _failed(f"cannot write {error.filename or 'what is to be printed'}: {error.strerror}", RunError.exit_code)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # The parser refuses something. Where its exceptions live depends on the version of typer.
        return _failed(f"{error.format_message()} (see coterie --help)", 2)
    return code if isinstance(code, int) else 0


def _trace(error: BaseException) -> str:
    """Where code that the experiment names has raised what ended the command: its author needs more than a sentence."""
    from coterie.errors import CoterieError

    cause = error.__cause__
    if (
        isinstance(error, CoterieError)
        and error.finding.rule in _OF_USER_CODE
        and cause is not None
        and not isinstance(cause, CoterieError)
    ):
        return "".join(traceback.format_exception(cause))
    return ""


def _failed(sentence: str, code: int, *, as_json: bool = False, trace: str = "") -> int:
    """Prints one line after the trace, if any, however narrow the terminal: wrapping it is the terminal's business."""
    from coterie_deploy.telemetry.logs import failure_line
    from coterie_deploy.terminal.printable import printable

    line = " ".join(sentence.split())
    try:
        print(failure_line(line, code, trace) if as_json else f"{trace}error: {printable(line)}", file=sys.stderr)  # noqa: T201
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        for stream in (sys.stdout, sys.stderr):  # or the interpreter complains when it flushes
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code
