"""A TCP proxy that cuts connections: after some bytes, some seconds, or some seconds without a byte in one direction.

Shared by tests; nothing here is tested itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

_PIECE = 16 << 10
_LINGER_S = 1.0


@dataclass
class Cutter:
    """The limits of each connection, and what has passed. `rate` is in bytes a second and direction. The proxy listens at `address`."""

    most_up: float = math.inf
    most_down: float = math.inf
    longest_s: float | None = None
    idle_s: float | None = None
    rate: float = math.inf
    address: str = ""
    passed: dict[str, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    n_connections: int = 0
    n_cuts: int = 0

    async def pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, direction: str, most: float) -> None:
        """Passes on what comes, to the end or to the limit. TimeoutError when nothing comes for too long."""
        n_passed, loop = 0, asyncio.get_running_loop()
        free_at = loop.time()
        while True:
            async with asyncio.timeout(self.idle_s):
                piece = await source.read(_PIECE)
            if not piece:
                return
            n_passed += len(piece)
            if n_passed > most:
                raise TimeoutError
            if self.rate < math.inf:
                free_at = max(free_at, loop.time()) + len(piece) / self.rate
                await asyncio.sleep(free_at - loop.time())
            self.passed[direction] += len(piece)
            sink.write(piece)
            await sink.drain()


async def _until_cut(cutter: Cutter, up: tuple[Any, Any], down: tuple[Any, Any]) -> None:
    tasks = [
        asyncio.create_task(cutter.pass_on(*up, "up", cutter.most_up)),
        asyncio.create_task(cutter.pass_on(*down, "down", cutter.most_down)),
    ]
    try:
        async with asyncio.timeout(cutter.longest_s):
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        cutter.n_cuts += 1
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        cutter.n_cuts += any(isinstance(end, TimeoutError) for end in ends)


@contextlib.asynccontextmanager
async def cutting(server: str, cutter: Cutter) -> AsyncIterator[Cutter]:
    """Passes connections on to HOST:PORT while the block runs."""
    host, _, port = server.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        cutter.n_connections += 1
        both = [writer]
        try:
            to_server, from_us = await asyncio.open_connection(host, int(port), limit=_PIECE)
            both.append(from_us)
            await _until_cut(cutter, (reader, from_us), (to_server, writer))
            for stream in both:
                stream.write_eof()
            await asyncio.sleep(_LINGER_S)  # an end of a connection would throw away what its reader has not taken
        except (OSError, RuntimeError, asyncio.CancelledError):  # the server is away, or the block has ended
            return
        finally:
            for stream in both:
                stream.transport.abort()

    proxy = await asyncio.start_server(connected, "127.0.0.1", 0, limit=_PIECE)
    async with proxy:
        cutter.address = f"127.0.0.1:{proxy.sockets[0].getsockname()[1]}"
        yield cutter
