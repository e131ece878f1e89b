"""One interface for what starts the members of a run, watches them, and ends them.

There are two kinds of engines. With a `MemberEngine` the coordinator is the process of the command, and the engine starts the others beside
it. With a `JobEngine` a scheduler gets the whole run, and the command only follows it.

A new engine promises four things. Every member gets the users of its share (`--users I/N`, or a selection): the bits are those of a run
on one machine. A member finds its parent by the address file (`--server @FILE`), or the engine tells it. Its state is in a folder that the
next attempt has too. And nothing that it has started outlives it, unless it was told to leave a job running.
"""

from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coterie_server.session.hub import Hub

LOG = "log.txt"  # in the folder of a member: what it prints
GRACE_S = 15.0  # of a member that is asked to end, for writing its state down


class MemberEngine(ABC):
    """Starts the members of one run beside a coordinator in this process."""

    @abstractmethod
    def members(self, hub: "Hub") -> AbstractAsyncContextManager[None]:
        """While the block runs, all members but the coordinator do, and its end ends them.

        One that a signal or a lost machine has ended is started again, and goes on from its state. One that cannot go on fails the hub
        (`Hub.ended`, `Hub.fail`). An error that ends the block is raised with what the members have said about it, for the data's owner.
        """


class Phase(StrEnum):
    """Where a job is."""

    waiting = "waiting"  # for machines, also again
    running = "running"
    ended = "ended"


@dataclass(frozen=True)
class JobState:
    phase: Phase
    said: str  # in the words of the scheduler


class Job(ABC):
    """A run that was handed to a scheduler."""

    name: str  # for people: "Slurm job 17"
    log: Path | None  # what the members print, if it is in a file
    cancel: str  # the command that ends it

    @abstractmethod
    def state(self) -> JobState:
        """Where it is now. RunError when the scheduler does not answer."""

    @abstractmethod
    def end(self) -> None:
        """Asks the scheduler to end it: the coordinator writes its checkpoint. RunError when the scheduler does not take it."""


class JobEngine(ABC):
    """Hands a whole run, its coordinator too, to a scheduler that may start it later, elsewhere, and again."""

    @abstractmethod
    def submit(self) -> Job:
        """The run as a job of the scheduler. ConfigError when it refuses the job, RunError when it does not answer."""
