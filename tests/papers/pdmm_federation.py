"""Both halves of PDMM joined without an engine: every message is encoded and decoded, rows split over hosts and merged in member order."""

import json
from collections import Counter
from functools import cached_property
from pathlib import Path

import numpy as np

from coterie.experiment.problem import ProblemConfig
from coterie.methods.pdmm import Config
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import ENVELOPE, encode
from coterie.wire.messages import kind_class
from coterie.wire.precision import Precision
from coterie_client.interface.half import Inbox, Local
from coterie_client.methods.pdmm import CLIENT
from coterie_client.problems import build_problem
from coterie_server.interface.half import Facts, Members, Outcome, Replies, Setting
from coterie_server.interface.merge import Layout, merged
from coterie_server.methods.pdmm.half import build, set_up

FIXTURES = Path(__file__).parents[1] / "fixtures"


def finished(coroutine):
    """What a coroutine that waits for nothing returns, without an event loop, which would take most of the time."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits for something, want one that does not")


class Data:
    """A fixture's users and optima, and the objective Phi."""

    def __init__(self, n):
        self.fixture = json.loads((FIXTURES / f"convex_clustering_{n}.json").read_text())
        self.config = ProblemConfig(loss="squared_hinge", l2=self.fixture["c"])
        self._set(np.array(self.fixture["A"]), np.array(self.fixture["Y"], float))
        self.global_models = np.tile(self.fixture["global"]["x"], (n, 1))

    def _set(self, features, labels):
        self.n, self.features, self.labels = len(features), features, labels
        self.problem = self.of(np.arange(self.n))
        self.d = self.problem.d
        smoothness, convexity = self.problem.smoothness(), self.problem.strong_convexity()
        self.facts = Facts(self.problem.n_rows, self.d, smoothness, convexity)

    @cached_property
    def local_models(self):
        return self.problem.argmin(np.zeros((self.n, self.d)), 0.0)

    def of(self, users):
        return build_problem(self.config, [f"u{i}" for i in users], list(self.features[users]), list(self.labels[users]))

    def phi(self, x, lam):
        i, j = np.triu_indices(self.n, 1)
        return self.problem.value(x).sum() + lam * np.linalg.norm(x[i] - x[j], axis=1).sum()

    def son(self, lam):
        return next(entry for entry in self.fixture["son"] if entry["LAM"] == lam)


class Points(Data):
    """f_i(x) = |x - a_i|^2 / 2: convex clustering as such."""

    def __init__(self, points):
        self.config = ProblemConfig(loss="squared_distance")
        points = np.array(points, float)
        self._set(points[:, None, :], np.zeros((len(points), 1)))
        self.global_models = np.tile(points.mean(axis=0), (self.n, 1))


