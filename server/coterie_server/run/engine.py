"""The round engine: one loop that runs every method, with checkpoints, stop rules and the evaluation of the final models.

A run is a sequence of stages on one joined federation. Only the method's state survives a round, so checkpoints need to know no method. A
resumed run takes the newest checkpoint and repeats the rounds after it; hosts answer tasks that they know from their stored replies.
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
from coterie.errors import CoterieError, RunError, StoppedError
from coterie.experiment.config import Experiment, StopRule
from coterie.experiment.features import MAX_LISTED, in_a_line, to_plain
from coterie.experiment.model import TensorInfo, convex_tensors, from_json
from coterie.experiment.representation import true_representation
from coterie.experiment.reveals import facts_of
from coterie.record.snapshot import SnapshotFile, check_saveable
from coterie.registry import method
from coterie.wire.precision import Precision
from coterie_server.families.prepare import prepare, prepare_network
from coterie_server.families.privacy import compute_noise
from coterie_server.interface.half import Facts, Members, Outcome, Setting, StageHalf, server_half
from coterie_server.interface.stages import Stage
from coterie_server.interface.sum_links import SumLinks
from coterie_server.record import closed_forms
from coterie_server.record.rundb import RunDatabase
from coterie_server.run import budget, returned
from coterie_server.run.evaluation import evaluated
from coterie_server.run.inference import with_moments
from coterie_server.run.memory import check_memory
from coterie_server.run.plan import check_absence, stages_of, why_everyone
from coterie_server.run.tiers import check_tiers, hosted
from coterie_server.session.hub import Hub
from coterie_server.session.run_state import HOST_BYTES


@dataclass(frozen=True)
class Point:
    """The position of a run between two rounds: a checkpoint holds it and the hub's memory."""

    stage: int = 0
    round: int = 0
    state: Any = None  # of the method; None before the stage has begun
    ended: str = ""  # why the stage has ended, when only its finish is missing
    facts: Facts | None = None
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)


@dataclass(frozen=True)
class Progress:
    """What an observer receives after each round."""

    stage: Stage
    number: int
    n_stages: int
    round: int
    figures: Mapping[str, float]
    part: float  # how much of the stage is over, 0 to 1


_TURNS_S = 0.02  # between two turns of the other tasks of the event loop
_FEWEST_ROUNDS = 20  # between two checkpoints that only free hosts' memory, since checkpoints cost time
_FORMAT = 5  # of checkpoints; those of another format cannot be resumed
_YOUNG_S = 0.5  # the end of a stage needs no checkpoint where the newest one is no older: little would be repeated

Observer = Callable[[Progress], None]


