"""The exercise `fix_the_disagreement` (notebook 02): name the line that leads the ranks apart, and mend the loop."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .observe import Evidence
from .report import Verdict, fails, passes
from .words import bound, difference

CULPRIT = "B"
WHY_NOT = {"A": "every rank goes round the same number of times", "C": "it is where the ranks stand apart, not what led them there",
           "D": "it is where the others stand when it shows, not what led them there", "E": "it calls nothing"}


def cases(seed: int) -> Iterator[Case]:
    """Losses that improve on one rank and not on the other; then drawn ones."""
    draw = random.Random(seed)
    yield _case([[4.0, 3.0, 3.5, 2.0], [4.0, 5.0, 2.5, 6.0]], "2 ranks, 4 steps")
    for world, steps in ((3, 6), (4, 8)):
        rows = [[draw.randint(1, 400) / 16 for _ in range(steps)] for _ in range(world)]
        rows[0][1], rows[1][1] = rows[0][0] - 0.0625, rows[1][0] + 9.0
        yield _case(rows, f"{world} ranks, {steps} drawn steps")


def _case(rows: list[list[float]], title: str) -> Case:
    losses = [torch.tensor(row, dtype=torch.float64).float() for row in rows]
    return Case(len(rows), title, each=[{"losses": list(row.reshape(-1, 1).unbind())} for row in losses], known={"losses": losses})


def saved_steps(losses: torch.Tensor) -> list[int]:
    """The steps in which a series is lower than ever before."""
    return [step for step in range(len(losses)) if step == 0 or losses[step] < losses[:step].min()]


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """The named line, the means and the steps with a save; then the barriers."""
    losses = torch.stack(case.known["losses"])
    means = losses.mean(0)
    saves = saved_steps(means)
    for rank, result in enumerate(evidence.values("result")):
        if wrong := _shape(result):
            return [fails("values", f"rank {rank}: {wrong}", rank=rank)]
        if wrong := _values(rank, result, losses, means, saves):
            return [fails("values", wrong, rank=rank)]
    right = passes("values", "the line, the means over all ranks and the steps with a save are right")
    return [right, _order(evidence, means, saves), _bytes(evidence, len(means))]


def _shape(result: object) -> str:
    if not isinstance(result, list) or len(result) != 3:
        return "return three things: the letter of the line, the list of means, the list of steps with a save"
    letter, means, saves = result
    if letter not in (*WHY_NOT, CULPRIT):
        return "the first thing to return is the letter of a line, \"A\" to \"E\""
    numbers = isinstance(means, list) and all(isinstance(each, int | float) for each in means)
    if not numbers or not isinstance(saves, list) or not all(isinstance(each, int) for each in saves):
        return "the means must be a list of numbers, and the steps with a save a list of whole numbers"
    return ""


def _values(rank: int, result: list, losses: torch.Tensor, means: torch.Tensor, saves: list[int]) -> str:
    letter, mine, saved = result
    if letter != CULPRIT:
        return f"line {letter} is not the one that leads the ranks apart: {WHY_NOT[letter]}"
    found = difference(torch.tensor(mine), means, what=f"rank {rank}'s list of means", tolerance=bound(means, len(losses)),
                       unlike={"the list of its own losses": losses[rank]}, world=len(losses))
    if found:
        return found.words
    if saved == saves:
        return ""
    for other in range(len(losses)):
        if saved == saved_steps(losses[other]):
            whose = "its own" if other == rank else f"rank {other}'s"
            return f"rank {rank} saves when {whose} loss is the lowest so far; let the mean over all ranks decide"
    lowest = [saved_steps(row) for row in losses]
    if saved == sorted(set().union(*map(set, lowest))):
        return f"rank {rank} saves as soon as any rank's loss is the lowest so far; let the mean over all ranks decide"
    step = next(step for step in range(len(means)) if (step in saved) != (step in saves))
    does, new = ("saves", "is no") if step in saved else ("does not save", "is a")
    return f"rank {rank} {does} in step {step}, where the mean {new} new lowest"


def _order(evidence: Evidence, means: torch.Tensor, saves: list[int]) -> Verdict:
    """One barrier for each save: all ranks wait there, together."""
    calls = [evidence.kinds(rank) for rank in range(evidence.world)]
    barriers = calls[0].count("barrier")
    if barriers == 0:
        return fails("order", "no barrier was called: the others do not wait until a save is done")
    if barriers != len(saves):
        return fails("order", f"{barriers} barriers were called in {len(means)} steps; call one in each step with a save and in no other",
                     actual=calls, expected=[["all_reduce", "barrier"] if step in saves else ["all_reduce"] for step in range(len(means))])
    return passes("order", "every rank makes the same calls, and a barrier only where there is a save")


def _bytes(evidence: Evidence, steps: int) -> Verdict:
    most = 64 * steps
    sent = max(evidence.sent(rank) for rank in range(evidence.world))
    if sent > most:
        return fails("bytes", f"a rank sends {sent} bytes in {steps} steps; to agree on a number a few bytes a step are enough")
    return passes("bytes", "a few bytes a step")


EXERCISE = Exercise(
    id="fix_the_disagreement", notebook="02", title="Find the line that leads the ranks apart, and mend it",
    task="The loop of this exercise hangs on some data. Return three things: the letter of the line that leads the ranks apart, the list "
         "of the mean losses over all ranks, and the list of the steps with a save. A save happens in the steps in which the mean over all "
         "ranks is lower than in every step before; in those, and only in those, every rank calls one barrier.",
    signature="def fix_the_disagreement(losses, rank, world, dist):",
    points={"values": 3, "order": 1, "no hang": 1, "bytes": 1},
    hints=("Write down, for two ranks with different losses, which collective each calls first, second and third.",
           "The ranks stand at C and D. Which line decided that one of them goes to C? What does that line look at?",
           "What decides whether a collective is called must be the same number on every rank. First make the mean with a collective that "
           "every rank calls in every step, then compare it."),
    cases=cases, judge=judge)
