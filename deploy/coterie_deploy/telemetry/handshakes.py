"""What gRPC says of failed TLS handshakes at a server, as sentences of ours.

gRPC writes it to the process's standard error, from C++, and tells it nobody else. So while a server with TLS runs, the descriptor
behind standard error is a pipe that is read here; what Python itself prints goes where it went before.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from coterie.session.tls import Tls
from coterie_server.session.hub import Hub

_LINE = re.compile(rb"[IWE][0-9]{4} [0-9:.]+ +[0-9]+ [\w./]+\.cc:[0-9]+\] ")  # how gRPC begins a line; F is its last
_FAILED = b"Handshake failed with error"
_REASONS = (
    (b"certificate has expired", "its certificate has expired"),
    (b"certificate is not yet valid", "its certificate is not valid yet"),
    (b"unsupported certificate purpose", "its certificate was issued for another role"),
    (b"PEER_DID_NOT_RETURN_A_CERTIFICATE", "it has no certificate"),
    (b"WRONG_VERSION_NUMBER", "it speaks plain text, as members without --tls do"),
    (b"HTTP_REQUEST", "it speaks plain text, as members without --tls do"),
    (b"BAD_PACKET_LENGTH", "it does not believe this server's certificate, and says why itself"),
    (b"ALERT", "it does not believe this server's certificate, and says why itself"),
    (b"CERTIFICATE_VERIFY_FAILED", "its certificate was not issued by this server's authority"),
)
_UNKNOWN = "for another reason, which the server's own log has from gRPC"  # whose words are no event: they may be the other side's
_MAX_LINE = 10_000
_END_S = 5.0  # for what is still in the pipe
_QUIET_S = 10.0  # between two reports of the same sentence: whoever is turned away tries again


@contextlib.asynccontextmanager
async def handshakes_reported(hub: Hub, tls: Tls | None, say: Callable[[str], None]) -> AsyncIterator[None]:
    """While the block runs, says and books as events which handshakes fail at a server with `tls`; each kind now and then."""
    if tls is None:
        yield
        return
    said: dict[str, float] = {}

    def turned_away(sentence: str) -> None:
        now = time.monotonic()
        if now - said.get(sentence, -_QUIET_S) >= _QUIET_S:
            said[sentence] = now
            hub.recorder.event("handshake", sentence)
            say(sentence)

    with handshakes_watched(turned_away):
        yield


def sentence_of(line: bytes) -> str | None:
    """What a line of gRPC's says about a failed handshake; None when it is about something else."""
    if _FAILED not in line:
        return None
    known = next((reason for sign, reason in _REASONS if sign in line), None)
    return f"somebody is turned away at the TLS handshake: {known or _UNKNOWN}"


@contextlib.contextmanager
def handshakes_watched(turned_away: Callable[[str], None]) -> Iterator[None]:
    """While the block runs, calls `turned_away(sentence)` on the event loop for each handshake that fails at a server of this process."""
    loop = asyncio.get_running_loop()
    sys.stderr.flush()
    kept = os.dup(2)
    reader, writer = os.pipe()
    # Where a line does not fit it is lost: a thread of gRPC's that waits here may hold what the thread that reads is waiting for.
    os.set_blocking(writer, False)
    os.dup2(writer, 2)
    os.close(writer)
    ours = os.fdopen(os.dup(kept), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    before, sys.stderr = sys.stderr, ours
    onwards = os.fdopen(os.dup(kept), "wb", buffering=0)  # the reader's own: it may outlive the block

    def read() -> None:
        with os.fdopen(reader, "rb") as lines, onwards:
            while line := lines.readline(_MAX_LINE):
                if (sentence := sentence_of(line)) is not None:
                    if sentence.endswith(_UNKNOWN):
                        with contextlib.suppress(OSError):  # as below
                            onwards.write(line)
                    with contextlib.suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(turned_away, sentence)
                elif not _LINE.match(line):
                    with contextlib.suppress(OSError):  # nobody may read there any more, but here the pipe must not fill up
                        onwards.write(line)

    thread = threading.Thread(target=read, name="coterie-handshakes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        sys.stderr = before
        os.dup2(kept, 2)  # closes the pipe's last end, unless a child has it too, so that the thread reads to its end
        os.close(kept)
        thread.join(timeout=_END_S)
        with contextlib.suppress(OSError):
            ours.close()
