"""Texts as symbol sequences. Words are hashed to a fixed number of symbols, so users need not agree on a vocabulary.

A word consists of letters and digits of any script; case is ignored. Short texts are padded with 0 at the front, so the last symbol is the
last word. Long texts keep their first words.
"""

import re
import zlib
from collections.abc import Sequence

import numpy as np

from coterie.arrays import Indices

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def symbols_of(texts: Sequence[str], n_symbols: int, length: int) -> Indices:
    """(n, length) symbols of n texts: 0 for padding, else 1 + crc32(word) mod (n_symbols - 1)."""
    symbols = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        words = [1 + zlib.crc32(word.encode()) % (n_symbols - 1) for word in _WORD.findall(text.lower())[:length]]
        if words:
            symbols[row, -len(words) :] = words
    return symbols
