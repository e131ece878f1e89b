"""What an exchange must bring is looked at host by host, so whoever brings something else is found by itself."""

from __future__ import annotations

import asyncio
import dataclasses
import math

import numpy as np
import pytest

from coterie.errors import ProtocolError
from coterie.families.evaluation import Scores as Judged
from coterie.families.partial import TrainingLoss, Updated
from coterie.wire.messages import Message
from coterie.wire.precision import Precision, first_bad
from coterie_server.interface.wanted import Wanted, check_wanted
from tests.unit.test_hub import All, Answer, asked, rows, run
from tests.unit.test_strikes import three_hosts

OWN = np.array([1, 2])


@pytest.mark.parametrize(
    ("messages", "wanted", "sentence"),
    [
        ([rows(2)], [Wanted(Answer)], None),
        ([rows(2)], [Wanted(Answer, np.array([0, 1, 2]), {"d": 2})], None),
        ([Answer(np.ones((1, 2)), np.ones(1), users=np.array([2]))], [Wanted(Answer, np.array([2, 3]))], None),
        ([], [Wanted(Answer, np.array([0, 3]))], None),
        ([], [Wanted(Answer)], r"hubtest.Answer came for members \[\], wanted it once for each of \[1, 2\]"),
        ([rows(2)], [Wanted(Answer, np.array([1]))], r"came for members \[1, 2\], wanted it once for each of \[1\]"),
        ([Answer(np.ones((1, 2)), np.ones(1), users=np.array([1]))], [Wanted(Answer)], r"came for members \[1\], wanted"),
        ([Answer(np.ones((2, 2)), np.ones(2), users=np.array([1, 1]))], [Wanted(Answer)], r"came for members \[1, 1\], wanted"),
        ([rows(2), rows(2)], [Wanted(Answer)], r"came for members \[1, 1, 2, 2\]"),
        ([rows(2)], [Wanted(Answer, None, {"d": 3})], "hubtest.Answer.x: axis 'd' is 2, wanted 3"),
        ([rows(2), TrainingLoss(np.ones(2))], [Wanted(Answer)], "it sent partial.TrainingLoss, which it was not asked for"),
    ],
)
def test_a_reply_is_what_was_wanted_of_the_host_and_nothing_else(
    messages: list[Message], wanted: list[Wanted], sentence: str | None
) -> None:
    if sentence is None:
        check_wanted(messages, OWN, wanted)
        return
    with pytest.raises(ProtocolError, match=sentence):
        check_wanted(messages, OWN, wanted)


def test_a_host_that_brings_something_else_is_left_out_and_the_others_are_not_suspected() -> None:
    async def test() -> None:
        w = await three_hosts()
        exchange = asyncio.create_task(w.hub.exchange(All(np.ones(2)), wanted=[Wanted(Answer, None, {"d": 2})]))
        await asyncio.sleep(0)
        w.answer("a", 1, Answer(np.ones((1, 5)), np.ones(1)))  # the first to come, and the only one that is wrong
        w.answer("b", 1, rows(2))
        w.answer("c", 1, rows(1))
        np.testing.assert_array_equal((await exchange)[Answer].users, [1, 2, 3])
        assert w.notes.decisions == [(1, "skip", ["a"])]
        exchange = await asked(w, All(np.ones(2)))  # nothing is wanted: rows that do not agree are nobody's fault in particular
        w.answer("b", 2, Answer(np.ones((2, 5)), np.ones(2)))
        w.answer("c", 2, rows(1))
        with pytest.raises(ProtocolError, match="with rows of shape"):
            await exchange

    run(test())


@pytest.mark.parametrize(("payload", "largest"), [("float16", 65519.0), ("bfloat16", 3.38e38), ("float32", 3.4e38)])
def test_what_overflows_on_the_wire_is_found_before_it_is_sent(payload: str, largest: float) -> None:
    precision, weights = Precision.of(payload), np.full((2, 3), 1.0, np.float32)
    weights[1, 2] = -largest
    assert first_bad(Updated(weights, np.zeros((2, 0), np.int64)), precision) is None
    weights[1, 2] = -np.inf if payload == "float32" else -largest * (1.01 if payload == "float16" else 1.005)
    bad = first_bad(Updated(weights, np.zeros((2, 0), np.int64)), precision)
    assert bad is not None
    assert (bad.field, bad.value, bad.row) == ("weights", -np.inf, 1)


def test_vectors_that_float32_cannot_hold_are_found_before_they_are_sent() -> None:
    answer = Answer(np.array([[1.0, 1e39]]), np.array([1e300]))
    assert first_bad(answer) is None
    assert first_bad(answer, Precision.of("float64", is_convex=True)) is None
    bad = first_bad(answer, Precision.of("float32", is_convex=True))
    assert bad is not None
    assert (bad.field, bad.value) == ("x", np.inf)


def test_a_judgement_may_be_infinite_but_a_value_of_the_objective_is_never_nan() -> None:
    nowhere = np.array([np.nan, 0.5])
    scores = Judged(np.array([np.inf, 1.0]), nowhere, nowhere, np.array([0, 3]))
    assert first_bad(scores) is None
    bad = first_bad(dataclasses.replace(scores, objective=np.array([1.0, np.nan])))
    assert bad is not None
    assert (bad.field, bad.row) == ("objective", 1)
    assert math.isnan(bad.value)
