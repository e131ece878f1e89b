"""Which row a user takes in an iteration."""

from __future__ import annotations

import numpy as np

from coterie_client.methods.async_al2sgd import drawn_rows, keys_of, recorded_rows

NUMBERS = np.array([0, 1, 7, 300])


def drawn(seed: int, n_rows: int, iterations: int, numbers: np.ndarray = NUMBERS) -> np.ndarray:
    """(iterations, n)."""
    keys = keys_of(seed, numbers)
    sizes = np.full(numbers.size, n_rows)
    return np.array([drawn_rows(keys, np.full(numbers.size, t), sizes) for t in range(iterations)])


def test_rows_are_uniform() -> None:
    rows = drawn(3, 7, 7000)
    for user in rows.T:
        counts = np.bincount(user, minlength=7)
        assert counts.size == 7
        assert ((counts - 1000.0) ** 2 / 1000).sum() < 22.5  # chi-square with 6 degrees of freedom, p = .001


def test_neighbouring_iterations_and_users_are_independent() -> None:
    rows = drawn(3, 4, 8000).astype(float)
    deviations = rows - rows.mean(axis=0)
    assert abs(np.corrcoef(deviations.T) - np.eye(4)).max() < 0.05
    lagged = (deviations[1:] * deviations[:-1]).mean(axis=0) / deviations.var(axis=0)
    assert np.abs(lagged).max() < 0.05


def test_a_draw_is_that_of_the_user_whoever_is_asked_beside() -> None:
    together = drawn(3, 5, 20)
    for place, number in enumerate(NUMBERS):
        np.testing.assert_array_equal(drawn(3, 5, 20, np.array([number]))[:, 0], together[:, place])


def test_users_may_be_at_different_iterations() -> None:
    at = np.array([4, 0, 19, 7])
    found = drawn_rows(keys_of(3, NUMBERS), at, np.full(4, 5))
    np.testing.assert_array_equal(found, drawn(3, 5, 20)[at, np.arange(4)])


def test_another_seed_draws_other_rows() -> None:
    assert (drawn(3, 5, 20) != drawn(4, 5, 20)).any()


def test_a_user_with_one_row_always_takes_it() -> None:
    assert not drawn(3, 1, 20).any()


def test_recorded_rows_are_those_of_the_users_by_their_numbers() -> None:
    coins = [[0, [1], [2, 0, 1], 0], [1, [0], [0, 3, 2], 1]]
    np.testing.assert_array_equal(recorded_rows(coins, np.array([0, 2])), [[2, 1], [0, 2]])
