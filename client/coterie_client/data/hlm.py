"""A hierarchical linear model, after (5.1) and section 6.1 of Lyu, Hanzely and Kolar (2022): clusters of users with linear regressions.

    centre = sigma_global N(0, I),   theta*_j = centre + sigma_cluster N(0, I),   theta*_i = theta*_j + sigma_user N(0, I),
    y_i = X_i theta*_i + sigma_noise N(0, I),   X_i with entries N(0, 1), or with X_i'X_i = m I (design "orthogonal").

Users are "u0", "u1", ... in cluster order; clusters are "c0", "c1", .... The model has no intercept: set `problem.intercept` to false. With
loss `least_squares`, reduction "sum" and sigma_noise = 1 a user's loss is the paper's 1/(2 sigma_i^2) |y_i - X_i theta|^2. For another
noise, multiply the weights of Theorem 5.1, gamma_i = 1/sigma_user^2 and lambda_j = 1/sigma_cluster^2, by its square.

All draws are keyed by name. So a user's truth and rows do not depend on the other loaded users, and a shorter draw is a prefix of a longer
one.
"""

from collections.abc import Collection, Sequence

import numpy as np

from coterie.arrays import Array
from coterie.draws.streams import normal, stream
from coterie.experiment.data import HlmData
from coterie.text.names import unknown_user
from coterie_client.data.users import UserData, UserHead, frozen


def heads(config: HlmData, *_rest: object) -> list[UserHead]:
    n_users = config.clusters * config.users_per_cluster
    return [UserHead(f"u{number}", f"c{number // config.users_per_cluster}", config.rows_per_user) for number in range(n_users)]


def load(config: HlmData, seed: int, names: Collection[str] | None, *_rest: object) -> list[UserData]:
    """The users in `names` (None: all) that exist."""
    seed = seed if config.seed is None else config.seed
    wanted = [head for head in heads(config) if names is None or head.name in names]
    thetas = truth(config, seed, [head.name for head in wanted])
    loaded = []
    for head, theta in zip(wanted, thetas, strict=True):  # the entries of test rows are N(0, 1) for every design
        rows = _rows(config, "", config.rows_per_user, seed, head.name, theta, is_orthogonal=config.design == "orthogonal")
        test_rows = _rows(config, "test ", config.test_per_user, seed, head.name, theta, is_orthogonal=False)
        loaded.append(UserData(head.name, head.cluster, *rows, *test_rows))
    return loaded


def truth(config: HlmData, seed: int, names: Sequence[str]) -> Array:
    """theta*_i (n, d) of the users in `names`, in that order; `seed` is the experiment's. ConfigError for an unknown name."""
    seed = seed if config.seed is None else config.seed
    clusters = {head.name: head.cluster for head in heads(config)}
    centre = config.sigma_global * normal(stream(seed, "hlm centre"), config.d)
    thetas = np.empty((len(names), config.d))
    for place, name in enumerate(names):
        if name not in clusters:
            raise unknown_user(name, list(clusters))
        of_cluster = centre + config.sigma_cluster * normal(stream(seed, "hlm cluster", str(clusters[name])), config.d)
        thetas[place] = of_cluster + config.sigma_user * normal(stream(seed, "hlm user", name), config.d)
    return thetas


def _rows(config: HlmData, kind: str, n_rows: int, seed: int, name: str, theta: Array, *, is_orthogonal: bool) -> tuple[Array, Array]:
    features = normal(stream(seed, f"hlm {kind}rows", name), n_rows * config.d).reshape(n_rows, config.d)
    if is_orthogonal:
        features = np.sqrt(n_rows) * np.linalg.qr(features)[0]
    noise = normal(stream(seed, f"hlm {kind}noise", name), n_rows)
    return frozen(features), frozen((features * theta).sum(axis=1) + config.sigma_noise * noise)
