"""What a student handed in, read as text: a notebook, or a Python file.

It must never run anything of a submission, nor trust a word of it: only what the file *defines* is taken over (imports, functions,
classes, constants), and of these only what the graded function needs. Its check cells, whatever they say now, are left behind.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

LIMIT = 5_000_000           # bytes of a submission; a student's notebook without its outputs has a hundredth of it
CODE_LIMIT = 200_000        # characters in its code cells
KEPT = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)


class SubmissionError(ConfigError):
    """A submission that cannot be graded: the message names the file, the cell and the fix."""


@dataclass(frozen=True)
class Submission:
    """One file that was handed in. `cells`: number -> text of each code cell (of a Python file: its only one, 0)."""

    path: Path
    cells: dict[int, str]

    @property
    def is_notebook(self) -> bool:
        """Whether a cell's number means something to the student."""
        return self.path.suffix == ".ipynb"

    def place(self, number: int) -> str:
        """Where a cell is, in words."""
        return f"cell {number} of {self.path.name}" if self.is_notebook else self.path.name


def read(path: Path) -> Submission:
    """Read a submission. Raises SubmissionError when it is neither a notebook nor Python text."""
    if path.suffix not in (".ipynb", ".py"):
        raise SubmissionError(f"{path.name} is neither a notebook nor a Python file; hand in NAME.ipynb or NAME.py")
    try:
        if not path.is_file() or path.is_symlink():
            raise SubmissionError(f"{path.name} is no file; hand in the notebook itself")
        if (size := path.stat().st_size) > LIMIT:
            raise SubmissionError(f"{path.name} has {size:,} bytes, more than {LIMIT:,}; clear its outputs, then hand it in again")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SubmissionError(f"{path.name} cannot be read as text ({error}); hand in the notebook as Jupyter saves it") from None
    cells = _cells(path, text) if path.suffix == ".ipynb" else {0: text}
    if (size := sum(map(len, cells.values()))) > CODE_LIMIT:
        raise SubmissionError(f"{path.name} holds {size:,} characters of code, more than {CODE_LIMIT:,}; hand in the exercise alone")
    return Submission(path, cells)


def _cells(path: Path, text: str) -> dict[int, str]:
    """The code cells of a notebook's JSON, by their number from 1. A cell magic's cell is no Python and is left out."""
    try:
        notebook = json.loads(text)
        if notebook["nbformat"] != 4:
            raise SubmissionError(f"{path.name} is a notebook of format {notebook['nbformat']!r}, not 4; open it in JupyterLab and save it")
        found = {number: cell["source"] if isinstance(cell["source"], str) else "".join(cell["source"])
                 for number, cell in enumerate(notebook["cells"], 1) if cell["cell_type"] == "code"}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SubmissionError(f"{path.name} is no notebook ({type(error).__name__}: {error}); hand in what Jupyter saves") from None
    return {number: without_magics(source) for number, source in found.items() if not source.lstrip().startswith("%%")}


def without_magics(source: str) -> str:
    """The cell with IPython's own lines (%time, !ls, name?) as comments, in the same number of lines."""
    return "\n".join("# " + line if line.startswith(("%", "!")) or line.rstrip().endswith("?") else line for line in source.splitlines())


def defines(submission: Submission, function: str) -> list[int]:
    """The numbers of the cells that define the function at their top level."""
    return [number for number, text in submission.cells.items() if function in _defined(_parsed(text))]


def text_for(submission: Submission, function: str) -> str:
    """The function with whatever of the submission it needs, in the submission's order: the text that is graded.

    Raises:
        SubmissionError: the function is missing, defined twice (a copied cell) or cut in two (a split cell).
    """
    places = defines(submission, function)
    broken = {number: error for number, text in submission.cells.items() if (error := _mistake(text)) is not None}
    if len(places) > 1:
        raise SubmissionError(f"{function} is defined in {len(places)} cells of {submission.path.name} (numbers {_listed(places)}): "
                              "a cell was copied; keep one and delete the others")
    if not places:
        why = next((f"; {submission.place(n)} is no Python ({e}): was it split in two?" for n, e in broken.items()
                    if function in submission.cells[n]), "")
        raise SubmissionError(f"{submission.path.name} defines no function {function}{why or '; keep its name and its line with def'}")
    after = places[0] + 1
    if after in broken and submission.cells[after][:1].isspace():
        raise SubmissionError(f"{submission.place(after)} begins in the middle of a block, after the cell that defines {function}: "
                              "the cell was split in two; merge the two again")
    statements = [(node, _lines(node, lines)) for number, text in submission.cells.items() if number not in broken
                  for lines in [text.splitlines()] for node in _parsed(text) if isinstance(node, KEPT) and not _is_future(node)]
    return "\n\n".join(["from __future__ import annotations", *_needed(statements, function)]) + "\n"


def _lines(node: ast.stmt, lines: list[str]) -> str:
    """A statement's own lines, decorators and comments inside it included."""
    first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))])
    return "\n".join(lines[first - 1:node.end_lineno])


def _needed(statements: list[tuple[ast.stmt, str]], function: str) -> list[str]:
    """The texts of those statements that define a name the function uses, directly or through one another."""
    makers: dict[str, list[int]] = {}
    for place, (node, _) in enumerate(statements):
        for name in _names([node]):
            makers.setdefault(name, []).append(place)
    kept = {place for place, (node, _) in enumerate(statements) if _is_star(node)}
    pending, asked = [function], {function}
    while pending:
        for place in makers.get(pending.pop(), ()):
            if place not in kept:
                kept.add(place)
                used = {each.id for each in ast.walk(statements[place][0]) if isinstance(each, ast.Name)} - asked
                asked |= used
                pending += used
    return [statements[place][1] for place in sorted(kept)]


def _names(nodes: Iterable[ast.stmt]) -> set[str]:
    """The names that these statements define."""
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return found


def _defined(nodes: list[ast.stmt]) -> set[str]:
    """The functions among them, and names bound to something else on purpose (`zero1_step = mine`)."""
    return _names(node for node in nodes if not isinstance(node, ast.Import | ast.ImportFrom))


def _is_star(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def _parsed(text: str) -> list[ast.stmt]:
    return [] if _mistake(text) else ast.parse(text).body


def _mistake(text: str) -> str | None:
    """What Python says against this text, or None."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    return None


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:-1])) + f" and {numbers[-1]}"
