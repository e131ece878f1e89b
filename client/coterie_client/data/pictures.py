"""Decodes JPEG and PNG files to uint8 (channels, height, width), with Pillow, which is imported on first use."""

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.extras import extra
from coterie.findings import Finding

Bytes = NDArray[np.uint8]

_MAX_PIXELS = 64 << 20  # of one image


class Pictures:
    """A batch of images of one size, filled one by one. The first image of a source sets channels and size for all."""

    block: Bytes  # (n, channels, height, width)

    def __init__(self, where: str, channels: int | None = None, resize: tuple[int, int] | None = None) -> None:
        self._where, self._channels, self._resize = where, channels, resize
        self._size = (0, 0)  # width and height, in Pillow's order
        self._first = ""

    def begin(self, first: bytes | Path, called: str, n: int) -> None:
        """Allocates space for n images of this size."""
        with self._opened(first, called) as image:
            if self._channels is None:
                self._channels = 1 if image.mode in ("1", "L", "I;16", "I", "F", "LA") else 3
            self._size = image.size if self._resize is None else (self._resize[1], self._resize[0])
        self._first = called
        self.block = np.empty((n, self._channels, self._size[1], self._size[0]), np.uint8)

    def put(self, place: int, data: bytes | Path, called: str) -> None:
        """Decodes one image. ConfigError that names it when it cannot be decoded, or its size differs from the first."""
        with self._opened(data, called) as image:
            if self._resize is None and image.size != self._size:
                (width, height), (first_width, first_height) = image.size, self._size
                raise ConfigError(
                    f"{self._where}: {called} has {height}x{width} pixels and {self._first} has {first_height}x{first_width}, want one size"
                )
            converted = image.convert("L" if self._channels == 1 else "RGB")
            if self._resize is not None:
                converted = converted.resize(self._size)
            pixels = np.asarray(converted)
        self.block[place] = pixels[np.newaxis] if self._channels == 1 else pixels.transpose(2, 0, 1)

    @contextmanager
    def _opened(self, data: bytes | Path, called: str) -> Iterator[Any]:
        pillow, source = _pillow(self._where), io.BytesIO(data) if isinstance(data, bytes) else data
        try:
            with warnings.catch_warnings(action="ignore"), pillow.open(source, formats=("JPEG", "PNG")) as image:
                if image.width * image.height > _MAX_PIXELS:
                    raise ConfigError(f"{self._where}: {called} has {image.height}x{image.width} pixels, want at most {_MAX_PIXELS} in all")
                yield image
        except ConfigError:
            raise
        except Exception as error:  # Pillow's readers fail in many ways
            said = f"{self._where}: {called} cannot be decoded ({_said(error)}), want a JPEG or PNG image"
            raise ConfigError(said, Finding("D6")) from error


def _said(error: Exception) -> str:
    said = str(getattr(error, "strerror", None) or error).partition("image file <")[0]  # Pillow appends the address of a buffer
    return said.strip() or type(error).__name__


def _pillow(where: str) -> Any:
    with extra("data", "PIL", f"{where} holds images and needs Pillow", finding=Finding("T21")):
        from PIL import Image  # noqa: PLC0415 - not needed by most
    return Image
