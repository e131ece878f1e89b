"""Whether what the stages of a run need fits into the memory that this process may use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from coterie.errors import ConfigError
from coterie_server.interface.half import server_half
from coterie_server.interface.stages import Stage
from coterie_server.record.rundb import RunDatabase

_WORTH_SAYING = 1e9  # bytes


def check_memory(stages: Sequence[Stage], n_users: int, d: int, database: RunDatabase, free: int | None = None) -> None:
    """ConfigError for the first stage that cannot fit; an event says what a large one needs. `free` replaces what the system tells."""
    said = ""
    for stage in stages:
        hook = server_half(stage.method).memory
        need = None if hook is None else hook(stage.config, n_users, d)
        if need is None:
            continue
        free = free_bytes() if free is None else free
        text = f"{need.of} needs {_size(need.bytes)}"
        if free is not None and need.bytes > free:
            raise ConfigError(f"{text}, and this process may use {_size(free)} more: {need.instead}")
        if need.bytes >= _WORTH_SAYING and text != said:
            said = text
            database.event("memory", text, stage=stage.name)


def _size(n_bytes: float) -> str:
    if n_bytes < 1e9:
        return f"{n_bytes / 1e6:,.0f} MB"
    return f"{n_bytes / 1e9:.2g} GB" if n_bytes < 1e10 else f"{n_bytes / 1e9:,.0f} GB"


def free_bytes(root: Path = Path("/")) -> int | None:
    """What this process may still use: of the machine, and of its control groups and those above them. None where the system is silent."""
    found = [_available(root / "proc/meminfo"), *_groups(root)]
    return min((one for one in found if one is not None), default=None)


def _available(path: Path) -> int | None:
    """What Linux reckons can be had without swapping."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None


def _groups(root: Path) -> Iterator[int | None]:
    """What each control group leaves, of version 2 and of version 1; in a container the path of its own group may be outside."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            top = root / "sys/fs/cgroup" / controllers
            limit, used = ("memory.max", "memory.current") if not controllers else ("memory.limit_in_bytes", "memory.usage_in_bytes")
            below = Path(path.lstrip("/"))
            for folder in {top, *(top / part for part in (below, *below.parents))}:
                yield _left(folder, limit, used)


def _left(folder: Path, limit: str, used: str) -> int | None:
    """The limit less what is in use; files that the system can drop are not."""
    try:
        most, now = int((folder / limit).read_text()), int((folder / used).read_text())
        cached = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
    except (OSError, ValueError):  # no such group, or "max"
        return None
    droppable = next((int(value) for name, value in cached if name in ("inactive_file", "total_inactive_file")), 0)
    return max(0, most - now + droppable)
