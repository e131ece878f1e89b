"""What an experiment asks of a host, in lines for its owner: the data by role, the method, the code, and who learns what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from coterie.experiment.config import Experiment
from coterie.experiment.consent import consent_hash, consent_parts
from coterie.experiment.reveals import steps_of
from coterie.text.quoting import shortened
from coterie_deploy.terminal.printable import printable

_ROLES: Mapping[str, str] = {  # keys of the data section, as an owner would call what they name
    "user_column": "users",
    "cluster_column": "known clusters",
    "target_column": "target",
    "feature_columns": "features",
}
_FIRST = ("source", "path", *_ROLES)
_MAX_LINE = 2000  # characters


def asked_lines(experiment: Experiment) -> list[str]:
    """What is asked, and who learns what from it; nothing in the experiment can end a line, or fill the screen."""
    asked = consent_parts(experiment)
    lines = [f"  {name}: {value}" for name, value in _data(experiment, asked["data"])]
    lines.append(f"  loss: {_mapping(asked['problem'])}")
    if "model" in asked:
        lines.append(f"  model: {_mapping(asked['model'])}")
    method = asked["method"]
    lines.append(f"  method: {method['name']}{_settings(method)}")
    lines.append(f"  references: {_listed(asked['references']) or 'none'}")
    lines.append(f"  vectors travel as {asked['payload']}; models are {'' if asked['evaluate'] else 'not '}judged on these rows")
    lines.append(f"  code to import here: {_listed(asked['code']) or 'none'}")
    if packages := asked.get("packages"):
        lines.append(f"  code of installed packages: {_mapping(packages)}")
    return [shortened(printable(line), _MAX_LINE) for line in (*lines, "Who learns what:", *reveal_lines(experiment))]


def print_asked(experiment: Experiment, *, hash_: bool, reveals: bool) -> None:
    """The hash alone, for scripts, or what is asked, with the hash where both are wanted."""
    if reveals:
        print("\n".join([f"{experiment.name} asks hosts for this:", *asked_lines(experiment)]))  # noqa: T201
    if hash_:
        print(consent_hash(experiment))  # noqa: T201


def reveal_lines(experiment: Experiment) -> list[str]:
    """Each step of an experiment: who sees what, and what can be concluded."""
    lines: list[str] = []
    for step in steps_of(experiment):
        line = f"  {plain(step.name.partition(' (')[0])}: the {step.seen_by} sees {plain(step.reveal.up)} -> {plain(step.reveal.concluded)}"
        if step.seen_by.count(" and "):
            line = line.replace(" sees ", " see ", 1)
        if line not in lines:
            lines.append(line)
    return lines


def plain(text: str) -> str:
    """Markdown as text."""
    return text.replace("**", "").replace("`", "")


def _data(experiment: Experiment, data: Mapping[str, Any]) -> list[tuple[str, str]]:
    listed = [(_ROLES.get(key, key), _value(data[key])) for key in _FIRST if key in data]
    if hasattr(experiment.data, "feature_columns") and "feature_columns" not in data:
        default = type(experiment.data).model_fields["feature_columns"].default
        listed.append(
            ("features", _value(list(default)) if default else "all other columns of numbers, booleans and dates, whose names travel")
        )
    listed += [(f"data.{key}", _value(value)) for key, value in data.items() if key not in _FIRST]
    if experiment.data.standardize:
        listed.append(("standardize", "yes"))
    return listed


def _settings(method: Mapping[str, Any]) -> str:
    others = {key: value for key, value in method.items() if key != "name"}
    return f" ({_mapping(others)})" if others else ""


def _mapping(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_value(value)}" for key, value in values.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({_mapping(value)})"
    if isinstance(value, list | tuple):
        return _listed(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _listed(values: Sequence[Any]) -> str:
    return ", ".join(map(_value, values))


__all__ = ["asked_lines", "plain", "print_asked", "reveal_lines"]
