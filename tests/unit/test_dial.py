"""Where an aggregator's work is done: a piece goes on when the stream that brought it is lost, and the next one waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from coterie.errors import RunError
from coterie.session.computer import OnLoop


class Desk:
    """Work that lasts until it is let go, and a list of what happened."""

    def __init__(self) -> None:
        self.computer = OnLoop()
        self.seen: list[str] = []
        self.go = asyncio.Event()

    async def work(self, name: str) -> str:
        self.seen.append(f"{name} begins")
        await self.go.wait()
        self.seen.append(f"{name} ends")
        return name

    def asked(self, name: str) -> asyncio.Task[str]:
        """A stream asks for a piece of work."""
        return asyncio.create_task(self.computer.run(self.work, name))


def run(test: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(5):
            await test

    asyncio.run(limited())


async def lost(stream: asyncio.Task[str]) -> None:
    await asyncio.sleep(0.01)
    stream.cancel()
    await asyncio.gather(stream, return_exceptions=True)
    assert stream.cancelled()


def test_a_piece_whose_stream_is_lost_is_finished_once_and_the_next_stream_waits_for_it() -> None:
    async def test() -> None:
        desk = Desk()
        await lost(desk.asked("a"))
        following = desk.asked("b")
        await asyncio.sleep(0.01)
        assert desk.seen == ["a begins"], "neither broken off nor overtaken"
        desk.go.set()
        assert await following == "b"
        assert desk.seen == ["a begins", "a ends", "b begins", "b ends"]

    run(test())


def test_a_piece_that_waits_for_its_turn_is_done_too_when_its_stream_is_lost() -> None:
    async def test() -> None:
        desk = Desk()
        first = desk.asked("a")
        await lost(desk.asked("b"))
        third = desk.asked("c")
        await asyncio.sleep(0.01)
        desk.go.set()
        assert await asyncio.gather(first, third) == ["a", "c"]
        assert desk.seen == [f"{name} {what}" for name in "abc" for what in ("begins", "ends")]

    run(test())


def test_what_need_not_be_awaited_waits_for_its_turn_as_well() -> None:
    async def test() -> None:
        desk = Desk()
        first = desk.asked("a")
        await asyncio.sleep(0.01)
        saved = asyncio.create_task(desk.computer.run(desk.seen.append, "saved"))
        await asyncio.sleep(0.01)
        desk.go.set()
        await asyncio.gather(first, saved)
        assert desk.seen == ["a begins", "a ends", "saved"]

    run(test())


def test_an_error_is_told_to_who_asked_and_the_next_piece_is_done() -> None:
    async def broken(reason: str) -> None:
        await asyncio.sleep(0)
        raise RunError(reason)

    async def test() -> None:
        desk = Desk()
        desk.go.set()
        failing = asyncio.create_task(desk.computer.run(broken, "a host is gone"))
        following = desk.asked("b")
        with pytest.raises(RunError, match="a host is gone"):
            await failing
        assert await following == "b"

    run(test())


def test_closing_ends_what_is_under_way_and_what_waits() -> None:
    async def test() -> None:
        desk = Desk()
        asked = [desk.asked(name) for name in "ab"]
        await asyncio.sleep(0.01)
        await desk.computer.close()
        assert [type(end) for end in await asyncio.gather(*asked, return_exceptions=True)] == [asyncio.CancelledError] * 2
        desk.go.set()
        await asyncio.sleep(0.01)
        assert desk.seen == ["a begins"]

    run(test())
