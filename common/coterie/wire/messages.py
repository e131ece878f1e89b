"""Declarations of what may cross the wire.

A method declares its messages, which become frozen dataclasses, in `coterie/methods/NAME.py`:

    @declare(method="pdmm", step="S5")
    class UpdatedModels(Rows):
        \"\"\"S5: each selected user sends x_i^{t+1} to the server.\"\"\"

        x: Annotated[Array, Vectors("rows", "d")]

Undeclared values are private: encoding them is a TypeError. `Rows` messages have one owner per row. A parent's rows are split over the
hosts of their owners; rows of hosts are joined in member order. `Broadcast` messages are the same for all receivers; they count once in
vectors and once per receiving host in bytes. `PerCluster` messages have one row per known cluster. Data common to a cluster's users is sent
once to each of their hosts, and an aggregator's message about its cluster contains no user's row.
"""

import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from typing import Annotated, ClassVar, Literal, TypeVar

import numpy as np

from coterie.arrays import Array, Indices
from coterie.errors import ProtocolError

Shape = tuple[str | int, ...]
Allowed = Literal["finite", "infinity", "nan"]  # each includes the ones before it
Packs = Literal["", "extents", "values", "aside"]  # of a compressed field: its shape, its numbers, and what is needed to read them


@dataclass(frozen=True)
class Spec:
    """How one field is sent. `shape` names its axes: "rows" is the axis of owners; other names must agree within a message."""

    shape: Shape
    is_float: bool
    counts_vectors: bool
    is_exact: bool = False  # always float64, whatever the payload type of the run
    allows: Allowed = "finite"  # the parent refuses a message with other numbers
    is_weights: bool = False  # parameters of a model: for networks float32 in the halves, and no wider on the wire
    is_fixed: bool = False  # fixed-point sums: payload in whole numbers of 64 bits, whose second axis are the words of a number
    packs: Packs = ""  # bytes of a compressed field: see `packed_kind`

    @property
    def is_payload(self) -> bool:
        """Whether the ledger counts its bytes as payload."""
        return self.is_float or self.is_fixed or self.packs == "values"

    def count(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(vectors, scalars) that the ledger books for an array of this shape. The words of a fixed-point number count as one scalar."""
        if self.packs == "extents":
            shape = shape[:-1]
        elif not (self.is_float or self.is_fixed):
            return 0, 0
        scalars = math.prod(shape)
        if self.is_fixed and scalars:
            scalars //= shape[1]
        return scalars // shape[-1] if self.counts_vectors and scalars else 0, scalars


def Vectors(*shape: str | int, exact: bool = False) -> Spec:  # noqa: N802 - reads as a type in annotations
    """Float payload whose last axis is a d-vector, counted in vectors and scalars. `exact` keeps float64 in a float32 run."""
    return Spec(shape, is_float=True, counts_vectors=True, is_exact=exact)


def Scalars(*shape: str | int, exact: bool = True, allows: Allowed = "finite") -> Spec:  # noqa: N802
    """Float payload counted only in scalars: losses, sums, matrices. `allows` infinity, or NaN too, if that is a valid answer."""
    return Spec(shape, is_float=True, counts_vectors=False, is_exact=exact, allows=allows)


def Weights(*shape: str | int) -> Spec:  # noqa: N802
    """The parameters of models, counted like `Vectors`.

    For networks, halves use float32, and the wire the payload type or float32. For convex problems they are float64, rounded to the payload
    type on the wire.
    """
    return Spec(shape, is_float=True, counts_vectors=True, is_weights=True)


def Positions(*shape: str | int) -> Spec:  # noqa: N802
    """Integers that identify the payload. They count as message bytes, not as payload."""
    return Spec(shape, is_float=False, counts_vectors=False)


@dataclass(frozen=True)
class Message:
    """Root of all declared messages. Use `Rows` or `Broadcast`."""

    kind: ClassVar[str] = ""  # "<method>.<Class>"
    method: ClassVar[str] = ""
    step: ClassVar[str] = ""  # the paper's own step, as the ledger shows it
    specs: ClassVar[tuple[tuple[str, Spec], ...]] = ()
    carries_weights: ClassVar[bool] = False
    is_whole: ClassVar[bool] = False  # never compressed: both ends keep it, or judge it
    total: ClassVar["type[Total] | None"] = None  # its sums over users, where they may be sent instead of the terms
    ask_total: ClassVar["type[AskTotal] | None"] = None


@dataclass(frozen=True)
class Rows(Message):
    """Row r of every "rows" axis belongs to user `users[r]`; None means all users, in order.

    In a parent's half `users` are member indices, in a host's half positions among the host's own users. A user may own several rows (the
    pairs of PDMM); their order is kept.

    A float field without a "rows" axis is common to the named users. It is sent once to each of their hosts, and counts once for each user
    in vectors and scalars. A message with such a field must name its users.
    """

    users: Indices | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Broadcast(Message):
    """The same for every receiver.

    With aggregators it counts once between clusters and once inside each of them. `Rows` with a float field without a "rows" axis count
    once for each user with and without aggregators.
    """


@dataclass(frozen=True)
class PerCluster(Broadcast):
    """Row r of every "clusters" axis belongs to the known cluster number `clusters[r]`, ascending, numbered in the whole run.

    A host receives the rows of its users' clusters. An aggregator sends up the rows of its own cluster.
    """

    clusters: Annotated[Indices, Positions("clusters")]


@dataclass(frozen=True)
class PerHost(Message):
    """What a host says of itself, not of its users. A parent's exchange does not put several together."""


