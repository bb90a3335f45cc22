"""A learner's answer as text: a function of a notebook cell or a module, with the functions, imports and constants it uses.

Text, because a function of a cell cannot be imported elsewhere and a pickle could run anything where it is loaded. This module must never
run what it reads.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
import types
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...errors import ConfigError

SIMPLE = (bool, int, float, str, bytes, type(None))


@dataclass(frozen=True)
class Submission:
    """`text` is a Python program; running it defines the function `name`."""

    text: str
    name: str

    @classmethod
    def of(cls, function: Callable | Submission) -> Submission:
        """The text of a function and of what it needs.

        Raises:
            ConfigError: it is no function that was written with `def`, or its source is nowhere to be found.
        """
        if isinstance(function, Submission):
            return function
        if not isinstance(function, types.FunctionType) or function.__name__ == "<lambda>":
            what = "a lambda" if isinstance(function, types.FunctionType) else f"something of type {type(function).__name__}"
            raise ConfigError(f"{what} cannot be checked; give the function you wrote with def, without calling it")
        parts: dict[str, str] = {}
        _collect(function.__name__, function, parts)
        return cls("\n\n".join(["from __future__ import annotations", *parts.values()]) + "\n", function.__name__)


def _collect(name: str, value: object, parts: dict[str, str]) -> None:
    """Add `name = value` to the parts, after everything it needs."""
    parts[name] = ""                                            # so that functions may call each other
    text = source_of(value)
    needed: dict[str, str] = {}
    space = _space(value)
    for used in _names(text):
        if used in parts or used not in space:
            continue
        found = space[used]
        if isinstance(found, types.FunctionType | type) and _same_home(found, value):
            _collect(used, found, parts)
        elif line := _line(used, found):
            needed[used] = line
    del parts[name]
    parts.update({used: line for used, line in needed.items() if used not in parts})
    parts[name] = text


def source_of(value: object) -> str:
    """The text of a function or class.

    Raises:
        ConfigError: it is nowhere to be found.
    """
    try:
        if isinstance(value, types.FunctionType):
            return textwrap.dedent(inspect.getsource(value))
        code = next(each.__code__ for each in vars(value).values() if isinstance(each, types.FunctionType))
        tree = ast.parse(text := "".join(linecache.getlines(code.co_filename)))
        return next(ast.get_source_segment(text, node) for node in ast.walk(tree)
                    if isinstance(node, ast.ClassDef) and node.name == value.__name__)
    except (OSError, TypeError, StopIteration, SyntaxError) as error:
        raise ConfigError(f"the source of {getattr(value, '__name__', value)} is nowhere to be found; define it in a cell or a file, "
                          "then check it") from error


def _space(value: object) -> dict:
    """The names a function or class sees."""
    functions = [value] if isinstance(value, types.FunctionType) else [each for each in vars(value).values()
                                                                       if isinstance(each, types.FunctionType)]
    space: dict = {}
    for function in functions:
        space |= function.__globals__
        space |= {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                  if _filled(cell)}
    return space


def _filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _names(text: str) -> list[str]:
    return list(dict.fromkeys(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)))


def _same_home(found: object, user: object) -> bool:
    return getattr(found, "__module__", None) == getattr(user, "__module__", "")


def _line(name: str, value: object) -> str:
    """The line that makes `name` in another process; empty when there is none."""
    if isinstance(value, types.ModuleType):
        return f"import {value.__name__} as {name}" if value.__name__ != "__main__" else ""
    if isinstance(value, torch.dtype):
        return f"import torch\n{name} = {value}"
    if isinstance(value, SIMPLE):
        return f"{name} = float('{value}')" if isinstance(value, float) else f"{name} = {value!r}"
    if isinstance(value, tuple | list | dict | set) and _plain(value):
        return f"{name} = {value!r}"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if module and qualname.isidentifier() and module not in ("__main__", "builtins"):
        return f"from {module} import {qualname} as {name}"
    return ""


def _plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(_plain(key) and _plain(each) for key, each in value.items())
    if isinstance(value, tuple | list | set):
        return all(map(_plain, value))
    return isinstance(value, SIMPLE) and not isinstance(value, float) or isinstance(value, float) and abs(value) < 1e300
