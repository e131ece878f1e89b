"""A method that keeps what Coterie promises, in one file: gradient descent with momentum, and a model of each user that never leaves it.

`tests/integration/test_broken_methods.py` breaks it in one line at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np

from coterie.arrays import Array
from coterie.experiment.method import Method
from coterie.experiment.reveals import Reveal
from coterie.experiment.settings import Settings
from coterie.wire.messages import Message, Rows, Scalars, Vectors, declare
from coterie_client.interface.half import ClientHalf, Inbox, Local
from coterie_server.interface.half import Federation, Outcome, ServerHalf, Setting, StageHalf
from coterie_server.interface.wanted import Wanted


@declare(method="healthy", step="model")
@dataclass(frozen=True)
class Model(Rows):
    """x, to each user."""

    x: Annotated[Array, Vectors("rows", "d")]


@declare(method="healthy", step="gradient")
@dataclass(frozen=True)
class Gradient(Rows):
    """The direction of each user, and its loss."""

    g: Annotated[Array, Vectors("rows", "d")]
    loss: Annotated[Array, Scalars("rows")]


class Config(Settings):
    """The step."""

    name: Literal["healthy"] = "healthy"
    step: float = 0.1


METHOD = Method(config=Config, reveals=(Reveal("a direction of descent, each round", "much of its rows", ("healthy",)),))


# ---- the server


@dataclass(frozen=True)
class State:
    """The common model (d,)."""

    x: Array


@dataclass(frozen=True)
class Server:
    """One stage."""

    config: Config
    setting: Setting

    async def init(self, federation: Federation) -> State:
        """x = 0."""
        assert self.setting.facts is not None
        return State(np.zeros(self.setting.facts.d))

    async def round(self, state: State, federation: Federation, number: int) -> tuple[State, Mapping[str, float]]:
        """A step along the mean direction of those who answer."""
        everyone = np.arange(len(self.setting.members))
        replies = await federation.exchange(Model(np.tile(state.x, (everyone.size, 1))), wanted=[Wanted(Gradient)])
        answered = replies.awaited(everyone)
        figures = {"users": float(answered.size), "unasked": float(replies.n_unasked(everyone))}
        if answered.size:
            sent = replies[Gradient]
            state = State(state.x - self.config.step * sent.g.mean(axis=0))
            figures["loss"] = float(sent.loss.sum())
        return state, figures

    async def finish(self, state: State, federation: Federation) -> Outcome:
        """x for all."""
        return Outcome(np.tile(state.x, (len(self.setting.members), 1)))

    def expected_vectors(self, figures: Sequence[Mapping[str, float]]) -> Mapping[Any, float]:
        """x to each user that is asked, a direction of each that answers."""
        n_asked = len(figures) * len(self.setting.members) - sum(row["unasked"] for row in figures)
        return {("model", "down"): n_asked, ("gradient", "up"): sum(row["users"] for row in figures)}

    def expected_scalars(self, figures: Sequence[Mapping[str, float]]) -> Mapping[Any, float]:
        """A direction and a loss."""
        assert self.setting.facts is not None
        return {("gradient", "up"): (self.setting.facts.d + 1) * sum(row["users"] for row in figures)}


def build(config: Config, setting: Setting) -> StageHalf[State]:
    """The server half for one stage."""
    stage = Server(config, setting)
    return StageHalf(
        client_options={"healthy": {"step": config.step}},
        init=stage.init,
        round=stage.round,
        finish=stage.finish,
        expected_vectors=stage.expected_vectors,
        expected_scalars=stage.expected_scalars,
    )


SERVER = ServerHalf(build=build)


# ---- the client


@dataclass(frozen=True)
class Kept:
    """What the users of a host keep."""

    step: float
    velocity: Array  # (n_own, d)
    own: Array  # (n_own, d) a model of their own, which nobody sees


def init(options: Mapping[str, Any], local: Local, previous: Kept | None) -> Kept:
    """At rest."""
    zeros = np.zeros((local.n_own, local.problem.d))
    return Kept(options["step"], zeros, zeros)


def step(state: Kept, inbox: Inbox, local: Local) -> tuple[Kept, Sequence[Message]]:
    """The direction: half the one before, and the gradient at x."""
    x = inbox[Model].x
    velocity = state.velocity / 2 + local.problem.gradient(x)
    own = state.own - state.step * local.problem.gradient(state.own)
    return replace(state, velocity=velocity, own=own), [Gradient(velocity, local.problem.value(x))]


def private(state: Kept) -> Sequence[str]:
    """Their own models."""
    return ("own",)


CLIENT = ClientHalf(init=init, step=step, private=private)

__all__ = ["CLIENT", "METHOD", "SERVER"]
