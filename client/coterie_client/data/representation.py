"""Regressions that share a representation: y = w*_i' B*' x + noise, x ~ N(0, I), section 5.1 of Collins et al. (2021).

Users are "u0", "u1", ...; `coterie.experiment.representation` draws the truth. Rows are drawn by user, purpose and round. So they do not
depend on the other loaded users, and a shorter draw is a prefix of a longer one.
"""

from collections.abc import Callable, Collection, Sequence

from coterie.arrays import Array
from coterie.draws.streams import normal, stream
from coterie.experiment.data import RepresentationData
from coterie.experiment.representation import true_head, true_representation
from coterie_client.data.users import UserData, UserHead, frozen


def heads(config: RepresentationData, *_rest: object) -> list[UserHead]:
    return [UserHead(f"u{number}", None, config.rows_per_user) for number in range(config.users)]


def load(config: RepresentationData, seed: int, names: Collection[str] | None, *_rest: object) -> list[UserData]:
    """The users in `names` (None: all) that exist."""
    wanted = [head.name for head in heads(config) if names is None or head.name in names]
    thetas = _thetas(config, seed, wanted)
    loaded = []
    for name, theta in zip(wanted, thetas, strict=True):
        rows = _rows(config, seed, name, theta, "rows", 0, config.rows_per_user)
        test_rows = _rows(config, seed, name, theta, "test rows", 0, config.test_per_user)
        loaded.append(UserData(name, None, *rows, *test_rows))
    return loaded


def fresh(config: RepresentationData, seed: int, names: Sequence[str]) -> Callable[[int, int, int], tuple[Array, Array]]:
    """(position in `names`, round, m) -> m rows (m, d) and targets (m,), different in every round."""
    thetas = _thetas(config, seed, names)

    def draw(position: int, round_number: int, m: int) -> tuple[Array, Array]:
        return _rows(config, seed, names[position], thetas[position], "fresh rows", round_number, m)

    return draw


def _thetas(config: RepresentationData, seed: int, names: Sequence[str]) -> list[Array]:
    """B* w*_i (d,) of each user."""
    truth = true_representation(config, seed)
    assert truth is not None  # noqa: S101 - this data has one
    return [(truth * true_head(config, seed, name)).sum(axis=1) for name in names]


def _rows(config: RepresentationData, seed: int, name: str, theta: Array, purpose: str, round_number: int, m: int) -> tuple[Array, Array]:
    seed = seed if config.seed is None else config.seed
    features = normal(stream(seed, f"representation {purpose}", name, round_number), m * config.d).reshape(m, config.d)
    noise = normal(stream(seed, f"representation noise of {purpose}", name, round_number), m)
    deviation = config.noise if config.noise_is == "std" else config.noise**0.5
    return frozen(features), frozen((features * theta).sum(axis=1) + deviation * noise)
