"""The report of a check: a verdict for each property, the first difference, a diagnosis in words, hints, and a picture.

The same words stand in a notebook, an editor and a terminal. It must never show an expected value or a line of the reference solution.
"""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Labels = Sequence[Sequence[str]]            # one row of labels a rank


@dataclass(frozen=True)
class Verdict:
    """What is to be said of one property.

    Attributes:
        property: values, sharding, lifetime, order, bytes or no hang.
        passed: None when it could not be judged.
        words: one sentence; of a failure the diagnosis.
        rank, parameter, step: where it first went wrong, as far as it is known.
        expected, actual: a row of short labels for each rank, for the picture (who holds what, or which calls in which order).
        pictured: what the labels are ("pieces held", "calls in order").
    """

    property: str
    passed: bool | None
    words: str
    rank: int | None = None
    parameter: str | None = None
    step: str | int | None = None
    expected: Labels | None = None
    actual: Labels | None = None
    pictured: str = ""

    @property
    def where(self) -> str:
        """`rank 1, parameter w, step 2`"""
        named = (("rank", self.rank), ("parameter", self.parameter), ("step", self.step))
        return ", ".join(f"{name} {value}" for name, value in named if value is not None)


def passes(property: str, words: str, **more: Any) -> Verdict:  # noqa: A002 (its name in the report)
    """A verdict that is good."""
    return Verdict(property, True, words, **more)


def fails(property: str, words: str, **more: Any) -> Verdict:  # noqa: A002
    """A verdict that is not."""
    return Verdict(property, False, words, **more)


class CheckFailed(AssertionError):
    """A property that a graded cell asks for did not pass; the message is the report's diagnosis."""


