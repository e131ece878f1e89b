"""Packages as pip installs them, made in a folder: a few modules, and their metadata. Nothing here is tested itself."""

from __future__ import annotations

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
