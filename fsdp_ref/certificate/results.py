"""Graded results as the graders write them: one row a learner and exercise, as CSV or JSON, read and checked.

Columns: learner (or student), exercise, score, points; others are left alone. The points of an exercise are those of the whole class, so
a learner without a row for it has 0 of them. Nothing here is trusted: names are text, numbers are checked.
"""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigError

LIMIT = 64 << 20        # bytes
NAME = 100              # characters of a name
COLUMNS = {"learner": ("learner", "student"), "exercise": ("exercise", "exercise id", "exercise_id"), "score": ("score",),
           "points": ("points",)}


@dataclass(frozen=True)
class Grades:
    """One learner: exercise -> (score, points), for every exercise of the course."""

    learner: str
    exercises: dict[str, tuple[float, float]]

    @property
    def score(self) -> float:
        """Points that were reached."""
        return math.fsum(score for score, _ in self.exercises.values())

    @property
    def points(self) -> float:
        """Points that there are."""
        return math.fsum(points for _, points in self.exercises.values())


def read(path: Path) -> list[Grades]:
    """Every learner of a file of results, by name.

    Raises:
        ConfigError: naming the file, the row and the fix.
    """
    found: dict[str, dict[str, float]] = {}
    points: dict[str, float] = {}
    for number, row in enumerate(_rows(path), 1):
        if row.get("error") and not row.get("exercise"):
            continue                                    # a file that answered no exercise; grading said so
        place = f"{path}, result {number}"
        learner, exercise = name(_field(row, "learner", place), place), name(_field(row, "exercise", place), place)
        score, of = (_number(_field(row, column, place), column, place) for column in ("score", "points"))
        if score > of:
            raise ConfigError(f"{place}: the score {score:g} is more than the {of:g} points; correct one of them")
        if points.setdefault(exercise, of) != of:
            raise ConfigError(f"{place}: exercise {exercise} has {of:g} points here and {points[exercise]:g} above; make them equal")
        if exercise in found.setdefault(learner, {}):
            raise ConfigError(f"{place}: {learner} has two results for {exercise}; leave the one that counts")
        found[learner][exercise] = score
    if not found:
        raise ConfigError(f"{path} holds no results; give the file that fsdp-ref exercises grade wrote")
    return [Grades(learner, {each: (scores.get(each, 0.0), of) for each, of in sorted(points.items())})
            for learner, scores in sorted(found.items())]


def names(path: Path) -> dict[str, str]:
    """Learner -> the name to print, from a CSV with the columns learner and name."""
    found = {}
    for number, row in enumerate(_rows(path), 1):
        place = f"{path}, row {number}"
        found[_field(row, "learner", place)] = name(row.get("name"), place)
    return found


def name(text: object, place: str) -> str:
    """A name that can be printed: one line of at most NAME characters."""
    if not isinstance(text, str) or not text.strip() or len(text) > NAME or not text.isprintable():
        raise ConfigError(f"{place}: {text!r:.60} is no name; write one line of 1 to {NAME} printable characters")
    return text.strip()


def _rows(path: Path) -> list[dict]:
    try:
        if path.stat().st_size > LIMIT:
            raise ConfigError(f"{path} has more than {LIMIT >> 20} MiB; split it")
        text = path.read_text(encoding="utf-8-sig")
        data = json.loads(text) if path.suffix.lower() == ".json" else list(csv.DictReader(io.StringIO(text, newline="")))
    except OSError as error:
        raise ConfigError(f"cannot read the results {path} ({error.strerror}); give a CSV or JSON file of graded results") from error
    except (ValueError, RecursionError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as results ({error}); give a CSV or JSON file of graded results") from error
    data = data.get("results") if isinstance(data, dict) else data
    if not isinstance(data, list) or not all(isinstance(row, dict) for row in data):
        raise ConfigError(f"{path} holds no list of results; write a list of objects with learner, exercise, score and points")
    return data


def _field(row: dict, column: str, place: str) -> object:
    for title in COLUMNS[column]:
        if row.get(title) not in (None, ""):
            return row[title]
    raise ConfigError(f"{place}: {column} is missing; give the columns learner, exercise, score and points")


def _number(value: object, column: str, place: str) -> float:
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and 0 <= number <= 1e6):
        raise ConfigError(f"{place}: {column} is {value!r:.40}; write a number of 0 or more")
    return number
