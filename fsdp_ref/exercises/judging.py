"""From text to a report: the door of this part to `fsdp_ref.lab.checks`, which runs answers in processes of their own.

This module must never take a verdict from anything that a submission could have touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from ..lab.checks import IDS, Report, Submission, check, exercise

KIND = 90               # letters of a diagnosis that tell one kind of mistake from another


@dataclass(frozen=True)
class Grader:
    """What grading needs to know: each exercise's function and full marks, and who judges a text."""

    functions: dict[str, str]
    points: dict[str, int]
    judge: Callable[[str, str], Report]


def grader() -> Grader:
    """The grader of all exercises."""
    return Grader({name: exercise(name).function for name in IDS}, {name: sum(exercise(name).points.values()) for name in IDS}, judge)


def judge(name: str, text: str) -> Report:
    """The report on an answer that is given as text."""
    return check(name, Submission(text, exercise(name).function))


def kind(report: Report) -> str:
    """The diagnosis without what differs from run to run (numbers), to count how many made the same mistake; empty for full marks."""
    if report.first is None:
        return ""
    words = re.sub(r"[-+]?\d+(\.\d+)?", "N", report.diagnosis).split(";")[0]
    return f"{report.first.property}: {words[:KIND]}{'…' if len(words) > KIND else ''}"
