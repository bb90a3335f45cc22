"""Judging an answer: right or not, and the words that belong to the answer that was given. It must never store or print anything."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import ConfigError
from . import formulas
from .question import LETTERS, Answer, Question

GENERAL = {"numeric": "That is not the number.", "string": "That is not it.", "multiple_choice": "That is not it.",
           "many_choice": "That is not all of it.", "order": "That order is not right."}


@dataclass(frozen=True)
class Verdict:
    """What became of an answer. `tries` counts this learner's answers to the question so far (0: not counted)."""

    id: str
    right: bool
    feedback: str
    where: str = ""
    tries: int = 0
    note: str = ""

    def __str__(self) -> str:
        head = f"{self.id}: {'right' if self.right else 'not right yet'}{f' (try {self.tries})' if self.tries > 1 else ''}."
        see = "" if self.right or not self.where else f"See {self.where}."
        return " ".join(part for part in (head, self.feedback, see, self.note) if part)

    __repr__ = __str__


def judge(question: Question, answer: object) -> Verdict:
    """Judge what a learner gave: a letter or a text (several for many_choice and order), a number.

    Raises:
        ConfigError: it is no answer to this kind of question (an unknown letter, a word instead of a number); nothing was judged.
    """
    right, words = {"multiple_choice": _one, "many_choice": _many, "order": _order, "numeric": _number, "string": _text}[question.kind](
        question, answer)
    return Verdict(question.id, right, words or ("" if right else GENERAL[question.kind]), question.where)


def value_of(answer: Answer) -> float | None:
    """The number of an answer: computed where it has a formula, else what the file says."""
    return formulas.compute(answer.formula, answer.given) if answer.formula else answer.value


def picks(question: Question, answer: object) -> list[Answer]:
    """Which of the shown answers are meant by letters ("b", "ac", "a, c", ["a", "c"]) or by their texts.

    Raises:
        ConfigError: a letter or a text that is not there, or one twice.
    """
    shown = question.shown
    by_name = {**{answer.text: answer for answer in shown}, **dict(zip(LETTERS, shown, strict=False))}
    if isinstance(answer, str):
        text = answer.strip()
        parts = [text] if text in by_name else list(re.sub(r"[\s,;()]+", "", text.lower()))
    else:
        parts = [str(part).strip() for part in answer] if isinstance(answer, Iterable) else [str(answer)]
    missing = [part for part in parts if part not in by_name]
    if missing or not parts:
        raise ConfigError(f"{question.id}: {answer!r:.60} is no answer; choose among the letters a to {LETTERS[len(shown) - 1]}")
    found = [by_name[part] for part in parts]
    if len({each.text for each in found}) < len(found):
        raise ConfigError(f"{question.id}: {answer!r:.60} has a letter twice; give each once")
    return found


def _one(question: Question, answer: object) -> tuple[bool, str]:
    found = picks(question, answer)
    if len(found) > 1:
        raise ConfigError(f"{question.id} has one right answer and {len(found)} were given; choose one letter")
    return found[0].correct, found[0].feedback


def _many(question: Question, answer: object) -> tuple[bool, str]:
    found = picks(question, answer)
    wrong = [each.feedback or f"Not: {each.text}." for each in found if not each.correct]
    missing = sum(each.correct for each in question.answers) - sum(each.correct for each in found)
    if wrong:
        return False, " ".join(wrong)
    if missing:
        return False, f"What you chose is right; {missing} more {'is' if missing == 1 else 'are'} to be found."
    return True, " ".join(each.feedback for each in found)


def _order(question: Question, answer: object) -> tuple[bool, str]:
    found = picks(question, answer)
    if len(found) < len(question.answers):
        raise ConfigError(f"{question.id} has {len(question.answers)} steps and {len(found)} were given; give the letters of all")
    for before, after in zip(question.answers, question.answers[1:], strict=False):
        if found.index(after) < found.index(before):
            return False, after.feedback
    return True, question.answers[0].feedback


def _number(question: Question, answer: object) -> tuple[bool, str]:
    given = number(question, answer)
    for each in sorted((a for a in question.answers if not a.default), key=lambda a: not a.correct):        # right ones first
        if _meets(question, each, given):
            return each.correct, each.feedback
    return False, next((each.feedback for each in question.answers if each.default), "")


def number(question: Question, answer: object) -> float:
    """The number that was typed. Raises ConfigError when it is none."""
    if isinstance(answer, int | float) and not isinstance(answer, bool) and math.isfinite(answer):
        return float(answer)
    text = str(answer).strip().replace("_", "").replace("\u2212", "-")
    if question.unit and text.endswith(question.unit):
        text = text.removesuffix(question.unit).strip()
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{question.id}: {answer!r:.60} is no number; write digits, with a point before decimals, such as 2.5")
    return found


def _meets(question: Question, answer: Answer, given: float) -> bool:
    if answer.range is not None:
        return answer.range[0] <= given <= answer.range[1]
    value, allowed = value_of(answer), question.tolerance
    if isinstance(allowed, str):
        return abs(given - value) <= abs(value) * float(allowed[:-1]) / 100 + 1e-12
    if allowed is not None:
        return abs(given - value) <= allowed + 1e-12
    if question.precision is not None:
        return float(f"{given:.{question.precision}g}") == float(f"{value:.{question.precision}g}")
    return math.isclose(given, value, rel_tol=1e-9, abs_tol=1e-12)


def _text(question: Question, answer: object) -> tuple[bool, str]:
    def plain(text: object) -> str:
        return " ".join(str(text).split()).casefold()

    for each in question.answers:
        if not each.default and plain(each.text) == plain(answer):
            return each.correct, each.feedback
    return False, next((each.feedback for each in question.answers if each.default), "")
