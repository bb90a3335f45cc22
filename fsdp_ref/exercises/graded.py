"""What a graded cell calls: `require("zero1_step", zero1_step, "sharding")` passes, or raises with the report's words.

The exercise is judged once a text, however many properties are asked for. This module must never print: a grader takes whatever a
graded cell writes to standard error for a failure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..lab.checks import CheckFailed, Submission, check, exercise


@dataclass(frozen=True)
class HandedIn:
    """A submission in a grader's kernel: its text, or why there is none."""

    text: str
    problem: str = ""


def require(name: str, answer: Callable | HandedIn | None, wanted: str) -> None:
    """Return if the answer to the exercise `name` has this property (and right values).

    Raises:
        CheckFailed: it has not; the message says what was found instead.
    """
    if answer is None:
        raise CheckFailed(f"{exercise(name).function} is not defined; keep the function's name")
    if isinstance(answer, HandedIn):
        if answer.problem:
            raise CheckFailed(answer.problem)
        answer = Submission(answer.text, exercise(name).function)
    check(name, answer).require(wanted)


def sealed(exercise: str, function: str, text: str, problem: str = "") -> str:
    """Python text that defines `function` as a submission's text instead of as code."""
    return f"from fsdp_ref.exercises.graded import HandedIn\n{function} = HandedIn({text!r}, {problem!r})"
