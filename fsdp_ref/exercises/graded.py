"""What a graded cell calls: `require("zero1_step", zero1_step, "sharding")` passes, or raises with the report's words.

The exercise is judged once a text, however many properties are asked for. This module must never print: a grader takes whatever a
graded cell writes to standard error for a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_reports: dict[tuple[str, str], object] = {}


class NotEarned(AssertionError):
    """A property that the answer does not have; the message says what was found instead."""


@dataclass(frozen=True)
class HandedIn:
    """A submission in a grader's kernel: its text, or why there is none. Calling it is what no grader does."""

    text: str
    problem: str = ""


def require(exercise: str, answer: Callable | HandedIn | None, property: str) -> None:
    """Raise NotEarned unless the answer has the property, on the hidden cases too."""
    if answer is None:
        raise NotEarned(f"{exercise} is not defined; keep the function's name")
    if isinstance(answer, HandedIn) and answer.problem:
        raise NotEarned(answer.problem)
    verdict = _report(exercise, answer).verdicts[property]
    if not verdict.passed:
        raise NotEarned(f"{property}: {verdict.words}")


def sealed(exercise: str, function: str, text: str, problem: str = "") -> str:
    """Python text that defines `function` as a submission's text instead of as code."""
    return f"from fsdp_ref.exercises.graded import HandedIn\n{function} = HandedIn({text!r}, {problem!r})"


def _report(exercise: str, answer: Callable | HandedIn):
    from .judging import judge
    from .live import text_of
    text = answer.text if isinstance(answer, HandedIn) else text_of(answer)
    if (exercise, text) not in _reports:
        _reports[exercise, text] = judge(exercise, text)
    return _reports[exercise, text]
