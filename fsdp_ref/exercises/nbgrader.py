"""A source assignment for nbgrader: `nbgrader generate_assignment` makes the student's version of it, `autograde` grades.

One property of the exercise is one graded cell with points of its own, since nbgrader gives a cell all of its points or none. What
the graded cells call is hidden until grading; nothing else in them. This module must never write keys into nbgrader's part of a
cell's metadata that its schema does not know.
"""

from __future__ import annotations

from .cells import GRADED_IMPORT, Graded, as_text, code, graded_line, markdown, notebook
from .source import Source

SCHEMA_VERSION = 3

# nbgrader runs a submission's cells in one kernel with the checks. These two preprocessors put its text in place of its cells, so that
# the code itself runs only in ranks of its own, and put the cells back for the feedback. A check limits itself; the limit here is slack.
CONFIG = """\
c = get_config()
c.CourseDirectory.course_id = "fsdp_ref"
c.Execute.timeout = 300
c.ClearSolutions.code_stub = {"python": "# YOUR CODE HERE\\nraise NotImplementedError()"}
c.Autograde.autograde_preprocessors = [
    "fsdp_ref.exercises.seal_nbgrader.Seal",
    "nbgrader.preprocessors.Execute",
    "fsdp_ref.exercises.seal_nbgrader.Unseal",
    "nbgrader.preprocessors.IgnorePattern",
    "nbconvert.preprocessors.ClearMetadataPreprocessor",
    "nbgrader.preprocessors.LimitOutput",
    "nbgrader.preprocessors.SaveAutoGrades",
    "nbgrader.preprocessors.AssignLatePenalties",
    "nbgrader.preprocessors.CheckCellMetadata",
]
"""


def build(source: Source, checks: list[Graded]) -> dict[str, str]:
    """Path below the folder of the build -> text."""
    cells, answers = [], 0
    for number, cell in enumerate(source.cells):
        if cell.role == "text":
            cells.append(markdown(cell.text))
        elif cell.role == "answer":
            answers += 1
            cells.append(code(cell.text, nbgrader=_metadata(f"{source.id}-answer-{answers}", solution=True)))
        elif cell.role == "check":
            cells.append(code(cell.text, nbgrader=_metadata(f"{source.id}-check-{number}", locked=True)))
        elif cell.role == "code":
            cells.append(code(cell.text))
    cells.append(markdown("## Points\n\nEach of these cells is one property of your answer. They are filled in and run after you hand in; "
                          "the check above tells you the same today."))
    cells += [_graded(source, graded) for graded in checks]
    name = f"source/{source.id}/{source.id}.ipynb"
    return {name: as_text(notebook(source, cells)), "nbgrader_config.py": CONFIG}


def _graded(source: Source, graded: Graded):
    text = "\n".join([f"# {graded.property}: {graded.points} point{'s' * (graded.points != 1)}", "# BEGIN HIDDEN TESTS", GRADED_IMPORT,
                      graded_line(source, graded), "# END HIDDEN TESTS"])
    return code(text, nbgrader=_metadata(f"{source.id}-{graded.property}", grade=True, locked=True, points=graded.points))


def _metadata(grade_id: str, *, grade: bool = False, solution: bool = False, locked: bool = False, points: int | None = None) -> dict:
    """nbgrader's keys, and none but them. A grade_id may hold letters, digits, - and _."""
    found = {"schema_version": SCHEMA_VERSION, "grade": grade, "solution": solution, "locked": locked, "task": False,
             "grade_id": grade_id.replace(" ", "_")}
    return found if points is None else {**found, "points": points}
