"""Progress: noted atomically, kept when damaged, never in the way of an answer; `fsdp-ref progress` says what is done and what is next."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from fsdp_ref import cli, progress, progress_command
from fsdp_ref.lab import ask
from fsdp_ref.lab import quiz as lab_quiz
from fsdp_ref.quizzes import bank
from fsdp_ref.quizzes.question import LETTERS
from tests.quiz.support import ROOT


def right_answer(name):
    question = bank.question(name)
    return [LETTERS[question.shown.index(answer)] for answer in question.answers if answer.correct]


def test_nothing_is_written_before_an_answer():
    ask("05")
    assert progress.load() == progress.Progress() and not progress.path().exists()


def test_what_is_noted_and_nothing_else():
    ask("05.q3", answer=right_answer("05.q3"))
    data = json.loads(progress.path().read_text())
    assert data == {"format": "fsdp_ref progress", "format_version": 1, "exercises": {},
                    "questions": {"05.q3": {"right": True, "tries": 1}}}
    assert sorted(path.name for path in progress.path().parent.iterdir()) == [".progress.lock", "progress.json"], "no draft is left"


HEAD = '{"format": "fsdp_ref progress", "format_version": 1, "exercises": {}, "questions": '


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"format": "another"}', '{"format": "fsdp_ref progress", "format_version": 2}',
                                  HEAD + '{"05.q1": 3}}', HEAD + '{"05.q1": {"tries": "x", "right": true}}}', HEAD + "[]}", "\x00\xff",
                                  "[" * 100_000])
def test_a_damaged_file_is_kept_and_told_once(text, monkeypatch):
    monkeypatch.setattr(lab_quiz, "_told", set())
    place = progress.path()
    place.parent.mkdir(parents=True)
    place.write_bytes(text.encode("latin-1"))
    first, second = ask("05.q3", answer="a"), ask("05.q3", answer="b")
    kept = place.with_name("progress.damaged-1.json")
    assert "Your progress was damaged" in first.note and str(kept) in first.note and second.note == ""
    assert kept.read_bytes() == text.encode("latin-1") and progress.load().questions["05.q3"]["tries"] >= 1
    place.write_text("{")
    assert "damaged-2" in progress.load().note, "an older kept copy is not overwritten"
    assert kept.read_bytes() == text.encode("latin-1")


def test_a_file_that_is_too_large(monkeypatch):
    progress.record_answer("05.q1", True)
    monkeypatch.setattr(progress, "LIMIT", 5)
    assert "damaged" in progress.load().note


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_by_permission(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("FSDP_REF_DATA", str(tmp_path / "no"))
    assert "Not noted" in ask("05.q3", answer="a").note


def test_a_place_that_is_no_folder_does_not_stop_an_answer(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FSDP_REF_DATA", str(tmp_path / "file"))
    verdict = ask("05.q3", answer=right_answer("05.q3"))
    assert verdict.right and "Not noted" in verdict.note and "set FSDP_REF_DATA" in verdict.note and verdict.tries == 0


def test_notebooks_that_answer_at_once_lose_nothing():
    with ThreadPoolExecutor(4) as pool:
        counts = list(pool.map(lambda _: progress.record_answer("05.q1", False)[0], range(24)))
    assert sorted(counts) == list(range(1, 25)) and progress.load().questions["05.q1"]["tries"] == 24


def test_a_writer_that_hangs_is_not_waited_for(monkeypatch):
    import fcntl
    progress.record_answer("05.q1", False)
    monkeypatch.setattr(progress, "PATIENCE", 0.1)
    with open(progress.path().with_name(".progress.lock"), "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        count, note = progress.record_answer("05.q1", False)
    assert count == 0 and "too long" in note and progress.load().questions["05.q1"]["tries"] == 1


def test_the_best_score_of_an_exercise_stays():
    for score in (2, 5, 1):
        assert progress.record_exercise("zero1_step", score, 5) == ""
    assert progress.load().exercises["zero1_step"] == {"score": 5.0, "points": 5.0, "tries": 3}


def test_where_the_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("FSDP_REF_DATA")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "platform", "linux")
    assert progress.path() == tmp_path / "fsdp_ref" / "progress.json"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert progress.path().parts[-4:] == ("Library", "Application Support", "fsdp_ref", "progress.json")


def test_the_command(capsys):
    for question in bank.quiz("00", "ada").questions[:2]:
        ask(question.id, answer=right_answer(question.id))
    wrong = next(letter for letter in "abcd" if [letter] != right_answer("00.q3"))
    ask("00.q3", answer=wrong)
    ask("00.q3", answer=right_answer("00.q3"))
    progress.record_exercise("ring_all_gather", 4, 4)
    progress.record_exercise("ring_reduce_scatter", 1, 4)
    capsys.readouterr()
    assert cli.main(["progress"]) == 0
    out = capsys.readouterr().out
    lines = {line.split()[0]: line.split() for line in out.splitlines() if line and line.split()[0] in ("00", "01", "final")}
    assert lines["00"][1:3] == ["3/7", "2"] and lines["01"][1:] == ["0/7", "0", "1", "of", "2"]
    assert 'Next: ask("00.q4")' in out and "ring_reduce_scatter: 1 of 4 points" in out and str(progress.path()) in out and "of ada" in out
    assert cli.main(["progress", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quizzes"][0] == {"quiz": "00", "questions": 7, "right": 3, "at_first": 2, "exercises": 0,
                                                                "full": 0}


def test_a_check_notes_its_score(monkeypatch):
    from types import SimpleNamespace

    from fsdp_ref import lab
    from fsdp_ref.lab import checks
    monkeypatch.setattr(checks, "check", lambda name, function, seed: SimpleNamespace(score=3, points=4))
    assert lab.check("zero1_step").score == 3 and not progress.load().exercises, "the card is no try"
    assert lab.check("zero1_step", len).score == 3
    assert progress.load().exercises == {"zero1_step": {"score": 3.0, "points": 4.0, "tries": 1}}


def test_every_exercise_has_its_place_in_the_report():
    from fsdp_ref.lab.checks import IDS
    assert set(IDS) <= {name for names in progress_command.EXERCISES.values() for name in names}


def test_what_comes_next_after_everything():
    for name in bank.names():
        for question in bank.quiz(name).questions:
            progress.record_answer(question.id, True)
    done = progress.load()
    rows = [progress_command.row_of(name, done) for name in bank.names()]
    assert progress_command.following(rows, done) == 'Next: check("ring_all_gather", ...)'
    for names in progress_command.EXERCISES.values():
        for name in names:
            progress.record_exercise(name, 3, 3)
    assert progress_command.following(rows, progress.load()) == "Everything is done."


def test_a_broken_quiz_leaves_the_rest_of_the_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FSDP_REF_QUIZZES", str(tmp_path))
    (tmp_path / "00.json").write_text("{")
    (tmp_path / "01.json").write_text((ROOT / "exercises" / "quizzes" / "01.json").read_text())
    assert cli.main(["progress"]) == 0
    out = capsys.readouterr().out
    assert "0/7" in out and "A quiz was left out: " in out and "00.json is no JSON" in out


def test_the_command_needs_no_torch():
    code = "import sys; from fsdp_ref import cli; cli.main(['progress']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
