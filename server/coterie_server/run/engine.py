"""The round engine: one loop that runs every method, with checkpoints, stop rules and the evaluation of what comes out.

A run is a sequence of stages on one joined federation. Nothing survives a round but the method's state, so a checkpoint is generic: a
resumed run takes the newest one and repeats what came after; hosts answer what they have answered before from what they have stored.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from coterie.arrays import Indices
from coterie.errors import ConfigError, CoterieError, RunError
from coterie.experiment.config import Experiment, StopRule
from coterie.experiment.features import MAX_LISTED, in_a_line, to_plain
from coterie.experiment.model import TensorInfo, convex_tensors, from_json
from coterie.experiment.representation import true_representation
from coterie.families.evaluation import FinalModels, Scores
from coterie.families.prepare import FEW_CELLS, FEW_ROWS
from coterie.record.snapshot import SnapshotFile
from coterie.registry import method
from coterie.wire.precision import Precision
from coterie_server.families.known_clusters import spread_of
from coterie_server.families.prepare import prepare, prepare_network
from coterie_server.interface.half import (
    FLAT_ONLY,
    ClusterSetting,
    Facts,
    Federation,
    Members,
    Outcome,
    Setting,
    StageHalf,
    server_half,
)
from coterie_server.interface.stages import Stage
from coterie_server.interface.wanted import Wanted
from coterie_server.record import closed_forms
from coterie_server.record.rundb import RunDatabase
from coterie_server.run.absence import check_absence, why_everyone
from coterie_server.run.plan import stages_of
from coterie_server.run.tiers import hosted
from coterie_server.session.hosts import HOST_BYTES
from coterie_server.session.hub import Hub


@dataclass(frozen=True)
class Point:
    """Where a run stands between two rounds: what a checkpoint holds beside the hub's memory."""

    stage: int = 0
    round: int = 0
    state: Any = None  # of the method; None before the stage has begun
    ended: str = ""  # why the stage has ended, when only its finish is missing
    facts: Facts | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """What an observer is told after each round."""

    stage: Stage
    number: int
    n_stages: int
    round: int
    figures: Mapping[str, float]
    part: float  # of the stage that is over


_TURNS_S = 0.02  # between two turns of what runs beside the rounds
_FEWEST_ROUNDS = 20  # between two checkpoints for the sake of hosts' memory, since checkpoints cost time
_FORMAT = 4  # of checkpoints; those of another cannot be taken up
_YOUNG_S = 0.5  # a checkpoint that is no older serves at the end of a stage too: little would be repeated

Observer = Callable[[Progress], None]


