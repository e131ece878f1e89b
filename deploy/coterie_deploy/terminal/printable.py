"""Text and numbers from others, made safe: names of hosts and their reasons cannot steer a terminal, and JSON has no NaN."""

import math
from collections.abc import Mapping
from typing import Any


def printable(text: str) -> str:
    """The text with its control, format and other unprintable characters written as escapes."""
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii") for letter in text)


def without_nan(content: Any) -> Any:
    """Content for JSON: NaN and infinity become None, at any depth."""
    if isinstance(content, float):
        return content if math.isfinite(content) else None
    if isinstance(content, Mapping):
        return {str(key): without_nan(value) for key, value in content.items()}
    return [without_nan(value) for value in content] if isinstance(content, list | tuple) else content
