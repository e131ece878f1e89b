"""The weights of networks on the wire: single precision in the halves, half of it where the payload says so, common parts once a host."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie.errors import ConfigError, ProtocolError, RunError
from coterie.experiment.model import TensorInfo, difference, from_json, named_tensors, shared_tensors, to_json
from coterie.record.ledger import DOWN, rows_of
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Encoded, Received, encode
from coterie.wire.messages import Message, Positions, Rows, Weights, dataclass, declare
from coterie.wire.precision import Precision
from coterie_server.families.averages import in_order
from coterie_server.interface.half import Replies
from coterie_server.interface.merge import Layout, check_finite, merged, weights_of

PAYLOADS = ("float64", "float32", "float16", "bfloat16")
ITEM_BYTES = {"float64": 4, "float32": 4, "float16": 2, "bfloat16": 2}


@declare(method="weightstest", step="shared")
@dataclass(frozen=True)
class Sent(Rows):
    """The same for the users named."""

    weights: Annotated[NDArray[np.float32], Weights("shared")]
    counts: Annotated[Indices, Positions("counts")]


@declare(method="weightstest", step="shared")
@dataclass(frozen=True)
class Returned(Rows):
    """Each user's own."""

    weights: Annotated[NDArray[np.float32], Weights("rows", "shared")]


def carried(encoded: Encoded) -> Received:
    assembler = Assembler(session_pb2.JoinResponse if encoded.is_task else session_pb2.JoinRequest)
    (received,) = (found for frame in encoded.frames() if isinstance(found := assembler.feed(frame), Received))
    return received


def down(message: Message, payload: str) -> Encoded:
    return encode(session_pb2.Task(seq=1), [message], Precision.of(payload))


NUMBERS = np.array([1.0, -0.1, 3e-5, 65000.0, 1e-30, 0.0], dtype=np.float32)


@pytest.mark.parametrize("payload", PAYLOADS)
def test_halves_see_single_precision_and_the_ledger_the_true_size(payload: str) -> None:
    users = np.array([1, 4, 6])
    received = carried(down(Sent(NUMBERS, np.array([7]), users=users), payload))
    (message,), entries = received.decode(8)
    assert isinstance(message, Sent)
    assert message.weights.dtype == np.float32
    assert message.counts.tolist() == [7]
    assert np.array_equal(message.weights, Precision.of(payload).rounded_weights(NUMBERS))
    assert entries[0].payload_bytes == ITEM_BYTES[payload] * NUMBERS.size  # travels once
    assert (entries[0].vectors, entries[0].scalars) == (3, 3 * NUMBERS.size)  # and counts for each user served
    assert entries == list(down(message, payload).entries)


def test_bfloat16_rounds_halves_to_even_and_keeps_what_is_not_a_number() -> None:
    precision = Precision.of("bfloat16")
    step = 2.0**-7  # between numbers from 1 to 2
    numbers = np.array([1 + step / 2, 1 + 3 * step / 2, 1 + 0.6 * step, -(1 + 0.4 * step), np.inf, -np.inf, np.nan], dtype=np.float32)
    rounded = precision.rounded_weights(numbers)
    assert rounded[:4].tolist() == [1.0, 1 + 2 * step, 1 + step, -1.0]
    assert rounded[4:6].tolist() == [np.inf, -np.inf]
    assert np.isnan(rounded[6])
    nasty = np.array([0x7F80_0001, 0xFFFF_FFFF], dtype=np.uint32).view(np.float32)  # rounding must not carry into another number
    assert np.isnan(precision.rounded_weights(nasty)).all()


def test_a_repeated_frame_is_read_by_its_plan_with_the_same_numbers() -> None:
    assembler = Assembler(session_pb2.JoinResponse)
    for payload in PAYLOADS:
        seen = []
        for shift in range(4):
            message = Sent(NUMBERS[:4] + np.float32(shift), np.array([shift]), users=np.array([0, 1]))
            (received,) = [assembler.feed(frame) for frame in down(message, payload).frames()]
            (found,), entries = received.decode(2)
            seen.append(entries[0].scalars)
            assert np.array_equal(found.weights, Precision.of(payload).rounded_weights(message.weights))
        assert seen == [8] * 4


