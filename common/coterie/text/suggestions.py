"""Suggestions: the known word that was probably meant by an unknown one, as the end of a sentence."""

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

_CUTOFF = 0.6
_LONGEST = 200  # characters; longer words are not typing errors


def suggestion(found: object, words: Iterable[str]) -> str:
    """ "; did you mean 'loss'?" if one of the words is similar, else ""."""
    if not isinstance(found, str) or len(found) > _LONGEST:
        return ""
    similar = difflib.get_close_matches(found, list(words), n=1, cutoff=_CUTOFF)
    return f"; did you mean {similar[0]!r}?" if similar else ""


def keys_at(root: type[BaseModel], place: Sequence[int | str], method: type[BaseModel] | None) -> Sequence[str]:
    """The keys of a mapping at this place of a pydantic error. `method` is the model of the experiment's method, if known.

    In a union, the place contains the tag of the chosen model.
    """
    models: list[type[BaseModel]] = [root]
    for step in place:
        if isinstance(step, int):
            continue
        if len(models) > 1 and (chosen := [model for model in models if _tag(model) == step]):
            models = chosen
        elif step == "method" and models == [root]:
            models = [] if method is None else [method]
        else:
            models = [inner for model in models if step in model.model_fields for inner in _inside(model.model_fields[step].annotation)]
    return [*dict.fromkeys(key for model in models for key in model.model_fields)]


def tags_of(annotation: object) -> list[str]:
    """The tags of the models in a union."""
    return [tag for model in _inside(annotation) if (tag := _tag(model)) is not None]


def method_of(content: object) -> str | None:
    """The name of the method in a mapping, or None."""
    method = content.get("method") if isinstance(content, Mapping) else None
    name = method.get("name") if isinstance(method, Mapping) else None
    return name if isinstance(name, str) else None


def _tag(model: type[BaseModel]) -> str | None:
    for key in ("source", "name"):
        values: tuple[Any, ...] = typing.get_args(model.model_fields[key].annotation) if key in model.model_fields else ()
        if len(values) == 1 and isinstance(values[0], str):
            return values[0]
    return None


def _inside(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for inner in typing.get_args(annotation):
        yield from _inside(inner)
