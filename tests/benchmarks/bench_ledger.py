"""What the ledger costs: the questions to a large one, and booking while a run goes on.

Questions: seconds for each on a ledger of 1,000,000 rows that is made here, in this process, and of the whole command `coterie ledger`.
Booking: how much longer a round of `Hub.exchange` over gRPC takes with a run database than with a recorder that books nothing. Both runs
are measured in turn, piece by piece, and the median ratio of neighbouring pieces counts: other work on the machine slows both down. It is
still a small difference of two large numbers; beside it stands the share of its rounds that the database was at work, which is steadier.
Nothing is computed in these rounds, so booking costs most here.
`--rows 0` leaves the questions out and `--seconds 0` booking.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coterie.experiment.config import experiment_from, experiment_to_json
from coterie.record.ledger import DOWN, UP, Row
from coterie.wire.codec import ENVELOPE
from coterie_server.record import summary
from coterie_server.record.curves import curves
from coterie_server.record.query import Query, totals
from coterie_server.record.run_file import FLUSH_S
from coterie_server.record.rundb import RunDatabase, open_run
from coterie_server.session.hub import Hub
from coterie_server.transport.serve import serving
from tests.benchmarks import record
from tests.benchmarks.bench_transport import ADDRESS, EXPERIMENT, Block, NoRecorder, _ended, _started, host_process
from tests.benchmarks.record import Figure

PIECE_S = 1.2 * FLUSH_S  # so that rows are written in each
KINDS = (("pdmm.Aggregates", DOWN), ("pdmm.UpdatedModels", UP), (ENVELOPE, DOWN), (ENVELOPE, UP), ("pdmm.AllBlocks", DOWN))
N_HOSTS, USERS_PER_HOST = 4, 20
ROWS = [  # of one exchange with one host
    Row(0, 1, 0, way, kind, n, 3 * n, 24 * n, 24 * n + 12, 1) for kind, way in KINDS for n in [0 if kind == ENVELOPE else USERS_PER_HOST]
]
QUESTIONS = (
    ("step", "scope"),
    ("stage", "step", "direction", "scope"),
    ("round", "direction", "scope"),
    ("link",),
    ("cluster",),
    ("user",),
)


# ---- questions


def make_large(folder: Path, n_rows: int) -> None:
    """A finished run of one long stage."""
    with contextlib.closing(RunDatabase(folder / "run.db")) as database:
        connection = database.connection
        connection.execute("PRAGMA synchronous=OFF")
        for key, value in {"name": "large", "run_id": "1", "status": "finished", "final_stage": "pdmm"}.items():
            database.put(key, value)
        n_rounds = n_rows // (N_HOSTS * len(KINDS))
        database.stage(0, "pdmm", "pdmm", n_rounds, f"{n_rounds} rounds", 100.0)
        expected = float(n_rounds * N_HOSTS * USERS_PER_HOST)
        database.result(0, {}, {("S5", "up"): expected, ("S7+S10", "down"): expected})
        everyone = range(N_HOSTS * USERS_PER_HOST)
        connection.execute("BEGIN")
        connection.executemany(
            "INSERT INTO members VALUES (?, ?, ?, ?)",
            [(i, f"u{i}", f"c{i // USERS_PER_HOST}", f"host-{i // USERS_PER_HOST}") for i in everyone],
        )
        connection.executemany("INSERT INTO rounds VALUES (0, ?, ?)", ((number, 0.01 * number) for number in range(n_rounds + 1)))
        connection.executemany("INSERT INTO figures VALUES (0, ?, 'objective', ?)", ((n, 10 + 1 / n) for n in range(1, n_rounds + 1)))
        connection.execute("COMMIT")
        for number, host in itertools.product(range(1, n_rounds + 1), range(N_HOSTS)):
            database.book(f"host-{host}", (0, number), [(row._replace(seq=number), None) for row in ROWS], True)
            database.flush_if_due()


def time_questions(folder: Path) -> Iterator[Figure]:
    with contextlib.closing(open_run(folder)) as connection:
        timed: dict[str, Callable[[], Any]] = {f"by {','.join(by)}": lambda by=by: totals(connection, Query(by)) for by in QUESTIONS}
        timed["one user"] = lambda: totals(connection, Query(("step",), users=("u7",)))
        timed["rounds 100:200"] = lambda: totals(connection, Query(("step",), first_round=100, last_round=200))
        timed["traffic with closed forms"] = lambda: summary.traffic(connection)
        timed["curves"] = lambda: curves(connection, summary.final_stage(connection))
        for name, question in timed.items():
            yield Figure(name, "s", _seconds(question))
    for options in (("--by", "step,scope"), ("--by", "step", "--direction", "up", "--sort", "wire"), (), ("--format", "csv")):
        command = [sys.executable, "-m", "coterie", "ledger", str(folder), *options]

        def run(command: list[str] = command) -> None:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ)

        yield Figure(" ".join(["coterie ledger RUN", *options]), "s", _seconds(run))


def _seconds(question: Callable[[], Any]) -> list[float]:
    found = []
    for _ in range(3):
        start = time.perf_counter()
        question()
        found.append(time.perf_counter() - start)
    return found


# ---- booking


@contextlib.asynccontextmanager
async def running(recorder: Any, x: np.ndarray[Any, Any], n_hosts: int) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """A federation over gRPC that sends every user a row and gets it back; what is yielded makes one round."""
    experiment = experiment_from({**EXPERIMENT, "federation": {"hosts": n_hosts}})
    hub = Hub(experiment, "bench", recorder, time.monotonic, keep_log=False)
    async with serving(hub, experiment_to_json(experiment), ADDRESS) as server:
        address = f"127.0.0.1:{server.port}"
        split = np.array_split(np.arange(len(x)), n_hosts)
        processes = [_started(host_process, address, f"h{i}", tuple(f"u{k}" for k in own)) for i, own in enumerate(split)]
        try:
            await hub.gather()
            hub.begin_stage(1, '{"stage": "bench", "options": {"bench": {}}}')

            async def one_round() -> None:
                hub.state.round += 1
                await hub.exchange(Block(x))

            yield one_round
            await hub.finish("done", failed=False)
        finally:
            await asyncio.to_thread(_ended, processes)


class Clocked:
    """A run database that knows how long it was at work."""

    def __init__(self, database: RunDatabase) -> None:
        self._database = database
        self.seconds = 0.0

    def book(self, *what: Any) -> None:
        start = time.perf_counter()
        self._database.book(*what)
        self.seconds += time.perf_counter() - start

    def flush_if_due(self) -> None:
        start = time.perf_counter()
        self._database.flush_if_due()
        self.seconds += time.perf_counter() - start

    def __getattr__(self, name: str) -> Any:
        return getattr(self._database, name)


async def cost(n_users: int, d: int, n_hosts: int, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Of each piece: seconds of a round without a ledger, how much longer one with it takes, the share of it that is booking."""
    x = np.random.default_rng(0).standard_normal((n_users, d))
    times: dict[bool, list[float]] = {True: [], False: []}
    shares: list[float] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(RunDatabase(Path(folder) / "run.db")) as database:
        books = Clocked(database)
        async with running(books, x, n_hosts) as booked, running(NoBooks(), x, n_hosts) as bare:

            async def piece(is_booked: bool) -> None:
                start, n_rounds, books.seconds = time.perf_counter(), 0, 0.0
                while time.perf_counter() - start < PIECE_S:
                    await (booked if is_booked else bare)()
                    n_rounds += 1
                    if is_booked:
                        books.flush_if_due()
                whole = time.perf_counter() - start
                times[is_booked].append(whole / n_rounds)
                if is_booked:
                    shares.append(books.seconds / whole)

            for is_booked in (True, False):  # to warm up
                await piece(is_booked)
            times.update({True: [], False: []})
            shares.clear()
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                for is_booked in (True, False) if len(times[True]) % 2 else (False, True):  # whoever is second has the warmer machine
                    await piece(is_booked)
    return times[False], [one / other - 1 for one, other in zip(times[True], times[False], strict=True)], shares


class NoBooks(NoRecorder):
    """Does not even make the rows."""

    def book(self, link: str, where: tuple[int, int], rows: Iterable[tuple[Row, Any]], useful: bool) -> None: ...


def figures(
    rows: int = 1_000_000, seconds: float = 20.0, hosts: Sequence[int] = (1, 4), sizes: Sequence[str] = ("60x3",)
) -> Iterator[Figure]:
    """Questions, then booking with each number of client processes and users x scalars."""
    if rows:
        with tempfile.TemporaryDirectory() as folder:
            make_large(Path(folder), rows)
            yield from time_questions(Path(folder))
    for size, n_hosts in itertools.product(sizes if seconds else [], hosts):
        n_users, d = (int(number) for number in size.split("x"))
        plain, longer, shares = asyncio.run(cost(n_users, d, n_hosts, seconds))
        case = f"{size}, {n_hosts} process{'es' * (n_hosts > 1)}"
        yield Figure(f"{case}, a round without the ledger", "ms", [1e3 * one for one in plain], None)
        yield Figure(f"{case}, longer with the ledger", "%", [100 * one for one in longer])
        yield Figure(f"{case}, booking", "%", [100 * one for one in shares])


if __name__ == "__main__":
    record.main(figures)
