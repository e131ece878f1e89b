"""Who may import whom."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {
    "common": {"coterie"},
    "server": {"coterie", "coterie_server"},
    "client": {"coterie", "coterie_client"},
    "deploy": {"coterie", "coterie_server", "coterie_client", "coterie_deploy"},
}


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_the_rooms_it_may(room: str) -> None:
    files = list((ROOT / room).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.startswith("coterie")}
        assert ours <= ROOMS[room], f"{path} imports {ours - ROOMS[room]}"


def printed(code: str) -> str:
    """By a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True).stdout.strip()


def test_a_client_starts_without_torch_scipy_pandas_pyarrow_or_the_server() -> None:
    code = (
        "import sys, coterie.dial, coterie_client.build, coterie.config\n"
        "from coterie.registry import method_module\n"
        "for name in ('pdmm', 'consensus', 'evaluation', 'prepare'): method_module('coterie_client', name)\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'scipy', 'pandas', 'pyarrow', 'matplotlib', 'coterie_server'}))"
    )
    assert printed(code) == ""


def test_a_client_with_rows_has_loaded_one_source_no_local_steps_and_no_masked_arrays() -> None:
    code = (
        "import sys, coterie.dial\n"
        "from coterie.config import experiment_from\n"
        "from coterie_client.build import build_host\n"
        "content = {'data': {'source': 'ellipses'}, 'problem': {'loss': 'squared_hinge'}, 'method': {'name': 'pdmm', 'penalty': 1.0}}\n"
        "build_host('a', experiment_from({'name': 'small', **content}), 'run-1', None)\n"
        "unused = ('coterie.methods.partial', 'coterie_client.learning', 'coterie_client.data.csv_table', 'coterie_client.data.digits')\n"
        "print(*(m for m in sys.modules if m.startswith('numpy.ma.') or m in unused))"
    )
    assert printed(code) == ""


def test_coterie_itself_imports_neither_side() -> None:
    code = (
        "import sys, coterie, coterie.config; print(*sorted(m for m in sys.modules if m.startswith(('coterie_server', 'coterie_client'))))"
    )
    assert printed(code) == ""
