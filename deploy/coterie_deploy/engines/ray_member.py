"""A member on a node of Ray: the actor, which runs the process of the member. It imports nothing of Ray, and little else.

The process ends when its standard input is closed: by the end of the run, or because the actor or its node is gone.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event

from coterie.record.files import private_folder
from coterie.session.failures import FAILURE
from coterie_deploy.engines.interface import LOG

TOKEN = ".shared"  # noqa: S105 - in the state folder: an actor that reads what the command has written there shares the folder
STATE, TLS = "{state}", "{tls}"  # in the arguments: folders that only the actor knows
MAX_LOG = 1 << 20  # bytes of a log that are brought back


class RayMember:
    """One start of a member. `tls` are the contents of its files. Its methods run in threads of one actor."""

    def __init__(self, arguments: Sequence[str], folder: str, token: str, tls: Mapping[str, str], here: str) -> None:
        self._arguments, self._tls, self._here = arguments, tls, Path(here)
        self._closing = Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.state = asked = Path(folder)
        self.is_shared = False
        with suppress(OSError):
            self.is_shared = (asked / TOKEN).read_text() == token
        if self.is_shared:
            return
        own = hashlib.sha256(os.fspath(asked.parent).encode()).hexdigest()[:16]
        self.state = Path.home() / ".cache" / "coterie" / "ray" / own / asked.name

    def place(self) -> tuple[str, bool]:
        """The name of this machine, and whether it shares the folder with the command."""
        return os.uname().nodename, self.is_shared

    def run(self) -> tuple[int, bytes, bytes | None]:
        """Runs the process to its end: its exit code, and of a folder that is not shared the end of its log, and its failure."""
        private_folder(self.state)
        (self.state / FAILURE).unlink(missing_ok=True)
        with ExitStack() as stack:
            tls = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
            for name, content in self._tls.items():
                (tls / name).touch(mode=0o600)
                (tls / name).write_text(content)
            names = {STATE: os.fspath(self.state), TLS: os.fspath(tls)}
            log = stack.enter_context((self.state / LOG).open("ab"))
            start = log.tell()
            self._process = subprocess.Popen(  # noqa: S603
                # -P: files of the working directory must not hide our modules
                [sys.executable, "-P", "-m", "coterie", *(names.get(word, word) for word in self._arguments)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._here if self._here.is_dir() else None,
                start_new_session=True,
            )
            if self._closing.is_set():
                self._close()
            code = self._process.wait()
            self._close()
        if self.is_shared:
            return code, b"", None
        with (self.state / LOG).open("rb") as written:
            written.seek(max(start, written.seek(0, os.SEEK_END) - MAX_LOG))
            end = written.read()
        failure = self.state / FAILURE
        return code, end, failure.read_bytes() if failure.exists() else None

    def end(self, grace_s: float) -> None:
        """Asks the process to end, and kills it when it does not."""
        self._closing.set()
        if self._process is not None:
            self._close()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
