"""What a stage with `privacy` needs of the engine: the key of the server's noise, and a look at its budget before the first round."""

from __future__ import annotations

from typing import Any

from coterie.draws.secret import Secret, kept_key
from coterie.errors import ConfigError
from coterie.experiment.config import Experiment, StopRule
from coterie.experiment.privacy import uncounted
from coterie.families.shares import n_noised
from coterie.record.snapshot import SnapshotFile
from coterie_server.interface.half import StageHalf
from coterie_server.interface.stages import Stage

_KEY = "noise.key"


class NoiseKey:
    """The key of the noise that the server adds. It lies beside the checkpoints until the run is over."""

    def __init__(self, experiment: Experiment, checkpoints: SnapshotFile | None) -> None:
        self._is_needed = experiment.privacy is not None and not experiment.privacy.is_of_hosts
        self._path = None if checkpoints is None else checkpoints.folder / _KEY
        self._key: bytes | None = None

    def of(self, stage: Stage, *, has_begun: bool) -> Secret | None:
        """That of a stage, None where the server adds no noise. RunError if it is missing though the stage has begun."""
        if not self._is_needed:
            return None
        if self._key is None:
            self._key = kept_key(self._path, has_begun=has_begun)
        return Secret(self._key).child(stage.name)

    def forget(self) -> None:
        """Deletes it: who has the key can take the noise off what it was added to."""
        if self._is_needed and self._path is not None:
            self._path.unlink(missing_ok=True)


def masks_of(experiment: Experiment) -> tuple[bool, int]:
    """Whether sums are masked, and how many hosts' shares of the noise a total has at least: 0 where hosts add none to sums."""
    is_shared = experiment.privacy is not None and experiment.privacy.is_shared
    return experiment.masks_sums, n_noised(experiment) if is_shared else 0


def notes_of(half: StageHalf[Any], experiment: Experiment) -> list[str]:
    """The notes of a stage's half, and what epsilon does not count."""
    return [*half.notes, *uncounted(experiment)]


def check_budget(stage: Stage, half: StageHalf[Any]) -> None:
    """ConfigError where already the first round would spend more than `stop.epsilon`."""
    limit = stage.stop.epsilon
    if limit is not None and half.epsilon is not None and (first := half.epsilon(1)) > limit:
        raise ConfigError(f"stop.epsilon is {limit:g}, but the first round of stage {stage.name!r} spends {first:.3g}: want more noise")


def spent_out(stop: StopRule, half: StageHalf[Any], n_rounds: int) -> str:
    """Why the stage ends after so many rounds, if another one would spend more than `stop.epsilon`; else ""."""
    if stop.epsilon is None or half.epsilon is None or half.epsilon(n_rounds + 1) <= stop.epsilon:
        return ""
    return f"epsilon {half.epsilon(n_rounds):.3g}: another round would spend more than {stop.epsilon:g}"