class Memory:
    """A `Federation` of h hosts in this process; user i lives on host i mod h. `vectors` counts what was really encoded."""

    def __init__(self, data, n_hosts=1, payload="float64"):
        self.data, self.precision = data, Precision.of(payload)
        own = {f"h{h}": np.arange(h, data.n, n_hosts) for h in range(n_hosts)}
        self.layout = Layout(own, data.n)
        self.locals = {
            host: Local(0, tuple(f"u{i}" for i in users), users, data.n, self.precision, (), data.of(users)) for host, users in own.items()
        }
        self.states = dict.fromkeys(own)
        self.vectors, self.scalars, self.message_bytes, self.contacts, self.exchanges = Counter(), Counter(), 0, 0, 0

    def begin(self, options):
        options = json.loads(json.dumps(dict(options)))["pdmm"]
        self.states = {host: CLIENT.init(options, local, self.states[host]) for host, local in self.locals.items()}

    async def exchange(self, *messages, to=None, wanted=()):
        self.exchanges += 1
        answers, broadcasts = {}, set()
        for host in self.layout.hosts_of(to):
            parts = [part for message in messages if (part := self.layout.part_for(host, message)) is not None]
            parts = [self._local_users(host, part, outward=False) for part in parts]
            sent = self._carried(session_pb2.Task(), parts, session_pb2.JoinResponse, host, broadcasts)
            inbox = Inbox("", 0, {type(message): message for message in sent})
            self.states[host], replies = CLIENT.step(self.states[host], inbox, self.locals[host])
            got = self._carried(session_pb2.Reply(), replies, session_pb2.JoinRequest, host, set())
            answers[host] = [self._local_users(host, message, outward=True) for message in got]
            self.contacts += 1
        return Replies(merged(answers, self.layout), to)

    def _local_users(self, host, message, outward):
        users = getattr(message, "users", None)
        if users is None:
            return message
        own = self.layout.own[host]
        arrays = {name: getattr(message, name) for name, _ in message.specs}
        return type(message)(users=own[users] if outward else np.searchsorted(own, users), **arrays)

    def _carried(self, frame, messages, outer, host, broadcasts):
        encoded = encode(frame, messages, self.precision)
        assembler, received = Assembler(outer), None
        for data in encoded.frames():
            received = assembler.feed(data)
        decoded, entries = received.decode(self.locals[host].n_own)
        direction = "down" if encoded.is_task else "up"
        for entry in entries:
            self.message_bytes += entry.message_bytes
            if entry.kind != ENVELOPE:
                self.scalars[kind_class(entry.kind).step, direction] += entry.scalars
            if entry.kind == ENVELOPE or entry.kind in broadcasts or not entry.vectors:
                continue
            cls = kind_class(entry.kind)
            if not hasattr(cls, "users"):  # a broadcast counts once, however many hosts receive it
                broadcasts.add(entry.kind)
            self.vectors[cls.step, direction] += entry.vectors
        return decoded


class Run:
    """One stage, driven round by round."""

    def __init__(self, data, n_hosts=1, payload="float64", seed=0, start="global", memory=None, stage="main", **config):
        self.data = data
        self.memory = memory or Memory(data, n_hosts, payload)
        outcome = Outcome(data.global_models) if start == "global" else start if isinstance(start, Outcome) else None
        members = Members(tuple(f"u{i}" for i in range(data.n)), ("",) * data.n)
        local = {"local": Outcome(data.local_models)} if "graph" in config else {}
        setting = Setting(seed, stage, members, self.memory.precision, data.facts, outcome, local)
        self.config = Config(start="zero" if start == "zero" else "global", **config)
        self.method = set_up(self.config, setting)
        self.arrivals = build(self.config, setting) if self.config.sampling == "arrival" else None
        self.memory.begin(self.half.client_options)
        self.state = finished(self.half.init(self.memory))
        self.figures = []

    @property
    def half(self):
        """What is driven; tests may replace `method`."""
        return self.arrivals or self.method

    def round(self):
        self.state, figures = finished(self.half.round(self.state, self.memory, len(self.figures) + 1))
        self.figures.append(figures)
        return self

    def rounds(self, count):
        """The models after each of `count` rounds."""
        return [self.round().state.x for _ in range(count)]

    def finish(self):
        return finished(self.half.finish(self.state, self.memory))

    def gaps(self):
        """Relative gap to the fixture's optimum after each evaluated round."""
        best = self.data.son(self.method.lam)["Phi"]
        return np.array([figures["objective"] / best - 1 for figures in self.figures if "objective" in figures])

    def until(self, gap, limit):
        """Rounds until the objective is within `gap` (relative) of the fixture's; fails at the limit."""
        best = self.data.son(self.method.lam)["Phi"]
        latest = np.inf
        while latest > (1 + gap) * best:
            assert len(self.figures) < limit, f"gap {latest / best - 1:.1e} after {limit} rounds"
            latest = self.round().figures[-1].get("objective", latest)
        return len(self.figures)


__all__ = ["Data", "Memory", "Points", "Run"]
