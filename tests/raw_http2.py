"""Just enough HTTP/2 to misbehave in ways that no gRPC library would: streams that stay half open, bodies that trickle, answers not taken.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Iterator

from coterie_server.transport.serve import SERVICE

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, SETTINGS = 0, 1, 4
_END_HEADERS, _INITIAL_WINDOW = 4, 4
JOIN, GET_EXPERIMENT, WATCH = f"/{SERVICE}/Join", f"/{SERVICE}/GetExperiment", "/grpc.health.v1.Health/Watch"


def frame(kind: int, payload: bytes, *, flags: int = 0, stream: int = 0) -> bytes:
    """One HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload


def connected(window: int | None = None) -> bytes:
    """What opens a connection; `window` is how many bytes of each stream's answers will be taken."""
    return PREFACE + frame(SETTINGS, b"" if window is None else struct.pack(">HI", _INITIAL_WINDOW, window))


def opened(path: str, stream: int = 1) -> bytes:
    """The headers of an rpc."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "parent",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())
    return frame(HEADERS, block, flags=_END_HEADERS, stream=stream)


def _text(text: str) -> bytes:
    return bytes((len(text),)) + text.encode()


def message(body: bytes, announced: int | None = None, stream: int = 1) -> bytes:
    """A gRPC message, or its beginning when more bytes are announced than there are."""
    return data(b"\x00" + struct.pack(">I", len(body) if announced is None else announced) + body, stream)


def data(body: bytes, stream: int = 1) -> bytes:
    """Bytes of a stream."""
    return b"".join(frame(DATA, piece, stream=stream) for piece in _pieces(body))


def _pieces(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), 16_000):
        yield body[start : start + 16_000]


async def connect(address: str, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that has sent these bytes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"".join(pieces))
    await writer.drain()
    return reader, writer
