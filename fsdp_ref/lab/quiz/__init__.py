"""`ask`: the quiz of a notebook, as widgets or as plain text; answers are judged here, in the kernel.

    ask("05")                       all questions of quiz 05
    ask("05.q3")                    one
    ask("05.q3", answer="b")        answer it, without widgets

Nothing that a notebook saves (outputs, the state of its widgets) may hold an answer or its feedback before the learner has answered.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from IPython import get_ipython

from ... import progress
from ...errors import ConfigError
from ...quizzes import Bank, Question, Verdict, bank, judge, show

__all__ = ["Asked", "ask", "judged"]

_told: set[str] = set()          # sentences about the progress file, each said once


class Asked:
    """One quiz or one question, ready to be shown: widgets where they work, otherwise text."""

    def __init__(self, quiz: Bank) -> None:
        self.quiz = quiz

    def __repr__(self) -> str:
        return show.quiz_text(self.quiz)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict:
        """Widgets first; beside them the same questions as HTML and as text, for a front end that has none."""
        from .widgets import view
        return {**view(self.quiz, judged)._repr_mimebundle_(), "text/html": show.quiz_html(self.quiz), "text/plain": repr(self)}


def ask(name: str, answer: object = None) -> Asked | Verdict:
    """Ask the questions of a quiz ("05", "final"), or one of them ("05.q3"); with `answer`, judge it and say what it teaches.

    Args:
        answer: a letter, several letters ("ac"), a number, a text, as the question says.

    Raises:
        ConfigError: no such quiz or question, a question that cannot be used, or an answer of another kind.
    """
    if not isinstance(name, str):
        raise ConfigError(f"{name!r:.40} names no quiz; write a text such as \"05\" or \"05.q3\"")
    if answer is not None:
        result = judged(bank.question(name, progress.learner()), answer)
    else:
        result = Asked(_one_or_all(name))
    if get_ipython() is None and not hasattr(sys, "ps1"):           # a script: nobody shows what an expression returns
        print(result)
    return result


def judged(question: Question, given: object) -> Verdict:
    """Judge an answer and note it in the learner's progress.

    Raises:
        ConfigError: what was given is no answer to this kind of question; nothing is noted.
    """
    verdict = judge(question, given)
    tries, note = progress.record_answer(question.id, verdict.right)
    note = "" if note in _told else note
    _told.add(note)
    return replace(verdict, tries=tries, note=note)


def _one_or_all(name: str) -> Bank:
    quiz, dot, _ = name.rpartition(".")
    if not dot:
        return bank.quiz(name, progress.learner())
    return Bank(quiz, (bank.question(name, progress.learner()),), {})
