"""The types of rows in memory: numbers as float64, images as uint8 with channels first, symbol sequences as int64."""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError

Reading = Literal["numbers", "bytes", "symbols"]
Channels = Literal["first", "last", "none"]

_CHANNELS = (1, 3, 4)


def as_rows(array: NDArray[Any], what: str, read_as: Reading | None = None, channels: Channels | None = None) -> NDArray[Any]:
    """The features of rows (n, ...) of integers or floats. `what` names them in messages.

    By default, tables and floats are numbers, other arrays are bytes if uint8, else symbols.
    """
    default = "numbers" if array.ndim <= 2 or array.dtype.kind == "f" else "bytes" if array.dtype == np.uint8 else "symbols"
    reading = read_as or default
    if reading == "bytes":
        if array.dtype != np.uint8:
            raise ConfigError(f"{what} has dtype {array.dtype}, want uint8 to be read as bytes")
        return with_channels(array, what, channels)
    if reading == "symbols":
        if array.dtype.kind not in "iu":
            raise ConfigError(f"{what} has dtype {array.dtype}, want integers to be read as symbols")
        return array.astype(np.int64, copy=False)
    return with_channels(array.astype(np.float64, copy=False), what, channels or "first")


def with_channels(images: NDArray[Any], what: str, channels: Channels | None) -> NDArray[Any]:
    """Images with channels first: (n, channels, height, width). Rows with other numbers of axes are unchanged."""
    if channels is None:
        channels = "first"
        if images.ndim == 3:
            channels = "none"
        elif images.ndim == 4 and images.shape[3] in _CHANNELS and images.shape[1] not in _CHANNELS:
            channels = "last"
    if channels == "none":
        return images[:, np.newaxis]
    if channels == "last":
        if images.ndim < 3:
            raise ConfigError(f"{what} has shape {images.shape}, want (n, ..., channels) for channels: last")
        return np.ascontiguousarray(np.moveaxis(images, -1, 1))
    return images
