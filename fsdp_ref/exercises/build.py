"""All builds of all exercises, as files.

    OUT/student/ID.ipynb            what is released
    OUT/solution/ID.ipynb           what is not
    OUT/nbgrader/                   source/ID/ID.ipynb and nbgrader_config.py: copy both into a course's folder
    OUT/otter/ID/ID.ipynb           the master notebook for `otter assign`
    OUT/pytest/ID.py, test_ID.py    a stub and its tests

The same sources give the same bytes. A build must never leave a half-written file where somebody would release it.
"""

from __future__ import annotations

from pathlib import Path

from .. import textfile
from ..errors import ConfigError
from . import nbgrader, otter, plain
from .cells import Graded
from .source import Source, read_all

PARTS = ("student", "solution", "nbgrader", "otter", "pytest")


def files(source: Source, checks: list[Graded], parts: tuple[str, ...] = PARTS) -> dict[str, str]:
    """Path below OUT -> text, of one exercise."""
    makers = {"student": lambda: {f"{source.id}.ipynb": plain.student(source)},
              "solution": lambda: {f"{source.id}.ipynb": plain.solution(source)},
              "nbgrader": lambda: nbgrader.build(source, checks),
              "otter": lambda: otter.build(source, checks),
              "pytest": lambda: plain.pytest(source, checks)}
    return {f"{part}/{name}": text for part in parts for name, text in makers[part]().items()}


def checks_of(source: Source) -> list[Graded]:
    """The exercise's properties with their points, in the order of its report."""
    from ..lab.checks import IDS, exercise
    if source.id not in IDS:
        raise ConfigError(f"{source.id}.py is the source of no exercise that fsdp_ref.lab.checks knows; rename it or add the check")
    return [Graded(name, points) for name, points in exercise(source.id).points.items()]


def write(folder: Path, out: Path, parts: tuple[str, ...] = PARTS, only: tuple[str, ...] = ()) -> list[Path]:
    """Build the sources of `folder` into `out`; returns what was written, in order."""
    sources = [source for source in read_all(folder) if not only or source.id in only]
    missing = set(only) - {source.id for source in sources}
    if missing:
        raise ConfigError(f"there is no source of {', '.join(sorted(missing))} in {folder}; its names are those of the exercises")
    written = []
    for source in sources:
        for name, text in files(source, checks_of(source), parts).items():
            written.append(_put(out / name, text))
    return sorted(set(written))


def _put(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path.parent} cannot be written to ({error.strerror}); give another folder with --out") from None
    return textfile.write(path, text, "the exercise")
