"""Packages as pip installs them, made in a folder: a few modules, and their metadata; and the check of one in a file.

Nothing here is tested itself.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent


def installed(folder: Path, name: str, version: str, names: Mapping[str, Mapping[str, str]], modules: Mapping[str, str]) -> Path:
    """The folder, with a distribution whose entry points are GROUP -> NAME -> VALUE; it is for `sys.path`."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in listed.items()) for group, listed in names.items()]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(dedent(text))
    return folder


def checked(name: str, folder: Path, kind: str = "method") -> str:
    """What `coterie check` prints of a method or compressor in a file of the folder. AssertionError where a check fails."""
    command = (sys.executable, "-m", "coterie", "check", kind, f"{name}:{kind.upper()}")
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=580, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return found.stdout
