"""Messages with one row per known cluster: who gets which rows, and how aggregators' answers are put together."""

from __future__ import annotations

import asyncio
from typing import Annotated

import numpy as np
import pytest

from coterie.arrays import Array
from coterie.errors import ProtocolError, RunError
from coterie.families.evaluation import FinalModels
from coterie.wire.messages import PerCluster, Vectors, dataclass, declare
from coterie.wire.precision import Precision
from coterie_server.interface.merge import Layout, check_finite, check_kinds, check_owners, merged
from coterie_server.interface.peers import as_sent
from coterie_server.run.tiers import _Tier


@declare(method="percluster", step="P1")
@dataclass(frozen=True)
class Centre(PerCluster):
    """A point of each cluster."""

    point: Annotated[Array, Vectors("clusters", "d")]


CLUSTER_OF = np.array([0, 1, 2, 0, 1, 2])
LAYOUT = Layout({"a": np.array([0, 1, 3]), "b": np.array([2, 4, 5])}, 6, CLUSTER_OF)


def centres(*clusters: int) -> Centre:
    return Centre(np.array(clusters), np.array([[float(number), 0.5] for number in clusters]))


def test_a_host_gets_the_rows_of_the_clusters_of_its_users() -> None:
    sent = centres(0, 1, 2)
    for host, clusters in (("a", [0, 1]), ("b", [1, 2])):
        part = LAYOUT.part_for(host, sent)
        assert isinstance(part, Centre)
        assert part.clusters.tolist() == clusters
        assert part.point.tolist() == [[float(number), 0.5] for number in clusters]
    assert LAYOUT.part_for("a", centres(2)) is None


def test_a_host_without_known_clusters_gets_none() -> None:
    assert Layout({"a": np.array([0])}, 1).part_for("a", centres(0)) is None


def test_answers_come_in_cluster_order_whatever_the_hosts_are_called() -> None:
    layout = Layout({"a": np.array([2, 5]), "b": np.array([0, 3]), "c": np.array([1, 4])}, 6, CLUSTER_OF)
    whole = merged({"a": [centres(2)], "b": [centres(0)], "c": [centres(1)]}, layout)[Centre]
    assert isinstance(whole, Centre)
    assert whole.clusters.tolist() == [0, 1, 2]
    assert whole.point[:, 0].tolist() == [0.0, 1.0, 2.0]


def test_an_aggregator_speaks_for_its_own_cluster_alone() -> None:
    with pytest.raises(ProtocolError, match=r"host 'b' sent percluster.Centre for clusters \[1\], wanted \[2\]"):
        check_owners("b", centres(1), np.array([2, 5]), np.array([2]))
    check_owners("b", centres(2), np.array([2, 5]), np.array([2]))


def test_an_aggregator_that_answers_twice_or_in_another_width_is_named() -> None:
    layout = Layout({"a": np.array([0, 3]), "b": np.array([1, 2, 4, 5])}, 6, CLUSTER_OF)
    with pytest.raises(ProtocolError, match=r"host 'a' sent percluster.Centre twice in one reply"):
        check_kinds("a", [centres(0), centres(0)])
    wide = Centre(np.array([1, 2]), np.ones((2, 3)))
    with pytest.raises(ProtocolError, match=r"host 'b'.*point.*"):
        merged({"a": [centres(0)], "b": [wide]}, layout)


def test_what_is_for_the_aggregators_is_not_mixed_with_what_is_for_users_in_a_flat_run_either() -> None:
    """There the users' part would be lost without a word."""
    mixed = (centres(0), FinalModels(np.ones((6, 2))))
    with pytest.raises(ProtocolError, match="a task mixes messages for the aggregator with messages for its users"):
        asyncio.run(_Tier(None, None, None, Precision.of("float64")).exchange(*mixed))  # type: ignore[arg-type]


def test_a_nan_of_an_aggregator_is_its_clusters() -> None:
    wrong = Centre(np.array([2]), np.array([[np.nan, 0.0]]))
    with pytest.raises(RunError, match=r"host 'b' returned nan for cluster 2 in percluster.Centre.point in round 7"):
        check_finite("b", wrong, np.array([2, 5]), [f"u{i}" for i in range(6)], 7)


def test_what_would_travel_between_the_tiers_is_rounded_in_a_flat_run_too() -> None:
    third = Centre(np.array([0]), np.array([[1 / 3, 1.0]]))
    rounded = as_sent(third, Precision.of("float32"))
    assert isinstance(rounded, Centre)
    assert rounded.point[0, 0] == np.float64(np.float32(1 / 3))
    assert as_sent(third, Precision.of("float64")).point[0, 0] == 1 / 3  # type: ignore[attr-defined]
