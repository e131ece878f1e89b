"""A TCP proxy that counts the payload bytes of every connection in each direction.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

_PIECE = 1 << 16


@dataclass
class Counted:
    """Bytes that were passed on: `up` to the server, `down` to those who dialled. The proxy listens at `address`."""

    address: str = ""
    up: int = 0
    down: int = 0
    connections: int = 0

    def add(self, direction: str, piece: bytes) -> None:
        """A piece is on its way."""
        if direction == "up":
            self.up += len(piece)
        else:
            self.down += len(piece)


@contextlib.asynccontextmanager
async def counting(server: str) -> AsyncIterator[Counted]:
    """Passes connections on to HOST:PORT while the block runs."""
    host, _, port = server.rpartition(":")
    counted = Counted()

    async def pass_on(source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await source.read(_PIECE):
                counted.add(direction, piece)
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