@dataclass(frozen=True)
class Total(Message):
    """The sums over users, or over clusters, of the fields of `of`, in fixed point and modulo 2^64.

    Row r is that of group `groups[r]`, ascending.

    Each field has the axes (groups, words of a number, axes of the field without rows). See `coterie.wire.fixed_point`.
    """

    of: ClassVar[type[Rows | PerCluster]]
    groups: Annotated[Indices, Positions("groups")]


@dataclass(frozen=True)
class AskTotal(Rows):
    """Asks hosts for the `Total` of their users' `of` instead of the terms, or aggregators for that of their clusters.

    `weight` (rows, 1) are whole numbers, (rows, 0) where all are 1. `group` (rows, 1) are numbers from 0, (rows, 0) for one group of all.
    Row k of `form` is the `Form` of the k-th field.
    """

    of: ClassVar[type[Rows | PerCluster]]
    weight: Annotated[Indices, Positions("rows", "weights")]
    group: Annotated[Indices, Positions("rows", "groupings")]
    form: Annotated[Indices, Positions("fields", 3)]


@dataclass(frozen=True)
class Aside(Message):
    """What is needed to read compressed fields besides their numbers: scales and positions. It follows the message with the numbers."""

    of: ClassVar[type[Message]]


M = TypeVar("M", bound=Message)
PACKED, ASIDE = "Packed", "Aside"  # ends of the names of kinds

_KINDS: dict[str, type[Message]] = {}
_PACKED: dict[str, type[Message]] = {}  # kinds with compressed fields, made on demand
_finders: list[Callable[[str], object]] = []
_KIND = re.compile(r"[a-z][a-z0-9_]*\.[A-Za-z0-9]+")
_MAX_SHOWN = 100  # characters


@typing.dataclass_transform(frozen_default=True)
def declare(*, method: str, step: str, total: bool = False, whole: bool = False) -> Callable[[type[M]], type[M]]:
    """Makes a message class a frozen dataclass, and registers it under "<method>.<Class>" with the paper's step.

    With `total`, sums over users may be sent instead of its rows, or over clusters: `federation.total` asks for them. All fields must have
    rows. With `whole` it is never compressed, because both ends keep it or judge it.
    """

    def register(cls: type[M]) -> type[M]:
        if "__dataclass_fields__" not in vars(cls):
            dataclass(frozen=True)(cls)
        hints = typing.get_type_hints(cls, include_extras=True)
        specs = []
        for declared in fields(cls):
            if declared.name == "users" and issubclass(cls, Rows):
                continue
            extras = getattr(hints[declared.name], "__metadata__", ())
            spec = next((extra for extra in extras if isinstance(extra, Spec)), None)
            if spec is None:
                raise TypeError(f"{cls.__name__}.{declared.name} needs Annotated[..., Vectors | Scalars | Positions]")
            specs.append((declared.name, spec))
        cls.kind, cls.method, cls.step, cls.specs = f"{method}.{cls.__name__}", method, step, tuple(specs)
        cls.carries_weights = any(spec.is_weights for _, spec in specs)
        cls.total, cls.ask_total, cls.is_whole = None, None, whole
        _KINDS[cls.kind] = cls
        if total:
            _declare_total(cls)
        return cls

    return register