class Engine:
    """Runs the stages of one experiment. ConfigError when a stage does not fit its topology, or needs users that may be left out."""

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
        self.experiment, self.hub, self.database = experiment, hub, database
        self.stages = stages_of(experiment)
        check_tiers(experiment, [stage.method for stage in self.stages])  # a missing half is found before hosts wait
        check_absence(experiment, self.stages)
        self.stop_requested: str | None = None
        self.wall_stops: frozenset[tuple[int, int]] = frozenset()  # decisions to repeat: (stage, round) that `wall_time_s` has ended
        self._observer, self._clock = observer, clock
        self._start = start  # the outcome of another run, for stages that start from no stage of this one
        self._store = SnapshotFile(folder / "checkpoints", "run") if folder is not None else None
        self._noise = budget.NoiseKey(experiment, self._store)
        self._checkpoint_at = self._turns_at = clock()
        self._n_rounds = 0  # since the newest checkpoint
        self._reached: tuple[Point, int] | None = None  # the last point between two rounds, and its exchange
        # At the newest checkpoint: its exchange, bytes that the hub keeps for replay, and bytes of replies of the busiest host.
        self._checkpoint_seq = self._log_bytes = self._replied_bytes = 0

    def load_checkpoint(self, attempt: int) -> Point | None:
        """Reads the newest checkpoint and sets the hub and the database back to it; None when there is none.

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
        self.database.rewind(self.hub.seq, point.stage, point.round, self.hub.errands)
        self.database.event("resume", f"resumed {self._where(point)}, exchange {self.hub.seq}", attempt=attempt)
        return point

    def _where(self, point: Point) -> str:
        is_over = point.stage == len(self.stages)
        stage = "after the last stage" if is_over else f"in stage {point.stage + 1}/{len(self.stages)} {self.stages[point.stage].name}"
        return f"{stage}, round {point.round}"

    def checkpoint(self, point: Point, seq: int | None = None) -> None:
        """Saves the point. Hosts may then forget the replies that the checkpoint before it has made needless.

        Hosts are asked to save their own states too, except before their first task. With `seq` the point is that of this earlier exchange,
        and the run ends: hosts are asked nothing, so the traffic of a stopped run stays that of an undisturbed one.
        """
        if self._store is None:
            return
        self.hub.settle()
        self.database.flush()
        self._store.save({"format": _FORMAT, "point": point, "hub": self.hub.memory(seq)})
        self.hub.outbox.durable_seq, self._checkpoint_seq = self._checkpoint_seq, self.hub.settled(seq)
        self._checkpoint_at, self._n_rounds = self._clock(), 0
        self._log_bytes, self._replied_bytes = self.hub.outbox.log_bytes, self.hub.roster.replied_bytes
        if self.hub.seq and seq is None:
            self.hub.request_snapshots()

    def request_stop(self, reason: str) -> None:
        """Writes a checkpoint at once, and another one after the round under way if that ends soon: see `Deadlines.stop`."""
        self.stop_requested = reason
        try:
            if self._reached is not None and self._store is not None:
                self.checkpoint(*self._reached)
                where = self._where(self._reached[0])
                self.database.event("stop", f"asked to stop by {reason}: the checkpoint {where} is written", round=self._reached[0].round)
        except RunError as error:  # a full disk
            self.hub.fail(error)
        self.hub.stop(reason)

    async def run(self, point: Point | None = None) -> Point:
        """Runs all stages, from the start or from a checkpoint; the last point holds their outcomes by name. Raises CoterieError."""
        members = await self.hub.gather()
        host_of = {user: host.name for host in self.hub.roster.hosts.values() for user in host.users}
        self.database.members(members, host_of)
        if self.hub.roster.model:
            self.database.put("model", self.hub.roster.model)
            self._note_sizes(self._network())
        self._note_features()
        if point is None:
            point = Point()
            self.checkpoint(point)
        self._reached = point, self.hub.seq
        if point.facts is None:
            point = replace(point, facts=await self._prepared(members))
            self._reached = point, self.hub.seq
        if point.facts is not None and self.experiment.model is None:
            self.hub.answers.dims = {"d": point.facts.d}
            check_memory(self.stages[point.stage :], len(members), point.facts.d, self.database)
        try:
            while point.stage < len(self.stages):
                await compute_noise(self.experiment, self.stages[point.stage], point.facts)
                point = await self._stage(self.stages[point.stage], point, members)
                self._reached = point, self.hub.seq
            self._noise.forget()
        finally:
            with contextlib.suppress(CoterieError):  # bookings are left only where another error is on its way
                self.hub.settle()
        return point

    def _note_features(self) -> None:
        """Records the features, where the hosts' data has names."""
        features = self.hub.roster.schema
        if not features:
            return
        self.database.put("features", json.dumps(to_plain(features)))
        shown = to_plain(features[:MAX_LISTED])
        self.database.event("features", f"features ({len(features):,}): {in_a_line(features)}", n=len(features), features=shown)
        self.database.flush()

    async def _prepared(self, members: Members) -> Facts:
        """What users say of their rows. Records how many they have together, those held out where they are known."""
        facts = await (self._convex(members) if self.experiment.model is None else prepare_network(self.hub, members, self._network()))
        held_out = None if facts.n_test is None else int(facts.n_test.sum())
        self.database.put("rows", json.dumps({"training": int(facts.n_rows.sum()), "held_out": held_out}))
        return facts

    async def _convex(self, members: Members) -> Facts:
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
            wants=facts_of(self.experiment),
        )
        if found := returned.few_rows(facts):
            self.database.event("warning", found[0], users=found[1])
        return facts

    def _network(self) -> tuple[TensorInfo, ...]:
        """The tensors of the users' network. RunError where the hosts have brought none."""
        if not self.hub.roster.model:
            raise RunError("the hosts have joined without a model, wanted the tensors of the experiment's")
        return from_json(self.hub.roster.model)

    def _note_sizes(self, tensors: Sequence[TensorInfo]) -> None:
        """Says how many numbers the parts of the users' network have."""
        sizes = {part: sum(tensor.size for tensor in tensors if tensor.part == part) for part in ("representation", "head")}
        listed = [f"{part} {size:,}" for part, size in sizes.items() if size]
        self.database.event("model", f"model: {' numbers, '.join(listed)}{'' if len(listed) > 1 else ' numbers'}", **sizes)

    async def _stage(self, stage: Stage, point: Point, members: Members) -> Point:
        half = self._build(stage, point, members)
        why = why_everyone(stage)
        self.hub.participation.needs_everyone = f"stage {stage.name!r} needs every user: {why}" if why else ""
        settings = json.dumps({"stage": stage.name, "options": dict(half.client_options)})
        started, earlier_s, figures = self._clock(), 0.0, list[dict[str, float]]()
        self._trace(stage, point.round, is_round=False)
        if point.state is None:
            self.database.stage(point.stage, stage.name, stage.method, 0, "", 0.0)
            self.database.figures(point.stage, 0, {})
            self._warn(stage, half.warnings)
            self._say(stage, budget.notes_of(half, self.experiment))
            self.hub.begin_stage(point.stage, settings)
            point = self._saveable(stage, replace(point, state=await half.init(self.hub), round=0))
            self._reached = point, self.hub.seq
        else:
            self.hub.resume_stage(point.stage, point.round, settings)
            figures, earlier_s = self.database.figures_of(point.stage), self.database.worked_s(point.stage)
        self.hub.participation.may_skip = not why
        while not point.ended:
            self.hub.state.round = point.round + 1
            self._trace(stage, point.round + 1, is_round=True)
            point, latest = await self._round(stage, half, point)
            self.hub.meanwhile(functools.partial(self._note_round, stage, half, point, latest, figures))
            if reason := half.ends(latest) or self._stop_reason(stage.stop, half, latest, point, started):
                point = replace(point, ended=reason)
            self._reached = point, self.hub.seq
            self._after_round(stage, half, point, latest)
            await self._give_turns()
        self.hub.settle()
        self._trace(stage, point.round, is_round=False)
        self.hub.participation.may_skip = False
        outcome = await self._finished(stage, half, point, len(members))
        self._warn(stage, [*returned.warnings(stage, point.ended, figures), *outcome.warnings])
        self._say(stage, outcome.notes)
        outcome, forms = await self._looked_at(stage, outcome, closed_forms.of_method(half, figures, outcome))
        outcome = replace(outcome, figures=returned.closing(outcome.figures, figures))
        if point.stage == 0 and point.facts is not None:
            n_aggregators = len(self.hub.roster.hosts) if self.experiment.federation.is_two_tier else 0
            forms = closed_forms.together(closed_forms.of_preparation(point.facts, n_aggregators), forms)
        self.database.result(point.stage, outcome.figures, forms, outcome.by_user)
        if half.printed_vectors is not None:
            self.database.printed(point.stage, half.printed_vectors(point.round))
        self.database.stage(point.stage, stage.name, stage.method, point.round, point.ended, earlier_s + self._clock() - started)
        outcomes = {**point.outcomes, stage.name: outcome}
        # Data for following stages is dropped once none needs it: along a path it would fill the checkpoints.
        awaited = {name for following in self.stages[point.stage + 1 :] for name in following.start}
        outcomes = {name: one if name in awaited else replace(one, carry=None) for name, one in outcomes.items()}
        is_due = self._is_checkpoint_due(point) or self._clock() - self._checkpoint_at > _YOUNG_S
        point = replace(point, stage=point.stage + 1, round=0, state=None, ended="", outcomes=outcomes)
        if is_due:
            self.checkpoint(point)
        return point

    async def _round(self, stage: Stage, half: StageHalf[Any], point: Point) -> tuple[Point, Mapping[str, float]]:
        state, figures = await half.round(point.state, self.hub, point.round + 1)
        if isinstance(figures, dict):  # others are computed when they are read
            returned.check_figures(f"`round` of {stage.method!r}", figures)
        if half.epsilon is not None:
            figures = {**figures, returned.EPSILON: half.epsilon(point.round + 1)}
        return replace(point, state=state, round=point.round + 1), figures

    async def _finished(self, stage: Stage, half: StageHalf[Any], point: Point, n_users: int) -> Outcome:
        d = None if point.facts is None or self.experiment.model is not None else point.facts.d
        return returned.check_outcome(stage.method, await half.finish(point.state, self.hub), n_users, d)

    @staticmethod
    def _saveable(stage: Stage, point: Point) -> Point:
        """The point. RunError where a checkpoint could not hold the method's state, also in a run that writes none."""
        check_saveable(point.state, f"the server's state of {stage.method!r}")
        return point

    def _warn(self, stage: Stage, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.database.event("warning", sentence, stage=stage.name)

    def _say(self, stage: Stage, sentences: Sequence[str]) -> None:
        for sentence in sentences:
            self.database.event("note", sentence, stage=stage.name)

    async def _looked_at(self, stage: Stage, outcome: Outcome, forms: closed_forms.Forms) -> tuple[Outcome, closed_forms.Forms]:
        """The outcome with what users tell of its models, and the closed form with that of these steps."""
        if self.experiment.evaluate and outcome.models is not None and not outcome.is_judged:
            outcome = await evaluated(outcome, self.hub, self.experiment.problem.metric, with_losses=self.experiment.judges_training_rows)
            forms = closed_forms.together(forms, closed_forms.of_evaluation(outcome))
        if self.experiment.inference and outcome.models is not None and method(stage.method).intervals(stage.config):
            outcome, sent = await with_moments(outcome, self.hub)
            forms = closed_forms.together(forms, sent)
        return outcome, forms

    async def _give_turns(self) -> None:
        """Lets signals and deadlines run, also where rounds ask nobody. Not in every round: a turn costs as much as a small message."""
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
            beside={name: point.outcomes[name] for name in stage.beside},
            rounds=stage.stop.rounds,
            residual=stage.stop.residual,
            tensors=self._network() if self.experiment.model else () if point.facts is None else convex_tensors(point.facts.d),
            problem=self.experiment.problem,
            privacy=self.experiment.privacy,
            secret=self._noise.of(stage, has_begun=point.state is not None),
            truth=true_representation(self.experiment.data, self.experiment.seed),
            hosts_of_cluster=self._hosts_of_cluster(members),
            peers=self.experiment.federation.peers_of(len(members.cluster_names)),
            is_exact=self.experiment.exact_sums,
            sums=self._sum_links(members) if self.experiment.exact_sums else None,
            robust=self.experiment.federation.robust,
        )
        half = server_half(stage.method)
        built = half.build(stage.config, setting)
        budget.check_budget(stage, built)
        if callable(half.tiers) and not self.experiment.federation.is_two_tier:
            built = hosted(built, half.tiers(stage.config, setting), setting)
        if self.experiment.federation.late == "skip" and (why := why_everyone(stage)):
            self.database.event("wait", f"stage {stage.name!r} skips no late host, since it needs every user: {why}", stage=stage.name)
        return built

    def _sum_links(self, members: Members) -> SumLinks:
        below = self._hosts_of_cluster(members) if self.experiment.federation.is_two_tier else None
        return SumLinks(self.hub.roster.layout.host_of, members.cluster_of, below, *budget.masks_of(self.experiment))

    def _hosts_of_cluster(self, members: Members) -> Indices:
        """(k,) how many client hosts have users of each known cluster; with aggregators, `federation.hosts_per_cluster`."""
        n_clusters = len(members.cluster_names)
        if self.experiment.federation.is_two_tier:
            return np.full(n_clusters, self.experiment.federation.hosts_per_cluster)
        return np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *self.hub.roster.layout.clusters.values()]), minlength=n_clusters)

    def _note_round(
        self, stage: Stage, half: StageHalf[Any], point: Point, latest: Mapping[str, float], figures: list[dict[str, float]]
    ) -> None:
        if point.round == 1:
            self._saveable(stage, point)
        figures.append(dict(latest))
        self.database.figures(point.stage, point.round, figures[-1])
        if (labels := half.labels_of(point.state)) is not None:
            self.database.membership(point.stage, point.round, labels)
        self.database.flush_if_due()

    def _after_round(self, stage: Stage, half: StageHalf[Any], point: Point, figures: Mapping[str, float]) -> None:
        self._n_rounds += 1
        if self._store is not None and self._is_checkpoint_due(point):
            self.checkpoint(point)
        if self._observer is not None:
            part = point.round / stage.stop.rounds if half.part is None else half.part(figures)
            self._observer(Progress(stage, point.stage, len(self.stages), point.round, figures, min(1.0, part)))
        if self.stop_requested is not None:
            self.checkpoint(point)
            raise StoppedError(
                f"stopped by {self.stop_requested} in stage {stage.name!r} after round {point.round}; --resume goes on from there"
            )

    def _is_checkpoint_due(self, point: Point) -> bool:
        snapshots = self.experiment.snapshots
        if point.round % snapshots.every_rounds == 0 or self._clock() - self._checkpoint_at > snapshots.every_s:
            return True
        replied_bytes = self.hub.roster.replied_bytes - self._replied_bytes
        is_host_full = replied_bytes > (HOST_BYTES if self._n_rounds >= _FEWEST_ROUNDS else snapshots.max_log_bytes)
        return is_host_full or self.hub.outbox.log_bytes - self._log_bytes > snapshots.max_log_bytes

    def _stop_reason(self, stop: StopRule, half: StageHalf[Any], figures: Mapping[str, float], point: Point, started: float) -> str:
        """Why the stage ends after this round; empty when it goes on."""
        if stop.residual is not None:  # only then: a figure may be computed when it is read
            residuals = [figures[name] for name in returned.RESIDUALS if name in figures]
            if residuals and max(residuals) <= stop.residual:
                return f"residuals at most {stop.residual:g}"
        if stop.objective_gap is not None and stop.reference_objective is not None and "objective" in figures:
            gap = (figures["objective"] - stop.reference_objective) / max(abs(stop.reference_objective), np.finfo(float).tiny)
            if gap <= stop.objective_gap:
                return f"objective gap at most {stop.objective_gap:g}"
        if reason := budget.spent_out(stop, half, point.round):
            return reason
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


def best(names: tuple[str, ...], outcomes: Mapping[str, Outcome]) -> str:
    """The stage with the smallest held-out loss, the earlier one of equals; where no user has held-out rows the last of the names."""
    judged = [name for name in names if "heldout_loss" in outcomes[name].figures]
    return min(judged, key=lambda name: outcomes[name].figures["heldout_loss"]) if judged else names[-1]
