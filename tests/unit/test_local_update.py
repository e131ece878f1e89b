"""What a local update knows, and the messages that it declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from coterie.errors import ProtocolError, RunError
from coterie.families.partial import Shared
from coterie.methods.ifca import Chosen
from coterie.methods.l2gd import Coins
from coterie_client.families import partial
from coterie_client.interface.half import Inbox
from coterie_client.interface.local_update import Context, LocalUpdate, Moved, pulled
from tests.local_updates import STAGE, Tensors, Users, a_model

TWO_STEPS = {"name": "fedper", "batch_size": 4, "updates": 2, "optimizer": {"lr": 0.05, "momentum": 0.0}}


def with_update(monkeypatch: pytest.MonkeyPatch, update: LocalUpdate) -> None:
    monkeypatch.setattr(partial, "local_update", lambda _: update)


def pulled_to(chosen: Callable[[Context, str], bool]) -> LocalUpdate:
    """Training that is pulled towards the model as it was before, in the tensors that are chosen."""

    def update(context: Context) -> Moved:
        anchor = {name: array for name, array in context.model.items() if chosen(context, name)}
        fitted = context.fit(context.model, pulled(context.phases, 2.0, anchor))
        return Moved(fitted.tensors, {}, fitted.loss)

    return LocalUpdate(update)


def trained(monkeypatch: pytest.MonkeyPatch, update: LocalUpdate) -> tuple[Any, Any]:
    """What users return, and the heads that they keep."""
    with_update(monkeypatch, update)
    users = Users(TWO_STEPS)
    returned, _ = users.round(1, a_model(users))
    return returned, users.state.private


def test_the_representation_can_be_pulled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the first step nothing has moved, so the second is the first that a pull changes, and a head's gradient there is the same."""
    plain, heads = trained(monkeypatch, pulled_to(lambda *_: False))
    of_shared, same_heads = trained(monkeypatch, pulled_to(lambda context, name: name in context.shared))
    of_all, other_heads = trained(monkeypatch, pulled_to(lambda *_: True))
    np.testing.assert_array_equal(same_heads, heads)
    np.testing.assert_array_equal(of_shared, of_all)
    assert not np.array_equal(of_shared, plain)
    assert not np.array_equal(other_heads, heads)


def stepped(users: Users, *more: Any) -> None:
    messages: dict[Any, Any] = {Shared: Shared(users.flat(a_model(users)), users.counts(a_model(users)), users=np.arange(3))}
    partial.CLIENT.step(users.state, Inbox(STAGE, 1, {**messages, **{type(one): one for one in more}}), users.local)


def test_a_message_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"sends l2gd\.Coins, which the method's local update does not declare"):
        stepped(Users({"name": "ditto"}), Coins(np.array([1, 1]), users=np.arange(3)))


def test_a_message_that_is_missing_is_named() -> None:
    with pytest.raises(ProtocolError, match=r"has sent no l2gd\.Coins with the shared tensors, which the local update needs"):
        stepped(Users({"name": "l2gd"}))


def test_a_message_to_other_users_is_refused() -> None:
    with pytest.raises(ProtocolError, match=r"sends l2gd\.Coins to other users than the shared tensors"):
        stepped(Users({"name": "l2gd"}), Coins(np.array([1, 1]), users=np.array([0, 2])))


@pytest.mark.parametrize(("up", "returned"), [((), [Chosen(np.zeros(1, np.int64))]), ((Chosen,), [])])
def test_an_update_returns_what_it_declares(up: Any, returned: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no declaration is private: to return it is a mistake of the method."""
    with_update(monkeypatch, LocalUpdate(lambda context: Moved(context.model, {}, 0.0, returned), up=up))
    with pytest.raises(RunError, match=r"a local update returned the messages .*, want those that it declares: "):
        stepped(Users({"name": "fedavg"}))


def test_an_update_has_the_round_of_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []

    def update(context: Context) -> Moved:
        rounds.append(context.round)
        return Moved(context.model, {}, 0.0)

    with_update(monkeypatch, LocalUpdate(update))
    users = Users({"name": "fedavg"})
    for number in (1, 2, 7):
        users.round(number, a_model(users), asked=(0,))
    assert rounds == [1, 2, 7]


def turned(model: Tensors) -> Tensors:
    return {name: array.T for name, array in model.items()}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (lambda c: Moved(turned(c.model), c.kept, 0.0), "returned 'representation.1.weight' with shape (5, 6), want (6, 5)"),
        (lambda c: Moved(c.model, 0.5, c.kept), "returned Moved.kept of type float, want arrays by name"),
        (lambda c: Moved({}, c.kept, 0.5), "returned Moved.tensors without 'representation.1.weight', want all tensors of the model"),
        (
            lambda c: Moved(c.fit(c.model, c.phases), c.kept, 0.5),
            "returned Moved.tensors of type Fitted, want arrays by name",
        ),
        (lambda _: None, "returned a value of type NoneType, want Moved(tensors, kept, loss)"),
        (lambda c: Moved(c.model, {"n": 3}, 0.5), "returned Moved.kept with 'n' of type int, want a NumPy array of numbers"),
        (lambda c: Moved(c.model, {}, 0.5), "returned Moved.kept without 'n', want all that `start` returns"),
        (lambda c: Moved(c.model, {**c.kept, "m": c.kept["n"]}, 0.5), "with 'm', which `start` does not return: want the names of `start`"),
        (
            lambda c: Moved(c.model, {"n": np.full(2, 0.5)}, 0.5),
            "returned Moved.kept with 'n' as float64 numbers of shape (2,), want int64 of shape (2,) as from `start`",
        ),
        (lambda c: Moved(c.model, c.kept, None), "returned Moved.loss of type NoneType, want one number; want Moved(tensors, kept, loss)"),
        (lambda c: Moved(c.model, c.kept, np.zeros(3)), "returned Moved.loss of type ndarray, want one number"),
    ],
)
def test_what_an_update_returns_is_checked(returned: Any, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with_update(monkeypatch, LocalUpdate(returned, start=lambda *_: {"n": np.zeros(2, np.int64)}))
    with pytest.raises(RunError) as caught:
        stepped(Users({"name": "fedavg"}))
    assert str(caught.value).startswith("method 'fedavg': update returned ")
    assert sentence in str(caught.value)


def test_what_a_user_starts_from_and_judges_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    with_update(monkeypatch, LocalUpdate(lambda _: None, start=lambda *_: {"n": 0}))  # type: ignore[arg-type, return-value, dict-item]
    with pytest.raises(RunError, match="method 'fedavg': start returned with 'n' of type int, want a NumPy array of numbers"):
        Users({"name": "fedavg"})
    with_update(monkeypatch, LocalUpdate(lambda _: None, judged=lambda model, *_: turned(model)))  # type: ignore[arg-type, return-value]
    users = Users({"name": "fedavg"})
    with pytest.raises(RunError, match=r"method 'fedavg': judged returned 'representation.1.weight' with shape \(5, 6\), want \(6, 5\)"):
        users.judged(1, a_model(users))
    with_update(monkeypatch, LocalUpdate(lambda _: None, received=lambda _: None))  # type: ignore[arg-type, return-value]
    with pytest.raises(RunError, match=r"method 'fedavg': received returned a value of type NoneType, want Received\(kept\)"):
        users.judged(1, a_model(users))
