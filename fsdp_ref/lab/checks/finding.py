"""What is wrong with an answer, one sentence each, the cause before what follows from it; and the verdicts that come of it.

A judge collects findings in that order; a property without one has passed. It must never run anything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .exercise import Case
from .observe import Evidence
from .report import Labels, Verdict
from .words import bound

TERMS = 16              # numbers added up, as `words.bound` counts them


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the property it fails, the diagnosis in words, and where it was seen first."""

    property: str
    words: str
    rank: int | None = None
    parameter: str | None = None
    step: str | int | None = None


@dataclass(frozen=True)
class Picture:
    """What was expected and what was seen, a row of short labels a rank."""

    pictured: str
    expected: Labels
    actual: Labels


def verdicts(findings: Iterable[Finding], good: dict[str, str], picture: Picture | None = None) -> list[Verdict]:
    """One verdict a property of `good` (what is said when it passed).

    Wrong values take the words of the first finding, whatever it is about: the numbers are wrong because of it.
    """
    found = list(findings)
    drawn = {} if picture is None else {"pictured": picture.pictured, "expected": picture.expected, "actual": picture.actual}
    judged = []
    for name, words in good.items():
        own = next((each for each in found if each.property == name), None)
        if own is None:
            judged.append(Verdict(name, True, words, **drawn))
            continue
        cause = found[0] if name == "values" else own
        judged.append(Verdict(name, False, _sentence(cause), cause.rank, cause.parameter, cause.step, **drawn))
    return judged


def careful(judge: Callable[[Case, Evidence], list[Verdict]]) -> Callable[[Case, Evidence], list[Verdict]]:
    """A judge that takes evidence of another form than its harness gives for a wrong answer: it comes from the answer's own process."""
    @functools.wraps(judge)
    def judged(case: Case, evidence: Evidence) -> list[Verdict]:
        try:
            return judge(case, evidence)
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            return [Verdict("values", False, f"what came back is not what the harness sends ({type(error).__name__}: {error}); the answer "
                                             "must leave the functions and objects it is given as they are")]
    return judged


def _sentence(finding: Finding) -> str:
    return finding.words if finding.rank is None else f"rank {finding.rank}: {finding.words}"


def close(got: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal but for the rounding of TERMS sums: the same arithmetic in another order passes."""
    if got.shape != right.shape or got.dtype != right.dtype:
        return False
    return bool(torch.isfinite(got).all()) and largest(got, right) <= bound(right, TERMS)


def largest(got: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference."""
    if got.shape != right.shape:
        return float("inf")
    return float((got.double() - right.double()).abs().max()) if right.numel() else 0.0


def ratio(got: torch.Tensor, right: torch.Tensor) -> float | None:
    """The one number k with got = k right, if there is one."""
    if got.shape != right.shape or not right.numel() or not float(right.abs().max()):
        return None
    k = float((got.double() * right.double()).sum() / (right.double() ** 2).sum())
    return k if largest(got.double(), k * right.double()) <= bound(right, TERMS) * max(1.0, abs(k)) else None
