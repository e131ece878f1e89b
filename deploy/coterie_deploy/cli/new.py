"""`coterie new`: a small package that runs at once, and that `pip install -e .` registers."""
# ruff: noqa: PLC0415 - what is made is imported when the command is called, so that a client does not pay for it

from __future__ import annotations

import importlib.util
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from coterie.errors import ConfigError
from coterie_deploy.cli.options import app

if TYPE_CHECKING:
    from coterie.experiment import plugins

EXPERIMENT_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAME = re.compile(r"[a-z][a-z0-9_]{0,49}")


@dataclass(frozen=True)
class Kind:
    group: plugins.Kind
    value: str  # what the entry point names in the module
    short: str  # how an experiment names it once it is installed
    requires: str = "coterie"
    who: str = "they need"  # its file, without the package


KINDS: Final[Mapping[str, Kind]] = {
    "loss": Kind("loss", "$name:LOSS", "problem: {loss: $name}"),
    "network_loss": Kind("loss", "$name:LOSS", "problem: {loss: $name}", "coterie[torch]"),
    "model": Kind("model", "$name:$name", "model: {name: $name}", "coterie[torch]"),
    "data": Kind("source", "$name:SOURCE", "data: {source: $name}"),
    "compressor": Kind("compressor", "$name:COMPRESSOR", "federation: {compress: {up: {by: $name}}}"),
    "rule": Kind("rule", "$name:RULE", "federation: {robust: {rule: $name}}", who="aggregators need"),
    "method": Kind("method", "$name", "method: {name: $name}", "coterie[torch]"),
    "halves": Kind("method", "$name", "method: {name: $name}"),
}


@app.command("new")
def make_package(
    kind: Annotated[Literal["experiment", "method", "loss", "model", "data", "compressor", "rule"], typer.Argument(help="What to create.")],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name. An experiment may have none: my.", show_default=False)
    ] = None,
    output: Annotated[Path | None, typer.Option(metavar="DIR", help="[default: ./NAME]")] = None,
    network: Annotated[bool, typer.Option("--network", help="A loss or an experiment of networks instead of convex problems.")] = False,
    messages: Annotated[bool, typer.Option("--messages", help="A method with messages of its own instead of a local update.")] = False,
) -> None:
    """Write a small package: a method, loss, model, data source, compressor or rule of your own. It runs at once.

    With it come a test and an experiment.

    An experiment is one file with comments, NAME.yaml, here or in DIR.
    """
    for option, given, of in (("--network", network, ("loss", "experiment")), ("--messages", messages, ("method",))):
        if given and kind not in of:
            raise ConfigError(f"{option} is for {' and '.join(of)}, but this is {kind}: want no such option")
    if kind == "experiment":
        typer.echo(f"next: edit {(path := write_experiment(name or 'my', output or Path(), network=network))}; coterie run {path}")
        return
    if name is None:
        raise ConfigError(f"coterie new {kind} wants the name of the {kind} after it")
    folder = output or Path(name)
    written = write_package("network_loss" if network else "halves" if messages else kind, name, folder)
    typer.echo(f"{folder}: {', '.join(written)}")
    checked = f" coterie check {kind} {name}:{kind.upper()};" if kind in ("method", "compressor") else ""
    typer.echo(f"next: cd {folder}; coterie run experiment.yaml;{checked} pip install -e .")


def write_experiment(name: str, folder: Path, *, network: bool = False) -> Path:
    """Writes NAME.yaml into the folder; its path. ConfigError for a wrong name, and if the file exists."""
    path = folder / f"{name}.yaml"
    if not re.fullmatch(EXPERIMENT_NAME, name):
        raise ConfigError(f"the name is {name!r}, want at most 100 letters, digits, dots, hyphens and underscores")
    template = files("coterie_deploy.cli").joinpath("templates", "experiment", f"{'network' if network else 'experiment'}.yaml.template")
    text = Template(template.read_text(encoding="utf-8")).substitute(name=name, file=path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already, want another name") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def write_package(kind: str, name: str, folder: Path) -> list[str]:
    """Writes a package of one of `KINDS` into a new folder; the names of its files. ConfigError for a wrong name or folder."""
    from coterie.experiment import plugins

    _check_name(name, KINDS[kind].group)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already, want a folder that is new or empty (--output DIR)")
    made = KINDS[kind]
    words = {"name": name, "Name": "".join(piece.capitalize() for piece in name.split("_"))}
    words |= {"package": f"coterie-{name.replace('_', '-')}", "group": plugins.GROUPS[made.group], "what": plugins.noun(made.group)}
    words |= {"value": Template(made.value).substitute(words), "short": Template(made.short).substitute(words), "requires": made.requires}
    words["who"] = made.who
    words["path"] = f"{name}:METHOD" if made.group == "method" else words["value"]
    written = []
    folder.mkdir(parents=True, exist_ok=True)
    for source in ("common", kind):
        for template in sorted(files("coterie_deploy.cli").joinpath("templates", source).iterdir(), key=lambda file: file.name):
            target = template.name.removesuffix(".template").replace("module", name)
            (folder / target).write_text(Template(template.read_text(encoding="utf-8")).substitute(words), encoding="utf-8")
            written.append(target)
    return sorted(written)


def _check_name(name: str, kind: plugins.Kind) -> None:
    """ConfigError unless experiments and modules can have this name, and nothing else has it."""
    from coterie.experiment import plugins
    from coterie.experiment.data import SOURCES
    from coterie.experiment.model import MODELS
    from coterie.experiment.problem import LOSSES
    from coterie.experiment.robust import RULES
    from coterie.registry import built_in_methods

    ours: Mapping[str, Sequence[str]] = {"loss": LOSSES, "model": MODELS, "source": SOURCES, "rule": RULES, "method": built_in_methods()}
    if not _NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"the name is {name!r}, want small letters, digits and underscores, of which the first is a letter")
    if name in ours.get(kind, ()):
        raise ConfigError(f"{plugins.noun(kind)} {name!r} is built in: want another name")
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.origin is not None:  # which a mere folder has not
        raise ConfigError(f"Python has a module {name!r} already: want another name")
