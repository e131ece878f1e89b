"""What the ledger leaves out: bytes of HTTP/2 and TLS, counted by a proxy between a host and its coordinator."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from coterie.experiment.config import experiment_to_json
from coterie.record.ledger import Row
from coterie.session.dial import serve_member
from coterie.session.tls import Tls, load_tls
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_server.transport.serve import serving
from tests.counting_proxy import counting
from tests.integration.test_session import Block, experiment, hosts, maker, new_hub, notes, ready

ROUNDS = 100
# In plain text: the start of a connection (preface, settings, headers, the experiment), at most; for each gRPC message, and each further 16
# KiB of it, the header of a DATA frame, and for each message two WINDOW_UPDATEs in the other direction. Pings are few.
START_BYTES, DATA_HEADER_BYTES, WINDOW_UPDATES_BYTES, DATA_BYTES = 3_000, 9, 2 * 13, 16 << 10


@dataclass(frozen=True)
class Framing:
    """Of one host's session, in bytes up and down: of messages, with the headers of gRPC frames, and of the TCP connections."""

    message: tuple[int, int]
    wire: tuple[int, int]
    tcp: tuple[int, int]
    frames: tuple[int, int]

    @property
    def explained(self) -> float:
        """The share of the TCP payload that is message bytes."""
        return sum(self.message) / sum(self.tcp)


async def measured(n_scalars: int, tls: tuple[Tls, Tls] | None = None, rounds: int = ROUNDS) -> Framing:
    """A run of exchanges that send the one user of a host some scalars, in float64, and get as many back."""
    hub = new_hub(silence_s=20.0)
    block = np.random.default_rng(0).standard_normal((1, n_scalars))
    ours, theirs = tls or (None, None)
    text = experiment_to_json(experiment(**hub.rules.model_dump(exclude_none=True)))
    async with (
        serving(hub, text, "127.0.0.1:0", ours) as server,
        counting(f"127.0.0.1:{server.port}") as counted,
        hosts(serve_member(maker("a", ["u0"]), counted.address, name="a", tls=theirs)) as running,
    ):
        await ready(hub)
        for _ in range(rounds):
            await hub.exchange(Block(block))
        await hub.finish("all done", failed=False)
        assert await asyncio.gather(*running) == ["all done"]
    rows = [row for _, row in notes(hub).rows]
    message = _by_direction(rows, "message_bytes")
    wire = _by_direction(rows, "wire_bytes")
    return Framing(message, wire, (counted.up, counted.down), _by_direction(rows, "frames"))


def _by_direction(rows: Sequence[Row], name: str) -> tuple[int, int]:
    """A column's sums, up and down."""
    up, down = (sum(getattr(row, name) for row in rows if row.direction == way) for way in ("up", "down"))
    return up, down


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tls, Tls]:
    """Those of the coordinator and of the host."""
    return issued(tmp_path_factory.mktemp("certs"))


def issued(folder: Path) -> tuple[Tls, Tls]:
    """Certificates in a folder."""
    init(folder)
    issue(folder, Asked("coordinator", "coordinator", ("127.0.0.1",)))
    issue(folder, Asked("host", "a"))
    return load_tls(folder / "coordinator", is_server=True), load_tls(folder / "a", is_server=False)


@pytest.mark.parametrize(("n_scalars", "rounds"), [(1_000, ROUNDS), (100_000, 20)])
@pytest.mark.parametrize("with_tls", [False, True])
def test_message_bytes_explain_at_least_97_percent_of_the_tcp_payload(
    n_scalars: int, rounds: int, with_tls: bool, certificates: tuple[Tls, Tls]
) -> None:
    found = asyncio.run(measured(n_scalars, certificates if with_tls else None, rounds))
    assert 0.97 <= found.explained < 1


@pytest.mark.parametrize("n_scalars", [3, 1_000])
def test_the_rest_is_the_start_of_the_connection_and_a_few_bytes_for_each_message(n_scalars: int) -> None:
    found = asyncio.run(measured(n_scalars))
    for tcp, wire, own, others in zip(found.tcp, found.wire, found.frames, reversed(found.frames), strict=True):
        least = DATA_HEADER_BYTES * own
        most = START_BYTES + DATA_HEADER_BYTES * (own + wire // DATA_BYTES) + WINDOW_UPDATES_BYTES * others
        assert least < tcp - wire < most


def main() -> None:
    """Prints the table of docs/reference/ledger.md."""
    with tempfile.TemporaryDirectory() as folder:
        pair = issued(Path(folder))
        for n_scalars in (3, 1_000, 100_000):
            for name, tls in (("plain text", None), ("TLS", pair)):
                once, often = (asyncio.run(measured(n_scalars, tls, rounds)) for rounds in (1, 1 + ROUNDS))
                each = [sum(getattr(often, key)) - sum(getattr(once, key)) for key in ("message", "wire", "tcp")]
                message, wire, tcp = (n_bytes / ROUNDS for n_bytes in each)
                start = sum(once.tcp) - sum(once.wire) - (tcp - wire)
                cells = [f"{n_scalars:,}", name, f"{message:,.0f}", f"{wire - message:,.0f}", f"{tcp - wire:,.0f}", f"{start:,.0f}"]
                print("|", " | ".join([*cells, f"{100 * message / tcp:.2f} %", f"{100 * often.explained:.2f} %"]), "|")


if __name__ == "__main__":
    main()