class Engine:
    """Runs the stages of one experiment. ConfigError when one of them has no place in its topology, or cannot leave out whom it is to."""

    def __init__(
        self,
        experiment: Experiment,
        hub: Hub,
        database: RunDatabase,
        folder: Path | None,
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: Outcome | None = None,
    ) -> None:
        self.experiment = experiment
        self.hub = hub
        self.database = database
        self.stages = stages_of(experiment)
        for stage in self.stages:
            server_half(stage.method)  # before the hosts wait for it
        if experiment.federation.is_two_tier:
            _check_clusters(self.stages)
        check_absence(experiment, self.stages)
        self.stop_requested: str | None = None
        self.wall_stops: frozenset[tuple[int, int]] = frozenset()  # decisions to repeat: (stage, round) at which the clock struck
        self._observer = observer
        self._clock = clock
        self._start = start  # what another run has left, for the stages that start from no stage of this one
        self._store = SnapshotFile(folder / "checkpoints", "run") if folder is not None else None
        self._checkpoint_seq = 0
        self._checkpoint_at = clock()
        self._n_rounds = 0  # since the newest checkpoint
        self._turns_at = clock()
        self._log_bytes = 0  # that the hub keeps for replay, at the newest checkpoint
        self._replied_bytes = 0  # by the busiest host, at the newest checkpoint

    def load_checkpoint(self, attempt: int) -> Point | None:
        """The newest checkpoint, with the hub and the database brought back to it; None when there is none.

        RunError when it cannot be read, or is of another version.
        """
        tree = self._store.load() if self._store is not None else None
        if self._store is None or tree is None:
            self.database.forget_books()
            return None
        if tree.get("format") != _FORMAT:
            raise RunError(
                f"the checkpoints in {self._store.folder} were written by another version of coterie: resume the run with that one"
            )
        point: Point = tree["point"]
        self.hub.restore(tree["hub"])
        self._checkpoint_seq = self.hub.seq
        self.database.rewind(self.hub.seq, point.stage, point.round)
        names = [stage.name for stage in self.stages]
        is_over = point.stage == len(names)
        where = "after the last stage" if is_over else f"in stage {point.stage + 1}/{len(names)} {names[point.stage]}"
        text = f"resumed {where}, round {point.round}, exchange {self.hub.seq}"
        self.database.event("resume", text, attempt=attempt)
        return point

    def checkpoint(self, point: Point) -> None:
        """Writes the point down; replies that the checkpoint before made needless may then be forgotten by their hosts.

        Hosts are asked to write down their own states, except before they have been asked anything.
        """
        if self._store is None:
            return
        self.hub.settle()
        self.database.flush()
        self._store.save({"format": _FORMAT, "point": point, "hub": self.hub.memory()})
        self.hub.outbox.durable_seq, self._checkpoint_seq = self._checkpoint_seq, self.hub.seq
        self._checkpoint_at, self._n_rounds = self._clock(), 0
        self._log_bytes, self._replied_bytes = self.hub.outbox.log_bytes, self.hub.roster.replied_bytes
        if self.hub.seq:
            self.hub.request_snapshots()

    def request_stop(self, reason: str) -> None:
        """Stops after the round under way, with a checkpoint; while the run waits for hosts that are not here, at once."""
        self.stop_requested = reason
        self.hub.stop(reason)

    async def run(self, point: Point | None = None) -> Point:
        """Runs all stages, from the start or from a checkpoint; the last point holds their outcomes by name. Raises CoterieError."""
        members = await self.hub.gather()
        host_of = {user: host.name for host in self.hub.roster.hosts.values() for user in host.users}
        self.database.members(members, host_of)
        if self.hub.roster.model:
            self.database.put("model", self.hub.roster.model)
        self._note_features()
        if point is None:
            point = Point()
            self.checkpoint(point)
        if point.facts is None:
            point = replace(point, facts=await self._prepared(members))
        if point.facts is not None and self.experiment.model is None:
            self.hub.answers.dims = {"d": point.facts.d}
        try:
            while point.stage < len(self.stages):
                point = await self._stage(self.stages[point.stage], point, members)
        finally:
            with contextlib.suppress(CoterieError):  # a stage leaves something put off only where something else has failed
                self.hub.settle()
        return point

    def _note_features(self) -> None:
        """Writes down what the features are, where the hosts' data has names, for all who look at the run."""
        features = self.hub.roster.schema
        if not features:
            return
        self.database.put("features", json.dumps(to_plain(features)))
        shown = to_plain(features[:MAX_LISTED])
        self.database.event("features", f"features ({len(features):,}): {in_a_line(features)}", n=len(features), features=shown)
        self.database.flush()

    async def _prepared(self, members: Members) -> Facts:
        if self.experiment.model is not None:
            return await prepare_network(self.hub, members, self._network())
        facts = await prepare(
            self.hub,
            members,
            standardize=self.experiment.data.standardize,
            fill=self.experiment.data.fills_missing,
            given=None if self._start is None else self._start.constants,
            may_be_constant=[feature.kind == "indicator" for feature in self.hub.roster.schema],  # of a column that lacks no cell
            features=self.hub.roster.features,
            wants_minimisers=any(method(stage.method).users_need_minimisers for stage in self.stages),
            wants_sizes=any(method(stage.method).needs_sizes for stage in self.stages),
        )
        self._warn_of_few_rows(facts)
        return facts

    def _tensors(self, point: Point) -> tuple[TensorInfo, ...]:
        if self.experiment.model is not None:
            return self._network()
        return () if point.facts is None else convex_tensors(point.facts.d)

    def _network(self) -> tuple[TensorInfo, ...]:
        """The tensors of the users' network. RunError where the hosts have brought none."""
        if not self.hub.roster.model:
            raise RunError("the hosts have joined without a model, wanted the tensors of the experiment's")
        return from_json(self.hub.roster.model)

    async def _stage(self, stage: Stage, point: Point, members: Members) -> Point:
        half = self._build(stage, point, members)
        why = why_everyone(stage)
        self.hub.participation.needs_everyone = f"stage {stage.name!r} needs every user: {why}" if why else ""
        settings = json.dumps({"stage": stage.name, "options": dict(half.client_options)})
        started = self._clock()
        figures: list[dict[str, float]] = []
        self._trace(stage, point.round, is_round=False)
        if point.state is None:
            self.database.stage(point.stage, stage.name, stage.method, 0, "", 0.0)
            self.database.figures(point.stage, 0, {})
            for sentence in half.warnings:
                self.database.event("warning", sentence, stage=stage.name)
            self.hub.begin_stage(point.stage, settings)
            point = replace(point, state=await half.init(self.hub), round=0)
        else:
            self.hub.resume_stage(point.stage, point.round, settings)
            figures = self.database.figures_of(point.stage)
        self.hub.participation.may_skip = not why
        while not point.ended:
            self.hub.state.round = point.round + 1
            self._trace(stage, point.round + 1, is_round=True)
            state, latest = await half.round(point.state, self.hub, point.round + 1)
            point = replace(point, state=state, round=point.round + 1)
            self.hub.meanwhile(functools.partial(self._note_round, half, point, latest, figures))
            if reason := half.ends(latest) or self._stop_reason(stage.stop, latest, point, started):
                point = replace(point, ended=reason)
            self._after_round(stage, half, point, latest)
            await self._give_turns()
        self.hub.settle()
        self._trace(stage, point.round, is_round=False)
        self.hub.participation.may_skip = False
        outcome = await self._finished(stage, half, point)
        is_evaluated = self.experiment.evaluate and outcome.models is not None and not outcome.is_judged
        forms = closed_forms.of_method(half, figures, outcome)
        if is_evaluated:
            outcome = await self._evaluated(outcome, self.hub)
            forms = closed_forms.together(forms, closed_forms.of_evaluation(outcome))
        outcome = replace(outcome, figures=_closing(outcome.figures, figures))
        if point.stage == 0 and point.facts is not None:
            forms = closed_forms.together(closed_forms.of_preparation(point.facts, self._n_aggregators), forms)
        self.database.result(point.stage, outcome.figures, forms, outcome.by_user)
        if half.printed_vectors is not None:
            self.database.printed(point.stage, half.printed_vectors(point.round))
        self.database.stage(point.stage, stage.name, stage.method, point.round, point.ended, self._clock() - started)
        outcomes = {**point.outcomes, stage.name: outcome}
        # What a stage carries for its successors is dropped once there is none left; along a path it would pile up in the checkpoints.
        awaited = {name for later in self.stages[point.stage + 1 :] for name in later.start}
        outcomes = {name: left if name in awaited else replace(left, carry=None) for name, left in outcomes.items()}
        is_due = self._is_checkpoint_due(point) or self._clock() - self._checkpoint_at > _YOUNG_S
        point = replace(point, stage=point.stage + 1, round=0, state=None, ended="", outcomes=outcomes)
        if is_due:
            self.checkpoint(point)
        return point

    async def _finished(self, stage: Stage, half: StageHalf[Any], point: Point) -> Outcome:
        outcome = await half.finish(point.state, self.hub)
        for sentence in outcome.warnings:
            self.database.event("warning", sentence, stage=stage.name)
        return outcome

    async def _give_turns(self) -> None:
        """Where rounds ask nobody, signals and deadlines get their turns here; a needless one costs as much as a small message."""
        now = self._clock()
        if now - self._turns_at > _TURNS_S:
            self._turns_at = now
            await asyncio.sleep(0)

    def _trace(self, stage: Stage, round_number: int, *, is_round: bool) -> None:
        if self.hub.state.tracer is not None:
            self.hub.state.tracer.enter(stage.name, stage.method, round_number, is_round=is_round)

    def _build(self, stage: Stage, point: Point, members: Members) -> StageHalf[Any]:
        start = best(stage.start, point.outcomes) if stage.start else None
        setting = Setting(
            seed=self.experiment.seed,
            stage=stage.name,
            members=members,
            precision=Precision.of_run(self.experiment),
            facts=point.facts,
            start=point.outcomes[start] if start else self._start,
            rounds=stage.stop.rounds,
            tensors=self._tensors(point),
            metric=self.experiment.problem.metric,
            truth=true_representation(self.experiment.data, self.experiment.seed),
            hosts_of_cluster=self._hosts_of_cluster(members),
        )
        half = server_half(stage.method)
        built = half.build(stage.config, setting)
        if callable(half.tiers) and not self.experiment.federation.is_two_tier:
            below = ClusterSetting(setting.seed, stage.name, members, setting.precision)
            built = hosted(built, half.tiers(stage.config, below), setting.precision)
        if self.experiment.federation.late == "skip" and why_everyone(stage):
            text = f"stage {stage.name!r} needs every member in every round, so it waits for late ones"
            self.database.event("wait", text, stage=stage.name)
        return built

    @property
    def _n_aggregators(self) -> int:
        return len(self.hub.roster.hosts) if self.experiment.federation.is_two_tier else 0

    def _hosts_of_cluster(self, members: Members) -> Indices:
        """(k,) how many client hosts have users of each known cluster; below aggregators, as many as these are told to wait for."""
        n_clusters = len(members.cluster_names)
        if self.experiment.federation.is_two_tier:
            return np.full(n_clusters, self.experiment.federation.hosts_per_cluster)
        found = self.hub.roster.layout.clusters.values()
        return np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *found]), minlength=n_clusters)

    def _warn_of_few_rows(self, facts: Facts) -> None:
        if facts.n_fewest is None:
            return
        few, does = (FEW_ROWS, "standardize is true") if facts.scale is not None else (FEW_CELLS, "missing cells get a common mean")
        n_users = int((facts.n_fewest < few).sum())
        if n_users:
            who = "1 user has" if n_users == 1 else f"{n_users} users have"
            what = f"fewer than {few} training rows" + (" with a value of some feature" if facts.fill is not None else "")
            text = f"{who} {what}, and {does}: whoever reads the sums they sent knows the features of a single row exactly"
            if few == FEW_ROWS:
                text += ", and of two rows both values of each feature, though not which belong together"
            self.database.event("warning", text, users=n_users)

    def _note_round(self, half: StageHalf[Any], point: Point, latest: Mapping[str, float], figures: list[dict[str, float]]) -> None:
        figures.append(dict(latest))
        self.database.figures(point.stage, point.round, figures[-1])
        self._note_labels(half, point)
        self.database.flush_if_due()

    def _note_labels(self, half: StageHalf[Any], point: Point) -> None:
        if (labels := half.labels_of(point.state)) is not None:
            self.database.membership(point.stage, point.round, labels)

    def _after_round(self, stage: Stage, half: StageHalf[Any], point: Point, figures: Mapping[str, float]) -> None:
        self._n_rounds += 1
        if self._store is not None and self._is_checkpoint_due(point):
            self.checkpoint(point)
        if self._observer is not None:
            part = point.round / stage.stop.rounds if half.part is None else half.part(figures)
            self._observer(Progress(stage, point.stage, len(self.stages), point.round, figures, min(1.0, part)))
        if self.stop_requested is not None:
            self.checkpoint(point)
            raise RunError(
                f"stopped by {self.stop_requested} in stage {stage.name!r} after round {point.round}; --resume goes on from there"
            )

    def _is_checkpoint_due(self, point: Point) -> bool:
        snapshots = self.experiment.snapshots
        if point.round % snapshots.every_rounds == 0 or self._clock() - self._checkpoint_at > snapshots.every_s:
            return True
        replied_bytes = self.hub.roster.replied_bytes - self._replied_bytes
        is_host_full = replied_bytes > (HOST_BYTES if self._n_rounds >= _FEWEST_ROUNDS else snapshots.max_log_bytes)
        return is_host_full or self.hub.outbox.log_bytes - self._log_bytes > snapshots.max_log_bytes

    def _stop_reason(self, stop: StopRule, figures: Mapping[str, float], point: Point, started: float) -> str:
        """Why the stage ends after this round; empty when it goes on."""
        if stop.residual is not None:  # figures may be computed when they are looked at
            residuals = [figures[name] for name in ("primal_residual", "dual_residual") if name in figures]
            if residuals and max(residuals) <= stop.residual:
                return f"residuals at most {stop.residual:g}"
        if stop.objective_gap is not None and stop.reference_objective is not None and "objective" in figures:
            gap = (figures["objective"] - stop.reference_objective) / max(abs(stop.reference_objective), np.finfo(float).tiny)
            if gap <= stop.objective_gap:
                return f"objective gap at most {stop.objective_gap:g}"
        if point.round >= stop.rounds:
            return f"{stop.rounds} rounds"
        if stop.wall_time_s is not None and self._clock_strikes(stop.wall_time_s, point, started):
            return f"{stop.wall_time_s:g} s"
        return ""

    def _clock_strikes(self, seconds: float, point: Point, started: float) -> bool:
        if (point.stage, point.round) in self.wall_stops:
            return True
        if not self.hub.participation.decides:
            return False
        strikes = self._clock() - started > seconds
        if strikes:
            self.database.decide(self.hub.seq, "wall_time", [point.stage, point.round])
        return strikes

    async def _evaluated(self, outcome: Outcome, federation: Federation) -> Outcome:
        """Delivers the final models and collects the users' judgement: by user, means and spread over those with held-out rows."""
        assert outcome.models is not None  # noqa: S101 - the caller has checked
        replies = await federation.exchange(FinalModels(outcome.models), wanted=[Wanted(Scores)])
        scores, n_users = replies[Scores], len(outcome.models)
        figures = {"sum_of_losses": float(scores.objective.sum()), **replies.left_out(n_users)}
        judged = scores.n_test > 0
        if not judged.any():
            return replace(outcome, figures={**outcome.figures, **figures})
        metric = scores.test_metric[judged]
        figures |= {"heldout_loss": float(scores.test_loss[judged].mean()), "heldout_metric": float(metric.mean())}
        figures |= {f"heldout_metric_{which}": value for which, value in spread_of(metric).items()}
        values = np.full(n_users, np.nan)
        values[replies.awaited(np.arange(n_users))[judged]] = metric
        by_user = {**outcome.by_user, f"heldout_{self.experiment.problem.metric}": values}
        return replace(outcome, figures={**outcome.figures, **figures}, by_user=by_user)


def _check_clusters(stages: Sequence[Stage]) -> None:
    """ConfigError when a method cannot run with aggregators."""
    for stage in stages:
        if server_half(stage.method).tiers == FLAT_ONLY:
            raise ConfigError(f"method {stage.method!r} has no clusters of its own, want federation.topology 'flat'")


def _closing(given: Mapping[str, float], rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The closing figures of a stage, with the objective of its last round where that has one. What is not known is left out."""
    objective = {"objective": rounds[-1]["objective"]} if rounds and "objective" in rounds[-1] else {}
    return {name: value for name, value in {**objective, **given}.items() if not np.isnan(value)}


def best(names: tuple[str, ...], outcomes: Mapping[str, Outcome]) -> str:
    """The stage with the smallest held-out loss, the earlier one of equals; where no user has held-out rows the last of the names."""
    judged = [name for name in names if "heldout_loss" in outcomes[name].figures]
    return min(judged, key=lambda name: outcomes[name].figures["heldout_loss"]) if judged else names[-1]
