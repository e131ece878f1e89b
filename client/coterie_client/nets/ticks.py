"""The batches of several users' steps, padded to one size."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Indices
from coterie_client.learning import Draw, Phase, count_steps

_MAX_DRAWN = 1 << 19  # row numbers that are drawn at once
PIECE = 32  # rows: whole users are padded to a multiple


class Ticks(NamedTuple):
    """The steps of a phase for users in descending order of their numbers of rows. Those who take a step t are the first ones."""

    rows: NDArray[np.int64]  # (T, k, b) row numbers; 0 for padding
    shares: NDArray[np.float32]  # (T, k, b) 1 / (rows of the batch); 0 for padding
    lengths: Indices  # (k,) steps of each user


def whole_size(n_rows: int) -> int:
    """Rows of a padded user."""
    return -(-n_rows // PIECE) * PIECE


def padded_size(n_rows: int, phase: Phase) -> int:
    """Rows of a padded batch: one more than the batch size, as a last batch may have, or all of the padded user's.

    A multiple of 4, as products with single columns, and with unaligned ones, may have other bits at other addresses.
    """
    whole = whole_size(n_rows)
    return whole if phase.batch_size is None else min(-(-(phase.batch_size + (phase.batch_size > 1)) // 4) * 4, whole)


def ticks_of(counts: Indices, phase: Phase, draw: Draw, number: int) -> Ticks:
    """The batches of phase `number`, which are those that each user draws in the loop."""
    b = padded_size(int(counts[0]), phase)
    lengths = np.array([count_steps(int(m), phase) for m in counts])
    per_epoch = np.array([count_steps(int(m), replace(phase, epochs=1, updates=None)) for m in counts])
    size = phase.batch_size or int(counts[0])
    step = np.arange(per_epoch[0])
    begins = np.minimum(step * size, counts[:, None])  # (k, steps of an epoch)
    sizes = np.where(step == per_epoch[:, None] - 1, counts[:, None] - begins, np.minimum(size, counts[:, None] - begins))
    is_row = np.arange(b) < sizes[..., None]  # (k, steps, b)
    places = np.where(is_row, begins[..., None] + np.arange(b), 0)
    shares = (is_row / np.maximum(sizes, 1)[..., None]).astype(np.float32)
    found = Ticks(np.zeros((int(lengths[0]), counts.size, b), np.int64), np.zeros((int(lengths[0]), counts.size, b), np.float32), lengths)
    n_epochs, at_once = -(-lengths // per_epoch), max(1, _MAX_DRAWN // places.size)
    for first in range(0, int(n_epochs.max()), at_once):
        drawing = [np.flatnonzero(n_epochs > epoch) for epoch in range(first, min(first + at_once, int(n_epochs.max())))]
        users, epochs = np.concatenate(drawing), first + np.repeat(np.arange(len(drawing)), [each.size for each in drawing])
        orders = np.zeros((users.size, int(counts[0])), np.int64)
        for i, order in enumerate(draw.orders(counts[users], users, [(number, epoch) for epoch in epochs.tolist()])):
            orders[i, : order.size] = order
        drawn = np.take_along_axis(orders, places[users].reshape(users.size, -1), 1).reshape(users.size, *places.shape[1:])
        passes, steps = np.nonzero(step < np.minimum(lengths[users] - epochs * per_epoch[users], per_epoch[users])[:, None])
        at, owners = epochs[passes] * per_epoch[users[passes]] + steps, users[passes]
        found.rows[at, owners] = np.where(is_row[owners, steps], drawn[passes, steps], 0)
        found.shares[at, owners] = shares[owners, steps]
    return found
