"""Frames as a hostile peer might send them: valid ones of both directions, mutilated as bytes or as protobuf messages.

Shared by the fuzz targets; nothing here is tested itself. Everything is drawn from the `Random` that is handed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Any

import numpy as np

from coterie.arrays import Array, Indices
from coterie.v1 import session_pb2, tensor_pb2
from coterie.wire.codec import PROTOCOL_VERSION, encode
from coterie.wire.messages import Broadcast, Message, PerCluster, Positions, Rows, Scalars, Vectors, Weights, declare
from coterie.wire.precision import Precision

N_OWN = 3
EDGES = (0, 1, 2, 3, 4, 48, 127, 128, 255, 2**14, 2**20, 2**31 - 1, 2**31, 2**32 - 1, 2**34, 2**34 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
KINDS = ("fuzz.Models", "fuzz.Common", "fuzz.Nets", "fuzz.Centres", "fuzz.Nobody", "os.path", "", "fuzz." + "x" * 300)
_SMALL = 200  # entries of a tensor that is not to be lifted out of its frame


@declare(method="fuzz", step="F1")
@dataclass(frozen=True)
class Models(Rows):
    """Vectors, scalars and positions."""

    x: Annotated[Array, Vectors("rows", "d")]
    loss: Annotated[Array, Scalars("rows")]
    pairs: Annotated[Indices, Positions("rows", 2)]


@declare(method="fuzz", step="F2")
@dataclass(frozen=True)
class Common(Broadcast):
    """The same for everyone."""

    centre: Annotated[Array, Vectors("d")]


@declare(method="fuzz", step="F3")
@dataclass(frozen=True)
class Nets(Rows):
    """Weights that the users named have in common."""

    weights: Annotated[Any, Weights("p")]


@declare(method="fuzz", step="F4")
@dataclass(frozen=True)
class Centres(PerCluster):
    """A row per cluster."""

    point: Annotated[Array, Vectors("clusters", "d")]


@dataclass(frozen=True)
class Base:
    """A valid message as frames, and what is in it."""

    name: str
    outer: Any  # JoinRequest or JoinResponse
    frames: tuple[bytes, ...]
    messages: tuple[Message, ...] = ()


def _models(n: int, d: int, users: Sequence[int] | None = None) -> Models:
    whole = np.arange(float(n * d)).reshape(n, d)
    pairs = np.arange(2 * n).reshape(n, 2)
    return Models(whole, np.arange(float(n)), pairs, users=None if users is None else np.array(users))


def bases() -> list[Base]:
    """Tasks and replies of every form, and the frames of a session."""
    contents: dict[str, tuple[Message, ...]] = {
        "small": (_models(N_OWN, 4),),
        "several": (_models(2, 3, [0, 2]), Common(np.ones(5)), Nets(np.ones(7, np.float32), users=np.array([1]))),
        "lifted": (_models(N_OWN, 1000), Common(np.ones(3))),
        "clusters": (Centres(np.arange(2), np.ones((2, 3))),),
    }
    found = []
    for name, messages in contents.items():
        for precision in ("float64", "bfloat16"):
            task = encode(session_pb2.Task(seq=5, attempt=1, round=2), messages, Precision.of(precision))
            reply = encode(session_pb2.Reply(seq=5, attempt=1), messages, Precision.of(precision))
            exact = messages if precision == "float64" else ()
            found.append(Base(f"task, {name}, {precision}", session_pb2.JoinResponse, tuple(task.frames()), exact))
            found.append(Base(f"reply, {name}, {precision}", session_pb2.JoinRequest, tuple(reply.frames()), exact))
    return [*found, *_chunked(), *_of_sessions()]


def _chunked() -> list[Base]:
    """Tensors in chunks, though they are small."""
    tensor = tensor_pb2.Tensor(name="centre", dtype=tensor_pb2.ELEMENT_TYPE_FLOAT64, shape=[12], chunked_bytes=96)
    part = tensor_pb2.Part(kind="fuzz.Common", tensors=[tensor])
    chunk = session_pb2.Chunk(data=np.ones(6).tobytes())
    down = [session_pb2.JoinResponse(task=session_pb2.Task(seq=5, attempt=1, parts=[part]))]
    down += [session_pb2.JoinResponse(chunk=chunk)] * 2
    up = [session_pb2.JoinRequest(reply=session_pb2.Reply(seq=5, attempt=1, parts=[part])), *[session_pb2.JoinRequest(chunk=chunk)] * 2]
    whole = (Common(np.ones(12)),)
    return [
        Base("task, chunked", session_pb2.JoinResponse, tuple(frame.SerializeToString() for frame in down), whole),
        Base("reply, chunked", session_pb2.JoinRequest, tuple(frame.SerializeToString() for frame in up), whole),
    ]


def _of_sessions() -> list[Base]:
    users = [session_pb2.User(name=f"u{i}", cluster="c") for i in range(3)]
    hello = session_pb2.Hello(
        protocol=PROTOCOL_VERSION,
        host="h",
        users=users,
        instance="x",
        schema=[session_pb2.Feature(name="a", kind="number"), session_pb2.Feature(name="b", kind="date", column="c")],
    )
    up = [
        session_pb2.JoinRequest(hello=hello),
        session_pb2.JoinRequest(heartbeat=session_pb2.Heartbeat(seq=3)),
        session_pb2.JoinRequest(failure=session_pb2.Failure(finding=session_pb2.Finding(rule="T3", count=1, role="feature"))),
        session_pb2.JoinRequest(book=session_pb2.Book(names="a", rows=b"123", n_rows=1)),
    ]
    welcome = session_pb2.Welcome(run_id="run-1", member_indices=[0, 1, 2], n_members=3, heartbeat_s=1.0)
    down = [session_pb2.JoinResponse(welcome=welcome), session_pb2.JoinResponse(finish=session_pb2.Finish(outcome="done"))]
    return [
        Base("session, up", session_pb2.JoinRequest, tuple(frame.SerializeToString() for frame in up)),
        Base("session, down", session_pb2.JoinResponse, tuple(frame.SerializeToString() for frame in down)),
    ]


BASES = bases()


def drawn(seed: int, number: int) -> Random:
    """The random numbers of one case."""
    return Random(f"{seed} {number}")  # noqa: S311 - they decide what is tried out


def mutilated(base: Base, random: Random) -> list[bytes]:
    """The frames of a base after one to four mutations, some of which hit the order of the frames."""
    frames = list(base.frames)
    for _ in range(random.randint(1, 4)):
        if not frames or random.random() < 0.1:
            _reorder(frames, random)
            continue
        place = random.randrange(len(frames))
        mutate = _as_message if random.random() < 0.5 else _as_bytes
        frames[place] = mutate(frames[place], base, random)
    return frames


def _reorder(frames: list[bytes], random: Random) -> None:
    choice = random.randrange(4)
    if choice == 0 and frames:
        frames.pop(random.randrange(len(frames)))
    elif choice == 1 and frames:
        frames.insert(random.randrange(len(frames) + 1), random.choice(frames))
    elif choice == 2:
        random.shuffle(frames)
    else:
        frames.insert(random.randrange(len(frames) + 1), random.choice(random.choice(BASES).frames))


def _as_bytes(frame: bytes, _: Base, random: Random) -> bytes:
    """Flips, cuts, doubles, fills and splices."""
    data = bytearray(frame or b"\0")
    at = min(random.randrange(len(data)), random.randrange(len(data)), random.randrange(300))  # the structure is in front
    n = random.choice((1, 1, 2, 5, 30))
    choice = random.randrange(8)
    if choice == 0:
        data[at] ^= 1 << random.randrange(8)
    elif choice == 1:
        data[at : at + n] = random.randbytes(n)
    elif choice == 2:
        del data[at : at + n]
    elif choice == 3:
        data[at:at] = random.randbytes(n)
    elif choice == 4:
        data[at:at] = data[at : at + n]
    elif choice == 5:
        del data[at:]
    elif choice == 6:
        data[at : at + 1] = _varint(random.choice(EDGES))
    else:
        other = random.choice(random.choice(BASES).frames)
        start = random.randrange(len(other) + 1)
        data[at : at + n] = other[start : start + random.choice((1, 10, 100))]
    return bytes(data)


def _varint(value: int) -> bytes:
    text = bytearray()
    while value > 0x7F:
        text.append(value & 0x7F | 0x80)
        value >>= 7
    text.append(value)
    return bytes(text)


def _as_message(frame: bytes, base: Base, random: Random) -> bytes:
    """Changes one field of what protobuf finds in the frame; bytes that it finds nothing in are changed as bytes."""
    try:
        outer = base.outer.FromString(frame)
    except Exception:  # protobuf's DecodeError type is not part of its typed interface
        return _as_bytes(frame, base, random)
    which = outer.WhichOneof("frame")
    if which == "chunk":
        outer.chunk.data = bytes(random.choice((0, 1, 47, 49, 96, 97)))
        return bytes(outer.SerializeToString())
    if which not in ("task", "reply"):
        return _as_bytes(frame, base, random)
    inner = getattr(outer, which)
    if random.random() < 0.2 or not inner.parts:
        fence = random.choice(("seq", "attempt", "durable_seq"))
        setattr(inner, fence, random.choice(EDGES) % 2 ** (32 if fence == "attempt" else 64))
        if random.random() < 0.3:
            inner.parts.add(kind=random.choice(KINDS))
    else:
        _change_part(random.choice(inner.parts), random)
    return bytes(outer.SerializeToString())


def _change_part(part: tensor_pb2.Part, random: Random) -> None:
    if random.random() < 0.15 or not part.tensors:
        part.kind = random.choice(KINDS)
        return
    if random.random() < 0.15:
        part.tensors.add().CopyFrom(random.choice(part.tensors))
        return
    tensor = part.users if random.random() < 0.2 else random.choice(part.tensors)
    changes: tuple[Callable[[], Any], ...] = (
        lambda: _reshape(tensor, random),
        lambda: _reshape(tensor, random),
        lambda: setattr(tensor, "dtype", random.choice((*range(9), 99))),
        lambda: setattr(tensor, "name", random.choice(("x", "loss", "", "y" * 5000))),
        lambda: setattr(tensor, "data", tensor.data[: random.choice((0, 1, 8, _SMALL))] + random.randbytes(random.choice((0, 1, 8)))),
        lambda: setattr(tensor, "chunked_bytes", random.choice(EDGES)),
        lambda: setattr(tensor, "data", random.randbytes(len(tensor.data))),  # NaN, infinity, users of any number
    )
    random.choice(changes)()


def _reshape(tensor: tensor_pb2.Tensor, random: Random) -> None:
    shape = list(tensor.shape)
    if random.random() < 0.3:  # as many numbers as before
        shape = random.choice((shape[::-1], [*shape, 1], [1, *shape], [min(math.prod(shape), 2**64 - 1)]))
    elif shape and random.random() < 0.7:
        shape[random.randrange(len(shape))] = random.choice(EDGES)
    else:
        shape.insert(random.randrange(len(shape) + 1), random.choice(EDGES))
    if random.random() < 0.1:
        shape *= 100
    del tensor.shape[:]
    tensor.shape.extend(shape)
