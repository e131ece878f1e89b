"""Hosts whose packages are not those of the coordinator: real processes, each with a path of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.commands import Command, commands_in
from tests.packaged import installed

LOSS = """
    import numpy as np

    class Square:
        is_classifier = False
        curvature_floor = curvature_bound = 1.0
        def value(self, s, y): return (s - y) ** 2 / 2
        def slope(self, s, y): return s - y
        def curvature(self, s, y): return np.ones_like(s)
        def check_targets(self, y, user): pass
        def predict(self, s): return s
"""
EXPERIMENT = {
    "name": "small",
    "data": {"source": "ellipses", "clusters": 1, "users_per_cluster": 3},
    "problem": {"loss": "square", "l2": 0.1},
    "method": {"name": "local"},
    "federation": {"join_timeout_s": 60},
}
VERSIONS = {"same": "1.0", "newer": "1.1", "missing": None}
REFUSED = {
    "newer": (
        "the package pack-square is installed here in version 1.1, and the experiment needs version 1.0",
        "a package of the experiment has another version (rule L10)",
    ),
    "missing": (
        "the experiment needs the package pack-square '1.0', which is not installed here",
        "a package of the experiment is not installed (rule L8)",
    ),
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(EXPERIMENT))
    for name, version in VERSIONS.items():
        if version is not None:
            installed(tmp_path / name, "pack-square", version, {"coterie.losses": {"square": "pack_square:Square"}}, {"pack_square": LOSS})
    with commands_in(tmp_path) as run:
        yield lambda site, *arguments: run(
            *arguments,
            launcher=["env", f"PYTHONPATH={os.pathsep.join(filter(None, [str(tmp_path / site), os.environ.get('PYTHONPATH')]))}"],
        )


def test_a_host_with_the_same_package_needs_no_leave_for_its_code(start: Callable[..., Command]) -> None:
    server = start("same", "server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "run")
    host = start("same", "client", "--server", server.address(), "--name", "a")
    assert (server.end()[0], host.end()[0]) == (0, 0)


@pytest.mark.parametrize("site", REFUSED)
def test_a_host_with_another_version_or_without_the_package_is_refused_with_one_sentence(site: str, start: Callable[..., Command]) -> None:
    server = start("same", "server", "small.yaml", "--listen", "127.0.0.1:0", "--output", "run")
    own, others = REFUSED[site]
    assert start(site, "client", "--server", server.address(), "--name", "a").fails(2) == f"error: {own}"
    assert others in server.line(others)
