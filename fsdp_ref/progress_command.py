"""`fsdp-ref progress`: what this learner has done of the course, one line a notebook, and what comes next. It changes nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable

from . import progress
from .errors import ConfigError
from .quizzes import bank
from .train_options import Parser

# The exercises of each notebook, in the order of the course.
EXERCISES = {"01": ("ring_all_gather", "ring_reduce_scatter"), "02": ("fix_the_disagreement",), "03": ("bytes_per_parameter",),
             "04": ("unequal_tokens", "ddp_buckets"), "05": ("zero1_step", "zero2_backward"), "06": ("shard_and_pad",),
             "07": ("fsdp_forward",), "08": ("fsdp_backward",), "09": ("clip_grad_norm",), "10": ("forward_prefetch",),
             "11": ("sharded_save", "exact_resume", "reshard_on_load"), "12": ("capstone",)}


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    p = Parser(prog="fsdp-ref progress", description="What you have done of the course: questions answered right, at the first try, "
               "exercises with full marks. It is kept in one file on this machine.",
               epilog="FSDP_REF_DATA names the folder of that file, FSDP_REF_LEARNER the learner for whom questions draw their numbers.")
    p.add_argument("--json", action="store_true", help="print it as JSON")
    args = p.parse_args(argv)
    done, rows, problems = progress.load(), [], []
    for name in bank.names():
        try:
            rows.append(row_of(name, done))
        except ConfigError as error:
            problems.append(str(error))
    if args.json:
        print(json.dumps({"learner": progress.learner(), "file": str(progress.path()), "quizzes": rows, "exercises": done.exercises,
                          "problems": problems}, indent=1))
    else:
        print("\n".join([report(rows, done), *(f"A quiz was left out: {problem}" for problem in problems)]))
    return 0


def row_of(name: str, done: progress.Progress) -> dict:
    """One quiz and its notebook's exercises: how many there are, right, right at the first try; exercises with full marks."""
    answered = [done.questions.get(question.id, {"right": False, "tries": 0}) for question in bank.quiz(name).questions]
    exercises = EXERCISES.get(name, ())
    return {"quiz": name, "questions": len(answered), "right": sum(each["right"] for each in answered),
            "at_first": sum(each["right"] and each["tries"] == 1 for each in answered), "exercises": len(exercises),
            "full": sum(is_full(done.exercises.get(each)) for each in exercises)}


def is_full(entry: dict | None) -> bool:
    """Whether an exercise has full marks."""
    return entry is not None and entry["score"] >= entry["points"] > 0


def report(rows: Iterable[dict], done: progress.Progress) -> str:
    """The same as text: a table, the exercises that have been tried, and what comes next."""
    rows = list(rows)
    lines = [f"Progress of {progress.learner()}", "", "quiz    right   at first try   exercises with full marks"]
    for row in rows:
        exercises = f"{row['full']} of {row['exercises']}" if row["exercises"] else "-"
        right = f"{row['right']}/{row['questions']}"
        lines.append(f"{row['quiz']:6}  {right:>5}   {row['at_first']:>12}   {exercises:>25}")
    tried = {name: entry for name, entry in sorted(done.exercises.items()) if not is_full(entry)}
    lines += ["", *(f"{name}: {entry['score']:g} of {entry['points']:g} points" for name, entry in tried.items())] if tried else []
    lines += ["", following(rows, done), f"Kept in {progress.path()}"]
    return "\n".join([*lines, *([done.note] if done.note else [])])


def following(rows: Iterable[dict], done: progress.Progress) -> str:
    """What to do next: the first question or exercise, in the order of the course, that is not done."""
    for row in rows:
        for question in bank.quiz(row["quiz"]).questions:
            if not done.questions.get(question.id, {}).get("right"):
                return f"Next: ask(\"{question.id}\")"
        for exercise in EXERCISES.get(row["quiz"], ()):
            if not is_full(done.exercises.get(exercise)):
                return f"Next: check(\"{exercise}\", ...)"
    return "Everything is done."
