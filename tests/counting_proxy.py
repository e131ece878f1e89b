"""A TCP proxy that counts the payload bytes of every connection in each direction, and reads gRPC messages of plain text.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

_PIECE = 1 << 16
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"  # which a client sends first
_FRAME_HEADER, _DATA, _PADDED = 9, 0, 0x08  # of HTTP/2: RFC 9113, 4.1 and 6.1
_MESSAGE_HEADER = 5  # of gRPC: a flag, and the length in 4 bytes


@dataclass
class Counted:
    """Bytes that were passed on: `up` to the server, `down` to those who dialled. The proxy listens at `address`."""

    address: str = ""
    up: int = 0
    down: int = 0
    connections: int = 0
    calls: dict[str, list[list[bytes]]] = field(default_factory=lambda: {"up": [], "down": []})  # messages of each, if asked for

    def add(self, direction: str, piece: bytes) -> None:
        """A piece is on its way."""
        if direction == "up":
            self.up += len(piece)
        else:
            self.down += len(piece)


class Sniffer:
    """Reads the gRPC messages of one direction of a connection in plain text, from the DATA frames of HTTP/2."""

    def __init__(self, calls: list[list[bytes]]) -> None:
        self._calls = calls
        self._bytes = bytearray()
        self._streams: dict[int, tuple[bytearray, list[bytes]]] = {}  # what has come of the next message, and those before it

    def read(self, piece: bytes) -> None:
        """A piece has passed. AssertionError for messages that gRPC has compressed."""
        self._bytes += piece
        if self._bytes.startswith(_PREFACE):
            del self._bytes[: len(_PREFACE)]
        while len(self._bytes) >= _FRAME_HEADER and not _PREFACE.startswith(self._bytes):
            end = _FRAME_HEADER + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < end:
                return
            kind, flags, stream = self._bytes[3], self._bytes[4], int.from_bytes(self._bytes[5:_FRAME_HEADER], "big")
            if kind == _DATA:
                padding = 1 + self._bytes[_FRAME_HEADER] if flags & _PADDED else 0
                start = _FRAME_HEADER + bool(padding)
                self._data(stream, self._bytes[start : end - max(0, padding - 1)])
            del self._bytes[:end]

    def _data(self, stream: int, data: bytearray) -> None:
        if stream not in self._streams:
            self._streams[stream] = bytearray(), []
            self._calls.append(self._streams[stream][1])
        held, messages = self._streams[stream]
        held += data
        while len(held) >= _MESSAGE_HEADER:
            assert not held[0], "a message is compressed by gRPC"
            end = _MESSAGE_HEADER + int.from_bytes(held[1:_MESSAGE_HEADER], "big")
            if len(held) < end:
                return
            messages.append(bytes(held[_MESSAGE_HEADER:end]))
            del held[:end]


@contextlib.asynccontextmanager
async def counting(server: str, *, sniffs: bool = False) -> AsyncIterator[Counted]:
    """Passes connections on to HOST:PORT while the block runs. With `sniffs` it reads their messages too."""
    host, _, port = server.rpartition(":")
    counted = Counted()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str) -> None:
        sniffer = Sniffer(counted.calls[direction])
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(_PIECE):
                counted.add(direction, piece)
                if sniffs:
                    sniffer.read(piece)
                sink.write(piece)
                await sink.drain()
        with contextlib.suppress(OSError, RuntimeError):
            sink.write_eof()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted.connections += 1
        to_server, from_us = await asyncio.open_connection(host, int(port))
        try:
            await asyncio.gather(pass_on(reader, from_us, "up"), pass_on(to_server, writer, "down"))
        except asyncio.CancelledError:
            return  # the block has ended
        finally:
            writer.close()
            from_us.close()

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with proxy:
        counted.address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        yield counted
