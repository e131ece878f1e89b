"""The slow suite, in shards: `python -m tests.slow [SHARD ...] [--minutes N] [--jobs N]`, or `make test-slow`.

Without names all shards run, one after the other. The commit decides which one is first, so that nobody's habits (submissions of an even
number of commits, or on every second day) leave the same shards for last, where time can run out.

The first failure ends it. When N minutes are over, it says which tests did not run. A shard that takes longer than LIMIT_S never fits into
a submission, which is an error: cut it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYTEST = (sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-m", "slow and not e2e and not browser")
LIMIT_S = 30 * 60.0
# Files of tests, all slow tests of which are in the shard. The claims of the papers come first.
SHARDS: Mapping[str, Sequence[str]] = {
    "claims-pdmm": ("tests/papers/test_pdmm.py", "tests/papers/test_pdmm_graph.py"),
    "claims-updates": ("tests/papers/test_pdmm_arrivals.py", "tests/papers/test_pdmm_rows.py"),
    "claims-rho": ("tests/papers/test_pdmm_rho.py",),
    "claims-privacy": (
        "tests/papers/test_private_silos.py",
        "tests/integration/test_noise_of_hosts.py",
        "tests/integration/test_noise_under_kills.py",
        "tests/integration/test_privacy.py",
        "tests/integration/test_privacy_clusters.py",
        "tests/integration/test_privacy_sums.py",
    ),
    "claims-representations": (
        "tests/papers/test_fedrep.py",
        "tests/papers/test_fedrep_digits.py",
        "tests/papers/test_fedrep_linear.py",
        "tests/papers/test_fedrep_linear_figures.py",
        "tests/papers/test_fedrep_networks_figures.py",
        "tests/papers/test_fedrep_table1.py",
    ),
    "claims-clusters": (
        "tests/papers/test_async_al2sgd.py",
        "tests/papers/test_async_l2gd.py",
        "tests/papers/test_convex_checks.py",
        "tests/papers/test_fed_mtl_convex.py",
        "tests/papers/test_figures.py",
        "tests/papers/test_hlm.py",
        "tests/papers/test_known_clusters_tables.py",
        "tests/papers/test_half_moons.py",
        "tests/papers/test_son_newton_losses.py",
        "tests/papers/test_son_newton_shipped.py",
    ),
    "conformance": (
        "tests/integration/test_bits.py",
        "tests/integration/test_broken_methods.py",
        "tests/integration/test_conformance.py",
        "tests/integration/test_plugins_keep_promises.py",
        "tests/integration/test_public_variates.py",
    ),
    "deaths": (
        "tests/integration/test_address_file.py",
        "tests/integration/test_convex_updates.py",
        "tests/integration/test_full_disk.py",
        "tests/integration/test_kills.py",
        "tests/integration/test_links.py",
        "tests/integration/test_arrivals.py",
        "tests/integration/test_loss.py",
        "tests/integration/test_renewal.py",
        "tests/integration/test_lying.py",
        "tests/integration/test_own_updates.py",
        "tests/integration/test_peers.py",
        "tests/integration/test_resume.py",
        "tests/integration/test_supervised.py",
        "tests/integration/test_masked_tiers.py",
        "tests/integration/test_two_tier.py",
    ),
    "documents": ("tests/documents/test_pages.py",),
    "commands": (
        "tests/fuzz/test_frames.py",
        "tests/fuzz/test_sessions.py",
        "tests/integration/test_cli_run.py",
        "tests/integration/test_coefficients.py",
        "tests/integration/test_attack.py",
        "tests/integration/test_compare.py",
        "tests/integration/test_consent.py",
        "tests/integration/test_convex_mistakes.py",
        "tests/integration/test_hostile.py",
        "tests/integration/test_jobs.py",
        "tests/integration/test_marker.py",
        "tests/integration/test_project.py",
        "tests/integration/test_tls.py",
        "tests/integration/test_tune.py",
        "tests/unit/test_certificate.py",
        "tests/unit/test_dashboard.py",
        "tests/unit/test_data_sources.py",
        "tests/unit/test_export_mlflow.py",
        "tests/unit/test_kubernetes.py",
        "tests/unit/test_log_format.py",
        "tests/unit/test_nets_training.py",
        "tests/unit/test_new.py",
        "tests/unit/test_report_page.py",
        "tests/unit/test_slow.py",
        "tests/unit/test_tracing.py",
    ),
}
SLOW = pytest.StashKey[set[str]]()  # the files of the slow tests that pytest has found
_OUTCOMES = "COTERIE_SLOW_OUTCOMES"  # the file that the pytest of a shard writes outcomes to


def slow_after(n: int, cases: Iterable[Any]) -> list[Any]:
    """Cases of a test, of which all but the first `n` are slow: what they cover beyond those is seldom what breaks."""
    first, others = list(cases)[:n], list(cases)[n:]
    return first + [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow) for case in others]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Writes down how a test has ended: a shard that is cut off says nothing of those before."""
    is_worker = "PYTEST_XDIST_WORKER" in os.environ
    if _OUTCOMES in os.environ and not is_worker and (report.when == "teardown" or report.failed):
        with Path(os.environ[_OUTCOMES]).open("a") as file:
            file.write(f"{report.outcome} {report.nodeid}\n")


