"""`ask`: the same words with and without widgets, nothing given away before an answer, tries counted."""

import json
import os
import subprocess
import sys

import ipywidgets
import nbformat
import pytest
from nbclient import NotebookClient

from fsdp_ref import progress
from fsdp_ref.errors import ConfigError
from fsdp_ref.lab import ask
from fsdp_ref.lab.quiz import judged
from fsdp_ref.lab.quiz.widgets import one, view
from fsdp_ref.quizzes import bank
from fsdp_ref.quizzes.question import LETTERS
from tests.quiz.support import NAMES, QUESTIONS, ROOT


def right_letters(question):
    return [LETTERS[question.shown.index(answer)] for answer in question.answers if answer.correct]


def controls(box, kind):
    found = [box] if isinstance(box, kind) else []
    return found + [each for child in getattr(box, "children", ()) for each in controls(child, kind)]


def said(box):
    return [html.value for html in controls(box, ipywidgets.HTML) if 'role="status"' in html.value][0]


def press(box):
    controls(box, ipywidgets.Button)[0].click()


def test_plain_answers_are_judged_and_tries_counted(capsys):
    question = bank.question("05.q3")
    right = right_letters(question)[0]
    wrong = next(letter for letter in "abcd" if letter != right)
    first, second, third = ask("05.q3", answer=wrong), ask("05.q3", answer=wrong.upper() + " "), ask("05.q3", answer=right)
    assert (first.right, second.right, third.right) == (False, False, True) and [v.tries for v in (first, second, third)] == [1, 2, 3]
    assert "See 05_zero1_and_zero2.ipynb" in str(first) and "See" not in str(third) and "(try 2)" in str(second)
    assert str(first) in capsys.readouterr().out, "a script shows the verdict"
    assert ask("05.q3", answer=third and question.answers[0].text).tries == 3, "after the right answer others count no more"
    assert progress.load().questions["05.q3"] == {"tries": 3, "right": True}


def test_each_kind_takes_its_answers():
    order = bank.question("05.q4")
    steps = right_letters(order)
    assert ask("05.q4", answer="".join(steps)).right and ask("05.q4", answer=" ".join(steps)).right and ask("05.q4", answer=steps).right
    assert "nothing to reduce before backward" in ask("05.q4", answer=[steps[1], steps[0], *steps[2:]]).feedback
    many = bank.question("05.q5")
    both = right_letters(many)
    assert ask("05.q5", answer=both).right and ask("05.q5", answer=",".join(both)).right
    assert "1 more is to be found" in ask("05.q5", answer=both[0]).feedback
    assert "ZeRO-3 adds" in ask("05.q5", answer=[*both, "weights at rest"]).feedback
    assert ask("03.q1", answer=16).right and ask("03.q1", answer=" 16 bytes ").right and ask("03.q1", answer="16.0").right
    assert "Adam keeps two moments" in ask("03.q1", answer="8").feedback and "Count the numbers" in ask("03.q1", answer=5).feedback


@pytest.mark.parametrize(("name", "answer", "words"), [
    ("05.q3", "x", "05.q3: 'x' is no answer; choose among the letters a to d"), ("05.q3", "ab", "one right answer and 2 were given"),
    ("05.q3", "", "is no answer"), ("05.q4", "ab", "has 5 steps and 2 were given"), ("05.q5", "aa", "a letter twice"),
    ("03.q1", "sixteen", "'sixteen' is no number; write digits"), ("03.q1", "1,6", "no number"), ("03.q1", float("nan"), "no number"),
    ("03.q1", True, "no number")])
def test_what_is_no_answer_is_told_and_not_counted(name, answer, words):
    with pytest.raises(ConfigError, match=words):
        ask(name, answer=answer)
    assert not progress.load().questions


@pytest.mark.parametrize(("name", "words"), [
    ("13", "no quiz '13'; choose one of 00, 01"), ("05.q99", "quiz 05 has no question 'q99'; it has q"), ("../05.q1", "no quiz '../05'"),
    (5, "5 names no quiz")])
def test_unknown_names(name, words):
    with pytest.raises(ConfigError, match=words):
        ask(name)
    with pytest.raises(ConfigError):
        ask(name, answer="a")


def hidden_words(quiz):
    """What must not be seen before answering: feedback, and everything that only the file says."""
    return [answer.feedback for question in quiz.questions for answer in question.answers if len(answer.feedback) > 20]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_saved_gives_an_answer_away(name):
    quiz = bank.quiz(name, "ada")
    before = set(ipywidgets.Widget._instances if hasattr(ipywidgets.Widget, "_instances") else ipywidgets.widgets.widget._instances)
    bundle = ask(name)._repr_mimebundle_()
    everything = ipywidgets.Widget._instances if hasattr(ipywidgets.Widget, "_instances") else ipywidgets.widgets.widget._instances
    state = json.dumps([widget.get_state() for key, widget in everything.items() if key not in before], default=str, ensure_ascii=False)
    saved = json.dumps(bundle, ensure_ascii=False) + state
    assert len(state) > 2000 and all(word.strip(".")[:60] not in saved for word in hidden_words(quiz))
    for mark in ('"correct"', "feedback", "misconception"):
        assert mark not in saved
    assert quiz.questions[0].text[:40] in bundle["text/plain"].replace("\n    ", " "), "the questions themselves are there"


