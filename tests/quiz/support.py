"""What the tests of quizzes share: every question of the bank, with every number that a learner may draw."""

import dataclasses
import itertools
import json
from pathlib import Path

from fsdp_ref.quizzes.question import parse

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "exercises" / "quizzes"
LESSONS = ["00_meet_the_ranks", "01_collectives", "02_when_ranks_disagree", "03_the_memory_ledger", "04_data_parallel_from_scratch",
           "05_zero1_and_zero2", "06_flatten_shard_pad", "07_fsdp_forward", "08_fsdp_backward", "09_optimizer_clip_accumulate_precision",
           "10_overlap_and_prefetch", "11_checkpoint_and_resume", "12_the_real_thing"]
NAMES = [*(name[:2] for name in LESSONS), *(["final"] if (FOLDER / "final.json").exists() else [])]


def raw(name):
    """The questions of one file as they are written, numbers not drawn."""
    return [parse(data, number, name, f"{name}.json") for number, data in enumerate(json.loads((FOLDER / f"{name}.json").read_text()), 1)]


QUESTIONS = [question for name in NAMES for question in raw(name)]


def drawn(question):
    """(numbers, question) for every combination of numbers that may be drawn."""
    for values in itertools.product(*question.draw.values()):
        numbers = dict(zip(question.draw, values, strict=True))
        yield numbers, dataclasses.replace(question, draw={name: [value] for name, value in numbers.items()}).for_learner("anybody")
