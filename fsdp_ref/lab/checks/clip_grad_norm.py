"""The exercise `clip_grad_norm` (notebook 09): one norm over all ranks' shards, one number on the wire, the same scaling everywhere."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator

import torch

from .exercise import Case, Exercise
from .finding import Finding, careful, close, largest, verdicts
from .observe import Evidence
from .report import Verdict

TOLERANCE = 1e-5                             # of a float32 sum in any order, and of the 1e-6 that torch adds to the norm
GOOD = {"values": "the norm is that of all shards, and every rank scales by the same factor",
        "sharding": "no gradient leaves its rank",
        "order": "one all-reduce",
        "bytes": "one number travels"}


def cases(seed: int) -> Iterator[Case]:
    """Even shards; then uneven and empty ones with padding, the infinity norm, and a norm that is below the limit."""
    draw = random.Random(seed)
    yield case_of([[4, 3], [4, 3]], [4, 3], 2.0, 0.5, 31)
    yield case_of([[5, 1, 2], [5, 0, 2], [2, 0, 1]], [5, 1, 2], 2.0, 0.25, seed)
    yield case_of([[3, 1], [0, 1], [0, 0]], [3, 1], math.inf, 0.5, seed + 1)
    long = draw.randint(4, 9)
    yield case_of([[long, 2], [long, 2], [long, 0], [draw.randint(0, long - 1), 0]], [long, 2], 3.0, 0.4, seed + 2)
    yield case_of([[2, 1], [1, 0]], [2, 1], 1.0, 3.0, seed + 3)


def case_of(real: list[list[int]], padded: list[int], order: float, share: float, seed: int) -> Case:
    """`real`: for each rank how many elements of each shard are its own; the others are padding and hold large numbers, as memory that
    nobody cleared does. `share`: max_norm as a share of the norm."""
    make, world = torch.Generator().manual_seed(seed), len(real)
    shards = [[torch.randn(length, generator=make) * (rank + 1) for length in padded] for rank in range(world)]
    for mine, counts in zip(shards, real, strict=True):
        for shard, count in zip(mine, counts, strict=True):
            shard[count:] = 100.0
    known = {"shards": shards, "real": real, "order": order}
    case = Case(world, f"{world} ranks, shards of {padded} elements of which {real} are real, norm of order {order:g}", known=known)
    known["limit"] = share * norm(case, range(world))
    case.shared.update(max_norm=known["limit"], norm_type=order)
    case.each.extend({"shards": mine, "real": counts} for mine, counts in zip(shards, real, strict=True))
    return case


def norm(case: Case, ranks: Iterable[int], order: float | None = None, padding: bool = False) -> float:
    """The norm over what some ranks hold."""
    pieces = [shard[: len(shard) if padding else real].double() for rank in ranks
              for shard, real in zip(case.known["shards"][rank], case.known["real"][rank], strict=True)]
    return float(torch.linalg.vector_norm(torch.cat(pieces), order or case.known["order"])) if sum(map(len, pieces)) else 0.0


@careful
def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """What is wrong, the cause before what follows from it."""
    found = [finding for look in (_calls, _norm, _scaling) for rank, seen in enumerate(evidence.values())
             for finding in look(case, evidence, rank, seen)]
    return verdicts(found, GOOD)


def _calls(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    calls, everyone, largest_order = evidence.of(rank), range(case.world), math.isinf(case.known["order"])
    sent = sum(event.nbytes for event in calls)
    if not calls:
        yield Finding("order", "no all-reduce is called: each rank clips by the norm of its own shards, so the "
                               "ranks scale differently", rank)
    elif max(event.numel for event in calls) > len(case.known["real"][rank]):
        yield Finding("sharding", f"a message of {max(event.numel for event in calls)} numbers is sent where one is enough: gradients need "
                                  "not travel to know their norm", rank)
    elif len(calls) > 1:
        yield Finding("order", f"{len(calls)} messages ({sent} bytes) where one all-reduce is enough: add up what this "
                               "rank holds first", rank)
    elif largest_order and calls[0].reduce != "max" and not _same(seen["norm"], norm(case, everyone, 2.0)):
        yield Finding("values", "the infinity norm is the largest absolute value of all ranks, and the all-reduce is a sum", rank)
    elif not largest_order and calls[0].reduce != "sum":
        yield Finding("values", f"the norm of order {case.known['order']:g} adds up over the ranks, and the all-reduce is a "
                                f"{calls[0].reduce}",
                      rank)
    if sent > 8:
        yield Finding("bytes", f"{sent} bytes are sent where one number, at most 8 bytes, is enough: add up over the parameters before the "
                      "message", rank)


def _norm(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    everyone, got = range(case.world), seen["norm"]
    right = norm(case, everyone)
    if got is None:
        yield Finding("values", "the function returns no number; return the norm before clipping", rank)
    elif not _same(got, right):
        yield Finding("values", _why(case, rank, got, right), rank, "norm")


def _why(case: Case, rank: int, got: float, right: float) -> str:
    everyone, world, order = range(case.world), case.world, case.known["order"]
    alone = [norm(case, [each]) for each in everyone]
    finite = not math.isinf(order)
    guesses = {
        "the norm of this rank's own shards": alone[rank],
        "the norm with the padding counted": norm(case, everyone, padding=True),
        "the sum of the ranks' norms; add up the powers, and take the root once at the end": sum(alone),
        f"{world ** (-1 / order) if finite else 0:.3g} times the reference: the powers were averaged over the ranks, not summed":
            right * world ** (-1 / order) if finite else math.nan,
        "the sum of the powers: the root was not taken": right**order if finite else math.nan,
        "the norm of order 2, whatever `norm_type` says": norm(case, everyone, 2.0),
        "the norm after clipping; return the one before": min(right, case.known["limit"]),
    }
    told = next((words for words, value in guesses.items() if _same(got, value)), None)
    return f"{got:.6g} is {told}" if told else f"{got:.6g} is not the norm of all ranks' real elements"


def _scaling(case: Case, evidence: Evidence, rank: int, seen: dict) -> Iterator[Finding]:
    right_norm = norm(case, range(case.world))
    factor = min(1.0, case.known["limit"] / right_norm)
    for index, (got, before, real) in enumerate(zip(seen["shards"], case.known["shards"][rank], case.known["real"][rank], strict=True)):
        got, before, name = got[:real], before[:real], f"parameter {index}"
        if got.shape != before.shape:
            yield Finding("values", f"the shard of {name} has the shape {tuple(got.shape)}; clip it in place, as it is", rank, name)
        elif real and largest(got, factor * before) > TOLERANCE * float(before.abs().max()):
            if close(got, before):
                words = f"the gradients are not scaled in place; they should be {factor:.3g} times what they were"
            elif factor == 1.0:
                words = f"gradients are scaled up to max_norm although their norm ({right_norm:.3g}) is below it; the factor is at most 1"
            else:
                words = f"the gradients are scaled by another factor than {factor:.6g}"
            yield Finding("values", words, rank, name)


def _same(got: float | None, right: float) -> bool:
    return got is not None and math.isclose(got, right, rel_tol=TOLERANCE, abs_tol=1e-12)


EXERCISE = Exercise(
    id="clip_grad_norm", notebook="09", title="One norm over all shards",
    task="shards is a list of this rank's gradient shards, real[i] how many leading elements of shards[i] are its own: the rest is "
         "padding, and may hold anything. Scale all shards in place by min(1, max_norm / norm), where norm is that of all ranks' real "
         "elements together, and return the norm before scaling. norm_type is its order: 2, another number, or infinity. "
         "all_reduce(tensor, op) puts the 'sum' or 'max' over the ranks into tensor.",
    signature="def clip_grad_norm(shards, real, max_norm, norm_type, all_reduce):",
    points={"values": 3, "sharding": 1, "order": 1, "bytes": 1, "no hang": 1},
    hints=("Which numbers can be added up over the ranks: norms, or something that you take the root of later?",
           "For order p each rank sums |x|**p over its real elements; one all-reduce sums that; the p-th root comes last. For infinity it "
           "is a maximum all the way.",
           "A rank may hold no element at all: its part is 0, and it still calls the all-reduce. Multiply in place, so that the tensors in "
           "the list change."),
    cases=cases, judge=judge)
