"""Checks of what a compressor does to rows of numbers: those that a run would not meet, or not soon."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.compress.draws import Draws
from coterie.compress.numbers import Bytes, Compressor, compressor
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment
from coterie_deploy.studies.check.trial import Failed, Trial

_LENGTHS = (1, 2, 3, 7, 8, 9, 64, 1000)  # of rows
_N_ROWS = 4
_SHOWN = 1000  # numbers of the row whose bytes are said
_ROWS_OF: dict[str, list[float]] = {
    "zeros": [0.0] * 9,
    "negative zeros": [-0.0] * 9,
    "one zero": [0.0],
    "one number": [-2.5],
    "equal numbers": [0.3] * 9,
    "one number among zeros": [0.0] * 8 + [1.0],
    "huge numbers": [1e30, -3e30, 2e30],
    "tiny numbers": [1e-30, -3e-30, 2e-30],
    "numbers that float32 has none of": [1e-60, -3e-60, 2e-60],
    "huge and tiny numbers": [1e30, -1e-30, 1e-30],
}


def sizes(trial: Trial) -> str:
    """`sizes` says two whole numbers, which `write` keeps to."""
    subject = _of(trial.experiment)
    for k in _LENGTHS:
        found = subject.sizes(k)
        if not (isinstance(found, tuple) and len(found) == 2 and all(isinstance(size, int) and size >= 0 for size in found)):
            raise Failed(f"sizes({k}) is {found!r}, want two whole numbers of bytes")
        if subject.sizes(k) != found:
            raise Failed(f"sizes({k}) is {subject.sizes(k)} when it is asked again, not {found}")
        subject.write(_normal(k), _draws(_N_ROWS))  # which compares
    return ""


def reads(trial: Trial) -> str:
    """Rows are written and read again with the same bits each time."""
    subject, said = _of(trial.experiment), ""
    for k in _LENGTHS:
        x = _normal(k)
        first, second = (_through(subject, x) for _ in range(2))
        if any(one.tobytes() != other.tobytes() for one, other in zip(first, second, strict=True)):
            raise Failed(f"rows of {k} numbers have other bytes when they are written and read again: want random numbers from draws alone")
        if not np.isfinite(first[2]).all():
            raise Failed(f"rows of {k} normal numbers are read as numbers that are not finite")
        if k == _SHOWN:
            lost, n_bytes = np.square(x - first[2]).sum() / np.square(x).sum(), sum(subject.sizes(k))
            said = f"{k:,} normal numbers take {n_bytes:,} bytes instead of {4 * k:,}, and {lost:.3g} of their squared length is lost"
    return said


def alone(trial: Trial) -> str:
    """A row has the same bytes and numbers whatever other rows are with it, as users may share a host."""
    subject = _of(trial.experiment)
    for k in _LENGTHS:
        together = _through(subject, _normal(k))
        for row in range(_N_ROWS):
            own = _through(subject, _normal(k)[row : row + 1], _draws(1, row))
            if any(one[row].tobytes() != other[0].tobytes() for one, other in zip(together, own, strict=True)):
                raise Failed(f"a row of {k} numbers has other bytes when it is alone: want each row written and read by itself")
    return ""


def numbers(trial: Trial) -> str:
    """Rows that are rare in a test and come in a run: all of them are finite numbers at the receiver."""
    subject = _of(trial.experiment)
    for what, listed in _ROWS_OF.items():
        *_, found = _through(subject, np.array([listed]))
        if not np.isfinite(found).all():
            raise Failed(f"a row of {what} is read as {found[0].tolist()}, want finite numbers")
    return ""


def foreign(trial: Trial) -> str:
    """A receiver reads bytes that no sender of ours has written."""
    subject = _of(trial.experiment)
    for k in _LENGTHS:
        random = np.random.default_rng(k)
        for least, most in ((0, 0), (255, 255), (0, 255)):
            values, aside = (random.integers(least, most, (_N_ROWS, size), np.uint8, endpoint=True) for size in subject.sizes(k))
            _read(subject, values, aside, k, _draws(_N_ROWS))
    return ""


def _of(experiment: Experiment) -> Compressor:
    rules = experiment.federation.compress
    name = None if rules is None or rules.up is None else rules.up.by
    if name is None:
        raise ConfigError("federation.compress.up.by is null, want the compressor to check")
    return compressor(name)


def _normal(k: int) -> Array:
    """The same rows (n, k) each time, which nobody may write to."""
    found = np.random.default_rng(k).standard_normal((_N_ROWS, k))
    found.flags.writeable = False
    return found


def _draws(n: int, first: int = 0) -> Draws:
    """For n rows from number `first` on."""
    return Draws(0, ("check",), [(row, 0) for row in range(first, first + n)])


def _through(subject: Compressor, x: Array, draws: Draws | None = None) -> list[NDArray[Any]]:
    """The bytes of rows, and the rows that are read from them."""
    own = draws or _draws(len(x))
    with np.errstate(all="ignore"):
        values, aside = subject.write(x, own)
    return [values, aside, _read(subject, values, aside, x.shape[1], own)]


def _read(subject: Compressor, values: Bytes, aside: Bytes, k: int, draws: Draws) -> Array:
    """As from the wire: of bytes that nobody may write to."""
    with np.errstate(all="ignore"):
        return subject.read(_held(values), _held(aside), k, draws)


def _held(part: Bytes) -> Bytes:
    return np.frombuffer(part.tobytes(), np.uint8).reshape(part.shape)
