"""`import coterie`: the public names, where they come from, and that documents and messages know no other door."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator

import coterie
from tests.rooms import DOORS, PACKAGES, ROOT, sources

NAMES = {
    "Comparison", "ConfigError", "CoterieError", "Experiment", "ProtocolError", "Result", "Run", "RunError", "SumOfNorms", "__version__",
    "compare", "load_experiment", "load_run", "run", "sum_of_norms", "user_source",
}  # fmt: skip
DOCUMENTS = ("README.md", "SECURITY.md", "CHANGELOG.md", "docs/**/*.md", "deploy/compose/*", "deploy/coterie_deploy/experiments/*")


def test_the_public_names_are_these() -> None:
    assert set(coterie.__all__) == NAMES
    assert set(dir(coterie)) >= NAMES
    for name in NAMES:
        assert getattr(coterie, name) is not None


def test_the_stub_types_each_name_from_the_module_that_it_is_fetched_from() -> None:
    stub = ast.parse((ROOT / "common/coterie/__init__.pyi").read_text(encoding="utf-8"))
    typed = {alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    errors = {name for name in NAMES if name.endswith("Error")}
    assert typed == {**coterie.FETCHED, **dict.fromkeys(errors, "coterie.errors")}


def test_the_doors_are_those_of_the_room_test() -> None:
    there = [path for pattern in ("__*__.py*", "plugin.py*", "registry.py") for path in (ROOT / "common/coterie").glob(pattern)]
    assert {path.as_posix() for path in there} == {(ROOT / door).as_posix() for door in DOORS}
    for module in coterie.FETCHED.values():
        assert module.split(".")[0] in PACKAGES
        importlib.import_module(module)


def test_no_document_names_the_package_behind_the_door() -> None:
    pages = [path for pattern in DOCUMENTS for path in ROOT.glob(pattern) if path.is_file() and "_build" not in path.parts]
    assert len(pages) > 20
    assert [path.name for path in pages if "coterie_deploy" in path.read_text(encoding="utf-8")] == []


def raised(module: ast.Module) -> Iterator[str]:
    """The texts in the errors that a module raises."""
    for node in ast.walk(module):
        parts = ast.walk(node.exc) if isinstance(node, ast.Raise) and node.exc is not None else ()
        yield from (part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))


def test_no_error_names_a_package_behind_the_door() -> None:
    texts = [text for package in PACKAGES for path in sources(package) for text in raised(ast.parse(path.read_text(encoding="utf-8")))]
    assert len(texts) > 1000
    assert [text for text in texts if "coterie_" in text] == []


def test_the_package_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "coterie", "--help"], capture_output=True, text=True, timeout=50, check=True)
    assert "Usage: coterie [OPTIONS] COMMAND" in done.stdout
