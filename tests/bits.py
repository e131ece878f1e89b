"""The bits that runs leave: hashes of the models of shipped experiments whose data comes with the project, and of each method's small run.

Numbers depend on the kernels that numpy, OpenBLAS and torch choose for a processor. `ENVIRONMENT` makes them choose those that every x86-64
processor has, so the hashes can be compared between machines.

Usage:  python -m tests.bits [--names hsb,digits] [--data FOLDER] [--write]
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie_deploy.studies.check.results import arrays_in

FIXTURE = Path(__file__).parent / "fixtures" / "bits.json"
SHIPPED = (
    "digits",
    "ellipses",
    "ellipses-paper",
    "exams",
    "growth",
    "growth-newton",
    "hlm",
    "hsb",
    "hsb-newton",
    "linear-representation",
    "new-users",
    "schools",
)
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Nehalem",
    "NPY_DISABLE_CPU_FEATURES": " ".join(
        name for name in np._core._multiarray_umath.__cpu_dispatch__ if np._core._multiarray_umath.__cpu_features__[name]
    ),
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX512F",
}


def hash_of(outcomes: Mapping[str, Any]) -> str:
    """The first 16 hex digits of the SHA-256 of all arrays and figures that the stages left."""
    digest = hashlib.sha256()
    for place, array in arrays_in({name: {**vars(outcome), "carry": None} for name, outcome in outcomes.items()}):
        digest.update(f"{place} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def printed(code: str, *threads: int) -> set[str]:
    """What a program in Python prints, with each of these numbers of threads for BLAS."""
    found = set()
    for number in map(str, threads):
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": number, "OMP_NUM_THREADS": number}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=50, check=True)
        found.add(done.stdout)
    return found


def libraries() -> dict[str, str]:
    """What else the bits may depend on."""
    import scipy
    import torch

    return {"numpy": np.__version__, "scipy": scipy.__version__, "torch": torch.__version__, "libc": "-".join(platform.libc_ver())}


def computed(names: list[str], data: Path | None) -> dict[str, str]:
    """The hashes, by name. To be called in a process that was started with `ENVIRONMENT`."""
    from coterie_deploy.engines.launch import Launch, launch
    from coterie_deploy.read import shipped
    from coterie_deploy.studies.check.federations import CASES

    found = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            if name in CASES:
                case, start = CASES[name], CASES[name].start(Path(folder))
                finished = asyncio.run(launch(case.experiment(Path(folder)), Launch("loopback", start=start)))
            else:
                finished = asyncio.run(launch(shipped.load(name, ["federation.topology=flat"]), Launch("loopback", data=data)))
        found[name] = hash_of(finished.outcomes)
        print(f"{name:30} {found[name]}", file=sys.stderr, flush=True)
    return found


def everything() -> list[str]:
    """The names in the fixture."""
    from coterie_deploy.studies.check.federations import CASES

    return [*SHIPPED, *CASES]


def in_a_process(*arguments: str, timeout: float) -> dict[str, Any]:
    """What this module prints in a process with `ENVIRONMENT`."""
    command = [sys.executable, "-m", "tests.bits", "--here", *arguments]
    done = subprocess.run(command, env={**os.environ, **ENVIRONMENT}, stdout=subprocess.PIPE, text=True, timeout=timeout, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Prints hashes and libraries as JSON, or writes the fixture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--names", help="separated by commas; all by default")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--write", action="store_true", help="write them into the fixture, and leave the other hashes")
    parser.add_argument("--here", action="store_true", help="in this process, which has the environment")
    options = parser.parse_args()
    if options.here:
        names = options.names.split(",") if options.names else everything()
        print(json.dumps({"libraries": libraries(), "hashes": computed(names, options.data)}))
        return
    arguments = [*(["--names", options.names] if options.names else []), *(["--data", str(options.data)] if options.data else [])]
    found = in_a_process(*arguments, timeout=3600)
    if options.write:
        found["hashes"] = {**json.loads(FIXTURE.read_text(encoding="utf-8"))["hashes"], **found["hashes"]}
        FIXTURE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    else:
        print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
