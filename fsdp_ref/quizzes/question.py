"""One question as the bank has it: jupyterquiz's JSON and what this course adds to it. Reading and checking; no judging.

    question, type, code, answers, precision                as in jupyterquiz (answers: answer, correct, feedback, type, value, range)
    id                                                      "q3"; by default the place in the file
    type "order"                                            answers stand in the right order; `feedback` of one is said when it was put
                                                            before the one above it
    see                                                     {"notebook": "07_fsdp_forward", "section": its heading, "source": file}
    answers[].misconception                                 "M5": the wrong belief that this answer states
    formula, given                                          the value of a numeric answer, computed (formulas.py)
    draw                                                    {"ranks": [2, 4, 8]}: a number for each learner, `{ranks}` in the texts
    tolerance, unit                                         of numeric answers: 0.5, or "2%"
    prints                                                  {"ranks": 2, "rank": 1}: the right answer is what `code` prints there
    shuffle                                                 false: answers are shown in the order of the file

This module must never evaluate a text of the file.
"""

from __future__ import annotations

import hashlib
import random
import re
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import ConfigError
from . import formulas

TYPES = ("multiple_choice", "many_choice", "numeric", "string", "order")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Answer:
    """One answer that the bank knows: a choice, a step, a text, a number, a range, or (`default`) any other."""

    text: str = ""
    correct: bool = False
    feedback: str = ""
    value: float | None = None
    range: tuple[float, float] | None = None
    formula: str = ""
    given: dict[str, Any] = field(default_factory=dict)
    misconception: str = ""
    default: bool = False


@dataclass(frozen=True)
class Question:
    """A question, checked. `id` is its name in the whole bank ("05.q3"), `shown` the answers in the order a learner sees them."""

    id: str
    kind: str
    text: str
    answers: tuple[Answer, ...]
    code: str = ""
    see: dict[str, str] = field(default_factory=dict)
    unit: str = ""
    precision: int | None = None
    tolerance: float | str | None = None
    draw: dict[str, list] = field(default_factory=dict)
    prints: dict[str, int] = field(default_factory=dict)
    shuffle: bool = True

    @property
    def shown(self) -> tuple[Answer, ...]:
        """The choices or steps in the order in which they are shown, the same for everyone; steps never stand in the right order."""
        if self.kind not in ("multiple_choice", "many_choice", "order"):
            return ()
        if not self.shuffle:
            return self.answers
        mixed = sorted(self.answers, key=lambda answer: hashlib.sha256(f"{self.id} {answer.text}".encode()).digest())
        return tuple(mixed[1:] + mixed[:1] if self.kind == "order" and mixed == list(self.answers) else mixed)

    @property
    def where(self) -> str:
        """Where in the course the answer can be seen, in words; empty when the file does not say."""
        section = f'section "{self.see["section"]}"' if self.see.get("section") else ""
        parts = [f"{self.see['notebook']}.ipynb" if self.see.get("notebook") else "", section]
        words = ", ".join(part for part in parts if part)
        source = self.see.get("source", "")
        return f"{words} (and {source})" if words and source else words or source

    def for_learner(self, learner: str) -> Question:
        """The same question with this learner's numbers in it, always the same ones."""
        dice = random.Random(f"{learner}/{self.id}")
        drawn = {name: dice.choice(values) for name, values in self.draw.items()}
        answers = tuple(replace(each, text=_fill(each.text, drawn), feedback=_fill(each.feedback, drawn),
                                given=formulas.arguments(each.formula, each.given, drawn) if each.formula else {})
                        for each in self.answers)
        return replace(self, text=_fill(self.text, drawn), code=_fill(self.code, drawn), answers=answers, draw={})


def _fill(text: str, drawn: dict[str, object]) -> str:
    """`{name}` becomes the number drawn for it; every other brace stays as it is."""
    return re.sub(r"\{(\w+)\}", lambda found: str(drawn.get(found[1], found[0])), text)


class Fields:
    """The fields of one JSON object, read with their types checked; an error names file, question, field and the fix."""

    def __init__(self, data: object, place: str, prefix: str = "") -> None:
        self.place, self.prefix = place, prefix
        if not isinstance(data, dict):
            raise ConfigError(f"{place}: {prefix.rstrip('.') or 'the question'} is no JSON object; write {{...}}")
        self.data = data

    def get(self, name: str, kind: type | tuple[type, ...], what: str, default: Any = None, required: bool = False) -> Any:
        """The field, or `default` when it is missing. Raises ConfigError when it is required and missing, or of another type."""
        if name not in self.data:
            if required:
                raise self.wrong(name, "is missing", f"add {what}")
            return default
        value = self.data[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, f"is {value!r:.60}", f"write {what}")
        return value

    def wrong(self, name: str, problem: str, fix: str) -> ConfigError:
        """An error about one field."""
        return ConfigError(f"{self.place}: field {self.prefix}{name} {problem}; {fix}")


