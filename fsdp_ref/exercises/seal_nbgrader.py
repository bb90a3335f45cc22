"""For nbgrader's autograding: the submission's text in place of its cells, and back again for the feedback.

nbgrader runs a submission and the checks in one kernel, where a submission could replace the check. `Seal` runs before it and leaves
only the graded cells (nbgrader has by then overwritten them from the source), each given the submission as text; `Unseal` runs after it.
This module must never let a cell of a submission run in nbgrader's kernel.
"""

from __future__ import annotations

import ast
from pathlib import Path

from nbgrader.preprocessors import NbGraderPreprocessor
from nbgrader.utils import is_grade, is_locked

from .graded import sealed
from .submission import Submission, SubmissionError, text_for, without_magics

KEY = "fsdp_ref_sealed"


class Seal(NbGraderPreprocessor):
    """Runs before Execute."""

    def preprocess(self, nb, resources):
        """Blank every code cell, but graded ones: these define the function as text, then call `require`."""
        cells = {number: without_magics(cell.source) for number, cell in enumerate(nb.cells, 1) if cell.cell_type == "code"
                 and not is_locked(cell) and not cell.source.lstrip().startswith("%%")}
        submission = Submission(Path("submission.ipynb"), cells)
        resources[KEY] = [cell.source for cell in nb.cells]
        for cell in nb.cells:
            if cell.cell_type == "code":
                cell.source = _sealed(cell, submission) if is_grade(cell) and is_locked(cell) else ""
        return nb, resources


class Unseal(NbGraderPreprocessor):
    """Runs after Execute."""

    def preprocess(self, nb, resources):
        """Put the texts of all cells back."""
        for cell, source in zip(nb.cells, resources.pop(KEY), strict=True):
            cell.source = source
        return nb, resources


def _sealed(cell, submission: Submission) -> str:
    """The graded cell with the submission's text before it."""
    calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "require"]
    if not calls:
        return "raise AssertionError('this cell was not overwritten with its source; generate the assignment first')"
    call = calls[0]
    exercise, function = call.args[0].value, call.args[1].id
    try:
        text, problem = text_for(submission, function), ""
    except SubmissionError as error:
        text, problem = "", str(error)
    return f"{sealed(exercise, function, text, problem)}\n{cell.source}"
