"""Transfers that are cut go on where they were cut: no bit changes, no chunk that arrived is sent again, and the books agree."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from coterie.errors import RunError
from coterie.session.dial import serve_member
from coterie.wire.assembler import Partial
from coterie_client.hosting.host import Host
from coterie_server.session.hub import Hub
from tests.cutting_proxy import Cutter, cutting
from tests.integration.test_session import Block, expected, hosts, inputs, maker, new_hub, notes, ready, run, served

N_USERS, D = 2, 600_000  # 9.6 MB each way


async def exchanged(cutter: Cutter, n_rounds: int = 2, **rules: float) -> tuple[Hub, list[str]]:
    """A run through a proxy that cuts; the hub, and what the host said. The answers are those of a calm run."""
    hub, said = new_hub(**rules), list[str]()
    blocks = inputs(N_USERS, D, n_rounds)
    async with served(hub) as (_, address), cutting(address, cutter):
        served_host = serve_member(maker("a", ["u0", "u1"]), cutter.address, name="a", patience_s=10.0, on_trouble=said.append)
        async with hosts(served_host) as (host,):
            await ready(hub)
            for block, wanted in zip(blocks, expected(blocks), strict=True):
                np.testing.assert_array_equal((await hub.exchange(Block(block)))[Block].x, wanted)
            await hub.finish("all done", failed=False)
            assert await host == "all done"
    return hub, said


@pytest.fixture
def arrived(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of each chunk that arrives, at either end."""
    sizes, add = list[int](), Partial.add

    def counted(self: Partial, data: bytes) -> None:
        sizes.append(len(data))
        add(self, data)

    monkeypatch.setattr(Partial, "add", counted)
    return sizes


def check_books(hub: Hub) -> None:
    """Rows of both books are the same to the byte, and each tensor is in both. What a lost stream carried may be in one book alone."""
    ours, theirs = ({row for _, row in book if row.seq} for book in (notes(hub).rows, notes(hub).host_rows))
    key = {(row.seq, row.attempt, row.resent, row.direction, row.kind): row for row in theirs}
    for row in ours:
        assert key.get((row.seq, row.attempt, row.resent, row.direction, row.kind), row) == row
    whole = [(row.seq, row.direction) for row in ours & theirs if row.payload_bytes == N_USERS * D * 8]
    assert len(set(whole)) == 2 * hub.seq


@pytest.mark.parametrize("direction", ["up", "down", "both"])
def test_a_body_limit_smaller_than_a_tensor_lets_each_chunk_arrive_once(direction: str, arrived: list[int]) -> None:
    async def test() -> None:
        limits = {f"most_{one}": 1 << 20 for one in ("up", "down") if direction in (one, "both")}
        cutter = Cutter(**limits)
        hub, said = await exchanged(cutter)
        assert cutter.n_cuts >= 4, "9.6 MB do not fit under 1 MiB"
        assert not said, "there was progress"
        assert sum(arrived) == 2 * 2 * N_USERS * D * 8, "each chunk arrived once, there and back"
        assert max(cutter.passed.values()) < 2 * 2 * N_USERS * D * 8, "what was on its way is less than what arrived"
        check_books(hub)

    run(test())


def test_a_link_that_drops_before_a_tensor_is_through_carries_it_in_pieces(arrived: list[int]) -> None:
    async def test() -> None:
        cutter = Cutter(longest_s=0.6, rate=4.8e6)  # 2 s for a tensor
        hub, _ = await exchanged(cutter, 1)
        assert cutter.n_cuts >= 5
        assert sum(arrived) == 2 * N_USERS * D * 8
        assert max(cutter.passed.values()) < 1.5 * N_USERS * D * 8
        check_books(hub)

    run(test())


def test_a_tensor_of_which_not_one_chunk_gets_through_is_said_and_ends_after_the_patience() -> None:
    async def test() -> None:
        cutter = Cutter(most_up=100_000)
        hub, said, blocks = new_hub(), list[str](), inputs(N_USERS, D, 1)
        async with served(hub) as (_, address), cutting(address, cutter):
            served_host = serve_member(maker("a", ["u0", "u1"]), cutter.address, name="a", patience_s=4.0, on_trouble=said.append)
            async with hosts(served_host) as (host,):
                await ready(hub)
                exchange = asyncio.create_task(hub.exchange(Block(blocks[0])))
                with pytest.raises(RunError, match=r"no session with .* for 4 s: the stream was cut \d+ times, .* client_max_body_size 0"):
                    await host
                exchange.cancel()
        assert len(said) == 1, "at the third cut, and not again for 30 s"
        assert said[0].startswith("the stream was cut 3 times, and nothing more got through: the last stream carried ")
        assert cutter.n_connections < 15, "pauses grow"

    run(test())


@pytest.mark.parametrize("limits", [{"idle_s": 1.5}, {"longest_s": 1.2}], ids=str)
def test_an_idle_limit_is_kept_off_by_heartbeats_and_a_cut_in_a_step_is_cheap(
    limits: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Host.handle

    def slow(self: Host, received: Any) -> Any:
        time.sleep(3.0 if received.frame.parts else 0.0)
        return step(self, received)

    monkeypatch.setattr(Host, "handle", slow)

    async def test() -> None:
        cutter = Cutter(**limits)
        hub, said = await exchanged(cutter, 1, heartbeat_s=0.5, silence_s=10.0)
        assert (cutter.n_cuts > 0) == ("longest_s" in limits)
        assert not said
        assert cutter.passed["down"] < N_USERS * D * 8 + 100_000, "the host had the task, and was not sent it again"
        check_books(hub)

    run(test())
