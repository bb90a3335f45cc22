"""Grading a folder: one row for each student and exercise, one clear error for what cannot be graded, and the batch goes on."""

import csv
import json

import nbformat
import pytest

from fsdp_ref.errors import ConfigError, WorldError
from fsdp_ref.exercises import command, grade
from fsdp_ref.exercises.judging import Grader, kind
from fsdp_ref.lab.checks import Report, fails, passes

POINTS = {"values": 2, "order": 1}


def judge(name, text):
    """A judge that only reads: the text says what is to come of it."""
    if "world" in text:
        raise WorldError("this machine cannot start ranks; free some memory")
    if "crash" in text:
        raise ZeroDivisionError("in the judge")
    verdicts = {"values": passes("values", "good"), "order": passes("order", "good")}
    if "wrong" in text:
        verdicts["order"] = fails("order", f"rank {len(text) % 3} sends 1{len(text)} bytes; it needs {len(text)}")
    report = Report(name, name, verdicts, POINTS, ("a", "b", "c"))
    report.diagnosis = report.first.words if report.first else ""
    return report


GRADER = Grader({"twice": "twice", "thrice": "triple"}, {"twice": 3, "thrice": 3}, judge)


def answer(words="right", name="twice"):
    return f"def {name}(x):\n    return '{words}'"


def hand_in(folder, place, *cells):
    path = folder / place
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".py":
        path.write_text("\n".join(cells))
    else:
        path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])))


def test_every_student_gets_a_row_whatever_the_others_handed_in(tmp_path):
    folder = tmp_path / "submitted"
    hand_in(folder, "ann/twice/twice.ipynb", answer(), answer(name="triple"))           # nbgrader's layout, two exercises in one file
    hand_in(folder, "bob.ipynb", answer("wrong"))
    hand_in(folder, "cara.py", answer("wrong, too"))
    hand_in(folder, "copied/twice.ipynb", answer(), answer())
    hand_in(folder, "split/twice.ipynb", "def twice(x):\n    y = x", "    return y")
    hand_in(folder, "other/essay.ipynb", "def something():\n    pass")
    hand_in(folder, "lost/twice.ipynb", "1 + 1")
    hand_in(folder, "double/a.ipynb", answer())
    hand_in(folder, "double/b.py", answer())
    hand_in(folder, "crash.ipynb", answer("crash"))
    hand_in(folder, "world.ipynb", answer("world"))
    hand_in(folder, "eve/.ipynb_checkpoints/twice.ipynb", answer())
    (folder / "notes.ipynb").write_text("dear teacher")
    (folder / "data.csv").write_text("1,2")
    (folder / "link").symlink_to(tmp_path)
    (tmp_path / "outside.ipynb").write_text("{}")
    told = []
    rows = grade.grade_folder(folder, GRADER, told.append)
    assert {(row.student, row.exercise): row.score for row in rows} == {
        ("ann", "twice"): 3, ("ann", "thrice"): 3, ("bob", "twice"): 2, ("cara", "twice"): 2, ("copied", "twice"): 0, ("split", "twice"): 0,
        ("other", ""): 0, ("lost", "twice"): 0, ("double", "twice"): 0, ("crash", "twice"): 0, ("world", "twice"): 0, ("notes", ""): 0}
    errors = {row.student: row.error for row in rows if row.error}
    wanted = {"copied": "a cell was copied", "split": "the cell was split in two", "other": "answers no exercise",
              "lost": "defines no function", "double": "more than once: double/a.ipynb, double/b.py",
              "crash": "grading failed with ZeroDivisionError",
              "world": "free some memory", "notes": "is no notebook"}
    assert set(errors) == set(wanted) and all(words in errors[student] for student, words in wanted.items()), errors
    assert len(told) == len(rows) == 13

    table = list(csv.DictReader(grade.write_scores(rows, tmp_path / "scores.csv").open()))
    assert [row["student"] for row in table] == sorted(row["student"] for row in table) and len(table) == 13
    assert next(row for row in table if row["student"] == "bob")["properties"] == "values yes; order no"
    counted = list(csv.DictReader(grade.write_diagnoses(rows, tmp_path / "diagnoses.csv").open()))
    mistakes = {(row["exercise"], row["diagnosis"]): row["students"] for row in counted}
    assert mistakes[("twice", "order: rank N sends N bytes")] == "2", "numbers do not make two mistakes of one"
    assert mistakes[("twice", "cannot be graded")] == "6" and mistakes[("", "cannot be graded")] == "2"


def test_only_grades_the_exercises_that_are_named(tmp_path):
    hand_in(tmp_path, "ann.ipynb", answer(), answer(name="triple"))
    assert [row.exercise for row in grade.grade_folder(tmp_path, GRADER, only=["thrice"])] == ["thrice"]
    with pytest.raises(ConfigError, match="there is no exercise nonsense; choose from twice, thrice"):
        grade.grade_folder(tmp_path, GRADER, only=["nonsense"])


def test_a_folder_without_submissions_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds no submission"):
        grade.grade_folder(tmp_path, GRADER)
    with pytest.raises(ConfigError, match="is no folder"):
        grade.grade_folder(tmp_path / "nowhere", GRADER)


def test_no_cell_of_a_csv_is_a_formula(tmp_path):
    """A student may be called =HYPERLINK(...), and a function may be as long as it likes."""
    hand_in(tmp_path / "in", "=1+1.ipynb", answer())
    path = grade.write_scores(grade.grade_folder(tmp_path / "in", GRADER), tmp_path / "scores.csv")
    row = next(csv.DictReader(path.open()))
    assert row["student"] == "'=1+1" and row["file"] == "'=1+1.ipynb"


def test_a_kind_is_what_is_the_same_in_two_reports():
    texts = [answer("wrong"), answer("wrong" * 30)]
    kinds = {kind(judge("twice", text)) for text in texts}
    assert kinds == {"order: rank N sends N bytes"} and kind(judge("twice", answer())) == ""


def test_the_commands_print_and_return_what_they_say(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("fsdp_ref.exercises.judging.grader", lambda: GRADER)
    hand_in(tmp_path, "in/ann.ipynb", answer())
    hand_in(tmp_path, "in/bob.ipynb", answer("wrong"))
    assert command.main(["check", str(tmp_path / "in" / "ann.ipynb")]) == 0
    assert command.main(["check", str(tmp_path / "in" / "ann.ipynb"), str(tmp_path / "in" / "bob.ipynb"), "--json"]) == 1
    capsys.readouterr()
    assert command.main(["check", str(tmp_path / "in" / "bob.ipynb"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told[0]["report"]["verdicts"]["order"]["passed"] is False and told[0]["score"] == "2" and told[0]["points"] == "3"
    assert command.main(["grade", str(tmp_path / "in"), "--csv", str(tmp_path / "out.csv")]) == 0
    said = capsys.readouterr()
    assert "2 answers of 2 students" in said.out and "bob  twice  2 of 3" in said.err and (tmp_path / "out_diagnoses.csv").exists()
    with pytest.raises(ConfigError, match="cannot be written"):
        command.main(["grade", str(tmp_path / "in"), "--csv", str(tmp_path / "no" / "out.csv")])
