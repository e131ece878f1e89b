"""What all benchmarks share: options, the printed figures beside those of the last time, and one line of JSON for each run.

A benchmark is a module `bench_NAME.py` with one function that yields its figures, and its arguments are the options:

    def figures(repeats: int = 5, sizes: Sequence[str] = ("60x3",)) -> Iterator[Figure]: ...

    if __name__ == "__main__":
        record.main(figures)

`make bench` runs all of them with `--keep`: the lines go to `records/MACHINE.jsonl`, which is kept in the repository. A figure is better or
worse if its median moved by more than the noise: the larger range of the repetitions of both runs, and at least a twentieth.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import platform
import re
import resource
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

RECORDS = Path(__file__).parent / "records"
FLOOR = 0.05  # of a figure: the same code differs by that much from one hour to the next, however steady the repetitions of one run are
MANY = 10  # repetitions, beyond which the range is that of the middle half: the median of many moves little
Verdict = Literal["better", "worse", "same", "new", ""]


@dataclass(frozen=True)
class Figure:
    """One quantity with the values of its repetitions. `better` is None where it only explains the others."""

    name: str  # with the case: "60 x 3, 1 process, of the bare stream"
    unit: str
    values: Sequence[float]
    better: Literal["less", "more"] | None = "less"
    wanted: float | None = None
    exact: bool = False  # a count that every run repeats: any change is a change

    def kept(self) -> dict[str, Any]:
        """As it stands in the line."""
        ends = (min(self.values), max(self.values)) if len(self.values) <= MANY else quantiles(self.values, n=4)[::2]
        value, low, high = (float(f"{x:.6g}") for x in (median(self.values), *ends))
        found = {"name": self.name, "value": value, "low": low, "high": high, "n": len(self.values), "unit": self.unit}
        return {**found, "better": self.better, "wanted": self.wanted, "exact": self.exact}


def verdict(now: dict[str, Any], last: dict[str, Any] | None) -> Verdict:
    """How a figure compares with that of the last time."""
    if now["better"] is None:
        return ""
    if last is None:
        return "new"
    change = now["value"] - last["value"]
    noise = max(now["high"] - now["low"], last["high"] - last["low"], 0 if now["exact"] else FLOOR * abs(last["value"]))
    if abs(change) <= noise:
        return "same"
    return "better" if (change > 0) == (now["better"] == "more") else "worse"


def last_of(lines: Iterable[dict[str, Any]], line: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The last line of the same benchmark with the same options, and its figures by name; both empty where there is none."""
    same = [one for one in lines if (one["bench"], one["options"]) == (line["bench"], line["options"])]
    return (same[-1], {figure["name"]: figure for figure in same[-1]["figures"]}) if same else ({}, {})


def machine() -> dict[str, Any]:
    """The kind of machine, by which lines are kept, and the versions, which a reader of a change must know."""
    described = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    cpu = dict(re.findall(r"^([^\t:]+?)\s*: (.*)$", described, re.MULTILINE))
    model = f"{cpu.get('model name', platform.machine())} ({cpu.get('cpu family', '?')}.{cpu.get('model', '?')})"
    versions = {name: metadata.version(name) for name in ("numpy", "scipy", "torch", "grpcio")}
    return {"cpu": model, "cores": len(os.sched_getaffinity(0)), "versions": {"python": platform.python_version(), **versions}}


def records_of(kind: dict[str, Any]) -> Path:
    """The file of a kind of machine."""
    return RECORDS / (re.sub(r"[^a-z0-9.]+", "-", f"{kind['cpu']} {kind['cores']} cores".lower()) + ".jsonl")


def read(path: Path) -> list[dict[str, Any]]:
    """The lines that are kept, in the order of their runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def shown(figure: dict[str, Any], last: dict[str, Any] | None) -> str:
    """One line for people."""
    found = f"{figure['name']:58} {figure['value']:>9.4g} {figure['unit']:9}"
    if figure["n"] > 1:
        found += f" ({figure['low']:.4g} to {figure['high']:.4g})"
    if (wanted := figure["wanted"]) is not None:
        is_missed = figure["value"] > wanted if figure["better"] == "less" else figure["value"] < wanted
        found += f"  wanted: at {'most' if figure['better'] == 'less' else 'least'} {wanted:g}{', MISSED' if is_missed else ''}"
    if said := verdict(figure, last):
        found += f"  {said.upper() if said == 'worse' else said}" + (f", was {last['value']:.4g}" if last else "")
    return found


def main(figures: Callable[..., Iterable[Figure]]) -> None:
    """The command of a benchmark: an option for each argument of its function."""
    module = inspect.getmodule(figures)
    parser = argparse.ArgumentParser(description=module and module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, one in inspect.signature(figures).parameters.items():
        is_list = isinstance(one.default, tuple)
        kind = type(one.default[0] if is_list else one.default)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, nargs="+" if is_list else None, default=one.default)
    parser.add_argument("--keep", action="store_true", help=f"append the line to the machine's file in {RECORDS.name}/")
    options = vars(parser.parse_args())
    is_kept, kind = options.pop("keep"), machine()
    path = records_of(kind)
    line: dict[str, Any] = {
        "bench": Path(inspect.getfile(figures)).stem.removeprefix("bench_"),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "options": json.loads(json.dumps(options)),
        "machine": kind,
    }
    last, before = last_of(read(path), line)
    if last:
        changed = [f"{name} {last['machine']['versions'].get(name)} then" for name, at in kind["versions"].items()
                   if last["machine"]["versions"].get(name) != at]  # fmt: skip
        load = f", when other work kept {last['load']:.1f} cores busy"
        print(f"beside {last['date'][:10]} at {last['commit']}{load}" + "".join(f", {one}" for one in changed), flush=True)
    started = _clocks()
    line["figures"] = []
    for figure in figures(**options):
        line["figures"].append(kept := figure.kept())
        print(shown(kept, before.get(kept["name"])), flush=True)
    seconds, busy, ours = (end - start for start, end in zip(started, _clocks(), strict=True))
    line["load"] = round(max(0.0, busy - ours) / seconds, 2)
    print(f"{seconds:.0f} s; other work kept {line['load']:.1f} of {kind['cores']} cores busy"
          + (", so times mean little" if line["load"] > kind["cores"] / 4 else ""), flush=True)  # fmt: skip
    if is_kept:
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    else:
        print(json.dumps(line), flush=True)


def _commit() -> str:
    """The commit, with a + where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=RECORDS.parent, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + "+" * bool(git("status", "--porcelain", "--", ":/", ":!records"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _clocks() -> tuple[float, float, float]:
    """Seconds: by the clock, of work of all cores, and of this process and the children that it has waited for."""
    user, nice, system, _, _, irq, soft, *_ = map(int, Path("/proc/stat").read_text().split()[1:11])
    ours = sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))
    return time.monotonic(), (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK"), ours


def moved(bench: str) -> list[str]:
    """The figures of the last kept line of a benchmark that are better or worse than in the line before."""
    lines = [line for line in read(records_of(machine())) if line["bench"] == bench]
    _, before = last_of(lines[:-1], lines[-1])
    pairs = [(figure, before.get(figure["name"])) for figure in lines[-1]["figures"]]
    return [f"{bench}: {shown(figure, last)}" for figure, last in pairs if verdict(figure, last) in {"better", "worse"}]
