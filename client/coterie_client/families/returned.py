"""Checks what the functions of a local update return, before anything is kept or sent: a sentence names the field and what it wants."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from coterie.errors import RunError
from coterie.experiment.model import TensorInfo
from coterie_client.interface.local_update import Moved, Received
from coterie_client.learning import Tensors

_NUMBERS = "fiub"  # kinds of arrays


@dataclass(frozen=True)
class Returned:
    """The checks for one method. Each raises RunError for a value that does not fit."""

    method: str
    n_users: int | None = None  #: of an update of several users at once: the first axis of its arrays

    def started(self, found: object) -> Tensors:
        """What `start` returned: arrays by name."""
        return self._arrays("start", "returned", found, {}, "")

    def moved(self, found: object, listed: Sequence[TensorInfo], kept: Tensors) -> Moved:
        """What `update` returned: the listed tensors in their shapes, and what the user kept before in the same shapes and types."""
        wanted = "want Moved(tensors, kept, loss)"
        if not isinstance(found, Moved):
            raise self._wrong("update", f"returned a value of type {_type(found)}, {wanted}")
        self._tensors("update", "Moved.tensors", found.tensors, listed)
        self._kept(found.kept, kept)
        is_array = isinstance(found.loss, int | float | np.number | np.ndarray)
        if not is_array or np.shape(found.loss) != self._axes or not _is_numeric(found.loss):
            raise self._wrong("update", f"returned Moved.loss of type {_type(found.loss)}, want one number{self._each}; {wanted}")
        return found

    def received(self, found: object) -> Received:
        """What `received` returned: arrays by name, which may have other names than before."""
        if not isinstance(found, Received):
            raise self._wrong("received", f"returned a value of type {_type(found)}, want Received(kept)")
        self._arrays("received", "returned Received.kept", found.kept, {}, "")
        return found

    def judged(self, found: object, listed: Sequence[TensorInfo]) -> Tensors:
        """What `judged` returned: the listed tensors in their shapes."""
        return self._tensors("judged", "the model", found, listed)

    def _tensors(self, function: str, field: str, found: object, listed: Sequence[TensorInfo]) -> Tensors:
        shapes = {tensor.name: (*self._axes, *tensor.shape) for tensor in listed}
        arrays = self._arrays(function, f"returned {field}", found, shapes, "tensors of the model")
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise self._wrong(function, f"returned {name!r} with shape {arrays[name].shape}, want {shape}")
        return arrays

    def _kept(self, found: object, kept: Tensors) -> None:
        begin = "returned Moved.kept"
        for name, array in self._arrays("update", begin, found, kept, "that `start` returns").items():
            if name not in kept:
                raise self._wrong("update", f"{begin} with {name!r}, which `start` does not return: want the names of `start`")
            if array.shape != kept[name].shape or not np.can_cast(array.dtype, kept[name].dtype, "same_kind"):
                said = f"{array.dtype} numbers of shape {array.shape}, want {kept[name].dtype} of shape {kept[name].shape} as from `start`"
                raise self._wrong("update", f"{begin} with {name!r} as {said}")

    def _arrays(self, function: str, begin: str, found: object, wanted: Mapping[str, object], whose: str) -> Tensors:
        """The value, if it is arrays by name with all of the wanted names."""
        if not isinstance(found, Mapping):
            hint = " (such as fitted.tensors)" if hasattr(found, "tensors") else ""
            raise self._wrong(function, f"{begin} of type {_type(found)}, want arrays by name{hint}")
        if missing := next((name for name in wanted if name not in found), None):
            raise self._wrong(function, f"{begin} without {missing!r}, want all {whose}")
        for name, array in found.items():
            if not isinstance(array, np.ndarray | np.generic) or not _is_numeric(array):
                raise self._wrong(function, f"{begin} with {name!r} of type {_type(array)}, want a NumPy array of numbers")
        return found

    @property
    def _axes(self) -> tuple[int, ...]:
        return () if self.n_users is None else (self.n_users,)

    @property
    def _each(self) -> str:
        return "" if self.n_users is None else f" of each of {self.n_users} users, or an UPDATE without together=True"

    def _wrong(self, function: str, what: str) -> RunError:
        return RunError(f"method {self.method!r}: {function} {what}")


def _is_numeric(value: Any) -> bool:
    return np.asarray(value).dtype.kind in _NUMBERS


def _type(value: object) -> str:
    return type(value).__name__
