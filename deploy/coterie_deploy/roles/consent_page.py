"""What an experiment asks of a host, in lines for its owner: the data by role, the method, the code, and who learns what."""

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash, consent_parts
from coterie.experiment.reveals import AMONG_PEERS, steps_of
from coterie.registry import written
from coterie.text.quoting import shortened
from coterie_deploy.terminal.printable import printable

_ROLES: Mapping[str, str] = {  # keys of the data section, as an owner would call what they name
    "user_column": "users",
    "cluster_column": "known clusters",
    "target_column": "target",
    "feature_columns": "features",
}
_FIRST = ("source", "path", *_ROLES)
_NOISE: Mapping[str, str] = {
    "row": "what is trained here has noise before it is sent, so it tells little of a single training row; training losses are not sent; "
    "row counts, and scores on rows that are held out, have no noise",
    "hosts": "this host adds a share of the noise to its sum, so the total tells the coordinator little of a single user; training losses, "
    "and scores of models that users keep, are not sent; row counts, and scores on rows that are held out, have no noise",
    "user": "the coordinator sees all of the above without noise; what it sends to others tells little of a single user",
}
_MAX_LINE = 2000  # characters
_SUMMED = {
    False: "over the users of this host; with one user they are its own",
    True: "under masks: others see totals over several hosts, and not those of this one",
}


def asked_lines(experiment: Experiment) -> list[str]:
    """What the experiment asks, and who learns what from it. Nothing in it can end a line, or fill the screen."""
    asked = consent_parts(experiment)
    # The keys of a method, and so the hash, are known only by its code.
    before = " (that of the method is imported before its owner is asked)" if written(asked["method"]["name"]) in asked["code"] else ""
    thin = experiment.federation.compress
    settings = {key: value for key, value in asked["method"].items() if key != "name"}
    lines = [
        *(f"  {name}: {value}" for name, value in _data(experiment, asked["data"])),
        f"  loss: {_mapping(asked['problem'])}",
        *([f"  model: {_mapping(asked['model'])}"] if "model" in asked else []),
        f"  method: {asked['method']['name']}{f' ({_mapping(settings)})' if settings else ''}",
        f"  references: {_listed(asked['references']) or 'none'}",
        f"  vectors travel as {asked['payload']}; models are {'' if asked['evaluate'] else 'not '}judged on these rows",
        *([] if thin is None else [f"  vectors are compressed on their way: {_mapping(thin.model_dump(mode='json', exclude_none=True))}"]),
        *([f"  sums below are {_SUMMED['sums' in asked]}"] if asked.get("exact_sums") else []),
        *(["  for standard errors second moments of these rows are sent"] if asked.get("inference") else []),
        *([f"  privacy: {_mapping(asked['privacy'])}"] if "privacy" in asked else []),
        f"  code to import here: {_listed(asked['code']) or 'none'}{before}",
        *([f"  code of installed packages: {_mapping(asked['packages'])}"] if asked.get("packages") else []),
    ]
    return [shortened(printable(line), _MAX_LINE) for line in (*lines, "Who learns what:", *reveal_lines(experiment))]


def print_asked(experiment: Experiment, *, hash_: bool, reveals: bool) -> None:
    """Prints the hash, what is asked, or both."""
    if reveals:
        lines = [f"{experiment.name} asks hosts for this:", *asked_lines(experiment)]
        print("\n".join(in_terminal(lines) if sys.stdout.isatty() else lines))  # noqa: T201
    if hash_:
        print(consent_hash(experiment))  # noqa: T201


def in_terminal(lines: Sequence[str]) -> list[str]:
    """The lines wrapped between words to the width of the terminal; what continues a line is indented more."""
    width = shutil.get_terminal_size().columns
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="    ", break_on_hyphens=False) or [""]]


def reveal_lines(experiment: Experiment) -> list[str]:
    """Each step of an experiment: who sees what, and what can be concluded."""
    lines: list[str] = []
    for step in steps_of(experiment):
        name, verb = plain(step.name.partition(" (")[0]), "see" if " and " in step.seen_by or step.seen_by == AMONG_PEERS else "sees"
        lines.append(f"  {name}: the {step.seen_by} {verb} {plain(step.reveal.up)} -> {plain(step.reveal.concluded)}")
    if experiment.privacy is not None:
        lines.append(f"  privacy: {_NOISE['hosts' if experiment.privacy.is_shared else experiment.privacy.unit]}")
    return list(dict.fromkeys(lines))


def plain(text: str) -> str:
    """Markdown as text."""
    return text.replace("**", "").replace("`", "")


def _data(experiment: Experiment, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    listed = [(_ROLES.get(key, key), _value(data[key])) for key in _FIRST if key in data]
    if hasattr(experiment.data, "feature_columns") and "feature_columns" not in data:
        default = type(experiment.data).model_fields["feature_columns"].default
        others = "all other columns of numbers, booleans and dates, whose names travel"
        listed.append(("features", _value(list(default)) if default else others))
    listed += [(f"data.{key}", _value(value)) for key, value in data.items() if key not in _FIRST]
    if experiment.data.standardize:
        listed.append(("standardize", "yes"))
    return listed


def _mapping(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_mapping(value)})"
    if isinstance(value, list | tuple):
        return _listed(value) or "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(_value, values))


__all__ = ["asked_lines", "plain", "print_asked", "reveal_lines"]
