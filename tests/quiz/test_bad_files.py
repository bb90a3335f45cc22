"""A question file that is wrong: one sentence that names file, question, field and fix; the rest of the bank works."""

import json

import pytest

from fsdp_ref.errors import ConfigError
from fsdp_ref.lab import ask
from fsdp_ref.quizzes import bank, judge

GOOD = {"question": "Which?", "type": "multiple_choice",
        "answers": [{"answer": "this", "correct": True, "feedback": "Yes."}, {"answer": "that", "correct": False, "feedback": "No."}]}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_REF_QUIZZES", str(tmp_path))
    (tmp_path / "06.json").write_text(json.dumps([GOOD]))
    return tmp_path


def put(folder, *questions):
    (folder / "05.json").write_text(json.dumps([GOOD, *questions]))


def change(**fields):
    return {**{key: value for key, value in GOOD.items() if fields.get(key) != "gone"},
            **{key: value for key, value in fields.items() if value != "gone"}}


NUMERIC = {"question": "How many?", "type": "numeric", "answers": [{"value": 1, "correct": True}]}
BROKEN = [
    (change(question="gone"), "field question is missing; add the question's text"),
    (change(question=3), "field question is 3; write the question's text"),
    (change(type="essay"), "field type is 'essay'; write one of multiple_choice"),
    (change(answers={}), "field answers is {}; write a list of answers"),
    (change(answers=[{"answer": "a", "correct": "yes"}]), r"field answers\[0\].correct is 'yes'; write true or false"),
    (change(answers=["a", "b"]), r"answers\[0\] is no JSON object"),
    (change(answers=[{"answer": "a", "correct": False}, {"answer": "b", "correct": False}]), "field answers has no correct answer"),
    (change(answers=[{"answer": "a", "correct": True}, {"answer": "b", "correct": True}]), "has 2 correct answers; leave one"),
    (change(answers=[{"answer": "a", "correct": True}, {"answer": "a", "correct": False}]), "has the same text twice"),
    (change(answers=[{"answer": "a", "correct": True}]), "has 1 entries; give 2 to 26"),
    (change(answers=[{"correct": True}, {"answer": "b"}]), r"field answers\[0\].answer is missing"),
    (change(see={"notebok": "05"}), "field see.notebok is '05'; see has notebook, section and source"),
    (change(see="05"), "field see is '05'; write"),
    (change(draw={"ranks": []}), "field draw.ranks is"),
    (change(prints={"ranks": 2, "rank": 2}, code="print(1)"), "field prints is"),
    (change(id=7), "field id is 7; write a short name"),
    ({**NUMERIC, "answers": [{"correct": True}]}, r"field answers\[0\].value is missing"),
    ({**NUMERIC, "answers": [{"formula": "__import__('os')", "correct": True}]}, r"field answers\[0\].formula is .*; write one of at_rest"),
    ({**NUMERIC, "answers": [{"range": [3, 1], "correct": True}]}, r"field answers\[0\].range is \[3, 1\]"),
    ({**NUMERIC, "tolerance": "a lot"}, "field tolerance is 'a lot'"), ({**NUMERIC, "precision": 0}, "field precision is 0"),
    ("a text", "the question is no JSON object"),
]


@pytest.mark.parametrize(("question", "words"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_question_is_named_and_the_others_work(folder, question, words):
    put(folder, question)
    quiz = bank.quiz("05")
    assert [good.id for good in quiz.questions] == ["05.q1"] and len(quiz.problems) == 1
    problem = str(next(iter(quiz.problems.values())))
    assert problem.startswith(f"{folder.name}/05.json, question q2: ") and "; " in problem
    with pytest.raises(ConfigError, match=words):
        raise next(iter(quiz.problems.values()))
    assert "A question was left out: " in repr(ask("05")) and "A question was left out" in ask("05")._repr_mimebundle_()["text/html"]
    assert judge(bank.question("05.q1"), "this").right and ask("06").quiz.questions
    if question != "a text" and question.get("id") != 7:
        with pytest.raises(ConfigError, match=words):
            ask("05.q2")


@pytest.mark.parametrize(("text", "words"), [
    ("[{", "05.json is no JSON: .* at line 1, column"), ("{}", "holds no list of questions"), ("[]", "holds no list"),
    (b"\xff\xfe", "no UTF-8 JSON text"), ("[" * 100_000, "no UTF-8 JSON text|no JSON")])
def test_a_broken_file_is_named_and_the_others_work(folder, text, words):
    (folder / "05.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=words):
        ask("05")
    assert ask("06").quiz.questions and [question.id for question in bank.everything()] == ["06.q1"]


def test_a_file_that_is_too_large(folder, monkeypatch):
    monkeypatch.setattr(bank, "LIMIT", 10)
    with pytest.raises(ConfigError, match="split it"):
        ask("06")


def test_no_files_at_all(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDP_REF_QUIZZES", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="there are no question files in .*none; name a folder"):
        ask("05")


def test_the_same_id_twice(folder):
    put(folder, {**GOOD, "id": "q1"})
    assert "is there twice" in str(bank.quiz("05").problems["05.q1"]) and bank.question("05.q1").text == "Which?"


def test_where_a_right_and_a_wrong_answer_overlap_the_right_one_counts(folder):
    (folder / "05.json").write_text(json.dumps([{"question": "Between?", "type": "numeric", "answers": [
        {"type": "range", "range": [0, 10], "correct": False, "feedback": "Near."},
        {"type": "value", "value": 5, "correct": True, "feedback": "Yes."}]}]))
    question = bank.question("05.q1")
    assert judge(question, 5).right and judge(question, 6).feedback == "Near." and not judge(question, 11).right


def test_plain_jupyterquiz_is_accepted_as_it_is(folder):
    """Fields and types as in its documentation; what we do not use is left alone."""
    (folder / "05.json").write_text(json.dumps([
        {"question": "Pi to two digits?", "type": "numeric", "precision": 2, "answer_cols": 2, "answers": [
            {"type": "value", "value": 3.1, "correct": True, "feedback": "Yes."},
            {"type": "range", "range": [3.2, 4], "correct": False, "feedback": "Too large."}, {"type": "default", "feedback": "No."}]},
        {"question": "The largest ocean?", "type": "string", "answers": [
            {"answer": "Pacific", "correct": True, "feedback": "Yes.", "match_case": False}, {"type": "default", "feedback": "No."}]},
        {"question": "Even?", "type": "many_choice", "code": "n % 2", "answers": [
            {"answer": "2", "correct": True}, {"answer": "3", "correct": False, "feedback": "Odd."}, {"answer": 4, "correct": True}]}]))
    pi, ocean, even = bank.quiz("05").questions
    assert judge(pi, 3.14).right and judge(pi, "3.5").feedback == "Too large." and judge(pi, 7).feedback == "No."
    assert judge(ocean, " pacific ").right and judge(ocean, "Indian").feedback == "No."
    assert judge(even, ["2", "4"]).right and judge(even, ["2", "3"]).feedback == "Odd."
