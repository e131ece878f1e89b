"""Low rank: what is sent of a network's matrices, and what is read again."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.compress.draws import Draws
from coterie.compress.factors import Factors
from coterie.compress.packing import Packing
from coterie.errors import ConfigError
from coterie.experiment.compress import Up
from coterie.experiment.config import experiment_from
from coterie.experiment.model import TensorInfo, to_json
from coterie.wire.precision import FLOAT32, FLOAT64

TENSORS = (
    TensorInfo("conv.weight", (8, 3, 2, 5), False, "representation", layer="Conv2d"),  # 8 by 30
    TensorInfo("conv.bias", (8,), False, "representation", layer="Conv2d"),
    TensorInfo("norm.weight", (8,), False, "representation", layer="BatchNorm2d"),
    TensorInfo("norm.mean", (8,), False, "representation", True, layer="BatchNorm2d"),
    TensorInfo("norm.seen", (), True, "representation", True, layer="BatchNorm2d"),
    TensorInfo("fc.weight", (12, 20), False, "representation", layer="Linear"),
    TensorInfo("fc.bias", (12,), False, "representation", layer="Linear"),
    TensorInfo("head.weight", (2, 3), False, "head", layer="Linear"),  # too small to gain from rank 2
    TensorInfo("head.scale", (), False, "head"),
)
WHOLE = {"representation": 8 + 8 + 8 + 12, "head": 7}
PARTS = {
    "all": [*TENSORS],
    "representation": TENSORS[:7],
    "without statistics": [tensor for tensor in TENSORS if not tensor.is_statistic],
    "without norms": [tensor for tensor in TENSORS if tensor.layer != "BatchNorm2d"],
    "head": TENSORS[7:],
}


def size(part: str) -> int:
    return sum(tensor.size for tensor in PARTS[part] if not tensor.is_integer)


def draws(n: int) -> Draws:
    return Draws(7, ("kind", "x", 1, 1), [(i, 0) for i in range(n)])


def packing(rank: int, dtype: np.dtype[Any] = FLOAT64, **more: Any) -> Packing:
    return Packing.of(Up(low_rank=rank, **more), dtype, factors=Factors(rank, lambda: to_json(TENSORS)))


def through(made: Packing, x: NDArray[np.float64]) -> NDArray[np.float64]:
    values, aside = made.pack(x, draws(len(x)))
    assert made.fits(values.size, aside.size, *x.shape)
    return made.unpack(values, aside, *x.shape, draws(len(x)))


def of_rank(rank: int, n: int = 3) -> NDArray[np.float64]:
    """Rows of the whole model whose matrices have this rank."""
    rng = np.random.default_rng(2)
    parts = []
    for tensor in TENSORS:
        rows, columns = (tensor.shape[0], math.prod(tensor.shape[1:])) if tensor.shape else (1, 1)
        product = rng.standard_normal((n, rows, rank)) @ rng.standard_normal((n, rank, columns))
        parts += [] if tensor.is_integer else [product.reshape(n, -1)]
    return np.concatenate(parts, axis=1)


@pytest.mark.parametrize("rank", [1, 2])
def test_matrices_of_that_rank_are_read_as_they_were(rank: int) -> None:
    x = of_rank(rank)
    assert through(packing(rank), x) == pytest.approx(x, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("part", PARTS)
def test_what_is_sent_is_two_thin_matrices_for_each_and_the_rest(part: str) -> None:
    thin = sum(sum((rows, columns)) for rows, columns in ((8, 30), (12, 20))) if part != "head" else 0
    whole = size(part) - (8 * 30 + 12 * 20 if part != "head" else 0)
    assert packing(2).sizes(1, size(part)) == (8 * (2 * thin + whole), 0)


def test_the_projection_is_nearly_the_best_of_its_rank_and_never_longer() -> None:
    x = np.random.default_rng(0).standard_normal((5, size("representation")))
    found = through(packing(3), x)
    assert (np.linalg.norm(x - found, axis=1) < np.linalg.norm(x, axis=1)).all()
    for row, read in zip(x, found, strict=True):
        values = np.linalg.svd(row[:240].reshape(8, 30), compute_uv=False)
        assert np.linalg.norm(row[:240] - read[:240]) < 1.2 * np.sqrt(np.square(values[3:]).sum())
    assert np.array_equal(found[:, 240:264], x[:, 240:264])  # biases


def test_each_row_is_by_itself_and_zeros_stay_zeros() -> None:
    x = np.random.default_rng(0).standard_normal((3, size("all")))
    x[1] = 0.0
    made = packing(2, FLOAT32)
    found = through(made, x)
    assert not found[1].any()
    for row in range(3):
        own = Draws(7, ("kind", "x", 1, 1), [(row, 0)])
        values, aside = made.pack(x[row : row + 1], own)
        assert made.unpack(values, aside, 1, x.shape[1], own).tobytes() == found[row : row + 1].tobytes()


def test_thin_matrices_take_a_few_bits_together() -> None:
    x = of_rank(2)
    found = through(packing(2, quantize={"bits": 8, "rotate": "hadamard"}), x)
    assert np.linalg.norm(found - x) < 0.05 * np.linalg.norm(x)


def test_vectors_that_are_no_part_of_the_model_travel_whole() -> None:
    x = np.random.default_rng(0).standard_normal((2, 77))
    assert np.array_equal(through(packing(2), x), x)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"up": {"low_rank": 2, "top_k": 0.1}}, "low_rank wants whole matrices, but top_k and rand_k send some of their numbers: give one"),
        ({"up": {"low_rank": 2, "against": "nothing"}}, "want against 'task' or 'last'"),
        ({"up": {"low_rank": 0}}, "low_rank"),
        ({"down": {"low_rank": 2}}, "low_rank: unknown key"),
        ({"up": {"low_rank": 2}}, "low_rank is for matrices of networks, but a convex problem has one vector: want a model, or top_k"),
    ],
)
def test_what_it_is_not_for_is_refused(changes: dict[str, Any], sentence: str) -> None:
    convex = {"data": {"source": "hsb"}, "problem": {"loss": "least_squares"}, "method": {"name": "fedavg"}}
    with pytest.raises(ConfigError, match=sentence):
        experiment_from({"name": "thin", **convex, "federation": {"compress": changes}})
