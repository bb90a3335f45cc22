"""Where questions are found: one file a quiz, `exercises/quizzes/05.json`, `final.json`; a damaged one leaves the others usable.

The files are those of the folder that FSDP_REF_QUIZZES names, else those beside the package: in a checkout `exercises/quizzes` (the folder
`bank` here is a link to it), in a wheel a copy. A name of a quiz is only looked up among the files that are there, never made a path.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError
from .question import Question, parse

LIMIT = 4 << 20          # bytes of one file


def folder() -> Path:
    """The folder with the question files.

    Raises:
        ConfigError: there is none.
    """
    chosen = os.environ.get("FSDP_REF_QUIZZES")
    places = [Path(chosen)] if chosen else [Path(__file__).parent / "bank", Path(__file__).parents[2] / "exercises" / "quizzes"]
    for place in places:
        if place.is_dir() and any(place.glob("*.json")):
            return place
    fix = "name a folder that has 00.json and the others" if chosen else "run from a checkout of the course, or set FSDP_REF_QUIZZES"
    raise ConfigError(f"there are no question files in {places[-1]}; {fix}")


@dataclass(frozen=True)
class Bank:
    """One quiz: its good questions in order, and the error of each that cannot be used, by id."""

    name: str
    questions: tuple[Question, ...]
    problems: dict[str, ConfigError]

    def question(self, name: str) -> Question:
        """One question by its short name ("q3").

        Raises:
            ConfigError: it is not there, or cannot be used.
        """
        found = {question.id: question for question in self.questions}
        key = f"{self.name}.{name}"
        if key not in found:
            if key in self.problems:
                raise self.problems[key]
            raise ConfigError(f"quiz {self.name} has no question {name!r:.40}; it has {', '.join(q.split('.')[1] for q in found)}")
        return found[key]


def names() -> list[str]:
    """The quizzes there are: "00" to "12", "final"."""
    return sorted(path.stem for path in folder().glob("*.json") if re.fullmatch(r"\w+", path.stem))


def quiz(name: str, learner: str = "") -> Bank:
    """A quiz by name, with this learner's numbers.

    Raises:
        ConfigError: there is no such quiz, or its file is no list of questions.
    """
    known = names()
    if name not in known:
        raise ConfigError(f"there is no quiz {name!r:.40}; choose one of {', '.join(known)}")
    path = folder().resolve() / f"{name}.json"
    file = f"{path.parent.name}/{path.name}"
    good, problems = [], {}
    for number, data in enumerate(_read(path, file), 1):
        try:
            question = parse(data, number, name, file)
            if question.id in {other.id for other in good}:
                raise ConfigError(f"{file}, question {question.id.split('.')[1]}: field id is there twice; give each question its own")
            good.append(question.for_learner(learner))
        except ConfigError as error:
            problems[f"{name}.q{number}" if not isinstance(data, dict) else f"{name}.{data.get('id', f'q{number}')}"] = error
    return Bank(name, tuple(good), problems)


def question(name: str, learner: str = "") -> Question:
    """A question by its full name, "05.q3".

    Raises:
        ConfigError: no such quiz or question, or one that cannot be used.
    """
    head, dot, tail = name.rpartition(".")
    if not dot or not head:
        raise ConfigError(f"{name!r:.40} names no question; write the quiz and the question, such as '05.q3'")
    return quiz(head, learner).question(tail)


def everything(learner: str = "") -> Iterator[Question]:
    """All usable questions of all usable quizzes."""
    for name in names():
        try:
            yield from quiz(name, learner).questions
        except ConfigError:
            continue


def _read(path: Path, file: str) -> list:
    try:
        if path.stat().st_size > LIMIT:
            raise ConfigError(f"{file} has more than {LIMIT >> 20} MiB; split it into several quizzes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file} ({error.strerror}); make it readable") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no UTF-8 JSON text ({error}); save it as such") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file} is no JSON: {error.msg} at line {error.lineno}, column {error.colno}; mend that line") from error
    if not isinstance(data, list) or not data:
        raise ConfigError(f"{file} holds no list of questions; write [{{\"question\": ...}}, ...]")
    return data
