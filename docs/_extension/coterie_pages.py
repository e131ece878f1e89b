"""Directives whose content is made from the code: keys of experiments, commands, methods, error rules, charts of shipped experiments."""

from __future__ import annotations

import hashlib
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import typer.main
from docutils import nodes
from docutils.parsers.rst import directives
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective
from sphinx.util.typing import ExtensionMetadata

from coterie import __version__
from coterie.experiment.config import experiment_to_json
from coterie.experiment.settings import Settings
from coterie.findings import RULES
from coterie.registry import method
from coterie_deploy.read.folders import is_finished
from coterie_deploy.read.keys import Key, keys_of
from coterie_deploy.read.shipped import load
from coterie_deploy.view import charts


class _Made(SphinxDirective):
    """A directive that writes Markdown, which is then read like the page itself."""

    def markdown(self) -> Iterable[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        source, line = self.get_source_info()
        lines = StringList([*self.markdown()], source=source, parent_offset=line)
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _cell(text: str) -> str:
    """Text of one cell of a Markdown table."""
    return " ".join(text.split()).replace("|", "\\|")


def _code(text: str) -> str:
    return f"`{_cell(text)}`" if text else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """A table whose rows are stacked on narrow screens."""
    yield from ("````{table}", ":class: stacked", "", f"| {' | '.join(header)} |", f"|{'---|' * len(header)}")
    yield from (f"| {' | '.join(row)} |" for row in rows)
    yield from ("````", "")


def _keys_table(model: type[Settings], beyond: type[Settings] | None = None) -> Iterable[str]:
    """A row for each key but those that choose the model, and those that `beyond` has alike."""
    known = {} if beyond is None else {key.name: key for key in keys_of(beyond)}
    keys = [key for key in keys_of(model) if key.meaning and known.get(key.name) != key]
    if not keys:
        return ["It has no keys." if beyond is None else "It has no keys of its own."]
    return _table(["key", "value", "meaning"], [_key_row(key) for key in keys])


def _key_row(key: Key) -> Sequence[str]:
    meaning = _cell(key.meaning)
    for choice in re.findall(r"`(\w+)`", key.type):
        meaning = re.sub(rf"(^|(?<=[.;:] )){choice}: ", f"`{choice}`: ", meaning)
    return f"`{key.name}`", _cell(key.value), meaning


class Keys(_Made):
    """`{keys} package.module:Model`: the keys of a part of an experiment, with `:beyond:` only those that another part has not."""

    required_arguments = 1
    option_spec: ClassVar = {"beyond": directives.unchanged_required}

    def markdown(self) -> Iterable[str]:
        beyond = self.options.get("beyond")
        yield from _keys_table(_model_at(self.arguments[0]), None if beyond is None else _model_at(beyond))


def _model_at(place: str) -> type[Settings]:
    module, _, name = place.partition(":")
    model: type[Settings] = getattr(importlib.import_module(module), name)
    return model


class MethodFacts(_Made):
    """`{method-facts} NAME`: the keys of a method, its steps, and who learns what."""

    required_arguments = 1

    def markdown(self) -> Iterable[str]:
        from coterie.experiment.reveals import SEEN  # noqa: PLC0415 - only pages of methods need it

        found = method(self.arguments[0])
        kinds = " and ".join({"convex": "convex problems", "network": "networks"}[kind] for kind in sorted(found.models))
        yield f"Models: {kinds}. {'May run as a reference. ' if found.is_reference else ''}"
        yield from ("", "**Keys of `method`**", "")
        yield from _keys_table(found.config)
        if found.reveals:
            yield from ("**Who learns what**", "")
            rows = [(_cell(one.up), _cell(one.concluded), SEEN[one.seen]) for one in found.reveals]
            yield from _table(["a user sends", "what can be concluded", "who sees it"], rows)


_VALUES = {"<int range>": "N", "<float range>": "NUMBER", "<float>": "NUMBER", "<str>": "TEXT", "<list[str]>": "TEXT", "<path>": "PATH"}
_CHOICE = re.compile(r" <([^<> ]+(?:\|[^<> ]+)+)>")
_NOTE = re.compile(r"\[(?:default: (?P<default>[^\]]*)|(?P<required>required))\]|\[(?P<bounds>[\d.x<>=; ]+)\]")


class Commands(_Made):
    """`{commands} SUBJECT`: the commands of `coterie_deploy.cli.SUBJECT`, with the text and the options of their `--help`."""

    required_arguments = 1

    def markdown(self) -> Iterable[str]:
        from coterie_deploy.cli.commands import app  # noqa: PLC0415 - one page needs it

        for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
            if subject_of(command) == self.arguments[0]:
                yield from self._of_command(f"coterie {name}", command)

    def _of_command(self, name: str, command: Any) -> Iterable[str]:
        if hasattr(command, "commands"):
            for below, other in command.commands.items():
                yield from self._of_command(f"{name} {below}", other)
            return
        context = typer.Context(command, info_name=name)
        pieces = [piece.replace("{", "").replace("}", "") for piece in command.collect_usage_pieces(context)]
        rows = []
        for parameter in command.params:
            shown = parameter.get_help_record(context)
            if shown is not None and parameter.name != "help":
                option = shown[0].split()[0] if parameter.param_type_name == "argument" else shown[0]
                rows.append(_option_row(option, shown[1]))
        yield from (f"### `{name}`", "", *_paragraphs(command.help or ""), "")
        yield from ("```text", " ".join([name, *pieces[1:], *(pieces[:1] if rows else [])]), "```", "")
        yield from _table(["option", "meaning"], rows) if rows else [""]


def subject_of(command: Any) -> str:
    """The module of `coterie_deploy.cli` that has the command, or the commands below it."""
    below = [*getattr(command, "commands", {}).values()]
    module: str = below[0].callback.__module__ if below else command.callback.__module__
    return module.rpartition(".")[2]


def _option_row(option: str, text: str) -> Sequence[str]:
    """An option with its value, and what it means, with its default as a sentence."""
    option = option.removeprefix("* ").strip("{}")
    for kind, value in _VALUES.items():
        option = option.replace(kind, value)
    said = [_NOTE.sub("", text).strip()]
    if (choice := _CHOICE.search(option)) is not None:
        option = option.replace(choice[0], "")
        said.append(f"One of {', '.join(f'`{one}`' for one in choice[1].split('|'))}.")
    for note in _NOTE.finditer(text):
        if note["required"]:
            said.append("Required.")
        elif note["default"]:
            said.append(f"Default: {note['default']}.")
    return _code(option), _cell(" ".join(filter(None, said)))


def _paragraphs(text: str) -> Iterable[str]:
    return (line.strip() for line in text.replace("\b", "").splitlines())


class ErrorRules(_Made):
    """`{error-rules} LETTER`: the rules of one letter. The content says what each means and what to do: `RULE: text`, on as many lines."""

    required_arguments = 1
    has_content = True

    def markdown(self) -> Iterable[str]:
        letter = self.arguments[0]
        remedies: dict[str, str] = {}
        rule = ""
        for line in self.content:
            head, colon, rest = line.partition(": ")
            if colon and head in RULES:
                rule, line = head, rest  # noqa: PLW2901 - the rest belongs to the rule
            remedies[rule] = f"{remedies.get(rule, '')} {line}".strip()
        wanted = [rule for rule in RULES if rule.rstrip("0123456789") == letter]
        if sorted(remedies) != sorted(wanted):
            raise self.error(f"remedies of rules {letter}: found {sorted(remedies)}, want {sorted(wanted)}")
        for rule in wanted:
            sentence = RULES[rule][0].replace("{at}", "").replace("{a_role}", "a column").replace("{role}", "column")
            yield from (f"(rule-{rule.lower()})=", f"`{rule}` {sentence}", f": {remedies[rule]}", "")


class RunChart(SphinxDirective):
    """`{run-chart} EXPERIMENT`: a chart of the report of a run that the build makes. The content is its caption."""

    required_arguments = 1
    has_content = True
    option_spec: ClassVar = {"chart": directives.unchanged_required, "set": directives.unchanged, "alt": directives.unchanged_required}

    def run(self) -> list[nodes.Node]:
        figures = _figures_of(Path(self.env.app.srcdir) / "_made" / "runs", self.arguments[0], (self.options.get("set") or "").split())
        drawn = figures / f"{self.options['chart']}.svg"
        if not drawn.exists():
            raise self.error(f"chart {self.options['chart']!r}: found {sorted(path.stem for path in figures.glob('*.svg'))}")
        picture = Path(self.env.app.srcdir) / "_made" / f"{figures.parent.name}-{drawn.name}"
        picture.write_bytes(drawn.read_bytes())
        image = nodes.image(uri=f"/_made/{picture.name}", alt=self.options["alt"])
        text, messages = self.parse_inline(" ".join(self.content))
        return [nodes.figure("", image, nodes.caption("", "", *text)), *messages]


def _figures_of(made: Path, experiment: str, overrides: Sequence[str]) -> Path:
    """The folder with all charts of a run. Another build has the same run, unless experiment or version differ, and draws it anew only
    where the code of charts does.
    """
    code = (path.read_text(encoding="utf-8") for path in sorted(Path(charts.__file__).parent.glob("*.py")))
    run = made / f"{experiment}-{_digest(experiment_to_json(load(experiment, overrides)), __version__)}"
    figures = run / f"figures-{_digest(*code)}"
    if not is_finished(run):
        changes = [part for change in overrides for part in ("--set", change)]
        _coterie("run", experiment, *changes, "--quiet", "--transport", "loopback", "--overwrite", "--output", str(run))
    if not figures.exists():
        drawn = figures.with_suffix(".tmp")
        _coterie("report", str(run), "--figures", str(drawn), "--format", "svg")
        drawn.rename(figures)
    return figures


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]


def _coterie(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coterie", *arguments], check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - ours


def setup(app: Sphinx) -> ExtensionMetadata:
    for name, directive in {
        "keys": Keys,
        "method-facts": MethodFacts,
        "commands": Commands,
        "error-rules": ErrorRules,
        "run-chart": RunChart,
    }.items():
        app.add_directive(name, directive)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
