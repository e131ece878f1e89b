"""Formulas such as "score ~ ses + C(sector) + ses:hours", parsed and evaluated by formulaic (of the extra `data`).

A formula comes from the coordinator, and formulaic evaluates Python in it. So only this is allowed: columns, numbers, arithmetic, and
functions of one row. Functions of many rows (center, scale, bs, poly) are refused, because hosts would differ.
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.arrays import Array
from coterie.errors import ConfigError
from coterie.experiment.features import Feature
from coterie.extras import needed
from coterie.findings import Finding

FUNCTIONS: Final = ("log", "log2", "log10", "exp", "I")
CATEGORY: Final = "C"
_STATEFUL = frozenset({"center", "scale", "standardize", "bs", "cs", "cc", "cr", "poly", "hashed", "lag"})
_ARITHMETIC = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd, ast.Load)
_MOST, _MOST_POWER = 1e300, 16
_MOST_DOUBLINGS = 16  # of the number of terms, when a formula is expanded


@dataclass(frozen=True)
class Asked:
    """The columns that a formula uses."""

    target: str
    columns: tuple[str, ...]  # the target first
    categories: frozenset[str]  # those in C()


def _wrong(formula: str, why: str) -> ConfigError:
    return ConfigError(f"formula {formula!r} {why}", Finding("T22", place="data.formula"))


@lru_cache(maxsize=8)
def asked_by(formula: str) -> Asked:
    """The columns that a formula uses. ConfigError if it contains anything that is not allowed."""
    Formula = _formulaic(formula).Formula
    _check_size(formula)
    try:
        parsed = Formula(formula)
        left, right = [[factor for term in side for factor in term.factors] for side in (parsed.lhs, parsed.rhs)]
    except Exception as error:  # the parser may raise anything
        raise _wrong(formula, f"cannot be read ({_first_line(error)}), want one such as 'score ~ ses + hours'") from None
    if len(left) != 1 or left[0].eval_method.value != "lookup":
        raise _wrong(formula, "has another left side than one column, want the name of the target")
    columns, categories = [left[0].expr], set()
    for factor in right:
        if factor.eval_method.value == "lookup":
            columns.append(factor.expr)
        elif factor.eval_method.value == "python":
            found, category = _columns_in(formula, factor.expr)
            columns += found
            categories |= {category} if category else set()
    if left[0].expr in columns[1:]:
        raise _wrong(formula, f"has the target {left[0].expr!r} on its right side, want other columns there")
    if len(columns) == 1:
        raise _wrong(formula, "has no column on its right side, want at least one")
    return Asked(left[0].expr, tuple(dict.fromkeys(columns)), frozenset(categories))


def _check_size(formula: str) -> None:
    """ConfigError for a formula that would expand into very many terms. Expanding it would exhaust time and memory."""
    outside, n_calls = formula, 1
    while n_calls:  # function calls and braces contain arithmetic, which adds no terms
        outside, n_calls = re.subn(r"\w+\([^()]*\)|\{[^{}]*\}", " f ", outside)
    degrees = [power.strip() for power in re.findall(r"(?:\*\*|\^)([^+*:~)]*)", outside)]
    if any(not degree.isdecimal() or int(degree) > _MOST_POWER for degree in degrees):
        raise _wrong(formula, f"has the power {degrees}, want whole numbers up to {_MOST_POWER} outside of I()")
    n_names = len(re.findall(r"\w+", outside))
    n_crossed = len(re.findall(r"(?<!\*)\*(?!\*)|/|%in%", outside))
    if n_crossed + math.prod(map(int, degrees)) * math.log2(n_names + 1) * bool(degrees) > _MOST_DOUBLINGS:
        raise _wrong(formula, "may have too many terms once it is multiplied out, want the terms written out, such as a + b + a:b")


def _columns_in(formula: str, expression: str) -> tuple[list[str], str | None]:
    """The columns of an expression, and the column that C() makes a category. ConfigError for anything but functions of one row."""
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _wrong(formula, f"has {expression!r}, which is no expression") from None
    call = tree.body
    if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == CATEGORY:
        if len(call.args) != 1 or call.keywords or not isinstance(call.args[0], ast.Name):
            raise _wrong(formula, f"has {expression!r}, want C(column): data.columns has the levels, the first is the reference")
        return [call.args[0].id], call.args[0].id
    functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
            if name in _STATEFUL:
                why = "which depends on the rows of a host, so that hosts would differ"
                raise _wrong(formula, f"has {name}(), {why}: want data.standardize, or a function of one row")
            if name not in FUNCTIONS or len(node.args) != 1 or node.keywords:
                raise _wrong(formula, f"has {name}(), want C() or one of {', '.join(f'{function}()' for function in FUNCTIONS)}")
        elif isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float) or abs(node.value) > _MOST:
                raise _wrong(formula, f"has {ast.unparse(node)}, want columns and numbers")
        elif not isinstance(node, (*_ARITHMETIC, ast.Name)):
            raise _wrong(formula, f"has {ast.unparse(node) or expression}, want columns, numbers and + - * / **")
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            _check_power(formula, node)
    return [node.id for node in names], None


def _check_power(formula: str, node: ast.BinOp) -> None:
    """ConfigError for any power but a column to a small constant: large powers of whole numbers exhaust memory."""
    power, has_column = node.right, any(isinstance(part, ast.Name) for part in ast.walk(node.left))
    if not has_column or not isinstance(power, ast.Constant) or not isinstance(power.value, int | float) or abs(power.value) > _MOST_POWER:
        raise _wrong(formula, f"has the power {ast.unparse(power)}, want a column to the power of a number, at most {_MOST_POWER}")


def terms(
    formula: str, numbers: Mapping[str, Array], categories: Mapping[str, tuple[Sequence[str], NDArray[np.int32]]]
) -> tuple[tuple[Feature, ...], Array]:
    """The features (n, p) of a formula, without its intercept, which the problem adds if it has one.

    `numbers` are columns (n,); `categories` are levels and the code of each row. ConfigError for values outside a function's domain.
    """
    import pandas as pd  # noqa: PLC0415 - heavy, and for formulas alone

    asked = asked_by(formula)
    content: dict[str, Any] = {name: values for name, values in numbers.items() if name != asked.target}
    for name, (levels, codes) in categories.items():
        if name != asked.target:
            content[name] = pd.Categorical.from_codes(codes, categories=pd.Index(list(levels)))
    right = formula.split("~")[1]
    try:
        with np.errstate(all="ignore"):
            matrix = _formulaic(formula).model_matrix(right, pd.DataFrame(content), context={}, na_action="ignore")
    except Exception as error:  # the library may raise anything
        raise _wrong(formula, f"cannot be evaluated ({_first_line(error)}), want one that its columns can be put into") from None
    names = [str(name) for name in matrix.columns if name != "Intercept"]
    if not names:
        raise _wrong(formula, "has no terms, want at least one")
    features = np.ascontiguousarray(matrix[names].to_numpy(dtype=np.float64))
    for column in np.flatnonzero(~np.isfinite(features).all(axis=0))[:1]:
        n_bad = int((~np.isfinite(features[:, column])).sum())
        raise _wrong(formula, f"has the term {names[column]!r}, which is no finite number in {n_bad} rows, want numbers in all")
    variables = {name: _columns_of(matrix, name) for name in names}
    return tuple(Feature(name, "term", variables[name] if variables[name] != name else "") for name in names), features


def _columns_of(matrix: Any, name: str) -> str:
    """The one column that a term uses; "" if it uses several."""
    for term, places in matrix.model_spec.term_indices.items():
        if name in [matrix.model_spec.column_names[place] for place in places]:
            found = {str(one) for one in matrix.model_spec.term_variables[term] if one.source == "data"}
            return found.pop() if len(found) == 1 else ""
    return ""


def _formulaic(formula: str) -> Any:
    return needed("formulaic", "data", f"the formula {formula!r} needs formulaic", finding=Finding("T21"))  # which loads pandas


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
