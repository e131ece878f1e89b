"""Writes the Python bindings and type stubs of the wire contract to common/coterie/v1 (or to another folder).

Usage: python protos/generate.py [FOLDER]        # the default is common/
"""

from __future__ import annotations

import sys
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent


def generate(target: Path) -> None:
    """Generates `target/coterie/v1/*_pb2.py` and `*_pb2.pyi`; raises SystemExit when protoc refuses a file."""
    files = sorted(str(path) for path in ROOT.glob("coterie/v1/*.proto"))
    code = protoc.main(["protoc", f"--proto_path={ROOT}", f"--python_out={target}", f"--pyi_out={target}", *files])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    generate(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT.parent / "common")
