"""Every step of a method is said in words, wherever traffic is shown."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path

import coterie.methods
from coterie_deploy.read.steps import STEPS


def test_every_declared_step_has_words() -> None:
    declared = set()
    for module in pkgutil.iter_modules(coterie.methods.__path__):
        source = importlib.import_module(f"coterie.methods.{module.name}").__file__
        declared |= set(re.findall(r'@declare\(method="\w+", step="([^"]+)"', Path(str(source)).read_text()))
    assert "S7+S10" in declared
    assert sorted(declared - set(STEPS)) == []
