"""The real nbgrader and the real otter, by the commands of docs/instructors.md: the same scores from both, no leak in what they release.

Full marks for the solution, none for the stub, and for a half-right answer the points of the properties it has.
"""

import csv
import json
import shutil

import nbformat
import pytest

from fsdp_ref.exercises import source
from fsdp_ref.lab.checks import exercise

from .course import NAME, ROOT, commands, handed_in, shell
from .test_build import leaks

POINTS = exercise(NAME).points
FULL = sum(POINTS.values())
SCORES = {"right": FULL, "half": FULL - POINTS["order"], "stub": 0, "forger": 0}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    folder = tmp_path_factory.mktemp("course")
    build, = commands("Release")
    shell(build.replace("--out", f"--only {NAME} --out"), folder)
    return folder


def test_nbgrader(course):
    pytest.importorskip("nbgrader")
    release, grade = commands("With nbgrader")
    shell(release, course)
    home = course / "course" / "nbgrader"
    released = home / "release" / NAME / f"{NAME}.ipynb"
    assert not leaks(released, source.read(ROOT / "exercises" / "src" / f"{NAME}.py"))
    assert "require(" not in released.read_text(), "what the graders call is hidden until grading"
    for student, notebook in handed_in(released).items():
        place = home / "submitted" / student / NAME
        place.mkdir(parents=True)
        nbformat.write(notebook, place / f"{NAME}.ipynb")
    shell(grade, course)
    rows = list(csv.DictReader((home / "scores.csv").open()))
    assert {row["student_id"]: float(row["score"]) for row in rows} == SCORES
    assert {float(row["max_score"]) for row in rows} == {FULL} and {row["duedate"][:10] for row in rows} == {"2027-02-01"}
    read = source.read(ROOT / "exercises" / "src" / f"{NAME}.py")
    feedback = (home / "feedback" / "half" / NAME / f"{NAME}.html").read_text()
    assert "in a ring every rank sends to one neighbour" in feedback and "no ring" in feedback, "diagnosis, and the student's own text"
    assert not [line for line in read.solution_lines() if len(line) > 25 and line in feedback]


def test_otter(course):
    pytest.importorskip("otter")
    release, grade = commands("With otter")
    shell(release, course)
    home = course / "course" / "otter" / NAME
    released = home / "dist" / "student" / f"{NAME}.ipynb"
    assert not leaks(released, source.read(ROOT / "exercises" / "src" / f"{NAME}.py"))
    assert "require(" not in "".join(path.read_text() for path in (home / "dist" / "student").rglob("*") if path.is_file())
    scores = {}
    (home / "submitted").mkdir()
    for student, notebook in handed_in(released).items():
        nbformat.write(notebook, home / "submitted" / "alice.ipynb")
        shutil.rmtree(home / "results", ignore_errors=True)
        (home / "results").mkdir()
        shell(grade, course)
        results = json.loads((home / "results" / "results.json").read_text())["tests"]
        scores[student] = sum(each.get("score", 0) for each in results)
        assert sum(each.get("max_score", 0) for each in results) == FULL
    assert scores == SCORES


def test_one_command_grades_a_folder(course):
    """The same submissions, and files that cannot be graded between them."""
    released = course / "course" / "student" / f"{NAME}.ipynb"
    folder = course / "submitted"
    for student, notebook in handed_in(released).items():
        (folder / student).mkdir(parents=True)
        nbformat.write(notebook, folder / student / f"{NAME}.ipynb")
    (folder / "broken.ipynb").write_text("%PDF")
    grade, = commands("Grade a folder of submissions in one command")
    shell(grade, course)
    rows = {row["student"]: row for row in csv.DictReader((course / "scores.csv").open())}
    assert {student: float(row["score"]) for student, row in rows.items()} == {**SCORES, "broken": 0}
    assert "is no notebook" in rows["broken"]["error"] and not rows["right"]["diagnosis"]
    counted = list(csv.DictReader((course / "scores_diagnoses.csv").open()))
    assert {(row["exercise"], row["students"]) for row in counted} == {("", "1"), (NAME, "2"), (NAME, "1")}
