"""Short types in the signatures of the Python reference: `Array` instead of how numpy spells it, fields as their classes write them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.typing import ExtensionMetadata

_ARRAYS = {"float64": "Array", "int64": "Indices"}
_NUMPY = re.compile(r"ndarray\[tuple\[Any, (?:\.\.\.|…)\], dtype\[(\w+)\]\]")


def _fields_as_written(app: Sphinx, what: str, name: str, found: Any, options: Any, signature: str | None, returns: str | None) -> Any:  # noqa: ARG001 - Sphinx passes them
    if what != "class" or not dataclasses.is_dataclass(found) or ":" not in (signature or ""):  # or the page gives a shorter one
        return None
    return f"({', '.join(_parameters(found))})", returns


def _parameters(found: Any) -> Iterator[str]:
    is_by_name = False
    for field in dataclasses.fields(found):
        if not field.init:
            continue
        if field.kw_only and not is_by_name:
            is_by_name = True
            yield "*"
        owner = next(one for one in found.__mro__ if field.name in vars(one).get("__annotations__", {}))
        default = ""
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
            is_plain = field.default is None or isinstance(field.default, str | int | float | bool) or field.default == ()
            default = f" = {field.default!r}" if is_plain else " = ..."
        yield f"{field.name}: {_annotations(owner.__module__)[owner.__qualname__, field.name]}{default}"


@functools.cache
def _annotations(module: str) -> Mapping[tuple[str, str], str]:
    analyzer = ModuleAnalyzer.for_module(module)
    analyzer.analyze()
    return analyzer.annotations


def _shorten(app: Sphinx, document: nodes.document) -> None:  # noqa: ARG001 - Sphinx passes it
    for signature in document.findall(addnodes.desc_signature):
        for node in [*signature.findall(addnodes.desc_annotation), *signature.findall(addnodes.desc_returns), *_of_parameters(signature)]:
            text = node.astext()
            if (short := _NUMPY.sub(lambda found: _ARRAYS.get(found[1], "ndarray"), text)) != text:
                node.children = []
                node.append(nodes.Text(short.removeprefix(" -> ")))


def _of_parameters(signature: nodes.Node) -> list[nodes.Element]:
    return [name for one in signature.findall(addnodes.desc_parameter) for name in one.findall(addnodes.desc_sig_name)]


def setup(app: Sphinx) -> ExtensionMetadata:
    app.connect("autodoc-process-signature", _fields_as_written)
    app.connect("doctree-read", _shorten)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
