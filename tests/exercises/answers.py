"""The answers that the repository keeps for its exercises: the solution of each source, correct ones in other styles, wrong ones."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from fsdp_ref.lab.checks import IDS, Submission, exercise

ROOT = Path(__file__).parents[2] / "exercises"


@dataclass(frozen=True)
class Answer:
    """One file of exercises/answers, or a source's solution. `words`: of a wrong one, what its diagnosis must contain."""

    exercise: str
    name: str
    submission: Submission
    words: str = ""

    def __str__(self) -> str:
        return f"{self.exercise}-{self.name}"


def solution(name: str) -> Answer:
    """The solution in an exercise's source: its code cells but the checks."""
    text = (ROOT / "src" / f"{name}.py").read_text()
    cells = text.split("\n# %%")[1:]
    code = [cell.split("\n", 1)[1] for cell in cells if not cell.startswith(" [markdown]") and "tags=[\"check" not in cell.split("\n")[0]]
    lines = [line for cell in code for line in cell.splitlines() if "fsdp_ref.lab import" not in line]
    return Answer(name, "solution", Submission("\n".join(lines), exercise(name).function))


def answers(kind: str) -> list[Answer]:
    """All answers of all exercises whose file begins with `kind` ("other" or "wrong")."""
    found = []
    for name in IDS:
        for path in sorted((ROOT / "answers" / name).glob(f"{kind}_*.py")):
            text = path.read_text()
            words = ast.get_docstring(ast.parse(text)) or ""
            found.append(Answer(name, path.stem, Submission(text, exercise(name).function), words))
    return found
