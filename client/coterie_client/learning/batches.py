"""Selects the rows of each step of a phase."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from coterie.arrays import Indices
from coterie.draws.streams import stream
from coterie_client.learning.learner import Draw
from coterie_client.learning.phases import Phase


class Epoch(NamedTuple):
    """Row numbers of all steps in order, and the batch size of each step."""

    order: Indices
    sizes: list[int]


def _sizes(n_rows: int, phase: Phase) -> list[int]:
    """The batch sizes of one epoch. A last batch of one row joins the previous one, as batch norm needs two (unless all have one)."""
    starts = list(range(0, n_rows, phase.batch_size or n_rows))
    if len(starts) > 1 and n_rows - starts[-1] == 1 and phase.batch_size != 1:
        starts.pop()
    return [end - start for start, end in zip(starts, [*starts[1:], n_rows], strict=True)]


def count_steps(n_rows: int, phase: Phase) -> int:
    lengths = (phase.updates, None if phase.epochs is None else phase.epochs * len(_sizes(n_rows, phase)))
    return min(length for length in lengths if length is not None)


def steps_of(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[tuple[Epoch, ...]]:
    """Tuples of epochs for phase `number`, one epoch for each batch that the rule takes per step. Each has its own random stream."""
    further = range(1, 1 if phase.rule is None else phase.rule.n_batches)
    draws = [draw, *(draw.another(f"batch {k}") for k in further)]
    return zip(*(epochs(n_rows, phase, each, number) for each in draws), strict=True)


def epochs(n_rows: int, phase: Phase, draw: Draw, number: int) -> Iterator[Epoch]:
    """The epochs of phase `number`, which counts from 0."""
    sizes, n_steps = _sizes(n_rows, phase), count_steps(n_rows, phase)
    done = epoch = 0
    while done < n_steps:
        order = stream(draw.seed, draw.purpose, draw.user, draw.round, number, epoch).order(n_rows)
        taken = sizes[: n_steps - done]
        yield Epoch(order[: sum(taken)], taken)
        done += len(taken)
        epoch += 1
