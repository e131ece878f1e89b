"""What a machine must have for the end-to-end tests. Nothing here is tested itself."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def untested(what: str, reason: str) -> NoReturn:
    """Skips the test where there is no engine, and fails it where REQUIRE_ENGINE says that there is to be one."""
    (pytest.fail if os.environ.get("REQUIRE_ENGINE") else pytest.skip)(f"NO {what} TESTED: {reason}")
