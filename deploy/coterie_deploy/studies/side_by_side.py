"""Work side by side, in a pool of processes of this machine. Each has one thread for sums, as commands have: so bits are the same."""

import asyncio
import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

from coterie.errors import CoterieError, RunError, StoppedError
from coterie_deploy.terminal.signals import STAY_S, Stop, stopping_at_end_of
from coterie_deploy.terminal.threads import ONE_THREAD

T = TypeVar("T")
GRACE_S = 10.0 + STAY_S  # of a run that was asked to stop: it writes its checkpoint


def cores() -> int:
    """The cores that this process may use: by its affinity, and by the limit of a container."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text(encoding="utf-8").rpartition("0::/")[2].strip()
        for folder in (place := Path("/sys/fs/cgroup") / group, *place.parents):
            if (limit := folder / "cpu.max").is_file():
                quota, period = limit.read_text(encoding="utf-8").split()
                n = n if quota == "max" else min(n, max(1, int(quota) // int(period)))
    return n


class Here:
    """A process of the pool, to the work in it."""

    told: Connection
    turn: Any  # a lock: one process at a time tells
    end: Connection  # it closes when the work is to stop, or the command is gone
    number = 0

    def tell(self, what: Any) -> None:
        """Tells the command how the call under way is getting on."""
        with self.turn:
            self.told.send((self.number, what))

    @contextlib.contextmanager
    def stopping(self) -> Iterator[Stop]:
        """While the block runs, what asks it to stop. Needs the running event loop."""
        stop = Stop()
        with stopping_at_end_of(self.end.fileno(), stop):
            yield stop


here = Here()


def _begin(told: Connection, turn: Any, end: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal: the command decides
    here.told, here.turn, here.end = told, turn, end
    threading.Thread(target=_end_with_the_command, daemon=True).start()


def _end_with_the_command() -> None:
    command = multiprocessing.parent_process()
    if command is not None:
        command.join()
        time.sleep(GRACE_S)
        os._exit(StoppedError.exit_code)


def _called(work: Callable[..., T], number: int, arguments: tuple[Any, ...]) -> T:
    if here.end.poll():
        raise StoppedError("stopped before it began")
    here.number = number
    here.tell(None)
    return work(*arguments)


class Pool(Generic[T]):
    """`jobs` processes that do one kind of work. It must be a function of a module, and what it takes and gives must be plain data."""

    def __init__(self, jobs: int, work: Callable[..., T], heard: Callable[[int, Any], None], ended: Callable[[int], object]) -> None:
        self._jobs, self._work = jobs, work
        self._heard, self._ended = heard, ended  # what a call tells, None when it begins; that it has ended well
        self._has_killed = False
        self._begun: set[int] = set()
        self._over: set[int] = set()

    async def results(self, calls: Mapping[int, tuple[Any, ...]], names: Mapping[int, str], stop: Stop, grace_s: float) -> dict[int, T]:
        """What the work gives for each call.

        The first error, which names its call, ends all others, and so does `stop` with a StoppedError. Calls under way may then take
        `grace_s` to end by themselves.
        """
        context, mine = multiprocessing.get_context("spawn"), set(multiprocessing.active_children())
        told, telling = context.Pipe(duplex=False)
        end, ending = context.Pipe(duplex=False)
        pool = ProcessPoolExecutor(min(self._jobs, len(calls)), context, _begin, (telling, context.Lock(), end))
        futures: dict[int, Future[T]] = {}
        processes: set[multiprocessing.process.BaseProcess] = set()
        try:
            with _one_thread():  # all processes start here
                futures = {number: pool.submit(_called, self._work, number, call) for number, call in calls.items()}
            processes = set(multiprocessing.active_children()) - mine
            telling.close()
            end.close()
            listening = threading.Thread(target=self._listen, args=(told, asyncio.get_running_loop()), daemon=True)
            listening.start()
            await self._end_of(futures, stop, grace_s, ending)
        finally:
            ending.close()
            if not all(future.done() for future in futures.values()):
                self._has_killed = True
                for process in processes:
                    process.kill()
            pool.shutdown(cancel_futures=True)
        listening.join(STAY_S)
        return {number: self._result(future, names[number], names) for number, future in sorted(futures.items(), key=self._rank)}

    def _listen(self, told: Connection, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(EOFError, OSError, RuntimeError):  # all processes have ended, or the loop has
            while True:
                loop.call_soon_threadsafe(self._hear, *told.recv())

    def _hear(self, number: int, what: Any) -> None:
        self._begun.add(number)
        if number not in self._over:  # what a call tells and that it has ended come by two ways
            self._heard(number, what)

    async def _end_of(self, futures: Mapping[int, "Future[T]"], stop: Stop, grace_s: float, ending: Connection) -> None:
        """Until all calls have ended. Once one has failed, or all are to stop, it is asked for, and waited for so long."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        for future in futures.values():
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(woken.set))
        stopping = asyncio.ensure_future(stop.wait())
        stopping.add_done_callback(lambda _: woken.set())
        while self._go_on(futures) and len(self._over) < len(futures) and not stop.is_set():
            await woken.wait()
            woken.clear()
        stopping.cancel()
        ending.close()
        for future in futures.values():
            future.cancel()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while not all(future.done() for future in futures.values()):
                    await woken.wait()
                    woken.clear()

    def _go_on(self, futures: Mapping[int, "Future[T]"]) -> bool:
        """Whether no call has failed."""
        for number, future in futures.items():
            if future.done() and number not in self._over:
                if future.exception() is not None:
                    return False
                self._over.add(number)
                self._ended(number)
        return True

    def _rank(self, item: "tuple[int, Future[T]]") -> tuple[int, int]:
        """Real errors come first, then what was stopped because of them, then results."""
        number, future = item
        if future.cancelled():
            return 2, number  # not begun
        error = future.exception()
        is_stopped = isinstance(error, StoppedError) or (isinstance(error, BrokenProcessPool) and self._has_killed)
        return 3 if error is None else 1 if is_stopped else 0, number

    def _result(self, future: "Future[T]", name: str, names: Mapping[int, str]) -> T:
        if future.cancelled():
            raise StoppedError(f"stopped before {name}")
        try:
            return future.result()
        except BrokenProcessPool:
            if self._has_killed:
                raise StoppedError(f"stopped in {name}") from None
            listed = ", ".join(names[number] for number in sorted(self._begun - self._over))
            raise RunError(
                f"a process of {listed} ended without a word: want memory for so many at a time, or fewer jobs"
                if listed
                else 'no process could start: in a script, want what has several jobs below `if __name__ == "__main__":`'
            ) from None
        except CoterieError as error:
            raise named(error, name) from None
        except Exception as error:
            error.add_note(f"in {name}")
            raise


def named(error: CoterieError, name: str) -> CoterieError:
    """The error, with what it happened in."""
    error.args = (f"{name}: {error}",)
    return error


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Processes that start while the block runs have one thread for sums."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