def _declare_total(cls: type[Message]) -> None:
    """Declares the sums of a kind, and the question for them. TypeError for fields that have no sums over users or clusters."""
    axis = "clusters" if issubclass(cls, PerCluster) else "rows"
    if wrong := [name for name, spec in summed(cls) if spec.shape[:1] != (axis,) or spec.allows != "finite"]:
        raise TypeError(f"{cls.__name__}.{wrong[0]} has no sum over users, want a field with rows of finite numbers")
    columns = [(name, Annotated[Indices, _fixed(name, spec)]) for name, spec in summed(cls)]
    names = {"of": cls, "__module__": cls.__module__}
    total = make_dataclass(f"{cls.__name__}Total", columns, bases=(Total,), frozen=True, namespace=names)
    ask = make_dataclass(f"Ask{cls.__name__}Total", [], bases=(AskTotal,), frozen=True, namespace=names)
    total.__doc__, ask.__doc__ = f"Sums of {cls.__name__} over users.", f"Asks for the sums of {cls.__name__} instead of its rows."
    register = declare(method=cls.method, step=cls.step)
    cls.total, cls.ask_total = register(total), register(ask)


def _fixed(name: str, spec: Spec) -> Spec:
    shape = ("groups", words_of(name), *spec.shape[1:])
    return Spec(shape, is_float=False, counts_vectors=spec.counts_vectors, is_fixed=spec.is_float)


def is_packable(spec: Spec) -> bool:
    """Whether a field may be compressed: vectors and weights that need not be exact."""
    return spec.is_float and spec.counts_vectors and not spec.is_exact


def packed_kind(cls: type[Message]) -> type[Message]:
    """The kind that carries the message with its vectors and weights compressed, and the other fields as they are.

    A field x has an array without bytes there, whose shape with a last axis of 0 says the extents, and its numbers as bytes (`x_values`).
    `Aside` of it has the bytes that are needed to read them (`x_aside`), if there are any.
    """
    kind = f"{cls.kind}{PACKED}"
    if kind not in _PACKED:
        whose = next((base for base in (Rows, PerCluster) if issubclass(cls, base)), Broadcast)
        columns: list[tuple[str, object]] = []
        beside: list[tuple[str, object]] = []
        for name, spec in cls.specs:
            if is_packable(spec):
                extents = Spec((*spec.shape, 0), is_float=False, counts_vectors=True, packs="extents")
                columns += [(name, Annotated[Array, extents]), (f"{name}_values", Annotated[Array, _bytes(name, "values")])]
                beside.append((f"{name}_aside", Annotated[Array, _bytes(name, "aside")]))
            else:
                columns.append((name, Annotated[Array, spec]))
        for end, base, listed in ((PACKED, whose, columns), (ASIDE, Aside, beside)):
            names = {"of": cls, "__module__": cls.__module__}
            made = make_dataclass(f"{cls.__name__}{end}", listed, bases=(base,), frozen=True, namespace=names)
            made.kind, made.method, made.step = f"{cls.kind}{end}", cls.method, cls.step  # type: ignore[attr-defined]
            made.specs = tuple((name, annotated.__metadata__[0]) for name, annotated in listed)  # type: ignore[attr-defined]
            _PACKED[f"{cls.kind}{end}"] = made
    return _PACKED[kind]


def aside_kind(cls: type[Message]) -> type[Message]:
    """The `Aside` of `packed_kind`."""
    packed_kind(cls)
    return _PACKED[f"{cls.kind}{ASIDE}"]


def unpacked_kind(cls: type[Message]) -> type[Message] | None:
    """The kind whose compressed numbers this kind carries; None for every other kind."""
    return cls.of if cls.kind in _PACKED and not issubclass(cls, Aside) else None  # type: ignore[attr-defined]


def _bytes(name: str, packs: Packs) -> Spec:
    return Spec((f"bytes of {name}_{packs}",), is_float=False, counts_vectors=False, packs=packs)


