"""Text as sequences of symbols: words hashed to a fixed number of symbols, so that no vocabulary has to be agreed on.

Lower-case letters and digits of any script make words. Symbol 0 fills the front of short texts, so that the last symbol is the last word;
of long texts the first words are taken.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import numpy as np

from coterie.arrays import Indices

_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?")


def symbols_of(texts: Sequence[str], n_symbols: int, length: int) -> Indices:
    """(n, length) symbols 0 to n_symbols - 1 of n texts: 1 + crc32(word) mod (n_symbols - 1)."""
    symbols = np.zeros((len(texts), length), np.int64)
    for row, text in enumerate(texts):
        words = [1 + zlib.crc32(word.encode()) % (n_symbols - 1) for word in _WORD.findall(text.lower())[:length]]
        if words:
            symbols[row, -len(words) :] = words
    return symbols