def in_turn(names: Sequence[str], commit: str) -> list[str]:
    """The names, from the one on that a commit's id (hexadecimal digits) chooses."""
    first = int(commit or "0", 16) % len(names)
    return [*names[first:], *names[:first]]


def run_shard(files: Sequence[str], jobs: int, seconds: float, outcomes: Path) -> int | None:
    """Pytest's exit status; None when time was up before, and nothing had failed."""
    options = ["-p", "tests.slow", "--maxfail", "1", "--timeout", "900", "-n", str(jobs), "--dist", "worksteal"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # a test of this runs in a worker
    environment[_OUTCOMES] = str(outcomes)
    process = subprocess.Popen([*PYTEST, *options, *files], cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return 1 if "failed" in ended(outcomes) else None
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Nothing of a shard is left: pytest hears of it first, so that tests can end what they have started."""
    for sent in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(20)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def ended(outcomes: Path) -> dict[str, list[str]]:
    """The tests by how they ended."""
    found: dict[str, list[str]] = {}
    for line in outcomes.read_text().splitlines() if outcomes.exists() else ():
        outcome, test = line.split(" ", 1)
        found.setdefault(outcome, []).append(test)
    return found


def collected(files: Iterable[str]) -> list[str]:
    """The slow tests of these files."""
    done = subprocess.run([*PYTEST, "--collect-only", "-q", *files], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return [line for line in done.stdout.splitlines() if "::" in line]


def say_left(tests: Iterable[str]) -> None:
    """Says which tests did not run, by function."""
    counts = Counter(re.sub(r"\[.*", "", test) for test in tests)
    print(f"\nTime is up. {sum(counts.values())} slow tests did not run:")
    for function, n in counts.items():
        print(f"  {function}{f' ({n} cases)' if n > 1 else ''}")


def run(names: Sequence[str], shards: Mapping[str, Sequence[str]], jobs: int, minutes: float, limit_s: float = LIMIT_S) -> int:
    """Runs shards as long as there is time. 0 when nothing has failed, and every shard that was cut off would fit into `limit_s`."""
    until = time.monotonic() + 60 * minutes
    for place, name in enumerate(names):
        print(f"\nShard {name} ({place + 1} of {len(names)})", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            outcomes, begin = Path(folder, "outcomes"), time.monotonic()
            status = run_shard(shards[name], jobs, max(min(limit_s, until - begin), 0.0), outcomes)
            took = time.monotonic() - begin
            if status is None:
                done = {test for tests in ended(outcomes).values() for test in tests}
                files = [file for later in names[place:] for file in shards[later]]
                say_left(test for test in collected(files) if test not in done)
                if took >= limit_s:
                    print(f"Shard {name} does not fit into {limit_s / 60:g} minutes: cut it (tests/slow.py).")
                return int(took >= limit_s)
        if status:
            print(f"Shard {name} has failed: pytest ended with exit status {status}.")
            return 1
        print(f"Shard {name} passed in {took / 60:.1f} minutes.", flush=True)
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.slow")
    parser.add_argument("shards", nargs="*", metavar="SHARD", help=f"one of {', '.join(SHARDS)}; all without")
    parser.add_argument("--minutes", type=float, default=24 * 60.0, help="the time for all")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    asked = parser.parse_args()
    if unknown := sorted(set(asked.shards) - SHARDS.keys()):
        parser.error(f"there is no shard {unknown[0]!r}, wanted one of {', '.join(SHARDS)}")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return run(asked.shards or in_turn(list(SHARDS), commit), SHARDS, asked.jobs, asked.minutes)


if __name__ == "__main__":
    sys.exit(main())
