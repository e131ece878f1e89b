"""Refusals of hosts, and texts from hosts cut to a length and to characters that can be shown."""

from __future__ import annotations

from coterie.errors import CoterieError

MAX_REASON_CHARS = 1000  # of a reason that a host receives, or that is written down: HTTP/2 trailers have a size limit
_MAX_NAME_CHARS = 50  # of a name that comes from outside


class Refusal(CoterieError):  # noqa: N818 - a decision, not a fault of ours
    """A host is turned away with the gRPC status `code` and the message. `public` may name other hosts, the message does not."""

    def __init__(self, code: str, reason: str, public: str | None = None) -> None:
        super().__init__(reason, public=public)
        self.code = code


def shortened(text: str, most: int = MAX_REASON_CHARS) -> str:
    """A text from a host, or a sentence with one: of bounded length, and in printable characters."""
    text = text[:most]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def short_name(name: str) -> str:
    """A name that was not checked, for a sentence."""
    return shortened(name, _MAX_NAME_CHARS)
