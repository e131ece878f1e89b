"""What the ledger counts and what it leaves out, bytes of HTTP/2 and TLS, by a proxy between a host and its coordinator."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, cast

import numpy as np
import pytest

from coterie.arrays import Array
from coterie.experiment.config import Experiment, experiment_from, experiment_to_json
from coterie.experiment.model import TensorInfo
from coterie.plugin import Compressor
from coterie.record.ledger import SESSION, Row
from coterie.session.dial import serve_member
from coterie.session.tls import Tls, load_tls
from coterie.v1 import session_pb2
from coterie.wire.codec import GRPC_FRAME_HEADER_BYTES
from coterie.wire.messages import ASIDE, PACKED, Rows, Weights, declare
from coterie_client.data import UserData
from coterie_client.hosting.host import Host
from coterie_client.interface.half import ClientHalf, Local
from coterie_client.learning import Network
from coterie_deploy.containers.certs import Asked, init, issue
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.counting_proxy import Counted, counting
from tests.integration.test_session import Block, Notes, experiment, hosts, maker, notes, ready

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
    block = np.random.default_rng(0).standard_normal((1, n_scalars))
    rows, counted = await passed(experiment(silence_s=20.0), Block(block), maker("a", ["u0"]), tls, rounds)
    message = _by_direction(rows, "message_bytes")
    wire = _by_direction(rows, "wire_bytes")
    return Framing(message, wire, (counted.up, counted.down), _by_direction(rows, "frames"))


async def passed(
    made: Experiment, message: Rows, make: Callable[[Experiment, str], Host], tls: tuple[Tls, Tls] | None, rounds: int
) -> tuple[list[Row], Counted]:
    """What the ledger has of exchanges that send a message to host a, and what a proxy has seen."""
    hub = Hub(made, "run-1", Notes(), time.monotonic)
    ours, theirs = tls or (None, None)
    async with (
        serving(hub, experiment_to_json(made), "127.0.0.1:0", ours) as server,
        counting(f"127.0.0.1:{server.port}", sniffs=tls is None) as counted,
        hosts(serve_member(make, counted.address, name="a", tls=theirs)) as running,
    ):
        await ready(hub)
        for _ in range(rounds):
            await hub.exchange(message)
        await hub.finish("all done", failed=False)
        assert await asyncio.gather(*running) == ["all done"]
    return [row for _, row in notes(hub).rows], counted


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


# ---- compressed messages

HALVES = Compressor(
    sizes=lambda k: (2 * k, 1),
    write=lambda x, _: (x.astype("<f2").view(np.uint8), np.zeros((len(x), 1), np.uint8)),
    read=lambda values, _, k, __: np.ascontiguousarray(values).view("<f2").reshape(-1, k).astype(np.float64),
)
ROTATED = {"rotate": "hadamard"}
COMPRESSORS: dict[str, dict[str, Any]] = {
    "8 bits": {"quantize": {"bits": 8}},
    "4 bits": {"quantize": {"bits": 4}},
    "2 bits": {"quantize": {"bits": 2, "stochastic": False}},
    "8 bits rotated": {"quantize": {"bits": 8, **ROTATED}},
    "eden": {"quantize": {"bits": 4, **ROTATED, "stochastic": False}},
    "drive": {"quantize": {"bits": 1, **ROTATED, "stochastic": False}},
    "top few": {"top_k": 0.01},
    "top many": {"top_k": 0.4, "quantize": {"bits": 4}},
    "rand": {"rand_k": 0.3},
    "rand bits": {"rand_k": 0.3, "quantize": {"bits": 2}},
    "lossless": {"lossless": "zlib"},
    "all": {"top_k": 0.2, "quantize": {"bits": 8}, "lossless": "zlib"},
    "plug-in": {"by": "halves:HALVES"},
}


@pytest.mark.parametrize(("name", "d"), [*((name, 999) for name in COMPRESSORS), ("8 bits", 150_000)])  # the last in chunks
def test_bytes_of_compressed_messages_on_the_wire_are_those_of_the_ledger(name: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("halves")
    module.HALVES = HALVES
    monkeypatch.setitem(sys.modules, "halves", module)
    rules = {"compress": {"up": {**COMPRESSORS[name], "against": "nothing"}, "down": COMPRESSORS[name]}, "silence_s": 20.0}
    made = experiment(**rules, method={"name": "fedavg"})
    block = np.random.default_rng(0).standard_normal((4, d))
    _compare(*asyncio.run(passed(made, Block(block), maker("a", [f"u{row}" for row in range(4)]), None, 3)))


@declare(method="echo", step="E3")
@dataclass(frozen=True)
class Layers(Rows):
    """The weights of a network for each user, there and back."""

    w: Annotated[Array, Weights("rows", "p")]


@pytest.mark.parametrize("more", [{}, {"quantize": {"bits": 4, **ROTATED}}, {"lossless": "zlib"}], ids=str)
def test_bytes_of_thin_matrices_on_the_wire_are_those_of_the_ledger(more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    half = ClientHalf(init=lambda *_: 0, step=lambda state, inbox, _: (state, [Layers(inbox[Layers].w + 1.0)]))
    monkeypatch.setattr(sys.modules["coterie_client.methods.echo"], "CLIENT", half)
    made = experiment_from(
        {
            "name": "session",
            "data": {"source": "npz", "path": "none.npz"},
            "model": {"name": "mlp", "hidden": [20], "classes": 30},
            "method": {"name": "fedavg"},
            "federation": {"hosts": 1, "silence_s": 20.0, "heartbeat_s": 0.2, "compress": {"up": {"low_rank": 2, **more}}},
        }
    )
    tensors = (TensorInfo("fc.weight", (30, 20), False, "head"), TensorInfo("fc.bias", (30,), False, "head"))
    empty, network = np.zeros((0, 1)), SimpleNamespace(tensors=tensors, numerics="")
    data = [UserData(f"u{row}", None, empty, empty[:, 0], empty, empty[:, 0]) for row in range(2)]

    def make(found: Experiment, run_id: str) -> Host:
        return Host("a", found, run_id, data, lambda _: cast(Local, None), None, "1", cast(Network, network))

    message = Layers(np.random.default_rng(0).standard_normal((2, 630)).astype(np.float32))
    rows, counted = asyncio.run(passed(made, message, make, None, 3))
    _compare(rows, counted, ways=("up",))
    n_bytes = sum(row.payload_bytes for row in rows if row.kind == "echo.LayersPacked")
    assert "lossless" in more or n_bytes == 3 * 2 * (2 * (30 + 20) + 30) * (4 if not more else 0.5)


def _compare(rows: Sequence[Row], counted: Counted, ways: Sequence[str] = ("up", "down")) -> None:
    """Of what is compressed on these ways."""
    for way in ways:
        frames = session_pb2.JoinRequest if way == "up" else session_pb2.JoinResponse
        call = [frames.FromString(message) for message in max(counted.calls[way], key=len)]  # others, for the experiment, have one message
        of_parts = [message for message in call if message.WhichOneof("frame") in ("task", "reply", "chunk")]
        booked = [row for row in rows if row.direction == way and row.kind != SESSION]
        assert sum(GRPC_FRAME_HEADER_BYTES + message.ByteSize() for message in of_parts) == sum(row.wire_bytes for row in booked)
        values, beside = (_tensor_bytes(of_parts, end) for end in (PACKED, ASIDE))
        assert values == sum(row.payload_bytes for row in booked) > 0
        others = [row for row in booked if row.kind.endswith(ASIDE)]
        assert bool(beside) == bool(others)
        assert all(row.vectors == row.scalars == row.payload_bytes == 0 for row in others)
        assert beside < sum(row.message_bytes for row in others) or not beside


def _tensor_bytes(frames: Iterable[Any], end: str) -> int:
    """Of the tensors in parts whose kind has this end."""
    tasks = [getattr(frame, frame.WhichOneof("frame")) for frame in frames if frame.WhichOneof("frame") != "chunk"]
    return sum(
        len(tensor.data) + tensor.chunked_bytes
        for task in tasks
        for part in task.parts
        if part.kind.endswith(end)
        for tensor in part.tensors
    )


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
