"""What holds for all tests."""

import gc
import os

import pytest
from hypothesis import settings

from coterie.record.snapshot import PACKAGES
from tests import slow

# A test must not depend on how fast the machine is. All else is as it was: on a machine for continuous integration, that profile's.
settings.register_profile("coterie", settings(), deadline=None)
settings.load_profile("coterie")
PACKAGES.add("tests")  # as plug-ins are: tests have dataclasses of their own in snapshots

os.environ["COTERIE_JOBS"] = "1"  # a pool of processes takes seconds to start; tests/integration/test_jobs.py has them


@pytest.hookimpl(tryfirst=True)  # before tests are left out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps the files that have slow tests, for the test that each is in a shard."""
    config.stash[slow.SLOW] = {item.nodeid.split("::")[0] for item in items if item.get_closest_marker("slow")}


def pytest_collection_finish() -> None:
    """The garbage collector passes over what is there for good, as thousands of tests and their modules are: an eighth of the time."""
    gc.collect()
    gc.freeze()
