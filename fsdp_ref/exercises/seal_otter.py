"""For otter's autograding: a plugin that puts the submission's text in place of its cells, before otter executes them.

otter runs a submission and the tests in one kernel, without a limit on time. After `Seal` the notebook has one cell, which defines the
graded function as text. This module must never let a cell of a submission, or a test in its metadata, run in otter's kernel.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
from otter.plugins import AbstractOtterPlugin

from .graded import sealed
from .submission import Submission, SubmissionError, text_for, without_magics


class Seal(AbstractOtterPlugin):
    """Configured with the exercise's id and the name of its function."""

    def before_execution(self, submission):
        """The notebook that is executed instead."""
        cells = {number: without_magics(cell.source) for number, cell in enumerate(submission.cells, 1)
                 if cell.cell_type == "code" and not cell.source.lstrip().startswith("%%")}
        exercise, function = self.plugin_config["exercise"], self.plugin_config["function"]
        try:
            text, problem = text_for(Submission(Path("submission.ipynb"), cells), function), ""
        except SubmissionError as error:
            text, problem = "", str(error)
        made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sealed(exercise, function, text, problem))])
        made.metadata["kernelspec"] = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
        return made