def test_the_shown_order_says_nothing_and_is_the_same_for_all():
    one_, other = bank.quiz("05", "ada").questions, bank.quiz("05", "grace").questions
    assert [a.text for a in one_[2].shown] == [a.text for a in other[2].shown]


def test_numbers_are_drawn_for_each_learner_and_stay():
    texts = {name: bank.question("05.q1", name).text for name in ("ada", "grace", "alan", "edsger", "barbara", "leslie")}
    assert len(set(texts.values())) > 1 and bank.question("05.q1", "ada").text == texts["ada"]
    for name, text in texts.items():
        ranks = int(text.split(" ranks")[0].split()[-1])
        assert judged(bank.question("05.q1", name), 8 + 8 / ranks).right


@pytest.mark.parametrize("question", [bank.question(name, "ada") for name in ("05.q3", "05.q5", "05.q1", "05.q4")], ids=lambda q: q.kind)
def test_widgets_judge_in_the_kernel(question):
    box = one(question, judged)
    assert said(box) == '<p role="status" aria-live="polite"></p>'
    press(box)
    assert f"{question.id}: " in said(box) and "; " in said(box) and not progress.load().questions, "an empty answer is not counted"
    letters = right_letters(question) if question.shown else []
    if question.kind == "multiple_choice":
        controls(box, ipywidgets.RadioButtons)[0].value = letters[0]
    elif question.kind == "many_choice":
        for letter in letters:
            next(c for c in controls(box, ipywidgets.Checkbox) if c.description.startswith(f"{letter})")).value = True
    elif question.kind == "order":
        for dropdown, letter in zip(controls(box, ipywidgets.Dropdown), letters, strict=True):
            dropdown.value = letter
    else:
        controls(box, ipywidgets.Text)[0].value = "10"          # ada's question is about 4 ranks or others; right or not, it is judged
    press(box)
    assert ("✓" in said(box) and "right." in said(box)) or question.kind == "numeric"
    assert progress.load().questions[question.id]["tries"] == 1


@pytest.mark.parametrize("name", NAMES)
def test_every_control_has_a_label_and_takes_the_keyboard(name):
    box = view(bank.quiz(name, "ada"), judged)
    kinds = (ipywidgets.RadioButtons, ipywidgets.Checkbox, ipywidgets.Dropdown, ipywidgets.Text)
    found = controls(box, kinds)
    assert len(found) >= len(bank.quiz(name).questions) and all(control.description for control in found)
    assert all(button.description and button.tooltip for button in controls(box, ipywidgets.Button))
    assert "0 of" in controls(box, ipywidgets.HTML)[-1].value


def test_the_count_below_the_quiz():
    box = view(bank.quiz("05", "ada"), judged)
    place = [question.id for question in bank.quiz("05").questions].index("05.q3")
    question = bank.question("05.q3")
    controls(box.children[1 + place], ipywidgets.RadioButtons)[0].value = right_letters(question)[0]
    press(box.children[1 + place])
    assert "1 of 7 answered right" in controls(box, ipywidgets.HTML)[-1].value


def test_html_in_a_question_is_shown_and_not_run():
    question = bank.question("02.q2")
    box = one(question, judged)
    assert "<code>if loss &lt; best: checkpoint.save(...)</code>" in controls(box, ipywidgets.HTML)[0].value


def test_a_script_prints_the_questions(tmp_path):
    done = subprocess.run([sys.executable, "-c", "from fsdp_ref.lab import ask; ask('00')"], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 0 and "00.q1  What is a rank?" in done.stdout and 'ask("00.q1", answer="b")' in done.stdout, done.stderr


def test_in_a_notebook_without_a_front_end(tmp_path):
    """nbval, nbconvert: the questions as readable text, widgets beside them, no answers anywhere."""
    cells = ["from fsdp_ref.lab import ask\nask('00')", "ask('00.q1', answer='a')"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    env = dict(os.environ)
    os.environ["PYTHONPATH"] = str(ROOT)
    try:
        NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    finally:
        os.environ.clear()
        os.environ.update(env)
    shown, verdict = (cell.outputs[0].data for cell in notebook.cells)
    assert "00.q1  What is a rank?" in shown["text/plain"] and '<ol type="a">' in shown["text/html"]
    assert "application/vnd.jupyter.widget-view+json" in shown and "00.q1: " in verdict["text/plain"]
    state = json.dumps([shown, notebook.metadata.get("widgets", {})], ensure_ascii=False)
    assert all(word.strip(".")[:60] not in state for word in hidden_words(bank.quiz("00", "ada")))


def test_every_question_can_be_answered_right_without_widgets():
    for question in (bank.question(question.id, "ada") for question in QUESTIONS):
        if question.shown:
            assert judged(question, right_letters(question)).right
