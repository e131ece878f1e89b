"""YAML for the tools of containers: plain values in the order they are given, the same text each time.

These tools read numbers where PyYAML sees text (1e3, 0o7), so all text that begins like a number is quoted.
"""

import re
from typing import Any

import yaml

_LIKE_A_NUMBER = re.compile(r"[-+.]?[0-9]")
_WIDTH = 140


class _Dumper(yaml.SafeDumper):
    """Without aliases."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - their names
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
        super().increase_indent(flow, False)


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    if "\n" in text and text.isascii() and text.replace("\n", "").isprintable():
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if _LIKE_A_NUMBER.match(text) else None)


def _list(dumper: yaml.SafeDumper, items: list[Any]) -> yaml.SequenceNode:
    is_plain = all(isinstance(item, str) and "\n" not in item for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=is_plain)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)


def as_yaml(content: Any) -> str:
    """One document."""
    return yaml.dump(content, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=_WIDTH, allow_unicode=True)
