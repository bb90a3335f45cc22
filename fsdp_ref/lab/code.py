"""The project's own code inside a notebook: what changed between two lessons, and where an idea lives in the source.

    changed("04:train", train)                      # a unified diff: the function of notebook 04's source, and one of this notebook
    read("engine/unit.py", "unshard")               # a function of the package, with its file and line

Code is read from where it stands, never copied, so a lesson stops passing when its source moves. This module must never run what it
reads, nor read a file outside the package and the notebooks.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from IPython import get_ipython
from IPython.display import display

from ..errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]
_KINDS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Code:
    """Some code, and the one line of words that is shown above it."""

    words: str
    text: str
    language: str = "python"

    def show(self) -> None:
        """Words and code: with colours where the front end has them, else as text."""
        if get_ipython() is None:
            print(f"{self.words}\n\n{self.text}")
            return
        fence = "`" * max(3, 1 + max(map(len, re.findall("`+", self.text)), default=0))
        display({"text/plain": f"{self.words}\n\n{self.text}",
                 "text/markdown": f"{self.words}\n\n{fence}{self.language}\n{self.text}\n{fence}"}, raw=True)

    def _ipython_display_(self) -> None:
        """Nothing: the call has shown it already."""


def changed(before: Callable | str, after: Callable | str) -> Code:
    """Show what changed from one function to the next as a unified diff (three lines around each change).

    Args:
        before, after: a function or class (of a cell, or importable), or `"04:train"`: the one called `train` in notebook 04's source.

    Raises:
        ConfigError: there is no such notebook or function, or the text of a function cannot be found.
    """
    (old_name, old), (new_name, new) = _source(before), _source(after)
    diff = list(difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm=""))
    added, removed = (sum(line.startswith(mark) for line in diff[2:]) for mark in "+-")
    words = f"From {old_name} to {new_name}: {_lines(added)} added, {_lines(removed)} removed." if diff else \
        f"{old_name} and {new_name} are the same."
    return _shown(Code(words, "\n".join(diff) or new, "diff" if diff else "python"))


def read(file: str, name: str) -> Code:
    """Show a function, method or class of the package, with its file and line.

    Args:
        file: a path inside `fsdp_ref`, such as `engine/unit.py`.
        name: `unshard`, or `Unit.unshard` when several things in the file have the name.

    Raises:
        ConfigError: there is no such file or name in it (it may have moved), or several have the name.
    """
    path = (PACKAGE / file).resolve()
    if not path.is_relative_to(PACKAGE) or path.suffix != ".py" or not path.is_file():
        raise ConfigError(f"there is no file {file} in fsdp_ref; give a path such as engine/unit.py")
    text = path.read_text(encoding="utf-8")
    found = [(full, node) for full, node in _definitions(text) if full == name or full.endswith(f".{name}")]
    if len(found) > 1 and name not in (full for full, _ in found):
        raise ConfigError(f"fsdp_ref/{file} has several {name}; write one of {[full for full, _ in found]}")
    if not found:
        raise ConfigError(f"fsdp_ref/{file} has no {name} any more; it has {_names(text)}")
    full, node = next(((full, node) for full, node in found if full == name), found[0])
    return _shown(Code(f"`fsdp_ref/{file}`, line {_first(node)}: `{full}`", _text(text, node)))


def _shown(code: Code) -> Code:
    code.show()
    return code


def _source(what: Callable | str) -> tuple[str, str]:
    """A name for a heading, and the text of a function."""
    if not isinstance(what, str):
        try:
            return what.__name__, textwrap.dedent(inspect.getsource(what)).rstrip()
        except (OSError, TypeError, AttributeError) as error:
            raise ConfigError(f"the text of {what!r} cannot be found; give a function of a cell or a module, or \"04:name\"") from error
    number, colon, name = what.partition(":")
    if not colon or not re.fullmatch(r"\d\d", number):
        raise ConfigError(f'{what!r} names no function; write "04:name", the function called name in the source of notebook 04')
    path = notebook_source(number)
    text = path.read_text(encoding="utf-8")
    nodes = [node for full, node in _definitions(text) if full == name]
    if not nodes:
        raise ConfigError(f"notebook {path.stem} has no {name} any more; it has {_names(text)}")
    return f"{name} ({number})", _text(text, nodes[-1])


def notebook_source(number: str) -> Path:
    """The py:percent source of notebook `number` (two digits): beside the package, or in the folder the notebook runs in.

    Raises:
        ConfigError: it is in neither.
    """
    folders = (PACKAGE.parent / "notebooks" / "src", Path.cwd() / "src", Path.cwd() / "notebooks" / "src")
    for folder in folders:
        if found := sorted(folder.glob(f"{number}_*.py")):
            return found[0]
    raise ConfigError(f"the source of notebook {number} was not found; run this where notebooks/src is")


def _definitions(text: str) -> list[tuple[str, ast.AST]]:
    """Functions, classes and methods of a module: dotted name and node, in order. A `# %%px` line is a comment to Python."""
    found: list[tuple[str, ast.AST]] = []

    def visit(body: list[ast.stmt], above: str) -> None:
        for node in body:
            if isinstance(node, _KINDS):
                found.append((above + node.name, node))
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{above}{node.name}.")
    visit(ast.parse(text).body, "")
    return found


def _names(text: str) -> str:
    return ", ".join(full for full, _ in _definitions(text)) or "none"


def _first(node: ast.AST) -> int:
    """The first line of a definition, its decorators included."""
    return min([node.lineno, *(each.lineno for each in node.decorator_list)])


def _text(text: str, node: ast.AST) -> str:
    return textwrap.dedent("\n".join(text.splitlines()[_first(node) - 1:node.end_lineno]))


def _lines(count: int) -> str:
    return f"{count} line{'' if count == 1 else 's'}"
