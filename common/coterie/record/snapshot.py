"""Snapshots: a tree of plain values and arrays in one checksummed file, written atomically; two generations are kept.

A tree consists of dataclasses, dicts with string keys, lists and tuples, arrays, bytes, strings, numbers, booleans and None. Nothing is
unpickled, and only dataclasses of `PACKAGES` are imported. The coordinator uses snapshots as checkpoints, a host for the state of its
users.
"""

import dataclasses
import hashlib
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import RunError
from coterie.findings import Finding
from coterie.record.files import written_whole
from coterie.text.quoting import quoted

# Top-level packages whose dataclasses a snapshot may name. The importer of a plug-in adds its package.
PACKAGES = {"coterie", "coterie_client", "coterie_server"}
_MAGIC = b"COTERIE1"
_DIGEST_BYTES = 32
_WANTED = "arrays, numbers, strings, bytes, None, lists, tuples, dicts with string keys or dataclasses of these"


def dumps(tree: Any) -> bytes:
    """The tree as bytes: magic, digest, length of the JSON skeleton, skeleton, buffers. TypeError for values of other types."""
    return b"".join(_pieces(tree))


def _pieces(tree: Any) -> list[bytes | memoryview]:
    # The bytes of arrays and bytes objects, in order. They are not copied, since they may take most of a process's memory.
    buffers: list[bytes | memoryview] = []
    at = 0

    def put(data: bytes | memoryview) -> dict[str, int]:
        nonlocal at
        buffers.append(data)
        at += len(data)
        return {"at": at - len(data), "bytes": len(data)}

    skeleton = json.dumps(_flatten(tree, put), allow_nan=True).encode()
    body = [len(skeleton).to_bytes(8, "little"), skeleton, *buffers]
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for piece in body:
        digest.update(piece)
    return [_MAGIC, digest.digest(), *body]


def check_saveable(tree: Any, what: str) -> None:
    """RunError that names the field of a value that a snapshot cannot hold; `what` is the name of the tree."""
    try:
        _flatten(tree, lambda _: {}, what)
    except TypeError as error:
        raise RunError(f"{error}; what is kept between rounds must be saved") from None


def loads(data: bytes) -> Any:
    """The inverse of `dumps`. ValueError when the checksum does not fit."""
    start = len(_MAGIC) + _DIGEST_BYTES
    if data[: len(_MAGIC)] != _MAGIC:
        raise ValueError("not a snapshot")
    body = memoryview(data)[start:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != data[len(_MAGIC) : start]:
        raise ValueError("the checksum does not fit the contents")
    length = int.from_bytes(body[:8], "little")
    return _restore(json.loads(bytes(body[8 : 8 + length])), body[8 + length :])


def _flatten(value: Any, put: Callable[[bytes | memoryview], dict[str, int]], place: str = "the tree") -> Any:
    """The skeleton of a value. TypeError names the place of a value of another type."""
    if value is None or isinstance(value, bool | str | int | float):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{place} is an array of objects, want numbers")
        buffer = put(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        return {"!": "array", "dtype": value.dtype.str, "shape": list(value.shape), **buffer}
    if isinstance(value, bytes | bytearray | memoryview):
        return {"!": "bytes", **put(value if isinstance(value, bytes) else memoryview(value).cast("B"))}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        cls = type(value)
        names = [field.name for field in dataclasses.fields(value)]
        content = {name: _flatten(getattr(value, name), put, f"{cls.__name__}.{name}") for name in names}
        return {"!": "dataclass", "class": f"{cls.__module__}:{cls.__qualname__}", "fields": content}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{place} is a dict with other keys than strings, want strings")
        return {"!": "dict", "items": {key: _flatten(item, put, f"{place}[{key!r}]") for key, item in value.items()}}
    if isinstance(value, list | tuple):
        name = "list" if isinstance(value, list) else "tuple"
        return {"!": name, "items": [_flatten(item, put, place) for item in value]}
    raise TypeError(f"{place} is of type {type(value).__name__}, want {_WANTED}")


def _restore(value: Any, body: memoryview) -> Any:
    if not isinstance(value, dict):
        return value
    kind = value["!"]
    if kind == "array":
        raw = bytes(body[value["at"] : value["at"] + value["bytes"]])
        return np.frombuffer(raw, dtype=np.dtype(value["dtype"])).reshape(value["shape"])
    if kind == "bytes":
        return bytes(body[value["at"] : value["at"] + value["bytes"]])
    if kind == "dataclass":
        return _dataclass(value["class"], {key: _restore(item, body) for key, item in value["fields"].items()})
    if kind == "dict":
        return {key: _restore(item, body) for key, item in value["items"].items()}
    items = [_restore(item, body) for item in value["items"]]
    return items if kind == "list" else tuple(items)


def _dataclass(path: str, content: dict[str, Any]) -> Any:
    """The dataclass MODULE:NAME with these fields. ValueError when it is not in `PACKAGES`, does not exist, or has other fields."""
    module, _, name = path.partition(":")
    if module.partition(".")[0] not in PACKAGES:
        raise ValueError(f"it names the class {quoted(path)}, want one of coterie or of an installed plug-in")
    try:
        cls: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):  # one of its own imports
            raise
        cls = None
    for part in name.split("."):
        cls = getattr(cls, part, None)
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    is_named = getattr(cls, "__module__", None) == module and getattr(cls, "__qualname__", None) == name  # defined there, not imported
    if not is_named or not dataclasses.is_dataclass(cls) or not needed <= content.keys() <= {field.name for field in fields}:
        raise ValueError(f"written by another version of coterie: it has a {name} of {', '.join(content) or 'nothing'}")
    build: Any = cls
    return build(**content)


@dataclasses.dataclass(frozen=True)
class SnapshotFile:
    """Two generations of one snapshot in a folder: NAME.snapshot, and the older NAME.snapshot.1."""

    folder: Path
    name: str

    def save(self, tree: Any) -> None:
        """Writes the newest generation and keeps the previous one. RunError when the disk refuses."""
        with written_whole(self.folder / f"{self.name}.snapshot", "the snapshot", keep=self.older) as file:
            file.writelines(_pieces(tree))

    @property
    def older(self) -> Path:
        return self.folder / f"{self.name}.snapshot.1"

    def load(self) -> Any | None:
        """The newest generation with a valid checksum, or None if there is no file. RunError if all are damaged."""
        damaged = []
        for path in (self.folder / f"{self.name}.snapshot", self.older):
            if not path.exists():
                continue
            try:
                return loads(path.read_bytes())
            except (ValueError, KeyError) as error:
                damaged.append(f"{path} ({error})")
        if damaged:
            raise RunError(f"no snapshot can be read: {', '.join(damaged)}", Finding("J5"))
        return None
