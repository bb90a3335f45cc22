"""What the pool must know of a notebook's cells: which functions a function needs, whether a text awaits, and the texts themselves.

The texts let a rank say which `if` a line stands under (source.py). Nothing here runs a cell.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import sys
import types
from collections.abc import Callable, Iterable
from pathlib import Path

from ipykernel.compiler import get_file_name

from .. import source


def name_of(code: str) -> str:
    """The name, without its folder, that ipykernel gives to the file of a cell with this text: the same in every process."""
    return Path(get_file_name(code)).name


def texts(functions: Iterable[Callable]) -> dict[str, str]:
    """The cells in which these functions were defined: name of the file -> text. Functions of modules are left out."""
    files = {code.co_filename for function in functions if (code := getattr(function, "__code__", None)) is not None}
    return {file: "".join(linecache.getlines(file)) for file in files if source.in_cell(file)}


def learn(known: dict[str, str]) -> None:
    """Runs in a rank: keep the texts of these cells."""
    for file, text in known.items():
        source.learn(file, text)


def helpers(function: Callable) -> dict[str, Callable]:
    """Functions of the notebook that `function` calls by name, directly or through one another; they travel with it."""
    main = sys.modules["__main__"].__dict__
    found: dict[str, Callable] = {}
    pending = [function]
    while pending:
        for name in _names(getattr(pending.pop(), "__code__", None)):
            value = main.get(name)
            if isinstance(value, types.FunctionType) and value.__module__ == "__main__" and name not in found:
                found[name] = value
                pending.append(value)
    return found


def awaits(code: str) -> bool:
    """Whether a cell's text has an await at its top level. What is no plain Python (a magic, a mistake) is not judged here."""
    try:
        return bool(compile(code, "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT).co_flags & inspect.CO_COROUTINE)
    except (SyntaxError, ValueError):
        return False


def _names(code: types.CodeType | None) -> set[str]:
    """The global names a function's code mentions, its comprehensions and inner functions included."""
    if code is None:
        return set()
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))
