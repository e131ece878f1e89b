"""The tables of checks: what each proves, and which others must pass for its verdict to mean anything."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from coterie_deploy.studies.check import compressors, declared, privacy, runs
from coterie_deploy.studies.check.trial import Trial


@dataclass(frozen=True)
class Check:
    """One property of every method or compressor.

    `run` returns what else there is to say; it raises `Failed`, or `NotApplicable` with the reason.
    """

    name: str
    proves: str  # in one sentence
    run: Callable[[Trial], str]
    needs: tuple[str, ...] = ()  # if one of these fails, this one says nothing new
    is_slow: bool = False  # takes more than two seconds: processes, or many restarts


CHECKS = (
    Check("halves", "The method has a server half, and a client half for each message that it declares.", declared.halves),
    Check(
        "reveals", "Each step that can travel is named by a reveal, which a host's owner reads before a run.", declared.reveals, ("halves",)
    ),
    Check("runs", "An undisturbed run of a small federation ends, and leaves finite numbers.", runs.ends, ("halves", "reveals")),
    Check("closed-form", "The vectors and scalars of every step are as many as the method's formulas say.", runs.closed_form, ("runs",)),
    Check("books", "Sender and receiver count the same messages, each on its own.", runs.books, ("runs",)),
    Check("private", "Rows and private state are in no message that leaves a host.", privacy.private, ("runs",)),
    Check("repeat", "A second run has the same bits: nothing depends on a clock or on unseeded draws.", runs.repeat, ("runs",)),
    Check("arrival", "The order in which answers arrive changes no bit.", runs.arrival, ("repeat",)),
    Check("hosts", "One host has the bits of three: numbers of a user do not depend on who shares its host.", runs.hosts, ("arrival",)),
    Check(
        "snapshots",
        "Hosts and coordinator restarted from disk have the same bits: snapshots hold all of the state.",
        runs.snapshots,
        ("arrival",),
        is_slow=True,
    ),
    Check(
        "kills",
        "Hosts and coordinator killed at random exchanges have the same bits, and nothing counts twice.",
        runs.kills,
        ("snapshots",),
        is_slow=True,
    ),
    Check(
        "left-out",
        "Without a lost host the run is refused with a reason, or goes on, and --replay-decisions has its bits.",
        runs.left_out,
        ("arrival", "closed-form"),
        is_slow=True,
    ),
    Check("grpc", "One and three client processes over gRPC have the bits of the loopback.", runs.grpc, ("hosts",), is_slow=True),
    Check(
        "aggregators",
        "With an aggregator for each known cluster the bits are the same, and both tiers have their closed form.",
        runs.aggregators,
        ("hosts", "closed-form", "books"),
        is_slow=True,
    ),
    Check(
        "processes",
        "A client process killed by SIGKILL and a resumed coordinator have the same bits.",
        runs.processes,
        ("grpc", "snapshots"),
        is_slow=True,
    ),
)
BY_NAME = {check.name: check for check in CHECKS}
_OF_RUNS = ("closed-form", "books", "repeat", "arrival", "hosts", "snapshots", "kills", "grpc", "processes")
COMPRESSOR_CHECKS = (
    Check("sizes", "Rows of any length take as many bytes as sizes says, which are known before they arrive.", compressors.sizes),
    Check("reads", "Rows are written and read again with the same bits, and nothing is changed in place.", compressors.reads, ("sizes",)),
    Check("alone", "A row has the same bytes whatever rows are with it: users may share a host.", compressors.alone, ("reads",)),
    Check("numbers", "Zeros, equal, huge and tiny numbers are read as finite numbers.", compressors.numbers, ("reads",)),
    Check("foreign", "Any bytes of the right number are read without an error: a host may send them.", compressors.foreign, ("reads",)),
    replace(BY_NAME["runs"], needs=("alone", "numbers")),
    *(BY_NAME[name] for name in _OF_RUNS),
)


def needed(check: Check, table: Sequence[Check] = CHECKS) -> list[str]:
    """The checks of the table that one builds on, directly and through others."""
    direct = [other for other in table if other.name in check.needs]
    return list(dict.fromkeys(name for other in direct for name in (*needed(other, table), other.name)))
