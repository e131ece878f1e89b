"""Values and sentences in error messages, with limited length."""

import reprlib
from collections.abc import Sequence

MAX_SENTENCE = 4000  # characters of a whole message
_MAX_TEXT = 200  # characters of a text in it
_MAX_BITS = 256  # of an integer whose digits are shown


class _Repr(reprlib.Repr):
    """A `repr` of a few items and levels."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxother = _MAX_TEXT

    def repr_int(self, x: int, level: int) -> str:  # noqa: ARG002 - the signature is reprlib's
        """Python refuses to write thousands of digits."""
        return repr(x) if x.bit_length() <= _MAX_BITS else f"a whole number of {x.bit_length()} bits"


def quoted(value: object) -> str:
    """A short representation of any value."""
    return shortened(_Repr().repr(value), 2 * _MAX_TEXT)


def some(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shortened(text: str, length: int = MAX_SENTENCE) -> str:
    """The text, or its beginning if it is too long."""
    return text if len(text) <= length else f"{text[: length - 4]} ..."
