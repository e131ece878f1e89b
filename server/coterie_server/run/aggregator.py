"""The aggregator: a server to the hosts of one known cluster, and to the coordinator a member that speaks for the cluster's users.

`PerCluster` messages of the coordinator are for the aggregators' half of the method; all others are for the users and are passed on, and
the users' answers passed up. What the half holds of its users never leaves it unless a declared message carries it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.config import Experiment
from coterie.record.ledger import pack, pack_own
from coterie.record.snapshot import SnapshotFile
from coterie.session.failures import finding_in
from coterie.session.member import Member
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie.wire.messages import Message
from coterie.wire.precision import Precision
from coterie_server.interface.half import ClusterMethod, ClusterSetting, server_half
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.plan import stages_of
from coterie_server.run.tiers import for_aggregators
from coterie_server.session.hosts import HOST_BYTES
from coterie_server.session.hub import Hub

_EVENTS_PER_BOOK = 1000
_EARLIER = 0.9  # of the joining time: the coordinator still waits when it is told which of the cluster's hosts are missing
_FEWEST_EXCHANGES = 50  # between two snapshots for the sake of hosts' memory, since snapshots cost time


@dataclass(frozen=True)
class ClusterUser:
    """A user of the cluster, as the coordinator is told of it."""

    name: str
    cluster: str


class Aggregator(Member):
    """One cluster's aggregator; its hub has gathered the cluster's hosts."""

    noun = "aggregator"
    is_aggregator = True

    def __init__(
        self, name: str, experiment: Experiment, hub: Hub, database: RunDatabase, store: SnapshotFile | None, instance: str = ""
    ) -> None:
        assert hub.roster.members is not None  # noqa: S101 - its hosts have been gathered
        users = [ClusterUser(user, cluster) for user, cluster in zip(hub.roster.members.names, hub.roster.members.clusters, strict=True)]
        super().__init__(name, experiment, hub.run_id, users, store, instance, hub.roster.schema, hub.roster.model)
        self.hub = hub
        self._database = database
        self._stages = stages_of(experiment)
        self._half: ClusterMethod[Any] | None = None
        self._half_state: Any = None
        self._checkpoint_seq = hub.seq
        self._log_bytes = hub.outbox.log_bytes  # that the hub keeps for replay, at the newest snapshot
        self._replied_bytes = 0  # by the busiest host, at the newest snapshot
        if (snapshot := self.restored()) is not None:
            self._half_state = snapshot["half"]
            if snapshot["stage_json"]:
                hub.resume_stage(snapshot["stage"], snapshot["round"], snapshot["stage_json"])

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        """Learns the numbers of its users in the whole run, and welcomes its own hosts."""
        super().welcome(welcome)
        self.hub.number(self.numbers, self.clusters)

    async def handle(self, received: Received) -> Encoded | None:
        """Handles one task; the reply to send, or None when the coordinator has it already."""
        asked = self.open(received)
        if asked.messages is None:
            return asked.answer
        task = asked.task
        if task.stage_json:
            self.hub.begin_stage(task.stage, task.stage_json)
            self._half, self._half_state = None, None
        self.hub.state.round = task.round
        if self.hub.state.tracer is not None:
            self.hub.state.tracer.task(
                self.name, task.seq, task.attempt, self._stages[task.stage].name if self.hub.state.stage_json else "", task.round
            )
        self._note("task begins", task)
        answers = await self._answers(asked.messages)
        self._note("task ends", task)
        reply = self.close(asked, answers)
        if self._is_snapshot_due:
            self.save()
        return reply

    def _note(self, what: str, task: session_pb2.Task) -> None:
        if self.experiment.federation.log_tasks:
            text = f"{what} at aggregator {self.name!r}: exchange {task.seq}, round {task.round}"
            self._database.event(what, text, seq=task.seq, stage=task.stage, round=task.round)

    async def _answers(self, messages: Sequence[Message]) -> Sequence[Message]:
        inbox: dict[type[Message], Message] = {type(message): message for message in for_aggregators(messages)}
        if not inbox:
            replies = await self.hub.exchange(*messages)
            return replies.messages
        half = self._cluster_half()
        state = half.init() if self._half_state is None else self._half_state
        self._half_state, answers = await half.step(state, inbox, self.hub)
        return answers

    def _cluster_half(self) -> ClusterMethod[Any]:
        if self._half is None:
            assert self.hub.roster.members is not None  # noqa: S101 - as above
            stage = self._stages[self.hub.state.stage]
            setting = ClusterSetting(
                self.experiment.seed,
                stage.name,
                self.hub.roster.members,
                Precision.of_run(self.experiment),
            )
            build = server_half(stage.method).tiers
            if not callable(build):
                raise ProtocolError(f"the coordinator asks the aggregators' half of method {stage.method!r}, which has none")
            self._half = build(stage.config, setting)
        return self._half

    # ---- snapshots

    @property
    def _is_snapshot_due(self) -> bool:
        """Whether so much is kept for replay below that it cannot wait for the coordinator's word: one of its tasks may be many here."""
        if self.hub.outbox.log_bytes - self._log_bytes > self.experiment.snapshots.max_log_bytes:
            return True
        is_host_full = self.hub.roster.replied_bytes - self._replied_bytes > HOST_BYTES
        return is_host_full and self.hub.seq - self._checkpoint_seq >= _FEWEST_EXCHANGES

    def save(self) -> None:
        """Writes down where the cluster is; replies that the snapshot before made needless may then be forgotten by its hosts."""
        self.hub.settle()
        self._database.flush()
        super().save()
        if self._store is not None:
            self.hub.outbox.durable_seq, self._checkpoint_seq = self._checkpoint_seq, self.hub.seq
            self._log_bytes, self._replied_bytes = self.hub.outbox.log_bytes, self.hub.roster.replied_bytes
            self.hub.request_snapshots()

    def tree(self) -> Mapping[str, Any]:
        """The hub's memory and the half's state."""
        return {
            "hub": self.hub.memory(),
            "half": self._half_state,
            "stage": self.hub.state.stage,
            "round": self.hub.state.round,
            "stage_json": self.hub.state.stage_json,
        }

    # ---- the end

    async def ending(self, finish: session_pb2.Finish) -> None:
        """Ends the run for the hosts, and waits for their books."""
        await self.hub.finish(finish.outcome, failed=finish.failed, finding=finding_in(finish.finding))
        self._database.flush()

    def books_below(self) -> Iterator[session_pb2.Book]:
        """Both sides of the links to its hosts, and the events of the cluster."""
        assert self.hub.roster.members is not None  # noqa: S101 - as above
        numbers = self.hub.roster.members.number_of
        sets, links = self._database.user_sets(numbers), self._database.links()
        for link in links:
            yield from pack_own(self._database.own_rows(link), link, sets)
            yield from pack(self._database.host_rows(link), link)
        lines = self._database.event_lines()
        for start in range(0, len(lines), _EVENTS_PER_BOOK):
            yield session_pb2.Book(events="\n".join(lines[start : start + _EVENTS_PER_BOOK]))


def cluster_experiment(experiment: Experiment, n_hosts: int) -> Experiment:
    """The experiment as the hub of an aggregator sees it. ConfigError when the run has no aggregators."""
    if not experiment.federation.is_two_tier:
        raise ConfigError("the coordinator's experiment has federation.topology 'flat': its hosts join it without an aggregator")
    join_timeout_s = experiment.federation.join_timeout_s * _EARLIER
    changes = {"topology": "flat", "hosts": n_hosts, "users": None, "join_timeout_s": join_timeout_s}
    rules = experiment.federation.model_copy(update=changes)
    return experiment.model_copy(update={"federation": rules})
