"""Secret random numbers: their distribution, that purposes are independent, and that a key is kept before it is used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from coterie.draws.secret import KEY_BYTES, Secret, kept_key, new_key
from coterie.errors import RunError


def test_numbers_are_normal_and_uniform() -> None:
    numbers = Secret(bytes(KEY_BYTES)).numbers()
    assert stats.kstest(numbers.normal(50_000), "norm").pvalue > 0.001
    assert stats.kstest(numbers.uniform(50_000), "uniform").pvalue > 0.001
    assert np.sort(numbers.order(1000)).tolist() == list(range(1000))


def test_the_same_key_repeats_its_numbers_and_each_draw_is_another_one() -> None:
    one, other = (Secret(bytes(KEY_BYTES)).child("round", 3).numbers() for _ in range(2))
    first, second = one.normal(100), one.normal(100)
    assert (other.normal(100) == first).all()
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.4


@pytest.mark.parametrize("names", [("round", 4), ("roun", "d3"), ("round3",), ("round", 3, ""), (b"round", b"3", b"")])
def test_other_names_give_other_numbers(names: tuple[str | int | bytes, ...]) -> None:
    root = Secret(bytes(KEY_BYTES))
    assert not np.isin(root.child(*names).numbers().uniform(100), root.child("round", 3).numbers().uniform(100)).any()


def test_keys_are_new_each_time_and_no_repr_shows_one() -> None:
    assert new_key() != new_key()
    assert repr(Secret(b"k" * KEY_BYTES)) == "Secret()"


def test_a_key_is_kept_in_a_file_of_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "noise.key"
    found = kept_key(path)
    assert kept_key(path) == found == path.read_bytes()
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_key_that_is_missing_or_damaged_ends_the_run_since_noise_would_be_drawn_twice(tmp_path: Path) -> None:
    path = tmp_path / "noise.key"
    with pytest.raises(RunError, match=r"^the key of the noise in .*noise.key is missing: without it noise would be drawn twice"):
        kept_key(path, has_begun=True)
    path.write_bytes(b"short")
    with pytest.raises(RunError, match=r"has 5 bytes, want 32$"):
        kept_key(path)
