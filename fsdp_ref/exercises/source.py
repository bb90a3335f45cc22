"""The source of an exercise, `exercises/src/ID.py`: py:percent text whose cells have a role.

    # %% [markdown]                     the statement: any number of cells; the first begins with a heading
    # %%                                code that everybody sees (imports, a toy example)
    # %%                                the answer: a cell with a function whose body stands between `# BEGIN SOLUTION`
    def zero1_step(...):                 and `# END SOLUTION`. Everything outside of the two lines is released
    # %% tags=["check"]                 the visible check: check("zero1_step", zero1_step)
    # %% tags=["check-hidden"]          what only the graders run beside their own calls (may be left out); never released

The graders' own calls, one a property with its points, follow from the exercise's entry in `fsdp_ref.lab.checks`.

A role follows from the text (a solution mark, a tag, a call of `check`) and from nothing else. This module must never execute a source.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

BEGIN, END = "# BEGIN SOLUTION", "# END SOLUTION"
STUB = ("# YOUR CODE HERE", "raise NotImplementedError()")
ROLES = ("text", "code", "answer", "check", "hidden")
NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class Cell:
    """One cell: its role (one of ROLES) and its text."""

    role: str
    text: str


@dataclass(frozen=True)
class Source:
    """An exercise's source: its id (the file's name), title, the name of the function that is graded, its cells."""

    id: str
    title: str
    function: str
    cells: tuple[Cell, ...]

    def solution_lines(self) -> list[str]:
        """Every line that must never be released, blank ones left out."""
        lines = [line.strip() for cell in self.cells if cell.role == "answer" for line in solution_of(cell.text)]
        return [line for line in lines if line]

    def hidden_lines(self) -> list[str]:
        """Every line of the hidden checks."""
        return [line.strip() for cell in self.cells if cell.role == "hidden" for line in cell.text.splitlines() if line.strip()]


def solution_of(text: str) -> list[str]:
    """The lines between the marks of one cell."""
    inside, found = False, []
    for line in text.splitlines():
        if line.strip() in (BEGIN, END):
            inside = line.strip() == BEGIN
        elif inside:
            found.append(line)
    return found


def with_stub(text: str) -> str:
    """The cell with each solution replaced by the stub, at the solution's indentation.

    >>> print(with_stub("def f():\\n    # BEGIN SOLUTION\\n    return 1\\n    # END SOLUTION"))
    def f():
        # YOUR CODE HERE
        raise NotImplementedError()
    """
    inside, kept = False, []
    for line in text.splitlines():
        if line.strip() == BEGIN:
            inside = True
            kept += [line[:len(line) - len(line.lstrip())] + stub for stub in STUB]
        elif line.strip() == END:
            inside = False
        elif not inside:
            kept.append(line)
    return "\n".join(kept)


def without_marks(text: str) -> str:
    """The cell as the solution shows it."""
    return "\n".join(line for line in text.splitlines() if line.strip() not in (BEGIN, END))


def read(path: Path) -> Source:
    """Read one source. Raises ConfigError that names the file, the cell and the fix."""
    try:
        import jupytext
    except ImportError:
        raise ConfigError('building exercises needs jupytext; install it: pip install "fsdp-ref[test]"') from None
    if not NAME.fullmatch(path.stem):
        raise ConfigError(f"{path.name} is no name for an exercise; use small letters, digits and underscores, as in zero1_step.py")
    try:
        notebook = jupytext.read(path, fmt="py:percent")
    except OSError as error:
        raise ConfigError(f"the source {path} cannot be read ({error.strerror}); give a folder of exercises' sources") from None
    cells = tuple(Cell(_role(cell, path.name, number), cell.source) for number, cell in enumerate(notebook.cells, 1) if cell.source.strip())
    return Source(path.stem, _title(cells, path.name), _function(cells, path), cells)


def read_all(folder: Path) -> list[Source]:
    """Every source of a folder, in order of name."""
    paths = sorted(folder.glob("*.py"))
    if not paths:
        raise ConfigError(f"{folder} holds no exercise source (*.py); give the folder exercises/src of a checkout with --src")
    return [read(path) for path in paths]


def _role(cell, file: str, number: int) -> str:
    """The role of a jupytext cell."""
    if cell.cell_type != "code":
        return "text"
    marks = [line.strip() for line in cell.source.splitlines() if line.strip() in (BEGIN, END)]
    if marks != [BEGIN, END] * (len(marks) // 2) or len(marks) % 2:
        raise ConfigError(f"{file}, cell {number}: the solution's marks do not pair up; write {BEGIN} before and {END} after each part")
    stray = [line.strip() for line in cell.source.splitlines() if "SOLUTION" in line and line.strip() not in (BEGIN, END)]
    if stray:
        raise ConfigError(f"{file}, cell {number}: {stray[0]!r} is no mark, though graders would take it for one; write {BEGIN} or {END}")
    tags = cell.metadata.get("tags", [])
    if marks:
        return "answer"
    return "hidden" if "check-hidden" in tags else "check" if "check" in tags else "code"


def _title(cells: tuple[Cell, ...], file: str) -> str:
    first = cells[0] if cells else Cell("code", "")
    if first.role != "text" or not first.text.startswith("# "):
        raise ConfigError(f"{file} does not begin with a heading; make its first cell Markdown that begins with '# '")
    return first.text.splitlines()[0].removeprefix("# ").strip()


def _function(cells: tuple[Cell, ...], path: Path) -> str:
    """What the visible check hands in: the second argument of check("ID", NAME), defined in a cell with a solution."""
    for role, how in (("answer", f"put {BEGIN} and {END} round the solution"), ("check", 'add a cell with tags=["check"]')):
        if not any(cell.role == role for cell in cells):
            raise ConfigError(f"{path.name} has no {role} cell; {how}")
    roles = [cell.role for cell in cells if cell.role != "hidden"]
    first, last = roles.index("answer"), len(roles) - roles[::-1].index("answer")
    if set(roles[first:last]) != {"answer"}:
        raise ConfigError(f"{path.name}: another cell stands between two cells with a solution; put the answers' cells one after the other")
    calls = [node for cell in cells if cell.role == "check" for node in ast.walk(ast.parse(cell.text))
             if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "check" and len(node.args) == 2]
    names = {node.args[1].id for node in calls if isinstance(node.args[1], ast.Name)
             and isinstance(node.args[0], ast.Constant) and node.args[0].value == path.stem}
    if len(names) != 1:
        raise ConfigError(f'{path.name}: its check cell does not hand in one function; write check("{path.stem}", {path.stem}) in it')
    return names.pop()
