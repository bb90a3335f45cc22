"""The bank itself: enough questions, all misconceptions, feedback for each wrong answer, and numbers that are computed."""

import re
from collections import Counter

import pytest

from fsdp_ref import placements, rows
from fsdp_ref.plan import preset
from fsdp_ref.quizzes import bank, judge
from fsdp_ref.quizzes.judging import value_of
from tests.quiz.support import FOLDER, LESSONS, NAMES, QUESTIONS, ROOT, drawn, raw


def each(rule):
    """A test of one question becomes a test of every quiz; what fails is named."""
    @pytest.mark.parametrize("name", NAMES)
    def test(name):
        for question in (question for question in QUESTIONS if question.id.startswith(f"{name}.")):
            try:
                rule(question)
            except AssertionError as error:
                raise AssertionError(f"{question.id}: {error}") from error

    test.__name__ = rule.__name__
    return test


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_has_a_quiz_and_no_question_is_left_out(name):
    quiz = bank.quiz(name)
    assert not quiz.problems and (len(quiz.questions) == 30 if name == "final" else len(quiz.questions) >= 5)
    assert [question.id for question in quiz.questions] == [f"{name}.q{number}" for number in range(1, len(quiz.questions) + 1)]


def test_all_misconceptions_are_wrong_answers_somewhere():
    found = Counter(answer.misconception for question in QUESTIONS for answer in question.answers if answer.misconception)
    assert set(found) == {f"M{number}" for number in range(1, 25)}
    lessons = Counter(answer.misconception for question in QUESTIONS if not question.id.startswith("final")
                      for answer in question.answers if answer.misconception)
    assert set(lessons) == set(found), "the final repeats what a notebook has asked"


def test_all_kinds_of_questions_are_there():
    kinds = Counter(question.kind for question in QUESTIONS)
    assert kinds["order"] >= 5 and kinds["many_choice"] >= 5 and kinds["numeric"] >= 15
    assert sum(bool(question.prints) for question in QUESTIONS) >= 5


@each
def test_every_wrong_answer_teaches(question):
    for place, answer in enumerate(question.answers):
        if answer.correct and question.kind != "order" or question.kind == "order" and place == 0:
            continue
        assert len(answer.feedback) > 30, f"{answer.text or answer.value}: say what is wrong with it"
    for answer in question.answers:
        assert len(re.findall(r"[.?!](?=\s|$)", answer.feedback)) <= 2, f"more than two sentences: {answer.feedback}"
        assert answer.feedback == "" or answer.feedback.endswith(".")
    if question.kind == "numeric":
        assert any(answer.default for answer in question.answers), "say something about any other number"
        assert any(not answer.correct and not answer.default for answer in question.answers), "name a typical wrong number"


@each
def test_every_question_points_to_a_place_in_the_course(question):
    assert question.see["notebook"] in LESSONS and question.see["notebook"][:2] <= question.id[:2], "not what comes later"
    text = (ROOT / "notebooks" / "src" / f"{question.see['notebook']}.py").read_text()
    assert f"\n# ## {question.see['section']}\n" in text, f"{question.see['notebook']} has no section {question.see['section']!r}"
    if "source" in question.see:
        assert (ROOT / question.see["source"]).is_file(), "the source has moved"


def test_length_gives_nothing_away():
    """The right answer of a choice is no more often the longest or the shortest than a guess would be."""
    lengths = [([len(answer.text) for answer in question.answers], next(len(a.text) for a in question.answers if a.correct))
               for question in QUESTIONS if question.kind == "multiple_choice"]
    assert all(len(each) == 4 for each, _ in lengths)
    for extreme in (max, min):
        assert sum(right == extreme(each) for each, right in lengths) < 0.36 * len(lengths)


@each
def test_numbers_are_computed_and_every_wrong_one_gets_its_own_words(question):
    for numbers, mine in drawn(question) if question.kind == "numeric" else ():
        for answer in mine.answers:
            if answer.default or answer.range is not None:
                continue
            verdict = judge(mine, value_of(answer))
            assert verdict.right == answer.correct and verdict.feedback == answer.feedback, f"{numbers}: {value_of(answer)}"
        texts = [mine.text, *(answer.feedback for answer in mine.answers)]
        assert not any(f"{{{name}}}" in text for name in numbers for text in texts), "a number was not filled in"
        assert not judge(mine, -12345.6).right


