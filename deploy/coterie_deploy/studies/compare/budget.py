"""The local work of each method in a comparison: by default as many users in a round and as many passes as the experiment's own method."""

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.experiment.config import Experiment
from coterie.experiment.method import Kind, Meaningless
from coterie.families.partial import Training, Work
from coterie.registry import method

DRAWN = ("participation", "users_per_round")  # keys that say how many users take part in a round
TRACED_ROUNDS = 25  # in which users evaluate on the way to a target


def work_of(experiment: Experiment) -> Work | None:
    """The local work of a drawn user in a round; None for methods whose users minimise exactly or take other steps."""
    config = experiment.method
    if not isinstance(config, Training) or _is_exact(config.name, _kind(experiment)):
        return None
    return config.work


def with_same_work(config: Any, section: Mapping[str, Any], experiment: Experiment, overrides: Sequence[str]) -> dict[str, Any]:
    """The section of a method, which gives `config`, with as many users in a round and passes as the experiment's own one has.

    It keeps its own passes where it cannot have those, or overrides set them.
    """
    work = work_of(experiment)
    if work is None or not isinstance(config, Training) or _is_exact(config.name, _kind(experiment)):
        return dict(section)
    drawn = experiment.method.model_dump(include=set(DRAWN), exclude_none=True)
    keys = None if is_by_hand(config.name, overrides) else config.keys_for(work)
    left = section if keys is None else {key: value for key, value in section.items() if key not in config.WORK} | keys
    return {**left, **drawn}


def with_evaluations(name: str, section: Mapping[str, Any], every: int | None) -> dict[str, Any]:
    """The section of a method, with evaluations every so many rounds if it has none yet and knows them."""
    if every is None or "evaluate_every" not in method(name).config.model_fields:
        return dict(section)
    return {"evaluate_every": every, **section}


def is_by_hand(name: str, overrides: Sequence[str]) -> bool:
    """Whether an override for the method alone says how much its users work."""
    config = method(name).config
    keys = {f"method.{key}" for key in config.WORK} if issubclass(config, Training) else set()
    return any(override.partition("=")[0].strip() in keys for override in overrides)


def said(work: Work | None) -> str:
    """The work in a few letters, for a table: "11", "5 batches"; "-" where it is not counted in passes."""
    if work is None:
        return "-"
    passes, batches = f"{work.passes:g}", f"{work.batches:g} batch{'' if work.batches == 1 else 'es'}"
    return f"{passes} + {batches}" if work.passes and work.batches else batches if work.batches else passes


def sentence(work: Work) -> str:
    """The work in words: a pass takes one gradient of each row."""
    return f"{said(work)}{'' if work.batches else ' pass' if work.passes == 1 else ' passes'}"


def users_in_a_round(experiment: Experiment, n_users: int) -> int:
    return experiment.method.n_selected(n_users) if isinstance(experiment.method, Training) else n_users


def _kind(experiment: Experiment) -> Kind:
    return "convex" if experiment.model is None else "network"


def _is_exact(name: str, kind: Kind) -> bool:
    """Whether the keys of local work mean nothing to a method on problems of this kind."""
    config = method(name).config
    without = method(name).meaningless.get(kind, Meaningless()).keys
    return issubclass(config, Training) and bool(config.WORK) and set(config.WORK) <= set(without)
