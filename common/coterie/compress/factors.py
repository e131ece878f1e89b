"""Matrices of weights as products of two thin ones, of a given rank: PowerSGD (Vogels, Karimireddy and Jaggi, 2019, algorithm 1).

M (n, m) becomes P (n, r) with orthonormal columns and Q = M^T P (m, r). It is read as P Q^T, the projection of M on P's columns, so less is
lost than there was, as a memory of losses needs it. In the paper all workers add up P before they compute Q. Here each user has matrices
of its own: they start from random signs instead of the last Q, and make `_PASSES` power iterations.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from coterie.arrays import Array
from coterie.compress.draws import Draws
from coterie.experiment.model import PARTS, from_json

_PASSES = 2
_MOST_CLASSES = 20  # of layers, since hosts may describe what they like


class Block(NamedTuple):
    """Numbers of a vector from `start` on: a matrix (rows, columns) that is sent as two thin ones."""

    start: int
    rows: int
    columns: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.columns


@dataclass(frozen=True)
class Factors:
    """`model` gives the tensors of the network, as hosts describe them at joining: both ends know them before there are weights.

    A tensor (out, in, height, width) of a convolution is the matrix (out, in * height * width). Tensors of one axis, and those that would
    not become smaller, are sent as they are.
    """

    rank: int
    model: Callable[[], str]

    def kept(self, d: int) -> int:
        """How many numbers are sent of d."""
        blocks = self._blocks(d)
        return d - sum(block.end - block.start - self.rank * (block.rows + block.columns) for block in blocks)

    def written(self, x: Array, draws: Draws) -> Array:
        """(n, k) the numbers that are sent of rows (n, d): P and Q of each matrix, then all others."""
        blocks, d = self._blocks(x.shape[1]), x.shape[1]
        signs = draws.directions(self.rank * max((block.columns for block in blocks), default=0))
        parts = []
        for block in blocks:
            matrices = x[:, block.start : block.end].reshape(-1, block.rows, block.columns)
            starts = signs[:, : self.rank * block.columns].reshape(-1, block.columns, self.rank)
            thin = [_thin(matrix, start) for matrix, start in zip(matrices, starts, strict=True)]
            parts.append(np.stack([np.concatenate([p.reshape(-1), q.reshape(-1)]) for p, q in thin]))
        return np.concatenate([*parts, *(x[:, start:end] for start, end in _between(blocks, d))], axis=1)

    def read(self, sent: Array, d: int) -> Array:
        """(n, d) the rows again: sums of products in a fixed order, so with the same bits on every machine."""
        found, at, blocks = np.empty((len(sent), d)), 0, self._blocks(d)
        for block in blocks:
            of_p, of_q = self.rank * block.rows, self.rank * block.columns
            p = sent[:, at : at + of_p].reshape(-1, block.rows, self.rank)
            q = sent[:, at + of_p : at + of_p + of_q].reshape(-1, block.columns, self.rank)
            matrices = found[:, block.start : block.end].reshape(-1, block.rows, block.columns)
            matrices[:] = 0.0
            for k in range(self.rank):
                matrices += p[:, :, None, k] * q[:, None, :, k]
            found[:, block.start : block.end] = matrices.reshape(len(sent), -1)
            at += of_p + of_q
        for start, end in _between(blocks, d):
            found[:, start:end] = sent[:, at : at + end - start]
            at += end - start
        return found

    def _blocks(self, d: int) -> tuple[Block, ...]:
        return _blocks(self.model(), self.rank, d)


@functools.lru_cache(maxsize=64)
def _blocks(model: str, rank: int, d: int) -> tuple[Block, ...]:
    """The matrices in a vector of d weights; none if these are no known part of the model."""
    shapes = _travelling(model).get(d, ())
    starts = itertools.accumulate(map(math.prod, shapes), initial=0)
    blocks = (Block(start, shape[0], math.prod(shape[1:])) for start, shape in zip(starts, shapes, strict=False) if len(shape) > 1)
    return tuple(block for block in blocks if rank * (block.rows + block.columns) < block.rows * block.columns)


@functools.lru_cache(maxsize=8)
def _travelling(model: str) -> Mapping[int, Sequence[tuple[int, ...]]]:
    """By their numbers, the shapes of what methods send of a model: all or a part, perhaps without statistics or layers of a class."""
    floats = [tensor for tensor in from_json(model) if not tensor.is_integer] if model else []
    classes = sorted({tensor.layer for tensor in floats})[:_MOST_CLASSES]
    found: dict[int, Sequence[tuple[int, ...]]] = {}
    for part, has_statistics, without in itertools.product(PARTS, (True, False), (None, *classes)):
        listed = [tensor for tensor in floats if part in ("all", tensor.part) and tensor.layer != without]
        shapes = [tensor.shape for tensor in listed if has_statistics or not tensor.is_statistic]
        found.setdefault(sum(map(math.prod, shapes)), shapes)
    return found


def _between(blocks: Sequence[Block], d: int) -> list[tuple[int, int]]:
    """From where to where the numbers are that are in no block."""
    ends = [0, *(end for block in blocks for end in (block.start, block.end)), d]
    return [(start, end) for place, (start, end) in enumerate(itertools.pairwise(ends)) if place % 2 == 0 and start < end]


def _thin(matrix: Array, start: Array) -> tuple[Array, Array]:
    """P (n, r) and Q (m, r) of a matrix (n, m), whose columns are scaled so that numbers of both have about the same size."""
    q = start
    for _ in range(_PASSES):
        p, _ = np.linalg.qr(matrix @ q)
        q = matrix.T @ p
    scales = np.sqrt(np.sqrt(np.square(q).sum(axis=0)) * np.sqrt(len(p) / len(q)))
    return p * scales, np.divide(q, scales, out=np.zeros_like(q), where=scales > 0)