def test_large_weights_travel_in_chunks_and_are_not_widened() -> None:
    numbers = np.arange(1 << 19, dtype=np.float32)
    received = carried(down(Sent(numbers, np.zeros(0, np.int64), users=np.array([0])), "float64"))
    (message,), entries = received.decode(1)
    assert entries[0].frames >= 2
    assert np.array_equal(message.weights, numbers)
    assert message.weights.base is not None  # a view of what was received


def test_a_common_part_must_name_its_users() -> None:
    with pytest.raises(TypeError, match="must name them"):
        down(Sent(NUMBERS, np.zeros(0, np.int64)), "float32")


def test_a_common_part_goes_once_to_each_host_of_its_users() -> None:
    layout = Layout({"a": np.array([0, 2]), "b": np.array([1, 3])}, 4)
    sent = Sent(NUMBERS, np.array([7]), users=np.array([0, 2, 3]))
    parts = {host: layout.part_for(host, sent) for host in ("a", "b")}
    assert [part.users.tolist() for part in parts.values()] == [[0, 2], [3]]
    vectors = [rows_of(down(part, "float32").entries, 1, 1, DOWN, 0)[0].vectors for part in parts.values()]
    assert vectors == [2, 1]


def test_weights_of_users_come_one_by_one_in_member_order() -> None:
    layout = Layout({"a": np.array([0, 2]), "b": np.array([1, 3])}, 4)
    answers = {
        "b": [Returned(np.full((1, 3), 3.0, np.float32), users=np.array([3]))],
        "a": [Returned(np.array([[0.0] * 3, [2.0] * 3], np.float32), users=np.array([0, 2]))],
    }
    assert merged(answers, layout) == {}
    replies = Replies(merged(answers, layout), None, weights_of(answers, layout))
    assert [(message.users.tolist(), message.weights[0, 0]) for message in replies.one_by_one(Returned)] == [
        ([0], 0.0),
        ([2], 2.0),
        ([3], 3.0),
    ]
    with pytest.raises(RunError, match=r"no member answered with weightstest\.Sent"):
        replies.one_by_one(Sent)


