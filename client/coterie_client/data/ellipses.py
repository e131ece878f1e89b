"""Synthetic classification in the plane, after section V of Armacki, Bajovic, Jakovetic and Kar (2022).

In the paper each cluster has a pool of points, each class uniform in an ellipse. The cluster's users draw rows from it without replacement.
The paper does not give the ellipses; these are ours. All clusters are centred at 0. Cluster k of K has the direction u_k at 90 + 360 k / K
degrees. Class +1 (-1) is uniform in the ellipse around +2 u_k (-2 u_k) with semi-axis 2.8 along u_k and 1.0 across. So the classes overlap.
A draw with only one class is repeated.

Users are "u0", "u1", ... in cluster order; clusters are "c0", "c1", .... Features are the two coordinates, without a constant.
"""

import math
from collections.abc import Collection

import numpy as np

from coterie.arrays import Array, distinct
from coterie.draws.streams import Stream, stream
from coterie.experiment.data import EllipsesData
from coterie_client.data.users import UserData, UserHead, frozen

FIRST_ANGLE_DEGREES = 90.0
CENTRE = 2.0  # distance of a class's ellipse from the origin, along u_k
SEMI_AXIS_ALONG = 2.8
SEMI_AXIS_ACROSS = 1.0


def heads(config: EllipsesData, *_rest: object) -> list[UserHead]:
    return [
        UserHead(f"u{cluster * config.users_per_cluster + place}", f"c{cluster}", config.rows_per_user)
        for cluster in range(config.clusters)
        for place in range(config.users_per_cluster)
    ]


def load(config: EllipsesData, seed: int, names: Collection[str] | None, *_rest: object) -> list[UserData]:
    """The users in `names` (None: all) that exist. Users of a cluster share its test arrays."""
    seed = seed if config.seed is None else config.seed
    loaded = []
    for cluster in range(config.clusters):
        first = cluster * config.users_per_cluster
        places = [place for place in range(config.users_per_cluster) if names is None or f"u{first + place}" in names]
        if not places:
            continue
        pool, pool_target = _points(config, cluster, config.points_per_class, stream(seed, "ellipses pool", cluster))
        test, test_target = _points(config, cluster, config.test_per_class, stream(seed, "ellipses test", cluster))
        for place in places:
            rows = _rows_with_both_classes(pool_target, config.rows_per_user, stream(seed, "ellipses user", cluster, place))
            loaded.append(UserData(f"u{first + place}", f"c{cluster}", frozen(pool[rows]), frozen(pool_target[rows]), test, test_target))
    return loaded


def _points(config: EllipsesData, cluster: int, n_per_class: int, draws: Stream) -> tuple[Array, Array]:
    """n_per_class points of class +1, then as many of -1: features (2 n_per_class, 2), target (2 n_per_class,)."""
    angle = math.radians(FIRST_ANGLE_DEGREES + 360.0 * cluster / config.clusters)
    along = np.array([math.cos(angle), math.sin(angle)])  # u_k
    across = np.array([-along[1], along[0]])
    target = np.repeat([1.0, -1.0], n_per_class)
    disc = _disc(2 * n_per_class, draws)
    distance = CENTRE * target + SEMI_AXIS_ALONG * disc[:, 0]
    points = distance[:, np.newaxis] * along + (SEMI_AXIS_ACROSS * disc[:, 1])[:, np.newaxis] * across
    return frozen(points), frozen(target)


def _disc(n: int, draws: Stream) -> Array:
    """(n, 2) points uniform in the unit disc. Rejection from the square needs no sine, whose last bit differs between machines."""
    kept = np.empty((0, 2))
    while len(kept) < n:
        square = 2.0 * draws.uniform(2 * max(n, 16)).reshape(-1, 2) - 1.0
        kept = np.concatenate([kept, square[square[:, 0] ** 2 + square[:, 1] ** 2 <= 1.0]])
    return kept[:n]


def _rows_with_both_classes(target: Array, n_rows: int, draws: Stream) -> list[int]:
    """n_rows of the pool's rows without replacement, drawn again until they contain both classes."""
    while True:
        rows = draws.order(len(target))[:n_rows]
        if len(distinct(target[rows])) == 2:
            return [int(row) for row in rows]
