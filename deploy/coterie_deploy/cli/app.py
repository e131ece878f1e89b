"""The command `coterie`: from its arguments to a role, and from an error to one sentence and an exit code.

0: done; 2: the command line, the experiment or its data is wrong; 3: the run cannot go on; 130 and 143: stopped by SIGINT or SIGTERM with
nothing to report. Anything else is a bug and shows its traceback.
"""

# ruff: noqa: PLC0415 - the environment comes first

import contextlib
import errno
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from coterie_deploy.terminal.threads import ONE_THREAD

_LEFT_OUT = ("coterie_server", "coterie_client", "scipy", "cryptography")  # of images for one role
_OF_USER_CODE = ("L1", "L2", "L3")


def main() -> None:
    os.environ.update(ONE_THREAD)  # before numpy is imported
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what matters is said by us
    gc.set_threshold(10_000)  # a start makes a hundred thousand objects that stay
    code = _for_supervisors(_run_to_the_last_line(sys.argv[1:]))
    gc.freeze()  # the interpreter looks through all objects at its end, some of them several times; memory goes with the process
    sys.exit(code)


def _for_supervisors(code: int) -> int:
    """The exit code; of a mistake, which stays one, that of the environment: some supervisors would start the command again for ever."""
    from coterie.errors import MISTAKE_CODE, ConfigError

    wanted = os.environ.get(MISTAKE_CODE, "")
    return int(wanted) if code == ConfigError.exit_code and wanted.isdecimal() and int(wanted) < 256 else code


def _run_to_the_last_line(arguments: list[str]) -> int:
    """Handles readers that stop reading, such as `head`: no error."""
    try:
        code = _run(arguments)
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:  # rich and click make SystemExit of it
        if isinstance(error, SystemExit) and not error.code:  # the completion of shells ends so
            return 0
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 141
    return code


def _run(arguments: list[str]) -> int:
    import typer

    from coterie.errors import CoterieError, RunError
    from coterie.extras import left_out
    from coterie_deploy.cli.commands import app
    from coterie_deploy.telemetry.logs import wants_json

    command = typer.main.get_command(app)
    try:
        with _notes_said():
            code = command.main(arguments, prog_name="coterie", standalone_mode=False)
    except CoterieError as error:
        return _failed(str(error), error.exit_code, as_json=wants_json(arguments), trace=_trace(error))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _LEFT_OUT:
            raise
        return _failed(left_out("this command", error.name), 2)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return _failed(f"cannot write {error.filename or 'what is to be printed'}: {error.strerror}", RunError.exit_code)
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        # The parser refuses something. Where its exceptions live depends on the version of typer.
        return _failed(_refusal(error), 2)
    return code if isinstance(code, int) else 0


@contextlib.contextmanager
def _notes_said() -> Iterator[None]:
    """Warnings about the user's own settings are notes, each said once. Other warnings look as in any program."""
    from coterie.errors import SettingsDropped

    said: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always", SettingsDropped)
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, SettingsDropped):
                others(message, category, *place, **more)
            elif str(message) not in said:
                said.add(str(message))
                print(f"note: {message}", file=sys.stderr)  # noqa: T201

        warnings.showwarning = show
        yield


def _refusal(error: Any) -> str:
    """The sentence of the parser, with what was probably meant and where to look."""
    from pydantic import ValidationError

    from coterie.experiment.config import complaint
    from coterie.text.suggestions import suggestion

    said, context = error.format_message(), getattr(error, "ctx", None)
    if isinstance(error.__cause__, ValidationError):  # typer reads values by pydantic, whose words do not say what was found
        found = error.__cause__.errors(include_url=False)[0]
        hint = said.removeprefix("Invalid value for ").partition(":")[0].strip("'")
        said = said.replace("Value error, ", "") if found["type"] == "value_error" else f"{hint} {complaint(found)}"
    if possibilities := getattr(error, "possibilities", None):  # of options
        said = said.partition(" (Possible ")[0] + (
            suggestion(error.option_name, possibilities) or f", want one of {', '.join(possibilities)}"
        )
    return f"{said} (see {'coterie' if context is None else context.command_path} --help)"


def _trace(error: BaseException) -> str:
    """The traceback of an error in code that the experiment names, for the author of that code; else ""."""
    from coterie.errors import CoterieError

    cause, is_of_code = error.__cause__, isinstance(error, CoterieError) and error.finding.rule in _OF_USER_CODE
    return "".join(traceback.format_exception(cause)) if is_of_code and cause and not isinstance(cause, CoterieError) else ""


def _failed(sentence: str, code: int, *, as_json: bool = False, trace: str = "") -> int:
    """Prints the trace, if any, and one line, which only the terminal wraps."""
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