def parse(data: object, number: int, quiz: str, file: str) -> Question:
    """The question number `number` (from 1) of a file.

    Raises:
        ConfigError: naming the file, the question, the field and the fix.
    """
    name = data.get("id", f"q{number}") if isinstance(data, dict) else f"q{number}"
    name = name if isinstance(name, str) and re.fullmatch(r"\w+", name) else f"q{number}"
    read = Fields(data, f"{file}, question {name}")
    if "id" in read.data and read.data["id"] != name:
        raise read.wrong("id", f"is {read.data['id']!r:.60}", 'write a short name such as "q3"')
    kind = read.get("type", str, f"one of {', '.join(TYPES)}", required=True)
    if kind not in TYPES:
        raise read.wrong("type", f"is {kind!r:.60}", f"write one of {', '.join(TYPES)}")
    answers = read.get("answers", list, "a list of answers", required=True)
    question = Question(
        id=f"{quiz}.{name}", kind=kind, text=read.get("question", str, "the question's text", required=True),
        answers=tuple(_answer(each, place, kind, read) for place, each in enumerate(answers)),
        code=read.get("code", str, "code as text", ""), see=_see(read), unit=read.get("unit", str, "a unit as text", ""),
        precision=read.get("precision", int, "a number of digits"),
        tolerance=read.get("tolerance", (int, float, str), 'a number, or a share such as "2%"'),
        draw=_draw(read), prints=read.get("prints", dict, '{"ranks": 2, "rank": 1}', {}),
        shuffle=read.get("shuffle", bool, "true or false", True))
    _check(question, read)
    return question


def _answer(data: object, place: int, kind: str, question: Fields) -> Answer:
    read = Fields(data, question.place, f"answers[{place}].")
    text = read.get("answer", (str, int, float), "the answer's text", "")
    limits = read.get("range", list, "[lowest, highest]")
    if limits is not None and not (len(limits) == 2 and all(isinstance(end, int | float) for end in limits) and limits[0] <= limits[1]):
        raise read.wrong("range", f"is {limits!r:.60}", "write [lowest, highest]")
    answer = Answer(
        text=str(text), correct=read.get("correct", bool, "true or false", kind == "order"),
        feedback=read.get("feedback", str, "what a learner who gives this answer is told", ""),
        value=read.get("value", (int, float), "a number"), range=None if limits is None else (limits[0], limits[1]),
        formula=read.get("formula", str, "the name of a formula in fsdp_ref/quizzes/formulas.py", ""),
        given={**question.get("given", dict, "a JSON object", {}), **read.get("given", dict, "a JSON object", {})},
        misconception=read.get("misconception", str, 'a number such as "M5"', ""), default=data.get("type") == "default")
    if kind == "numeric" and not answer.default and answer.value is None and answer.range is None and not answer.formula:
        raise read.wrong("value", "is missing", "add value, range or formula, or \"type\": \"default\"")
    if answer.formula and answer.formula not in formulas.FORMULAS:
        raise read.wrong("formula", f"is {answer.formula!r:.40}", f"write one of {', '.join(sorted(formulas.FORMULAS))}")
    if kind != "numeric" and not answer.default and not answer.text:
        raise read.wrong("answer", "is missing", "add the answer's text")
    return answer


def _see(read: Fields) -> dict[str, str]:
    see = read.get("see", dict, '{"notebook": "07_fsdp_forward", "section": "..."}', {})
    for name, value in see.items():
        if name not in ("notebook", "section", "source") or not isinstance(value, str):
            raise read.wrong(f"see.{name}", f"is {value!r:.60}", "see has notebook, section and source, each a text")
    return see


def _draw(read: Fields) -> dict[str, list]:
    draw = read.get("draw", dict, '{"ranks": [2, 4, 8]}', {})
    for name, values in draw.items():
        if not isinstance(values, list) or not values or not all(isinstance(value, int | float | str) for value in values):
            raise read.wrong(f"draw.{name}", f"is {values!r:.60}", "write the list of values to draw from")
    return draw


def _check(question: Question, read: Fields) -> None:
    """What must hold between the fields of a question."""
    right = [answer for answer in question.answers if answer.correct]
    if not right:
        raise read.wrong("answers", "has no correct answer", 'write "correct": true in one of them')
    if question.kind == "multiple_choice" and len(right) > 1:
        raise read.wrong("answers", f"has {len(right)} correct answers", "leave one correct, or make the type many_choice")
    texts = [answer.text for answer in question.answers if not answer.default]
    if question.kind != "numeric" and len(texts) != len(set(texts)):
        raise read.wrong("answers", "has the same text twice", "make the texts differ")
    if question.kind in ("multiple_choice", "many_choice", "order") and not 2 <= len(question.answers) <= len(LETTERS):
        raise read.wrong("answers", f"has {len(question.answers)} entries", f"give 2 to {len(LETTERS)}")
    tolerance = question.tolerance
    if isinstance(tolerance, str) and not re.fullmatch(r"\d+(\.\d+)?%", tolerance):
        raise read.wrong("tolerance", f"is {tolerance!r}", 'write a number, or a share such as "2%"')
    if question.precision is not None and question.precision < 1:
        raise read.wrong("precision", f"is {question.precision}", "write 1 or more digits")
    if question.prints and not (set(question.prints) == {"ranks", "rank"} and all(type(n) is int for n in question.prints.values())
                                and 0 <= question.prints["rank"] < question.prints["ranks"] and question.code):
        raise read.wrong("prints", f"is {question.prints!r:.60}", 'write {"ranks": 2, "rank": 1} and the code beside it')
