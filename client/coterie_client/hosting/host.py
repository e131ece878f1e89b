"""The client host: the users of one process, their state, and the client halves of the methods.

It does no I/O except for snapshots, and has no clock and no network. A transport feeds it whole tasks and carries its replies.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coterie.errors import ProtocolError, RunError, default_finding
from coterie.experiment.config import Experiment
from coterie.experiment.model import to_json
from coterie.experiment.reveals import is_answered, summed_by
from coterie.findings import Finding
from coterie.record.snapshot import SnapshotFile, check_saveable
from coterie.session.masks import ROOM, Masks
from coterie.session.member import Member
from coterie.session.tls import Tls
from coterie.v1 import session_pb2
from coterie.wire.codec import Encoded, Received
from coterie.wire.messages import AskTotal, Message, Rows
from coterie.wire.precision import first_bad
from coterie_client.data import UserData
from coterie_client.data.users import Note
from coterie_client.hosting.noise_keys import NoiseKeys
from coterie_client.hosting.noised_sums import share_of
from coterie_client.hosting.totals import with_totals
from coterie_client.interface.half import ClientHalf, Inbox, Local, client_half
from coterie_client.problems import ConvexProblem

if TYPE_CHECKING:
    from coterie_client.hosting.pseudonyms import Admitted
    from coterie_client.learning import Network

_MAX_SHOWN = 100  # characters
_OWN_FAULT = Finding("M2")


class Host(Member):
    def __init__(
        self,
        name: str,
        experiment: Experiment,
        run_id: str,
        users: Sequence[UserData],
        build_local: Callable[[Host], Local],
        store: SnapshotFile | None,
        instance: str = "",
        network: Network | None = None,
        losses: ConvexProblem | None = None,
        notes: Sequence[Note] = (),
        answered: frozenset[str] | None = None,  # the steps that the owner has accepted; None: all
        admitted: Admitted | None = None,
        tls: Tls | None = None,
    ) -> None:
        model = "" if network is None else to_json(network.tensors)
        super().__init__(name, experiment, run_id, users, store, instance, users[0].schema, model, [note.finding for note in notes])
        self.network = network
        self.losses = losses  # on rows that are not standardised
        self.users = tuple(users)
        self.notes = tuple(notes)  # on their data
        self.states: dict[str, Any] = {}
        self._build_local = build_local
        self._local: Local | None = None
        self._stage = ""
        self._clients: dict[str, tuple[str, ClientHalf[Any]]] = {}
        self._answered = answered
        self._admitted = admitted
        self._masks = Masks(name, experiment, run_id, store, tls) if experiment.masks_sums else None
        self._summed = summed_by(experiment)  # the steps whose terms never leave the host
        self._ahead: list[Callable[[], None]] = []  # work of methods in idle time
        snapshot = self.restored()
        if snapshot is not None:
            self._stage, self.states = snapshot["stage"], snapshot["states"]
        self._noise = None
        self._share = None
        if experiment.privacy is not None and experiment.privacy.is_of_hosts:
            self._noise = NoiseKeys.of(experiment, run_id, users, store, None if snapshot is None else snapshot.get("noise"))
            self._share = share_of(experiment, self._noise)

    def true_name(self, name: str) -> str:
        """A user's name in the data, from its name in the run."""
        return name if self._admitted is None else self._admitted.true_names[name]

    def numerics(self) -> str:
        """With a network, torch is included."""
        return super().numerics() if self.network is None else f"{super().numerics()}; {self.network.numerics}"

    def welcome(self, welcome: session_pb2.Welcome) -> None:
        """Stores the member order. ProtocolError if it does not fit the host's users."""
        super().welcome(welcome)
        self._local = None

    def handle(self, received: Received) -> Encoded | None:
        """Handles one task. Returns the reply to send, or None if the parent already has it."""
        asked = self.open(received)
        if asked.messages is None:
            return asked.answer
        if asked.task.stage_json:
            self._begin_stage(asked.task.stage_json)
        if self._noise is not None:
            self._noise.saw(asked.task, [message for message in asked.messages if not _is_of_sums(message)])
        with default_finding(_OWN_FAULT):
            answers = self._dispatch(asked.messages, asked.task.round)
            for message in answers:
                self._check_finite(message, asked.task.round)
            asks = [message for message in asked.messages if isinstance(message, AskTotal)]
            if asks or self._summed:
                answers = with_totals(answers, asks, self.local, self._summed, self._share)
            if self._masks is not None:
                answers = self._masks.answers(asked.task, asked.messages, answers, self.settled_until(asked.task))
            return self.close(asked, answers)

    def _check_finite(self, message: Message, round_number: int) -> None:
        """RunError that names user, field and round of a number that the parent would refuse."""
        if (bad := first_bad(message, self._precision)) is None:
            return
        users = message.users if isinstance(message, Rows) else None
        whose = "" if bad.row is None else f" for user {self.users[bad.row if users is None else users[bad.row]].name!r}"
        place = f"{message.kind}.{bad.field} in round {round_number}"
        hint = "a smaller step, or features of a smaller scale, may help"
        raise RunError(f"host {self.name!r} has {bad.value}{whose} in {place}, wanted finite numbers: {hint}", Finding("M1"))

    def settle(self) -> None:
        """Does the work that no reply waits for, so that the next task need not wait."""
        super().settle()
        while self._ahead:
            self._ahead.pop()()

    def ending(self, finish: session_pb2.Finish) -> None:
        """Saves private models, which outlive the run that trained them. Other methods have delivered or evaluated theirs."""
        if not finish.failed and any(self._client(room)[1].model_of is not None for room in self.states):
            self.save()

    def ended(self) -> None:
        """Removes the secrets of masks and of noise."""
        for secrets in (self._masks, self._noise):
            if secrets is not None:
                secrets.forget()

    def _begin_stage(self, stage_json: str) -> None:
        """Sets up the methods of a new stage, which may continue from their earlier states."""
        self._stage, options_of = _read_stage(stage_json)
        for name, options in options_of.items():
            room, client = self._client(name)
            if room != name:
                raise ProtocolError(f"the parent sends settings of {name!r}, which is no client half but the local update of one")
            # Like steps, settings decide what is sent, so they must be the experiment's.
            if self._answered is not None and not client.allows(options, self.experiment, self.n_members):
                sentence = f"the parent's settings of {room!r} are not those of the experiment that this host serves"
                raise ProtocolError(sentence, Finding("C10"))
            self.states[room] = self._saveable(room, client.init(options, self.local, self.states.get(room)))

    def _dispatch(self, messages: Sequence[Message], round_number: int) -> list[Message]:
        """Dispatches the messages to the halves of their methods, in order, and collects the replies."""
        by_room: dict[str, dict[type[Message], Message]] = {}
        for message in messages:
            if self._answered is not None and not is_answered(self._answered, message.method, message.step):
                asked = f"the parent asks for step {message.step!r} of {message.method!r}"
                raise ProtocolError(f"{asked}, which is no part of the experiment that this host serves", Finding("C9"))
            if _is_of_sums(message):  # the half answers as always: see `with_totals`, `Masks`
                continue
            room, _ = self._client(message.method)
            by_room.setdefault(room, {})[type(message)] = message
        replies: list[Message] = []
        self._ahead.clear()
        for room, listed in by_room.items():
            _, client = self._client(room)
            if room not in self.states:
                self.states[room] = self._saveable(room, client.init({}, self.local, None))
            before, inbox = self.states[room], Inbox(self._stage, round_number, listed, None if self._noise is None else self._noise.secret)
            self.states[room], answers = client.step(before, inbox, self.local)
            if round_number <= 1:
                self._saveable(room, self.states[room])
            if client.ahead is not None and (work := client.ahead(self.states[room], inbox, self.local)):
                self._ahead.append(work)
            if client.changes_rows and self.states[room] is not before:
                self._local = None
            replies.extend(answers)
        return replies

    @staticmethod
    def _saveable(room: str, state: Any) -> Any:
        """The state. RunError where a snapshot could not hold it, also on a host that writes none."""
        check_saveable(state, f"the users' state of {room!r}")
        return state

    def _client(self, name: str) -> tuple[str, ClientHalf[Any]]:
        """The half that takes messages of this name, and its own name."""
        if name not in self._clients:
            found = client_half(name)
            if found is None:
                raise ProtocolError(f"the parent sends messages of {name[:_MAX_SHOWN]!r}, for which there is no client half")
            self._clients[name] = found
        return self._clients[name]

    @property
    def local(self) -> Local:
        """The input of the halves."""
        if self._local is None:
            self._local = self._build_local(self)
        return self._local

    def tree(self) -> Mapping[str, Any]:
        return {"stage": self._stage, "states": self.states, "noise": None if self._noise is None else self._noise.history}


def _is_of_sums(message: Message) -> bool:
    """Whether it is no message for a half, but says how answers are added up or masked."""
    return isinstance(message, AskTotal) or message.method == ROOM


def _read_stage(stage_json: str) -> tuple[str, Mapping[str, Any]]:
    """The name of a stage and the options of its methods. ProtocolError for any other text."""
    try:
        stage = json.loads(stage_json)
        return str(stage["stage"]), dict(stage["options"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        found = f"{stage_json[:_MAX_SHOWN]!r} ({type(error).__name__})"
        raise ProtocolError(f"the settings of a stage are {found}, wanted its name and the options of its methods as JSON") from None
