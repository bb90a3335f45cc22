"""From cases and evidence to a report: runs every case, asks the exercise's judge, and puts the verdicts together.

A run that did not come to its end is told before the judge is asked. This module must never pass a property that no case has shown.
"""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Iterator

from . import sandbox
from .exercise import Case, Exercise
from .observe import Evidence, Failure
from .report import Report, Verdict, passes
from .submission import Submission

# The property that a failure counts against
AGAINST = {"mismatch": "order", "deadlock": "no hang", "time": "no hang", "exit": "no hang", "error": "values", "memory": "values",
           "flood": "values", "message": "values"}
_cache: dict[tuple[str, str], Report] = {}


def load(name: str) -> Exercise:
    """The exercise of a module of this package."""
    return importlib.import_module(f".{name}", __package__).EXERCISE


def examine(exercise: Exercise, submission: Submission, seed: int | None = None) -> Report:
    """Run all cases and report. Without a seed, the same text is not run twice in one process: a notebook with five graded cells checks
    once."""
    key = (exercise.id, submission.text)
    if seed is None and key in _cache:
        return _cache[key]
    drawn = secrets.randbits(31) if seed is None else seed
    report = Report(exercise.id, exercise.title, {}, exercise.points, exercise.hints, seed=drawn)
    found: dict[str, Verdict] = {}
    for case, evidence in _runs(exercise, submission, drawn):
        report.runs += 1
        _note(report, evidence)
        verdicts = [_stopped(exercise, evidence.failure)] if evidence.failure else _judged(exercise, case, evidence)
        for verdict in verdicts:
            if verdict.property not in exercise.points:
                raise ValueError(f"{exercise.id} judges {verdict.property!r} and gives no points for it")
            before = found.get(verdict.property)
            if before is None or before.passed and not verdict.passed:
                found[verdict.property] = verdict
                report.case = report.case or ("" if verdict.passed else case.title)
        if evidence.failure or not found["values"].passed:
            break
    late = evidence.failure is not None and evidence.failure.kind == "time"
    _conclude(report, exercise, found, stopped=evidence.failure is not None)
    if seed is None and not late:                           # a busy machine may be quicker next time
        _cache[key] = report
        while len(_cache) > 32:
            del _cache[next(iter(_cache))]
    return report


def _runs(exercise: Exercise, submission: Submission, seed: int) -> Iterator[tuple[Case, Evidence]]:
    """Each case with its evidence; a generator of cases is told of the evidence before it gives the next."""
    cases = iter(exercise.cases(seed))
    case = next(cases)
    while True:
        evidence = sandbox.run(submission, exercise.id, case)
        yield case, evidence
        try:
            case = cases.send(evidence) if hasattr(cases, "send") else next(cases)
        except StopIteration:
            return


def _stopped(exercise: Exercise, failure: Failure) -> Verdict:
    """What a run that did not come to its end says."""
    against = exercise.stops.get(failure.kind, AGAINST[failure.kind])
    return Verdict(against if against in exercise.points else "values", False, failure.words, failure.rank)


def _judged(exercise: Exercise, case: Case, evidence: Evidence) -> list[Verdict]:
    """The judge's verdicts on a run in which every rank returned."""
    ended = [passes("no hang", "every rank returned, every time")] if "no hang" in exercise.points else []
    try:
        return [*ended, *exercise.judge(case, evidence)]
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, RuntimeError) as error:
        return [Verdict("values", False, f"what the ranks returned cannot be judged ({type(error).__name__}: {error})")]


def _conclude(report: Report, exercise: Exercise, found: dict[str, Verdict], stopped: bool) -> None:
    """Order the verdicts; what a run that was stopped, or wrong values, left open is not judged; the first failure is the diagnosis."""
    stopped = stopped or not found["values"].passed
    for name in exercise.points:
        verdict = found.get(name)
        if verdict is None or stopped and verdict.passed:
            verdict = Verdict(name, None, "the runs did not come so far")
        report.verdicts[name] = verdict
    if report.first is not None:
        report.diagnosis = report.first.words
    elif not report.passed:
        raise ValueError(f"{exercise.id}: no case judged {[name for name, v in report.verdicts.items() if v.passed is None]}")


def _note(report: Report, evidence: Evidence) -> None:
    for rank, mine in enumerate(evidence.ranks):
        for what in mine.denied:
            _add(report, f"rank {rank} tried what is not allowed: {what}")
        if mine.threads > 0:
            _add(report, f"rank {rank} left {mine.threads} thread{'s' * (mine.threads > 1)} behind; they were ended with its process")
        if mine.output and report.runs == 1:
            _add(report, f"rank {rank} printed: {mine.output[-300:]}")


def _add(report: Report, note: str) -> None:
    if note not in report.notes and len(report.notes) < 12:
        report.notes.append(note)
