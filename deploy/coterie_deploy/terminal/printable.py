"""Text for a terminal: what others have chosen, such as the names of hosts and the reasons they give, cannot steer it."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text with its control, format and other unprintable characters written as escapes."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text)
