"""The graph of convex clustering on the users of a run."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.errors import ConfigError, RunError
from coterie.families.ties import File, Graph, Neighbours, Pairs
from coterie.text.quoting import quoted, shortened
from coterie_server.interface.half import Setting
from coterie_server.interface.stages import Stage, reference
from coterie_server.maths import graphs, ssnal

_SMALLEST, _LARGEST = 1e-100, 1e100  # weights; squares of others are 0 or infinite
_LINE_BYTES = 700.0  # of a pair, as names and in the set of pairs that have been seen


def before(graph: Graph) -> list[Stage]:
    """The stages that a graph needs: local models, to choose neighbours."""
    return [reference("local")] if isinstance(graph, Neighbours) else []


def pairs_of(graph: Graph, n: int) -> tuple[int, str] | None:
    """At most how many pairs the graph ties among n users, and these in words. None for a file that cannot be read: it is refused later."""
    if graph == "complete":
        return n * (n - 1) // 2, f"all pairs of {n:,} users"
    if isinstance(graph, Neighbours):
        return n * min(graph.neighbours, n - 1), f"{graph.neighbours} neighbour{'s' * (graph.neighbours != 1)} of each of {n:,} users"
    if isinstance(graph, Pairs):
        return len(graph.pairs), f"the {len(graph.pairs):,} listed pairs of {n:,} users"
    try:
        with Path(graph.file).open("rb") as file:
            n_pairs = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b"")) + 1  # the last line may have no end
    except OSError:
        return None
    return n_pairs, f"the {n_pairs:,} pairs of {shortened(graph.file)} and {n:,} users"


def bytes_to_read(graph: Graph, n_pairs: int) -> float:
    """What a file needs while its lines become a graph."""
    return _LINE_BYTES * n_pairs if isinstance(graph, File) else 0.0


def instead_of(graph: Graph) -> str:
    """What needs less memory, as an order."""
    if graph == "complete":
        return "use graph: {neighbours: 15}"
    return "use fewer neighbours" if isinstance(graph, Neighbours) else "list fewer pairs, or use graph: {neighbours: 15}"


def check_same(graph: ssnal.Graph | None, mark: int) -> None:
    """RunError for a stage that goes on with another graph than the one with this mark: its file may have changed. None is complete."""
    if mark_of(graph) != mark:
        raise RunError("the pairs or weights of method.graph are others than those that the run began with: give it the same file again")


def mark_of(graph: ssnal.Graph | None) -> int:
    """0 for all pairs."""
    return 0 if graph is None else graph.mark


def outcome_of(graph: ssnal.Graph | None) -> dict[str, NDArray[Any]]:
    """The graph as `Outcome.ties` has it, in numbers of 32 bits; empty for all pairs."""
    if graph is None:
        return {}
    return {"first": graph.first.astype(np.int32), "second": graph.second.astype(np.int32), "weight": graph.weights}


def notes_on(graph: ssnal.Graph | None) -> tuple[str, ...]:
    """What a run says of a graph that is not complete."""
    if graph is None:
        return ()
    parts = np.bincount(graph.components())
    alone = f", {int((parts == 1).sum())} of one user" if (parts == 1).any() else ""
    return (f"the graph ties {graph.n:,} users by {graph.m:,} pairs; it has {len(parts)} part{'s' * (len(parts) > 1)}{alone}",)


def graph_of(graph: Graph, setting: Setting) -> ssnal.Graph:
    """The graph of a first stage. ConfigError where members or models do not fit."""
    names = setting.members.names
    if isinstance(graph, Neighbours):
        found = setting.beside.get("local", setting.start)
        if found is None or found.models is None:
            raise ConfigError("a graph of neighbours needs local models, but no stage before has any")
        return graphs.nearest(found.models, graph.neighbours, graph.phi)
    if isinstance(graph, File):
        return tied(_pairs_in(Path(graph.file)), names, f"a pair in {shortened(graph.file)} (method.graph)")
    if isinstance(graph, Pairs):
        return tied(graph.pairs, names, "a pair of method.graph")
    return ssnal.Graph.complete(len(names))


def tied(pairs: Sequence[tuple[str, str, float]], names: Sequence[str], where: str) -> ssnal.Graph:
    """The graph of pairs of users by name. ConfigError for pairs of others."""
    place, seen = {name: number for number, name in enumerate(names)}, set[frozenset[str]]()
    for one, other, weight in pairs:
        if one not in place or other not in place or one == other:
            raise ConfigError(f"{where} is {quoted(one)} and {quoted(other)}, want two different users of this run")
        if not _SMALLEST <= weight <= _LARGEST:
            found = f"{quoted(one)} and {quoted(other)}, has the weight {weight}"
            raise ConfigError(f"{where}, {found}, want a number from {_SMALLEST:g} to {_LARGEST:g}")
        if (pair := frozenset((one, other))) in seen:
            raise ConfigError(f"{where}, {quoted(one)} and {quoted(other)}, is there twice, want each pair once, in either order")
        seen.add(pair)
    first, second = (np.array([place[name] for name in side], np.int64) for side in list(zip(*pairs, strict=True))[:2])
    return ssnal.Graph.of(len(names), first, second, np.array([pair[2] for pair in pairs]))


def _pairs_in(path: Path) -> list[tuple[str, str, float]]:
    where, pairs, number = f"{shortened(str(path))} (method.graph)", [], 0
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for number, cells in enumerate(csv.reader(file), 1):
                if not cells:
                    continue
                if len(cells) != 3:
                    raise ConfigError(f"line {number} of {where} has {len(cells)} cells, want two users and a weight")
                pairs.append((cells[0].strip(), cells[1].strip(), float(cells[2])))
    except OSError as error:
        raise ConfigError(f"cannot read {where}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not a text in UTF-8") from None
    except (ValueError, csv.Error):
        raise ConfigError(f"line {number} of {where} has no number as weight, want two users and a weight") from None
    if not pairs:
        raise ConfigError(f"{where} is empty, want a line for each pair: two users and a weight")
    return pairs
