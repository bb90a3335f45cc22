"""The command `fsdp-ref exercises`: build the exercises' notebooks, check a file, grade a folder of submissions.

This module only reads arguments and prints. It must never run what was handed in: that happens in processes of its own (lab.checks).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ..errors import ConfigError
from ..train_options import Parser

ROOT = Path(__file__).parents[2]
PARTS = ("student", "solution", "nbgrader", "otter", "pytest")
EPILOG = """\
examples:
  fsdp-ref exercises build --out course                  all builds of all exercises
  fsdp-ref exercises check zero1_step.ipynb              what the grader says about one file
  fsdp-ref exercises grade submitted --csv scores.csv    a folder of submissions; the diagnoses are counted in scores_diagnoses.csv

exit codes: 0 done (check: full marks), 1 check: less than full marks, 2 a wrong argument
"""


def parser() -> Parser:
    """The options of all actions."""
    p = Parser(prog="fsdp-ref exercises", description="Build exercises, check an answer, grade a folder of submissions.", epilog=EPILOG)
    actions = p.add_subparsers(dest="action", required=True, metavar="build|check|grade")
    build = actions.add_parser("build", help="write the notebooks: for students, the solutions, for nbgrader, otter and pytest")
    build.add_argument("--out", required=True, type=Path, metavar="DIR", help="the folder to write to (made if need be)")
    build.add_argument("--src", type=Path, metavar="DIR", help="the sources (default: exercises/src of this checkout)")
    build.add_argument("--only", nargs="+", default=[], metavar="ID", help="these exercises alone")
    build.add_argument("--part", nargs="+", default=PARTS, choices=PARTS, metavar="PART", help=f"these builds alone: {', '.join(PARTS)}")
    check = actions.add_parser("check", help="what the grader says about a notebook or a Python file")
    check.add_argument("files", nargs="+", type=Path, metavar="FILE",
                       help="a notebook or a Python file that defines an exercise's function")
    check.add_argument("--json", action="store_true", help="as JSON, for programs")
    grade = actions.add_parser("grade", help="grade a folder of submissions into a CSV")
    grade.add_argument("folder", type=Path, metavar="FOLDER", help="holds a folder or a file for each student (nbgrader's submitted/ fits)")
    grade.add_argument("--csv", required=True, type=Path, metavar="OUT",
                       help="scores; the counted diagnoses go to OUT's name with _diagnoses")
    grade.add_argument("--only", nargs="+", default=[], metavar="ID", help="these exercises alone")
    return p


def main(argv: list[str]) -> int:
    """Run one action; returns the exit code."""
    args = parser().parse_args(argv)
    return {"build": build, "check": check, "grade": grade}[args.action](args)


def build(args) -> int:
    """Write the builds."""
    from . import build as builds
    folder = args.src or ROOT / "exercises" / "src"
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder; the sources come with a checkout, not with the package: name theirs with --src")
    for path in builds.write(folder, args.out, tuple(args.part), tuple(args.only)):
        print(path)
    return 0


def check(args) -> int:
    """Print the report of each file; 1 when one has less than full marks."""
    from .grade import grade_file
    from .judging import grader
    graders = grader()
    rows = [row for path in args.files for row in grade_file(path, graders)]
    if args.json:
        print(json.dumps([{**row.cells(), "report": json.loads(row.report.to_json()) if row.report else None} for row in rows], indent=2))
    else:
        for row in rows:
            print(f"{row.file}: {row.error}" if row.error else f"{row.file}\n{row.report}")
    return 0 if all(not row.error and row.score == row.points for row in rows) else 1


def grade(args) -> int:
    """Write the CSVs and print the counted diagnoses."""
    from ..viz.table import as_text
    from .grade import Row, count_diagnoses, grade_folder, write_diagnoses, write_scores
    from .judging import grader

    def tell(row: Row) -> None:
        print(f"{row.student}  {row.exercise or '?'}  {row.error or f'{row.score:g} of {row.points:g}'}", file=sys.stderr, flush=True)

    rows = grade_folder(args.folder, grader(), tell, args.only)
    scores = write_scores(rows, args.csv)
    diagnoses = write_diagnoses(rows, args.csv.with_name(f"{args.csv.stem}_diagnoses{args.csv.suffix}"))
    print(f"{len(rows)} answers of {len({row.student for row in rows})} students in {scores}; the diagnoses counted in {diagnoses}")
    if counted := count_diagnoses(rows):
        print(as_text(counted))
    return 0
