"""The aggregator: a server to the hosts of one known cluster, and to the coordinator a member that speaks for the cluster's users.

`PerCluster` messages of the coordinator are for the aggregators' half of the method. All others are passed on to the users, and their
answers are passed up. Data of users leaves the half only in declared messages. With `federation.sums: masked` the hosts mask their sums
towards the aggregator, and it masks the total of its cluster towards the coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from coterie.errors import ConfigError, ProtocolError
from coterie.experiment.config import Experiment
from coterie.record.ledger import pack, pack_own
from coterie.record.snapshot import SnapshotFile
from coterie.session.failures import finding_in
from coterie.session.masks import ROOM, Masks
from coterie.session.member import Member
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie.wire.messages import AskTotal, Message, PerCluster
from coterie.wire.precision import Precision
from coterie_server.interface.half import ClusterMethod, ClusterSetting, Replies, server_half
from coterie_server.interface.totals import of_clusters, passed_on
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.plan import stages_of
from coterie_server.run.tiers import for_aggregators
from coterie_server.session.hub import Hub
from coterie_server.session.peering import Peering
from coterie_server.session.run_state import HOST_BYTES

_EVENTS_PER_BOOK = 1000
_EARLIER = 0.9  # of the joining time: the coordinator must still be waiting when it learns which of the cluster's hosts are missing
_FEWEST_EXCHANGES = 50  # between two snapshots that only free hosts' memory, since snapshots cost time


class Aggregator(Member):
    """One cluster's aggregator; its hub has gathered the cluster's hosts."""

    noun = "aggregator"
    is_aggregator = True

    def __init__(
        self,
        name: str,
        experiment: Experiment,
        hub: Hub,
        database: RunDatabase,
        store: SnapshotFile | None,
        instance: str = "",
        tls: Tls | None = None,
        peers: Peering | None = None,
    ) -> None:
        members = hub.roster.fixed
        users = [session_pb2.User(name=user, cluster=cluster) for user, cluster in zip(members.names, members.clusters, strict=True)]
        super().__init__(name, experiment, hub.run_id, users, store, instance, hub.roster.schema, hub.roster.model)
        self.hub, self._database, self._stages, self._peers = hub, database, stages_of(experiment), peers
        self._half: ClusterMethod[Any] | None = None
        self._half_state: Any = None
        self._masks = Masks(name, experiment, hub.run_id, store, tls, "aggregator") if experiment.masks_sums else None
        self._is_busy = False  # with a task
        self._checkpoint_seq = hub.seq
        self._log_bytes = hub.outbox.log_bytes  # that the hub keeps for replay, at the newest snapshot
        self._replied_bytes = self._peers_bytes = 0  # by the busiest host, and kept for peers, at the newest snapshot
        if (snapshot := self.restored()) is not None:
            self._half_state = snapshot["half"]
            if peers is not None:
                peers.restore(snapshot["peers"])
            if snapshot["stage_json"]:
                hub.resume_stage(snapshot["stage"], snapshot["round"], snapshot["stage_json"])

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        """Learns the numbers of its users in the whole run, and welcomes its own hosts."""
        super().welcome(welcome)
        self.hub.number(self.numbers, self.clusters)

    def meet(self, peers: session_pb2.PeerList) -> None:
        """Learns where the other aggregators are."""
        if self._peers is None:
            super().meet(peers)
        else:
            self._peers.meet(peers)

    async def handle(self, received: Received) -> Encoded | None:
        """Handles one task; the reply to send, or None when the coordinator has it already."""
        asked = self.open(received)
        if asked.messages is None:
            return asked.answer
        task = asked.task
        if task.stage_json:
            self._say_notes()
            self.hub.begin_stage(task.stage, task.stage_json)
            self._half, self._half_state = None, None
        self.hub.state.round = task.round
        if self.hub.state.tracer is not None:
            stage = self._stages[task.stage].name if self.hub.state.stage_json else ""
            self.hub.state.tracer.task(self.name, task.seq, task.attempt, stage, task.round)
        self._note("task begins", task)
        self._is_busy = True
        try:
            answers = await self._answers(task, [message for message in asked.messages if message.method != ROOM])
        finally:
            self._is_busy = False
        if self._masks is not None:
            answers = self._masks.answers(task, asked.messages, answers, self.settled_until(task))
        self._note("task ends", task)
        reply = self.close(asked, answers)
        if self._is_snapshot_due:
            self.save()
        return reply

    def _note(self, what: str, task: session_pb2.Task) -> None:
        if self.experiment.federation.log_tasks:
            text = f"{what} at aggregator {self.name!r}: exchange {task.seq}, round {task.round}"
            self._database.event(what, text, seq=task.seq, stage=task.stage, round=task.round)

    def _say_notes(self) -> None:
        """Writes down how the stage went that ends."""
        if self._half is not None and self._half_state is not None:
            for text in self._half.notes(self._half_state):
                self._database.event("note", text)

    async def _answers(self, task: session_pb2.Task, messages: Sequence[Message]) -> Sequence[Message]:
        if not messages:
            return []
        own = [message for message in messages if isinstance(message, AskTotal) and issubclass(message.of, PerCluster)]
        rest = [message for message in messages if not any(message is one for one in own)]
        inbox: dict[type[Message], Message] = {type(message): message for message in for_aggregators(rest)}
        if not inbox:
            asks = [message for message in messages if isinstance(message, AskTotal)]
            replies = await (self._masked(messages, asks) if asks and self._masks is not None else self.hub.exchange(*messages))
            return replies.messages
        if self._peers is not None:
            self._peers.begin(task, self._durable_seq)
        half = self._cluster_half()
        state = half.init() if self._half_state is None else self._half_state
        self._half_state, answers = await half.step(state, inbox, self.hub)
        return of_clusters(answers, own)

    def _masked(self, messages: Sequence[Message], asks: Sequence[AskTotal]) -> Awaitable[Replies]:
        asked = [ask.users for ask in asks if ask.users is not None]
        to = np.unique(np.concatenate(asked)) if len(asked) == len(asks) else None
        wanted = [passed_on(ask, len(self.hub.roster.fixed)) for ask in asks]
        return self.hub.masking.exchange(*messages, to=to, wanted=wanted)

    def _cluster_half(self) -> ClusterMethod[Any]:
        if self._half is None:
            stage = self._stages[self.hub.state.stage]
            members, precision, robust = self.hub.roster.fixed, Precision.of_run(self.experiment), self.experiment.federation.robust
            how: dict[str, Any] = {"robust": robust, "is_exact": self.experiment.exact_sums}
            setting = ClusterSetting(self.experiment.seed, stage.name, members, precision, **how)
            method = server_half(stage.method)
            if self._peers is not None and method.peers is not None:
                self._half = method.peers(stage.config, setting, self._peers)
            elif self._peers is None and callable(method.tiers):
                self._half = method.tiers(stage.config, setting)
            else:
                raise ProtocolError(f"the coordinator asks the aggregators' half of method {stage.method!r}, which has none")
        return self._half

    @property
    def _is_snapshot_due(self) -> bool:
        """Whether replay keeps too much to wait for the coordinator's request: one task of it may be many exchanges here."""
        most = self.experiment.snapshots.max_log_bytes
        if self.hub.outbox.log_bytes - self._log_bytes > most:
            return True
        if self._peers is not None and self._peers.kept_bytes - self._peers_bytes > most:
            return True
        is_host_full = self.hub.roster.replied_bytes - self._replied_bytes > HOST_BYTES
        return is_host_full and self.hub.seq - self._checkpoint_seq >= _FEWEST_EXCHANGES

    def save(self) -> None:
        """Saves the cluster's state, but not in the middle of a task. Its hosts may then forget what the snapshot before it needed."""
        if self._is_busy:
            self._is_snapshot_asked = True
            return
        self.hub.settle()
        self._database.flush()
        super().save()
        if self._store is not None:
            self.hub.outbox.durable_seq, self._checkpoint_seq = self._checkpoint_seq, self.hub.seq
            self._log_bytes, self._replied_bytes = self.hub.outbox.log_bytes, self.hub.roster.replied_bytes
            self._peers_bytes = 0 if self._peers is None else self._peers.kept_bytes
            self.hub.request_snapshots()

    def tree(self) -> Mapping[str, Any]:
        """The hub's memory and the half's state."""
        state = self.hub.state
        at = {"stage": state.stage, "round": state.round, "stage_json": state.stage_json}
        return {"hub": self.hub.memory(), "half": self._half_state, "peers": None if self._peers is None else self._peers.tree(), **at}

    async def ending(self, finish: session_pb2.Finish) -> None:
        """Ends the run for the hosts, and waits for their books."""
        self._say_notes()
        await self.hub.finish(finish.outcome, failed=finish.failed, finding=finding_in(finish.finding))
        self._database.flush()

    def ended(self) -> None:
        """Removes the secrets of masks."""
        if self._masks is not None:
            self._masks.forget()

    def books_below(self) -> Iterator[session_pb2.Book]:
        """Both sides of the links to its hosts, and the events of the cluster."""
        sets = self._database.user_sets(self.hub.roster.fixed.number_of)
        for link in self._database.links():
            yield from pack_own(self._database.own_rows(link), link, sets)
            yield from pack(self._database.host_rows(link), link)
        if self._peers is not None:
            yield from self._peers.books()
        lines = self._database.event_lines()
        for start in range(0, len(lines), _EVENTS_PER_BOOK):
            yield session_pb2.Book(events="\n".join(lines[start : start + _EVENTS_PER_BOOK]))


def cluster_experiment(experiment: Experiment, n_hosts: int) -> Experiment:
    """The experiment as the hub of an aggregator sees it. ConfigError when the run has no aggregators."""
    rules = experiment.federation
    if not rules.is_two_tier:
        raise ConfigError("the coordinator's experiment has federation.topology 'flat': its hosts join it without an aggregator")
    waits = rules.join_timeout_s if rules.join_timeout_s == "none" else rules.join_timeout_s * _EARLIER
    changes = {"topology": "flat", "hosts": n_hosts, "users": None, "join_timeout_s": waits}
    return experiment.model_copy(update={"federation": rules.model_copy(update=changes)})
