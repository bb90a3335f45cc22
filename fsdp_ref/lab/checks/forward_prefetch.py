"""The exercise `forward_prefetch` (notebook 10): the next unit is gathered while this one computes. The clock is counted.

The clock is the harness's (inside/forward_prefetch.py, [Note: the counted clock]).
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, Picture, careful, close, largest, verdicts
from .observe import Evidence
from .report import Verdict

GOOD = {"values": "the output is that of the plain forward",
        "overlap": "no more is exposed than with one unit gathered ahead",
        "lifetime": "never more than two units are whole, and none afterwards",
        "order": "each unit computes once, with its weights there",
        "bytes": "each unit is gathered once"}


def cases(seed: int) -> Iterator[Case]:
    """Times in milliseconds; the link is faster than compute, then slower, then now one and now the other."""
    draw = random.Random(seed)
    yield case_of(2, [3, 3, 3, 3], [4, 4, 4, 4], 41)
    yield case_of(2, [5, 5, 5], [2, 2, 2], seed)
    count = draw.randint(4, 6)
    yield case_of(3, [draw.randint(1, 9) for _ in range(count)], [draw.randint(1, 9) for _ in range(count)], seed + 1)


def case_of(world: int, gather: list[int], compute: list[int], seed: int) -> Case:
    """Units of equal size; what each takes to gather and to compute."""
    make = torch.Generator().manual_seed(seed)
    shards = [[torch.randn(3, generator=make) for _ in gather] for _ in range(world)]
    facts = {"gather": gather, "compute": compute, "units": [f"block {index}" for index in range(len(gather))]}
    return Case(world, f"{world} ranks, gathers of {gather} ms and computes of {compute} ms", shared=facts,
                each=[{"shards": mine} for mine in shards], known={**facts, "shards": shards})


def unit_names(case: Case) -> list[str]:
    """What the units are called."""
    return case.known["units"]


def bound(case: Case) -> float:
    """The exposed time with one unit gathered ahead: the first gather, and what later ones take longer than the compute before them."""
    now = free_at = exposed = 0.0
    ends = [case.known["gather"][0]]
    free_at = ends[0]
    for index, compute in enumerate(case.known["compute"]):
        late = max(0.0, ends[index] - now)
        exposed, now = exposed + late, now + late
        if index + 1 < len(case.known["gather"]):
            free_at = max(now, free_at) + case.known["gather"][index + 1]
            ends.append(free_at)
        now += compute
    return exposed


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    found = [finding for look in (_order, _held, _overlap, _numbers) for rank, seen in enumerate(evidence.values())
             for finding in look(case, rank, seen)]
    count = len(unit_names(case))
    best = ["gather 0", "wait 0"]
    for index in range(count):
        best += ([f"gather {index + 1}"] if index + 1 < count else []) + [f"compute {index}", f"free {index}"]
        best += [f"wait {index + 1}"] if index + 1 < count else []
    actual = [[f"{row['what']} {row['unit']}" for row in seen["log"]] for seen in evidence.values()]
    return verdicts(found, GOOD, Picture("calls in order (one order that is right)", [best] * case.world, actual))


def _order(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    names = unit_names(case)
    for row in (row for row in seen["log"] if row["what"] == "compute" and not row["there"]):
        name = names[row["unit"]]
        gathered = any(other["what"] == "gather" and other["unit"] == row["unit"] for other in seen["log"])
        freed = any(other["what"] == "free" and other["unit"] == row["unit"] and other["was"] and other["at"] <= row["begin"]
                    for other in seen["log"])
        yield Finding("order", f"{name} computes " + ("before its gather was waited for: its weights may not be there" if row["asked"] else
                      "after its weights were freed" if gathered and freed else "and was never gathered"), rank, name)
    computed = [row["unit"] for row in seen["log"] if row["what"] == "compute"]
    if computed != list(range(len(names))):
        yield Finding("order", f"the units compute in the order {', '.join(names[each] for each in computed) or 'none'}; each computes "
                               "once, in the order of the list", rank)
    for index, name in enumerate(names):
        times = sum(row["what"] == "gather" and row["unit"] == index for row in seen["log"])
        if times > 1:
            yield Finding("bytes", f"{name} is gathered {times} times in one forward; once is enough", rank, name)


def _held(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    names = unit_names(case)
    frees = [row for row in seen["log"] if row["what"] == "free"]
    if not frees and seen["log"]:
        yield Finding("lifetime", f"no unit is ever freed: after forward all {len(seen['left'])} are whole", rank)
    elif seen["peak"] > 2:
        first = next(row for row in seen["log"] if row["what"] == "gather" and row["whole"] > 2)
        before = not any(row["what"] == "compute" for row in seen["log"][: seen["log"].index(first)])
        why = "everything is gathered before the first unit computes" if before else ("free each unit before the gather after the next is "
                                                                                      "begun")
        yield Finding("lifetime", f"{seen['peak']} units are whole at once where 2 are enough, the one that computes and "
                                  f"the next: {why}", rank,
                      names[first["unit"]])
    elif seen["left"]:
        yield Finding("lifetime", f"{', '.join(names[each] for each in seen['left'])} is still whole after forward", rank,
                      names[seen["left"][0]])


def _overlap(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    least, sum_of_all = bound(case), float(sum(case.known["gather"]))
    if seen["exposed"] > least + 1e-9:
        late = [row for row in seen["log"] if row["what"] == "wait" and row["exposed"] > 0]
        places = {(row["what"], row["unit"]): place for place, row in reversed(list(enumerate(seen["log"])))}
        early = [unit for unit in range(1, len(case.known["gather"]))
                 if places.get(("gather", unit), 0) < places.get(("compute", unit - 1), 0) and places.get(("wait", unit), 1e9) <
                 places.get(("compute", unit - 1), 0)]
        why = ("a gather is begun in time and waited for at once, before the unit ahead of it computes" if early else
               "each gather is begun only when the unit before it has computed, so nothing is hidden" if seen["exposed"] >= sum_of_all else
               "some gathers begin too late")
        yield Finding("overlap", f"{seen['exposed']:g} ms of gathers are exposed where {least:g} ms need be: {why}", rank,
                      unit_names(case)[late[-1]["unit"]] if late else None)


def _numbers(case: Case, rank: int, seen: dict) -> Iterator[Finding]:
    x = torch.zeros(case.world * len(case.known["shards"][0][0]))
    for index in range(len(case.known["gather"])):
        x = torch.tanh(x + torch.cat([case.known["shards"][each][index] for each in range(case.world)]))
    if not isinstance(seen["output"], torch.Tensor):
        yield Finding("values", "the function returns no tensor; return the output of the last unit", rank)
    elif not close(seen["output"], x):
        yield Finding("values", "the output differs from that of the plain forward by "
                                f"up to {largest(seen['output'], x):.3g}", rank, "output")


EXERCISE = Exercise(
    id="forward_prefetch", notebook="10", title="Gather the next unit while this one computes",
    task="Run the forward of all units in order and return the last output. gather(unit) begins an all-gather and returns a handle at "
         "once; handle.wait() returns when the weights are there; compute(unit, x) returns the unit's output and needs them; free(unit) "
         "gives their memory back. Memory is taken when a gather begins. At most two units may be whole at once, and as little time as "
         "possible may be spent in wait(). The clock is counted, so every run takes the same time.",
    signature="def forward_prefetch(units, x, gather, compute, free):",
    points={"values": 2, "order": 1, "bytes": 1, "lifetime": 2, "overlap": 3, "no hang": 1},
    hints=("Draw two lanes, gathers above and computes below. When is the link idle in the plain loop gather, wait, compute, free?",
           "While unit i computes, the link can carry unit i + 1: begin that gather before compute(i), and wait for it after.",
           "Before the loop begin the first gather. In each turn: wait for this unit, begin the next one if there is one, compute, free."),
    cases=cases, judge=judge)
