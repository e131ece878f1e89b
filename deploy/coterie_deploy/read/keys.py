"""Keys of experiments with type, default and meaning, read from the models of pydantic. A comment `#:` at a key is its meaning."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic import BaseModel, StringConstraints
from pydantic.fields import FieldInfo

from coterie.experiment.config import Experiment
from coterie.experiment.settings import Settings
from coterie.registry import built_in_methods, is_method, method

_WORD = re.compile(r"[\w.]+")
_WORDS = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`", type(None): "`null`", Any: "mapping"}
_ANY = "any value"
_PLURALS = {"whole number": "whole numbers", "number": "numbers", "text": "texts", "mapping": "mappings", "list": "lists"}
_NONSENSE = 1e6  # larger bounds are only there to refuse nonsense
_NULL = " or `null`"
_KINDS = ("source", "name")  # keys that choose one of several models


@dataclass(frozen=True)
class Key:
    name: str
    type: str  # Markdown
    default: str  # "" if the key is required, "its own" for a mapping with keys of its own
    meaning: str  # "" if the code does not say it

    @property
    def value(self) -> str:
        """Its type, and what holds without it, as Markdown."""
        if not self.default:
            return f"{self.type}, required"
        if self.default == "null":
            return f"{self.type.removesuffix(_NULL)}, optional"
        return self.type if self.default == "its own" else f"{self.type}; default `{self.default}`"


def keys_of(model: type[Settings]) -> Sequence[Key]:
    """The keys of a model, inherited ones too."""
    model.model_rebuild()
    return [Key(name, _type(field), _default(field), _meaning(model, name)) for name, field in model.model_fields.items()]


def lines_of(name: str, width: int) -> Iterator[str]:
    """The keys of a method, or of a name of `sections`, as lines for a terminal. KeyError if there is no such thing."""
    called, place, model = (f"method {name}", "method", method(name).config) if is_method(name) else sections()[name]
    yield from textwrap.wrap(f"Keys of {called}, below `{place}` of an experiment, or as --set {place}.KEY=VALUE:", width)
    yield from _key_lines(model, "", width)


def sections() -> Mapping[str, tuple[str, str, type[Settings]]]:
    """By name a section such as `stop`, a source of `data` and a model, with what it is called, its place, and its keys."""
    found = {}
    for place, field in Experiment.model_fields.items():
        listed = list(dict.fromkeys(_models_in(field.annotation)))
        if len(listed) == 1:
            found[place] = (f"section {place}", place, listed[0])
            continue
        for model in listed:
            kind = next((key for key in _KINDS if key in model.model_fields), None)
            for name in () if kind is None else get_args(model.model_fields[kind].annotation):
                found[name] = (f"{'source' if kind == 'source' else place} {name}", place, model)
    return found


def _key_lines(model: type[Settings], prefix: str, width: int) -> Iterator[str]:
    for key in keys_of(model):
        if not key.meaning:  # it only chooses the model
            continue
        title = f"{prefix}{key.name}: {key.value.replace('`', '')}"
        yield ""
        yield from textwrap.wrap(title, width, initial_indent="  ", subsequent_indent="      ")
        yield from textwrap.wrap(key.meaning.replace("`", ""), width, initial_indent="    ", subsequent_indent="    ")
        for below in _models_in(model.model_fields[key.name].annotation):
            yield from _key_lines(below, f"{prefix}{key.name}.", width)


def models() -> Sequence[type[Settings]]:
    """Each model of which an experiment can have keys, those of all built-in methods among them."""
    found: dict[type[Settings], None] = {}
    pending: list[type[Settings]] = [Experiment, *(method(name).config for name in built_in_methods())]
    while pending:
        model = pending.pop(0)
        if model in found:
            continue
        found[model] = None
        model.model_rebuild()
        for field in model.model_fields.values():
            pending += _models_in(field.annotation)
    return list(found)


def _models_in(annotation: Any) -> Iterator[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        yield annotation
    for below in get_args(annotation):
        if not isinstance(below, str):
            yield from _models_in(below)


@functools.cache
def _comments(module: str) -> Mapping[tuple[str, str], str]:
    """By class and key: the comment `#:` at the end of its line, or on the lines above it."""
    source = inspect.getsource(importlib.import_module(module))
    lines = source.splitlines()
    found = {}
    for owner in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)):
        for field in owner.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                above = field.lineno - 1
                while lines[above - 1].lstrip().startswith("#:"):
                    above -= 1
                said = [line.partition("#:")[2].strip() for line in (*lines[above : field.lineno - 1], lines[(field.end_lineno or 1) - 1])]
                found[owner.name, field.target.id] = " ".join(filter(None, said))
    return found


def _meaning(model: type[BaseModel], name: str) -> str:
    for owner in model.__mro__:
        if name in getattr(owner, "__annotations__", {}) and (said := _comments(owner.__module__).get((owner.__qualname__, name))):
            return said
    return ""


def _default(field: FieldInfo) -> str:
    """Its default as in YAML."""
    if field.is_required():
        return ""
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "its own"
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) and _WORD.fullmatch(value) else json.dumps(value, ensure_ascii=False)


def _type(field: FieldInfo) -> str:
    return _bounded(_said(field.annotation), field.metadata)


def _bounded(said: str, metadata: Sequence[Any]) -> str:
    least, most, bounds = "", "", []
    for one in metadata:
        match one:
            case annotated_types.Ge(ge=bound):
                least = f"{bound:,g}"
            case annotated_types.Gt(gt=0) if said.startswith("whole number"):
                least = "1"
            case annotated_types.Gt(gt=bound):
                bounds.append(f"> {bound:,g}")
            case annotated_types.Le(le=bound) if isinstance(bound, int | float) and bound < _NONSENSE:
                most = f"{bound:,g}"
            case annotated_types.Lt(lt=bound):
                bounds.append(f"< {bound:,g}")
            case FieldInfo() if one.metadata:
                return _bounded(said, one.metadata)
    if least and most:
        bounds.insert(0, f"{least} to {most}")
    else:
        bounds = [*([f"≥ {least}"] if least else []), *bounds, *([f"≤ {most}"] if most else [])]
    if not bounds:
        return said
    return f"{said.removesuffix(_NULL)} {', '.join(bounds)}{_NULL if said.endswith(_NULL) else ''}"


def _literal(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text and text.isprintable() and text.strip() == text and "`" not in text else f"`{json.dumps(text)}`"


def _said(annotation: Any) -> str:
    """The type in words, as Markdown."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _bounded(_said(arguments[0]), arguments[1:])
    if origin is Literal:
        return ", ".join(map(_literal, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(_said(one) for one in arguments))
    if origin in (tuple, list) or annotation is tuple:
        fixed = [one for one in arguments if one is not Ellipsis]
        return f"list of {_plural(_said(fixed[0]))}" if fixed else "list"
    if origin is dict:
        value = _said(arguments[1])
        return "mapping" if value == _ANY else f"mapping of names to {_plural(value)}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return "mapping"
    return _WORDS.get(annotation, "text" if isinstance(annotation, StringConstraints) else _ANY)


def _plural(said: str) -> str:
    for one, many in _PLURALS.items():
        if said == one or said.startswith(f"{one} "):
            return many + said.removeprefix(one)
    return said