@dataclass
class Report:
    """What `check` returns.

    Attributes:
        exercise, title: which exercise.
        verdicts: property -> verdict, in the order in which they are judged.
        weights: property -> points.
        diagnosis: one sentence; empty when everything passed.
        hints: three.
        notes: what else was seen (refused attempts, threads that were left, printed lines).
        case: the run that failed first.
        runs: how many runs there were.
        seed: with `check(id, fn, seed=...)` the same cases come again.
    """

    exercise: str
    title: str
    verdicts: dict[str, Verdict]
    weights: dict[str, int]
    hints: tuple[str, str, str]
    diagnosis: str = ""
    notes: list[str] = field(default_factory=list)
    case: str = ""
    runs: int = 0
    seed: int = 0

    @property
    def passed(self) -> bool:
        """Whether every property passed."""
        return all(verdict.passed for verdict in self.verdicts.values())

    @property
    def score(self) -> int:
        """Points of the properties that passed; without right values none."""
        if not self.verdicts["values"].passed:
            return 0
        return sum(self.weights[name] for name, verdict in self.verdicts.items() if verdict.passed)

    @property
    def points(self) -> int:
        """The most that can be had."""
        return sum(self.weights.values())

    @property
    def first(self) -> Verdict | None:
        """The first property that failed."""
        return next((verdict for verdict in self.verdicts.values() if verdict.passed is False), None)

    def earned(self, *properties: str) -> bool:
        """Whether these properties (default: all) passed, and with them the values."""
        names = properties or tuple(self.verdicts)
        return bool(self.verdicts["values"].passed) and all(self.verdicts[name].passed for name in names)

    def require(self, *properties: str) -> Report:
        """Return the report if these properties (default: all) passed, and with them the values.

        Raises:
            CheckFailed: one of them did not; the message says what and why, for a graded cell.
        """
        names = properties or tuple(self.verdicts)
        wrong = [self.verdicts[name] for name in dict.fromkeys(("values", *names)) if not self.verdicts[name].passed]
        if wrong:
            raise CheckFailed(f"{self.exercise}, {wrong[0].property}: {wrong[0].words}")
        return self

    def hint(self, level: int = 1) -> str:
        """Hint 1, 2 or 3."""
        return self.hints[min(max(level, 1), 3) - 1]

    @cached_property
    def picture(self):
        """Expected beside actual, a `viz.Picture`; None when there is nothing to draw."""
        shown = next((verdict for verdict in (self.first, *self.verdicts.values()) if verdict is not None and verdict.expected), None)
        if shown is None:
            return None
        from .pictures import beside
        return beside(f"{self.exercise}: {shown.pictured or shown.property}, expected beside yours", shown.expected, shown.actual or ())

    # -- shown ----------------------------------------------------------------------------------------------------------------------

    def rows(self) -> list[dict[str, str]]:
        """The verdicts as a table."""
        return [{"property": name, "verdict": _WORD[verdict.passed],
                 "points": f"{self.weights[name] if self.earned(name) else 0} of {self.weights[name]}", "what was seen": verdict.words}
                for name, verdict in self.verdicts.items()]

    @property
    def headline(self) -> str:
        """One line."""
        return f"{self.exercise}: {'passed' if self.passed else 'not yet'}, {self.score} of {self.points} points"

    def lines(self) -> list[str]:
        """What is said, line by line."""
        wide = max(map(len, self.verdicts))
        found = [self.headline]
        found += [f"  {name:{wide}}  {_WORD[verdict.passed]:10}  {verdict.words}" for name, verdict in self.verdicts.items()]
        if self.diagnosis:
            where = self.first.where if self.first else ""
            at = "; ".join(each for each in (where, f"seen with {self.case}" if self.case else "") if each)
            found += [f"diagnosis: {self.diagnosis}{f' ({at})' if at else ''}"]
            found += [f"hint 1 of 3: {self.hints[0]} (the next: report.hint(2))"]
        return found + [f"note: {note}" for note in self.notes]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = html.escape
        head = "".join(f'<th scope="col">{text(name)}</th>' for name in self.rows()[0])
        body = "".join("<tr>" + "".join(f'<td style="text-align:left">{text(value)}</td>' for value in row.values()) + "</tr>"
                       for row in self.rows())
        rest = "".join(f"<p>{text(line)}</p>" for line in self.lines()[1 + len(self.verdicts):])
        drawn = self.picture.page_html if self.picture is not None and not self.passed else ""
        return f"<table><caption>{text(self.headline)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}{drawn}"

    def to_json(self) -> str:
        """The report as JSON, for programs."""
        return json.dumps({
            "exercise": self.exercise, "passed": self.passed, "score": self.score, "points": self.points, "diagnosis": self.diagnosis,
            "case": self.case, "runs": self.runs, "seed": self.seed, "notes": self.notes,
            "verdicts": {name: {"passed": v.passed, "points": self.weights[name], "words": v.words, "rank": v.rank,
                                "parameter": v.parameter, "step": v.step} for name, v in self.verdicts.items()}})


_WORD = {True: "passed", False: "FAILED", None: "not judged"}


@dataclass(frozen=True)
class Card:
    """What `check(id)` shows when there is no answer yet: what to write, its first line, points, link."""

    exercise: str
    notebook: str
    title: str
    task: str
    signature: str
    weights: dict[str, int]
    link: str

    def __str__(self) -> str:
        points = ", ".join(f"{name} {points}" for name, points in self.weights.items())
        return (f"{self.exercise} (notebook {self.notebook}): {self.title}\n{self.task}\n    {self.signature}\n"
                f"{sum(self.weights.values())} points: {points}\nnotebook of the exercise: {self.link}\n"
                f'when you have written it: check("{self.exercise}", {self.signature.removeprefix("def ").split("(")[0].strip()})')

    __repr__ = __str__

    def _repr_html_(self) -> str:
        text = html.escape
        points = "".join(f"<tr><td>{text(name)}</td><td>{points}</td></tr>" for name, points in self.weights.items())
        return (f"<p><b>{text(self.exercise)}</b> (notebook {text(self.notebook)}): {text(self.title)}</p><p>{text(self.task)}</p>"
                f"<pre>{text(self.signature)}</pre><table><caption>{sum(self.weights.values())} points</caption><thead><tr>"
                f'<th scope="col">property</th><th scope="col">points</th></tr></thead><tbody>{points}</tbody></table>'
                f'<p><a href="{text(self.link)}">the exercise</a></p>')
