"""Checks of exercises: `check("ring_all_gather", fn)` runs an answer on fresh ranks and says what is right about it and what is not.

How an exercise is added, with `ring_all_gather` as the pattern. Five places, all named by its id:

1. `checks/ID.py`             `EXERCISE = Exercise(...)`: what to write, points, three hints, `cases(seed)` and `judge(case, evidence)`.
                              Cases vary world sizes (2 to 4), shapes and seeds; what the judge expects stands in `Case.known`, which never
                              reaches a rank. The judge is a pure function: evidence in, a `passes` or `fails` for each property out, one
                              sentence each. It is called only when every rank returned; exceptions, deadlocks, time, floods are told
                              before it.
2. `checks/inside/ID.py`      `run(function, case, rank) -> evidence`: calls the learner's function in the rank and returns None, numbers,
                              text, lists, dicts, tensors. It holds nothing of the answer, and imports torch and `fsdp_ref` only.
                              `rank.wire.put/take` are send and receive, `torch.distributed`'s functions work too; all of it passes
                              through the judge, who counts (`evidence.of`, `.sent`, `.kinds`). `with rank.meter() as meter:` measures
                              bytes held; `rank.mark("step 1")` divides the record into steps. The server imports every harness once, before
                              it forks: what an answer needs that is slow to import (optimizers need torch._dynamo) is imported at its top.
3. `exercises/src/ID.py`      the source of the exercise's notebooks: statement, starter, solution, visible check, hidden checks.
4. `exercises/answers/ID/`    `other_1.py`, `other_2.py` (correct, in another style), `wrong_NAME.py` (six or more). The docstring of a
                              wrong answer is the part of the diagnosis that it must get. `tests/exercises/test_answers.py` runs all.
5. its id in `COURSE` below.

Rules. A property is judged from evidence that does not depend on how the learner wrote it: bytes and order from the wire, who holds what
from the meter and from what is returned. Values are compared exactly only where they are copied or summed in the judge's own order, else
with `words.bound`. Where values are wrong nothing else counts. The answer that keeps everything everywhere must fail sharding, lifetime
or bytes. What a diagnosis names must be different for each typical mistake: give `words.difference` the results of mistakes (`unlike`).

This package must never run an answer in the process that judges it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ...errors import ConfigError
from .exercise import Case, Exercise
from .judging import examine, load
from .observe import Evidence
from .report import Card, CheckFailed, Report, Verdict, fails, passes
from .submission import Submission

COURSE = ("ring_all_gather", "ring_reduce_scatter", "fix_the_disagreement", "bytes_per_parameter", "unequal_tokens", "ddp_buckets",
          "zero1_step", "zero2_backward", "shard_and_pad", "fsdp_forward", "fsdp_backward", "clip_grad_norm", "forward_prefetch",
          "sharded_save", "exact_resume", "reshard_on_load", "capstone")
IDS = tuple(name for name in COURSE if Path(__file__).with_name(f"{name}.py").exists())          # in the order of the course

__all__ = ["IDS", "Card", "Case", "CheckFailed", "Evidence", "Exercise", "Report", "Submission", "Verdict", "check", "exercise", "fails",
           "passes"]


def exercise(name: str) -> Exercise:
    """The exercise of this id.

    Raises:
        ConfigError: there is none.
    """
    if name not in IDS:
        raise ConfigError(f"there is no exercise {name!r}; choose one of {', '.join(IDS)}")
    return load(name)


def check(name: str, function: Callable | Submission | None = None, *, seed: int | None = None) -> Report | Card:
    """Check an answer, or, without one, show the card of the exercise.

    Args:
        name: the exercise's id.
        function: the learner's function (of a cell or a module), or its text as a `Submission`.
        seed: draws the hidden cases; None draws them anew.

    Raises:
        ConfigError: there is no such exercise, or the function's source is nowhere to be found.
        WorldError: this machine cannot start ranks.
    """
    found = exercise(name)
    if function is None:
        return Card(found.id, found.notebook, found.title, found.task, found.signature, found.points, found.link)
    return examine(found, Submission.of(function), seed)
