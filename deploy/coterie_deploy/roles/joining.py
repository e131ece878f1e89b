"""What client hosts and aggregators have in common when they join: whom they may dial, and what their state is called."""

from __future__ import annotations

import re
import zlib

from coterie.errors import ConfigError

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME, _MAX_RUN_ID = 100, 64  # characters of it in the name of a file


def state_name(name: str, run_id: str) -> str:
    """What a member's state in a run is called: a name of its own for each run and each member, so that neither meet."""
    safe = _UNSAFE.sub("_", name)
    own = safe if safe == name else f"{safe[:_MAX_NAME]}-{zlib.crc32(name.encode()):08x}"
    return f"{own}.{_UNSAFE.sub('_', run_id)[:_MAX_RUN_ID]}"


def check_server_address(server: str, *, insecure: bool) -> None:
    """ConfigError unless `server` is HOST:PORT, on this machine or allowed to be elsewhere."""
    host, colon, port = server.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"--server is {server!r}, want HOST:PORT")
    if not insecure and host.strip("[]") not in ("localhost", "::1") and not host.startswith("127."):
        allow = "give a certificate with --tls, or allow it with --insecure"
        raise ConfigError(f"joining {server} without TLS sends models in plain text: {allow}")
