"""The reference names each key with its meaning, and each method, command and rule has its place on the site."""

from __future__ import annotations

import re

import pytest
import typer.main

from coterie.experiment.settings import Settings
from coterie.findings import RULES
from coterie.registry import built_in_methods
from coterie_deploy.cli.commands import app
from coterie_deploy.read.keys import keys_of, models
from coterie_pages import subject_of
from tests.pages import ROOT, site_pages

SITE = "\n".join(page.read_text(encoding="utf-8") for page in site_pages())
OF_METHODS = {model for model in models() if model.__name__ == "Config"}


@pytest.mark.parametrize("model", models(), ids=lambda model: f"{model.__module__}.{model.__name__}")
def test_each_key_has_a_meaning(model: type[Settings]) -> None:
    missing = [key.name for key in keys_of(model) if not key.meaning and key.name not in ("name", "source")]
    assert not missing, f"a comment #: is missing at {missing}"


@pytest.mark.parametrize("model", [model for model in models() if model not in OF_METHODS], ids=lambda model: model.__name__)
def test_each_part_of_an_experiment_is_on_a_page(model: type[Settings]) -> None:
    assert re.search(rf"\{{keys\}} {re.escape(f'{model.__module__}:{model.__name__}')}$", SITE, re.MULTILINE)


@pytest.mark.parametrize("name", built_in_methods())
def test_each_method_has_a_page(name: str) -> None:
    text = (ROOT / "docs" / "methods" / f"{name}.md").read_text(encoding="utf-8")
    assert f"{{method-facts}} {name}\n" in text


def test_each_command_is_on_a_page() -> None:
    subjects = {subject_of(command) for command in typer.main.get_command(app).commands.values()}  # type: ignore[attr-defined]
    assert set(re.findall(r"^```\{commands\} (\w+)$", SITE, re.MULTILINE)) == subjects


def test_each_rule_has_its_entry() -> None:
    letters = {rule.rstrip("0123456789") for rule in RULES}
    assert set(re.findall(r"^```\{error-rules\} ([A-Z])$", SITE, re.MULTILINE)) == letters
