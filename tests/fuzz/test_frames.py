"""The frame decoder against mutilated frames: it says ProtocolError or decodes what has the declared shapes, and goes on working."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, note, settings
from hypothesis import strategies as st

from coterie.errors import ProtocolError
from coterie.v1 import session_pb2
from coterie.wire.assembler import Assembler
from coterie.wire.codec import Received, check_announced
from coterie.wire.messages import Rows, check_extents
from tests.fuzz.mutations import BASES, N_OWN, Base, drawn, mutilated

_BATCH = 50  # cases of one draw: hypothesis itself takes longer than a case
_WIDEST = 8  # times as many bytes as on the wire: a byte may become an integer of 64 bits
_SLACK = 1000
_LONGEST = 10_000  # characters of a refusal, most of which are the kinds that there are
BY_NAME = {base.name: base for base in BASES}
WHOLE = [base.name for base in BASES if base.messages]


def _settings(n_examples: int, *, is_fixed: bool) -> settings:
    return settings(
        max_examples=n_examples,
        phases=(Phase.generate,),  # a smaller seed is no simpler
        derandomize=is_fixed,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


def decode(assembler: Assembler, frames: Sequence[bytes]) -> int:
    """Feeds the frames, checks all that comes out, and tells how many messages did. ProtocolError when one is refused."""
    n_bytes = sum(map(len, frames))
    n_messages = 0
    for frame in frames:
        item = assembler.feed(frame)
        if isinstance(item, Received):
            messages, entries = item.decode(N_OWN, {"d": 4} if len(frame) % 2 else None)
            for message in messages:
                rows = message.users.size if isinstance(message, Rows) and message.users is not None else N_OWN
                try:
                    shapes = [getattr(message, name).shape for name, _ in message.specs]
                    check_extents(type(message), shapes, rows if isinstance(message, Rows) else None, {})
                except ProtocolError as error:
                    raise AssertionError("this should have been refused") from error
                assert sum(getattr(message, name).nbytes for name, _ in message.specs) <= _WIDEST * n_bytes + _SLACK
            for entry in entries:
                assert min(entry.vectors, entry.scalars, entry.payload_bytes, entry.message_bytes, entry.frames) >= 0
            n_messages += len(messages)
    return n_messages


def check_still_works(base: Base, assembler: Assembler) -> None:
    """What was refused has taught the assembler nothing wrong."""
    item = None
    for frame in base.frames:
        item = assembler.feed(frame)
    assert isinstance(item, Received)
    messages, _ = item.decode(N_OWN)
    for message, wanted in zip(messages, base.messages, strict=True):
        for name, _ in wanted.specs:
            np.testing.assert_array_equal(getattr(message, name), getattr(wanted, name))


def _outcome(assembler: Assembler, frames: Sequence[bytes]) -> tuple[int, str]:
    """How many messages were decoded, or why they were refused."""
    try:
        return decode(assembler, frames), ""
    except ProtocolError as error:
        return 0, str(error)


def _case(base: Base, after: Base, random: Random) -> int:
    """One mutilated message, and then a whole one, or between two; how many messages were decoded of the first."""
    frames = mutilated(base, random)
    announced: Any = functools.partial(check_announced, n_own=N_OWN, dims={}) if random.random() < 0.5 else None
    assembler = Assembler(base.outer, announced)
    if is_taught := bool(base.messages) and random.random() < 0.5:
        check_still_works(base, assembler)  # it has learnt what such frames look like
    n_messages, sentence = _outcome(assembler, frames)
    assert len(sentence) < _LONGEST
    if is_taught:
        assert (n_messages, sentence) == _outcome(Assembler(base.outer, announced), frames), "what was learnt decides nothing"
    if assembler.held.flowing is None and after.outer is base.outer:  # else whole messages would have to wait for the chunks of this one
        check_still_works(after, assembler)
    return n_messages


@pytest.mark.parametrize(("n", "is_fixed"), [(1500, True), pytest.param(80_000, False, marks=pytest.mark.slow)])
def test_mutilated_frames_are_refused_or_decoded_as_declared(n: int, is_fixed: bool) -> None:
    n_cases = n_messages = 0

    @_settings(-(-n // _BATCH), is_fixed=is_fixed)
    @given(st.sampled_from(list(BY_NAME)), st.sampled_from(WHOLE), st.integers(0, 2**64 - 1))
    def batch(name: str, name_after: str, seed: int) -> None:
        nonlocal n_cases, n_messages
        base, after = BY_NAME[name], BY_NAME[name_after]
        for number in range(_BATCH):
            try:
                n_messages += _case(base, after, drawn(seed, number))
            except BaseException:
                note(f"case {number}: {[frame[:300].hex() for frame in mutilated(base, drawn(seed, number))]}")
                raise
            n_cases += 1

    batch()
    print(f"{n_cases} mutilated messages, of which {n_messages} were decoded all the same")
    assert n_cases >= n
    assert n / 20 < n_messages < n, "mutations are neither harmless nor hopeless"


TENSORS = st.fixed_dictionaries(
    {},
    optional={
        "name": st.sampled_from(["x", "loss", "pairs", "centre", ""]),
        "dtype": st.integers(0, 9),
        "shape": st.lists(st.sampled_from([0, 1, 2, 3, 2**32, 2**64 - 1]), max_size=10),
        "data": st.binary(max_size=64),
        "chunked_bytes": st.sampled_from([0, 1, 24, 2**34, 2**64 - 1]),
    },
)
PARTS = st.fixed_dictionaries(
    {"kind": st.sampled_from(["fuzz.Models", "fuzz.Common", "fuzz.Nets", "fuzz.Centres", "x"])},
    optional={"users": TENSORS, "tensors": st.lists(TENSORS, max_size=4)},
)
REPLIES = st.fixed_dictionaries({"parts": st.lists(PARTS, max_size=4)}, optional={"seq": st.integers(0, 2**64 - 1)})
FRAMES = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda tag, rest: bytes((tag,)) + rest, st.sampled_from([0x0A, 0x12, 0x1A, 0x22, 0x2A, 0x32]), st.binary(max_size=100)),
    st.builds(lambda fields: session_pb2.JoinRequest(reply=fields).SerializeToString(), REPLIES),
    st.builds(lambda fields: session_pb2.JoinResponse(task=fields).SerializeToString(), REPLIES),
    st.builds(lambda data: session_pb2.JoinRequest(chunk={"data": data}).SerializeToString(), st.binary(max_size=48)),
)


@pytest.mark.parametrize(("n", "is_fixed"), [(150, True), pytest.param(1000, False, marks=pytest.mark.slow)])
def test_frames_made_of_anything_are_refused_or_decoded_as_declared(n: int, is_fixed: bool) -> None:
    n_cases = 0

    @_settings(n, is_fixed=is_fixed)
    @given(st.sampled_from([session_pb2.JoinRequest, session_pb2.JoinResponse]), st.lists(FRAMES, min_size=1, max_size=6))
    def stream(outer: Any, frames: list[bytes]) -> None:
        nonlocal n_cases
        n_cases += 1
        with contextlib.suppress(ProtocolError):
            decode(Assembler(outer), frames)

    stream()
    print(f"{n_cases} streams of anything")
    assert n_cases >= n
