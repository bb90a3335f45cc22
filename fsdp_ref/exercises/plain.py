"""The builds that need no grader: the student's notebook, the solution's, and a stub with tests for pytest.

The student's notebook checks itself with `check`. This module must never write a solution into anything but the solution's notebook.
"""

from __future__ import annotations

from collections.abc import Callable

from .cells import GRADED_IMPORT, Graded, as_text, code, graded_line, markdown, notebook, solution_text, student_text
from .source import Source


def student(source: Source) -> str:
    """The released notebook: statement, stub, visible check."""
    return _notebook(source, student_text)


def solution(source: Source) -> str:
    """The same with the solution in it."""
    return _notebook(source, solution_text)


def pytest(source: Source, checks: list[Graded]) -> dict[str, str]:
    """Path below the folder of the build -> text: a module to fill in, and a test of each property."""
    words = "\n\n".join(cell.text for cell in source.cells if cell.role == "text")
    parts = [student_text(cell.role, cell.text) for cell in source.cells if cell.role == "answer"]
    imports = [cell.text for cell in source.cells if cell.role == "code"]
    module = f'r"""{words}\n"""\n\n' + "\n\n\n".join([*imports, *parts]) + "\n"
    head = [f'"""Tests of {source.id}, one a property: pytest test_{source.id}.py"""', GRADED_IMPORT,
            f"from {source.id} import {source.function}"]
    tests = ["\n\n".join(head)]
    tests += [f"def test_{graded.property.replace(' ', '_')}():\n    {graded_line(source, graded)}" for graded in checks]
    return {f"{source.id}.py": module, f"test_{source.id}.py": "\n\n\n".join(tests) + "\n"}


def _notebook(source: Source, form: Callable[[str, str], str]) -> str:
    """The source's cells, but hidden ones, each in this form."""
    return as_text(notebook(source, [_cell(cell.role, form(cell.role, cell.text)) for cell in source.cells if cell.role != "hidden"]))


def _cell(role: str, text: str):
    return markdown(text) if role == "text" else code(text, tags=[role]) if role in ("answer", "check") else code(text)
