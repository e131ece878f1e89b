"""Refusals of hosts, and text of theirs made fit to be shown."""

from __future__ import annotations

from coterie.errors import CoterieError

MAX_REASON_CHARS = 1000  # of what a host is told, and of what is written down: HTTP/2 trailers have a size limit
_MAX_NAME_CHARS = 50  # of a name that comes from outside


class Refusal(CoterieError):  # noqa: N818 - a decision, not a fault of ours
    """A host is turned away; `code` is the gRPC status it gets, with the message. `public` may name other hosts, the message does not."""

    def __init__(self, code: str, reason: str, public: str | None = None) -> None:
        super().__init__(reason, public=public)
        self.code = code


def shortened(text: str, most: int = MAX_REASON_CHARS) -> str:
    """What a host has sent, or a sentence with it: of bounded length, and in characters that can be shown."""
    text = text[:most]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def short_name(name: str) -> str:
    """A name that was not checked, as a piece of a sentence."""
    return shortened(name, _MAX_NAME_CHARS)
