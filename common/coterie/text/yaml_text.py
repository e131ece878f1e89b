"""YAML for experiments: limited in size and depth, without aliases, without repeated keys.

Any text is read with little time and memory, and an error is one short sentence. A client never reads YAML, and saves the memory of this
module.
"""

from typing import Any

import yaml

from coterie.errors import ConfigError
from coterie.text.names import normal
from coterie.text.quoting import quoted, shortened

MAX_BYTES = 1 << 20  # of a text
MAX_DEPTH = 50  # of nested lists and mappings
_MAX_BITS = 1024  # of an integer: larger ones do not fit into a float
_MAX_COMPLAINT = 1000

# Raised by yaml's constructors for values they do not check: too many digits, a 13th month, "!!bool x".
_RAISED = (ValueError, ArithmeticError, LookupError, AttributeError, TypeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Refuses while reading, before anything large is built."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            raise yaml.YAMLError(f"line {line} has an alias, {quoted(f'*{event.anchor}')}, want the value itself")
        if self.depth >= MAX_DEPTH:
            raise yaml.YAMLError(f"line {line} is nested more than {MAX_DEPTH} levels deep, want fewer")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            line, name = key.start_mark.line + 1, normal(key.value)  # names that look alike are one name in an experiment
            if (key.tag, name) in lines:
                first = lines[key.tag, name]
                raise yaml.YAMLError(f"the key {quoted(name)} occurs twice, in line {first} and in line {line}, want it once")
            lines[key.tag, name] = line
        return node

    def construct_yaml_int(self, node: Any) -> int:
        number: int = super().construct_yaml_int(node)
        if number.bit_length() > _MAX_BITS:
            line = node.start_mark.line + 1
            raise yaml.YAMLError(f"line {line} has a whole number of {number.bit_length()} bits, want at most {_MAX_BITS}")
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)


def parsed(text: str, where: str) -> Any:
    """The content of a YAML text. ConfigError beginning with `where` if it is invalid."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ConfigError(f"{where} is too long, want at most {MAX_BYTES} bytes")
    try:
        return yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {shortened(' '.join(str(error).split()), _MAX_COMPLAINT)}") from None
    except _RAISED as error:
        raise ConfigError(f"{where} has a value that YAML cannot read: {shortened(str(error), _MAX_COMPLAINT)}") from None
