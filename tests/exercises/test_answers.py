"""Every exercise is proven by mutation: right answers get full marks whatever their style, each typical wrong one its own diagnosis."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from fsdp_ref.lab.checks import IDS, exercise, inside
from fsdp_ref.lab.checks.judging import examine

from .answers import ROOT, answers, solution

pytestmark = pytest.mark.slow            # a run on fresh ranks each, 300 in all
SEED = 7
WRONG = answers("wrong")
RIGHT = [*map(solution, IDS), *answers("other")]
SHARDING = ("sharding", "lifetime", "bytes")


@cache
def report_on(answer):
    """Each answer runs once."""
    return examine(exercise(answer.exercise), answer.submission, SEED)


@pytest.mark.parametrize("answer", RIGHT, ids=str)
def test_a_right_answer_in_any_style_gets_full_marks(answer):
    report = report_on(answer)
    assert report.passed, str(report)
    assert report.score == report.points and not report.diagnosis and not report.notes


@pytest.mark.parametrize("answer", WRONG, ids=str)
def test_a_wrong_answer_gets_its_own_diagnosis(answer):
    report = report_on(answer)
    assert not report.passed and report.score < report.points, str(report)
    assert answer.words in report.diagnosis, str(report)
    others = [other for other in WRONG if other.exercise == answer.exercise and other != answer and other.words in report.diagnosis]
    assert not others, f"{answer.name} is told what {[other.name for other in others]} should be told"


@pytest.mark.parametrize("name", IDS)
def test_the_stub_gets_nothing(name):
    found = exercise(name)
    text = f"{found.signature}\n    raise NotImplementedError()\n"
    report = examine(found, type(solution(name).submission)(text, found.function), SEED)
    assert report.score == 0 and "NotImplementedError" in report.diagnosis


@pytest.mark.parametrize("name", IDS)
def test_an_exercise_is_complete(name):
    found = exercise(name)
    assert found.id == name and "values" in found.points and all(points > 0 for points in found.points.values())
    assert len(set(found.hints)) == 3 and all(found.hints) and found.signature.startswith("def ") and found.signature.endswith(":")
    kinds = Counter(answer.name.split("_")[0] for answer in [*answers("other"), *WRONG] if answer.exercise == name)
    assert kinds["other"] >= 2 and kinds["wrong"] >= 6, kinds
    words = [answer.words for answer in WRONG if answer.exercise == name]
    assert all(words) and len(set(words)) == len(words)
    source = (ROOT / "src" / f"{name}.py").read_text()
    assert found.signature in source, "the source and the card begin the function with the same line"
    worlds = {case.world for case in cases_of(found)}
    assert len(worlds) > 1 or name == "capstone", "more than one world size"


@pytest.mark.parametrize("name", IDS)
def test_no_line_of_a_solution_is_in_what_a_check_can_say(name):
    """Hints and tasks may explain; they must not hold the answer's lines."""
    found = exercise(name)
    said = "\n".join([found.task, *found.hints])
    inside = (ROOT / "src" / f"{name}.py").read_text().split("# BEGIN SOLUTION")[1:]
    lines = [line.strip() for part in inside for line in part.split("# END SOLUTION")[0].splitlines()]
    assert not [line for line in lines if len(line) > 12 and line in said]


def test_an_answer_that_holds_everything_everywhere_fails():
    """Each exercise that is judged on sharding, lifetime or bytes keeps an answer with the right numbers alone."""
    for name in IDS:
        judged = [each for each in SHARDING if each in exercise(name).points]
        if not judged:
            continue
        reports = [report_on(answer) for answer in WRONG if answer.exercise == name]
        assert any(report.verdicts["values"].passed and report.first.property in judged for report in reports), name


def test_the_harnesses_hold_no_judge():
    """What runs beside a submission must not be able to import an answer."""
    for path in Path(inside.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                assert node.level < 2 and "lab" not in (node.module or ""), path.name


def cases_of(found):
    """The cases of an exercise, without running them; a generator that wants evidence is read as far as it gives."""
    cases = iter(found.cases(SEED))
    seen = []
    try:
        for case in cases:
            seen.append(case)
    except Exception:
        pass
    return seen
