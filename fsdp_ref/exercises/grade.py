"""Grade what students handed in: every file by itself, and a whole folder into a CSV of scores with the diagnoses counted.

    FOLDER/STUDENT/**/NAME.ipynb (nbgrader's `submitted/`, an unpacked download)  or  FOLDER/STUDENT.ipynb, FOLDER/STUDENT.py

Which exercise a file answers is seen from the functions it defines. A file that cannot be graded is a row with an error; the rest of
the batch goes on. This module must never run a submission itself (`judging` does, in processes of their own), nor follow a link out of
the folder.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import ConfigError, FsdpRefError
from .judging import Grader, kind
from .submission import Submission, SubmissionError, defines, read, text_for

COLUMNS = ("student", "exercise", "score", "points", "properties", "diagnosis", "notes", "error", "file")
FORMULA = ("=", "+", "-", "@", "\t", "\r")              # how a cell begins that a spreadsheet would run


@dataclass
class Row:
    """One exercise of one student. `error`: why it could not be graded; then there is no report and the score is 0."""

    student: str
    exercise: str
    file: str
    score: float = 0
    points: float = 0
    diagnosis: str = ""
    kind: str = ""
    error: str = ""
    notes: str = ""
    properties: dict[str, bool] = field(default_factory=dict)
    report: object = None

    def cells(self) -> dict[str, object]:
        """As a row of the CSV."""
        marks = "; ".join(f"{name} {'yes' if passed else 'no'}" for name, passed in self.properties.items())
        row = {"student": self.student, "exercise": self.exercise, "score": f"{self.score:g}", "points": f"{self.points:g}",
               "properties": marks, "diagnosis": self.diagnosis, "notes": self.notes, "error": self.error, "file": self.file}
        return {name: _safe(str(value)) for name, value in row.items()}


def grade_file(path: Path, grader: Grader, student: str = "", shown: str = "", only: Collection[str] = ()) -> list[Row]:
    """The rows of one file: one for each exercise it answers (with `only`: each of these), or one with an error."""
    shown = shown or path.name
    try:
        submission = read(path)
        answered = answers(submission, grader.functions)
    except FsdpRefError as error:
        guess = path.stem if path.stem in grader.functions else ""
        return [Row(student, guess, shown, points=grader.points.get(guess, 0), error=str(error))]
    return [_row(submission, grader, Row(student, exercise, shown, points=grader.points[exercise]))
            for exercise in answered if not only or exercise in only]


def answers(submission: Submission, functions: dict[str, str]) -> list[str]:
    """The exercises that a file answers: those whose function it defines, or the one it is named after.

    Raises:
        SubmissionError: there is none.
    """
    found = [exercise for exercise, function in functions.items() if defines(submission, function)]
    if not found and submission.path.stem in functions:
        found = [submission.path.stem]
    if not found:
        text = "\n".join(submission.cells.values())             # a cell that is no Python: the error will say so
        found = [exercise for exercise, function in functions.items() if f"def {function}(" in text][:1]
    if not found:
        raise SubmissionError(f"{submission.path.name} answers no exercise: it defines none of the functions they ask for "
                              f"({', '.join(sorted(functions.values()))}); keep the function's name")
    return found


def _row(submission: Submission, grader: Grader, row: Row) -> Row:
    try:
        report = grader.judge(row.exercise, text_for(submission, grader.functions[row.exercise]))
    except FsdpRefError as error:
        row.error = str(error)
        return row
    except Exception as error:                          # whatever it is, it is one student's: the rest of the batch goes on
        row.error = f"grading failed with {type(error).__name__}: {error}"
        return row
    row.score, row.points, row.report = report.score, report.points, report
    row.diagnosis, row.kind, row.notes = report.diagnosis, kind(report), "; ".join(report.notes)
    row.properties = {name: report.earned(name) for name in report.verdicts}
    return row


def files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(student, file) of every notebook and Python file below the folder, in order; links and hidden folders are left out."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; give the one that holds a folder or a file for each student")
    for path in sorted(folder.rglob("*")):
        below = path.relative_to(folder)
        hidden = any(part.startswith(".") for part in below.parts)
        if path.suffix in (".ipynb", ".py") and path.is_file() and not path.is_symlink() and not hidden:
            if path.resolve().is_relative_to(folder.resolve()):
                yield (below.parts[0] if len(below.parts) > 1 else path.stem), path


def grade_folder(folder: Path, grader: Grader, told: Callable[[Row], None] = lambda row: None, only: Collection[str] = ()) -> list[Row]:
    """Every row of a folder of submissions; `told` hears of each as it comes.

    Raises:
        ConfigError: the folder holds no submission at all, or `only` names an exercise that does not exist.
    """
    if unknown := sorted(set(only) - set(grader.functions)):
        raise ConfigError(f"there is no exercise {', '.join(unknown)}; choose from {', '.join(grader.functions)}")
    rows: list[Row] = []
    for student, path in files(folder):
        for row in grade_file(path, grader, student, str(path.relative_to(folder)), only):
            rows.append(row)
            told(row)
    if not rows:
        raise ConfigError(f"{folder} holds no submission; give the folder that holds a folder or a file for each student")
    return _without_doubles(rows)


def _without_doubles(rows: list[Row]) -> list[Row]:
    """A student who answered one exercise in several files gets one row without a score, which names them."""
    found: dict[tuple, list[Row]] = {}
    for row in rows:
        found.setdefault((row.student, row.exercise or row.file, bool(row.exercise)), []).append(row)
    return [same[0] if len(same) == 1 else _double(same) for same in found.values()]


def _double(same: list[Row]) -> Row:
    names = ", ".join(row.file for row in same)
    first = same[0]
    return Row(first.student, first.exercise, names, points=max(row.points for row in same),
               error=f"{first.exercise} was handed in more than once: {names}; keep one")


def write_scores(rows: list[Row], path: Path) -> Path:
    """The CSV of scores, one line for each student and exercise."""
    return _write(path, COLUMNS, [row.cells() for row in sorted(rows, key=lambda row: (row.student, row.exercise, row.file))])


def write_diagnoses(rows: list[Row], path: Path) -> Path:
    """The CSV of diagnoses: which mistakes were made how often, by exercise, the most frequent first."""
    return _write(path, ("exercise", "diagnosis", "students", "example"), count_diagnoses(rows))


def count_diagnoses(rows: list[Row]) -> list[dict[str, object]]:
    """One row for each kind of mistake in each exercise. Rows with an error count as `cannot be graded`."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        kind = "cannot be graded" if row.error else row.kind
        if kind:
            found.setdefault((row.exercise, kind), []).append(row)
    order = sorted(found.items(), key=lambda item: (item[0][0], -len(item[1]), item[0][1]))
    return [{"exercise": exercise, "diagnosis": kind, "students": len({row.student for row in each}),
             "example": _safe(each[0].error or each[0].diagnosis)} for (exercise, kind), each in order]


def _write(path: Path, columns: tuple[str, ...], rows: list[dict]) -> Path:
    try:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); give a file in a folder that exists") from None
    return path


def _safe(text: str) -> str:
    """A cell that no spreadsheet takes for a formula, in one line."""
    text = " ".join(text.split())
    return "'" + text if text.startswith(FORMULA) else text