def test_rows_that_came_side_by_side_stay_together() -> None:
    layout = Layout({"a": np.array([0, 1, 4]), "b": np.array([2, 3])}, 5)
    numbers = np.arange(15, dtype=np.float32).reshape(5, 3)
    answers = {
        "a": [Returned(numbers[[0, 1, 4]], users=np.array([0, 1, 4]))],
        "b": [Returned(numbers[[3, 2]], users=np.array([3, 2]))],  # in another order
    }
    replies = Replies(merged(answers, layout), None, weights_of(answers, layout))
    runs = replies.in_runs(Returned)
    assert [message.users.tolist() for message in runs if message.users is not None] == [[0, 1], [2], [3], [4]]
    assert np.array_equal(np.concatenate([message.weights for message in runs]), numbers)
    assert [message.weights.base is not None for message in runs] == [True] * 4
    assert np.array_equal(np.concatenate([message.weights for message in replies.one_by_one(Returned)]), numbers)


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1000, 300_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_a_mean_has_the_bits_of_a_sum_user_by_user(size: int, dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(size)
    n = 9 if size > 1000 else 300
    rows = (1000 * rng.standard_normal((n, size))).astype(dtype)
    shares = rng.random(n)
    wanted = np.zeros(size)
    for share, row in zip(shares, rows, strict=True):
        wanted += share * row
    for split in ([], [4], [1, 2, 5, n - 1]):
        assert in_order(np.split(rows, split), shares).tobytes() == wanted.tobytes()


def test_weights_that_do_not_fit_together_are_the_hosts_fault() -> None:
    layout = Layout({"a": np.array([0]), "b": np.array([1])}, 2)
    short, long = (Returned(np.zeros((1, size), np.float32), users=np.array([place])) for place, size in ((0, 3), (1, 4)))
    with pytest.raises(ProtocolError, match=r"host 'b' sent weightstest.Returned.weights with rows of shape \(4,\), wanted \(3,\)"):
        weights_of({"a": [short], "b": [long]}, layout)
    with pytest.raises(ProtocolError, match="twice for one user"):
        weights_of({"a": [short, short]}, layout)


def test_a_weight_that_is_not_finite_names_its_user() -> None:
    bad = Returned(np.array([[0.0, np.nan]], np.float32), users=np.array([1]))
    with pytest.raises(RunError, match=r"host 'h' returned nan for user 'bo' in weightstest.Returned.weights in round 4"):
        check_finite("h", bad, np.array([0, 1]), ["al", "bo"], 4)


TENSORS = (
    TensorInfo("body.weight", (2, 3), False, "representation"),
    TensorInfo("body.mean", (3,), False, "representation", True),
    TensorInfo("body.seen", (), True, "representation", True),
    TensorInfo("head.weight", (4,), False, "head", layer="Linear"),
)


def test_a_model_survives_the_hello() -> None:
    assert from_json(to_json(TENSORS)) == TENSORS
    before_layers = [{key: value for key, value in told.items() if key != "layer"} for told in json.loads(to_json(TENSORS))]
    assert from_json(json.dumps(before_layers)) == tuple(replace(tensor, layer="") for tensor in TENSORS)
    for broken in (
        "",
        "[]",
        "{}",
        '[{"name": "a"}]',
        '[{"name": "a", "shape": [-1], "is_integer": false, "part": "head", "is_statistic": false}]',
    ):
        with pytest.raises(ProtocolError):
            from_json(broken)


def test_the_method_says_which_tensors_travel() -> None:
    def named(sharing: str, **how: Any) -> list[str]:
        return [tensor.name for tensor in shared_tensors(TENSORS, sharing, **how)]  # type: ignore[arg-type]

    assert named("all") == [tensor.name for tensor in TENSORS]
    assert named("representation") == ["body.weight", "body.mean", "body.seen"]
    assert named("representation", statistics_travel=False) == ["body.weight"]
    assert named("head") == ["head.weight"]
    assert named("none") == []
    assert named("all", private_layers=("Linear", "Embedding")) == ["body.weight", "body.mean", "body.seen"]
    with pytest.raises(ConfigError, match="no tensors in its head"):
        named("head", private_layers=("Linear",))
    with pytest.raises(ConfigError, match="no tensors in its representation"):
        shared_tensors(TENSORS[3:], "representation")


def test_tensors_get_their_shapes_back_and_single_numbers_survive() -> None:
    named = named_tensors(np.arange(9, dtype=np.float32), np.array([5]), TENSORS[:3])
    assert named["body.weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert named["body.mean"].tolist() == [6, 7, 8]
    assert named["body.seen"].shape == ()
    assert int(named["body.seen"]) == 5
    with pytest.raises(ProtocolError, match="8 weights and 1 counts came, wanted 9 and 1"):
        named_tensors(np.arange(8, dtype=np.float32), np.array([5]), TENSORS[:3])


def test_hosts_with_different_models_are_told_apart() -> None:
    other = (TensorInfo("body.weight", (2, 4), False, "representation"), *TENSORS[1:])
    assert difference(to_json(other), to_json(TENSORS)) == (
        "has a model with tensor 'body.weight' of shape [2, 4] in the representation, wanted shape [2, 3] in the representation as"
    )
    assert "no tensor 'head.weight'" in difference(to_json(TENSORS[:3]), to_json(TENSORS))
    of_another_layer = (*TENSORS[:3], replace(TENSORS[3], layer="LayerNorm"))
    assert difference(to_json(of_another_layer), to_json(TENSORS)) == (
        "has a model with tensor 'head.weight' of shape [4] in the head, of a LayerNorm, wanted shape [4] in the head, of a Linear as"
    )
    assert difference("", to_json(TENSORS)) == "has no model, unlike"
    assert "another order" in difference(to_json(TENSORS[::-1]), to_json(TENSORS))