def summed(cls: type[Message]) -> list[tuple[str, Spec]]:
    """The fields of a kind that have sums: all but the numbers of clusters."""
    return [(name, spec) for name, spec in cls.specs if not (name == "clusters" and issubclass(cls, PerCluster))]


def words_of(name: str) -> str:
    """The axis of the words of a field of a `Total`."""
    return f"words of {name}"


def has_rows(spec: Spec) -> bool:
    """Whether the first axis of the field is the axis of owners."""
    return bool(spec.shape) and spec.shape[0] == "rows"


def declared(room: str) -> tuple[type[Message], ...]:
    """The kinds of messages that a method, or steps of every run, have declared, as far as their module has been imported."""
    return tuple(cls for cls in _KINDS.values() if cls.method == room)


def find_kinds_with(finder: Callable[[str], object]) -> None:
    """Registers a function that imports a method's declarations, if it has any, given its name."""
    _finders.append(finder)


def kind_class(kind: str) -> type[Message]:
    """The declared class of a kind, after importing its method's declarations if necessary. ProtocolError for an undeclared kind."""
    cls = _KINDS.get(kind) or _PACKED.get(kind)
    if cls is None and _KIND.fullmatch(kind):
        for find in _finders:
            find(kind.partition(".")[0])
        cls = _KINDS.get(kind)
        base = next((_KINDS.get(kind.removesuffix(end)) for end in (PACKED, ASIDE) if kind.endswith(end)), None)
        if cls is None and base is not None and any(is_packable(spec) for _, spec in base.specs):
            packed_kind(base)
            cls = _PACKED[kind]
    if cls is None:
        raise ProtocolError(f"message kind {kind[:_MAX_SHOWN]!r} is not declared; known kinds: {', '.join(sorted(_KINDS))}")
    return cls


def check_extents(cls: type[Message], shapes: Iterable[tuple[int, ...]], n_rows: int | None, dims: Mapping[str, int]) -> None:
    """ProtocolError unless fields of these shapes have their declared axes.

    `n_rows` is the number of owners if known. `dims` are known extents (for example d); others must agree within the message.
    """
    bound = dict(dims)
    if n_rows is not None:
        bound["rows"] = n_rows
    for (name, spec), shape in zip(cls.specs, shapes, strict=True):
        if len(shape) != len(spec.shape):
            raise ProtocolError(f"{cls.kind}.{name} has shape {shape}, wanted axes {spec.shape}")
        for extent, axis in zip(shape, spec.shape, strict=True):
            wanted = bound.setdefault(axis, extent) if isinstance(axis, str) else axis
            if extent != wanted:
                raise ProtocolError(f"{cls.kind}.{name} has shape {shape}: axis {axis!r} is {extent}, wanted {wanted}")


def select(message: Message, positions: Indices | slice | None, users: Indices | None) -> Message:
    """The rows of a `Rows` message at `positions`, owned by `users`. Broadcasts are unchanged."""
    if isinstance(message, Broadcast) or positions is None:
        return message
    arrays = {name: getattr(message, name)[positions] if has_rows(spec) else getattr(message, name) for name, spec in message.specs}
    return type(message)(users=users, **arrays)  # type: ignore[call-arg]


def select_clusters(message: PerCluster, clusters: Indices) -> PerCluster | None:
    """The rows of these clusters (ascending numbers); None if there are none."""
    kept = np.flatnonzero(np.isin(message.clusters, clusters))
    if kept.size == message.clusters.size:
        return message
    taken = {name: getattr(message, name)[kept] if "clusters" in spec.shape[:1] else getattr(message, name) for name, spec in message.specs}
    return type(message)(**taken) if kept.size else None


__all__ = [
    "Annotated", "Array", "Aside", "AskTotal", "Broadcast", "Indices", "Message", "PerCluster", "PerHost", "Positions", "Rows", "Scalars",
    "Spec", "Total", "Vectors", "Weights", "aside_kind", "check_extents", "dataclass", "declare", "declared", "find_kinds_with", "has_rows",
    "is_packable", "kind_class", "packed_kind", "select", "select_clusters", "summed", "unpacked_kind", "words_of",
]  # fmt: skip