@each
def test_numbers_that_depend_on_the_engine_have_a_formula(question):
    """A right number may be written down only where nothing is drawn and nothing of the package is asked about."""
    if question.kind == "numeric":
        assert all(answer.formula for answer in question.answers if answer.correct), "name the formula that computes it"


def test_where_the_right_answer_stands_is_spread():
    places = Counter(next(i for i, answer in enumerate(question.shown) if answer.correct) for question in QUESTIONS
                     if question.kind == "multiple_choice")
    assert all(places[place] > 0.1 * places.total() for place in range(4))


def test_steps_are_never_shown_in_the_right_order():
    for question in QUESTIONS:
        if question.kind == "order":
            shown, right = ([answer.text for answer in steps] for steps in (question.shown, question.answers))
            assert shown != right and sorted(shown) == sorted(right)


def by_hand(name, **numbers):
    """The right number of a question, worked out here and not by its formula."""
    question = next(question for question in QUESTIONS if question.id == name)
    found = [mine for drawn_numbers, mine in drawn(question) if drawn_numbers == numbers]
    assert found, f"{name} does not draw {numbers}"
    return next(value_of(answer) for answer in found[0].answers if answer.correct)


def test_formulas_against_arithmetic_by_hand():
    assert by_hand("00.q5", ranks=4) == 4 and by_hand("05.q1", ranks=4) == 8 + 2 and by_hand("05.q2", ranks=4) == 4 + 3
    assert by_hand("01.q3", size=120, ranks=4) == 90 and by_hand("01.q7", size=120, ranks=4) == 180
    assert by_hand("03.q1") == 16 and by_hand("03.q2", billions=7) == 112 and by_hand("03.q7", ranks=4) == 2 + 2 + 3
    assert by_hand("04.q2", tokens=5, loss=2.0, other_tokens=1, other_loss=8.0) == 3
    assert by_hand("05.q7", size=160, ranks=4) == 240 and by_hand("08.q4", size=160, ranks=4) == 240
    assert [by_hand("06.q1", rows=rows) for rows in (5, 6, 9, 10)] == [0, 0, 0, 1]
    assert by_hand("06.q2", rows=10, ranks=4) == 2 and by_hand("06.q6", ranks=4) == 2
    assert by_hand("07.q4", blocks=12, size=100, ranks=4) == 400 and by_hand("10.q4", size=100, ahead=2) == 300
    assert by_hand("09.q2", norm=3, other_norm=4) == 5 and by_hand("10.q2", compute=4, gather=9) == 5
    assert by_hand("10.q7", bandwidth=4, latency=1, size=80, ranks=2) == 11
    assert by_hand("11.q3", ranks=2) == 3 and by_hand("11.q3", ranks=3) == 2
    assert by_hand("11.q7", stall=5, mtbf=36000) == 600
    assert by_hand("12.q6", gpus=32, ranks=8) == 2 and by_hand("12.q2", vocab=256, dim=96) == 24576


def test_the_planner_and_the_ladder_are_asked(monkeypatch):
    """A figure that changes in the package changes in the question."""
    assert by_hand("12.q7", gpus=8) == pytest.approx(16 * preset("llama3.1-70b").parameters / 8 / 1e9)
    before = by_hand("05.q1", ranks=4)
    monkeypatch.setattr(placements.Placements, "bytes_per_parameter", lambda self, ranks, **_: 99.0)
    assert by_hand("05.q1", ranks=4) == 99 != before
    assert rows.wire_bytes("all-gather", 120, 4) == 90


def test_files_are_plain_jupyterquiz_where_they_can_be():
    """Types and fields that jupyterquiz has keep its names and meaning; ours come on top."""
    for question in QUESTIONS:
        assert question.kind in ("multiple_choice", "many_choice", "numeric", "string", "order")
    assert {path.stem for path in FOLDER.glob("*.json")} == set(NAMES)
    assert all(raw(name) for name in NAMES)
