"""The exercise `ddp_buckets` (notebook 04): gradients averaged in buckets, from the last parameter to the first."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .gradients import judge_gradients, most_bytes
from .observe import Evidence
from .report import Verdict, fails, passes


def cases(seed: int) -> Iterator[Case]:
    """A case small enough for paper; then drawn shapes, among them a gradient larger than a bucket."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    yield _case(2, [(4,), (2, 3), (5,), (3,)], 32, make)
    shapes = [(draw.randint(1, 6), draw.randint(1, 6)) for _ in range(7)]
    yield _case(3, [*shapes[:3], (9, 8), *shapes[3:], (1,)], 4 * draw.randint(30, 40), make)
    yield _case(4, [(draw.randint(1, 9),) for _ in range(9)], 40, make)


def _case(world: int, shapes: list[tuple], limit: int, make: torch.Generator) -> Case:
    grads = [[torch.randn(shape, generator=make) for shape in shapes] for _ in range(world)]
    return Case(world, f"{world} ranks, {len(shapes)} gradients, buckets of {limit} bytes", shared={"bucket_bytes": limit},
                each=[{"grads": mine} for mine in grads], known={"grads": grads, "limit": limit})


def buckets(sizes: list[int], limit: int) -> list[list[int]]:
    """Which parameters go together: from the last to the first, a new bucket whenever the next would not fit."""
    found: list[list[int]] = []
    room = -1
    for index in reversed(range(len(sizes))):
        if sizes[index] > room:
            found.append([])
            room = max(limit, sizes[index])
        found[-1].append(index)
        room -= sizes[index]
    return found


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values; which calls in which order; the largest buffer; bytes."""
    grads, limit, world = case.known["grads"], case.known["limit"], case.world
    expected = [sum(column) / world for column in zip(*grads, strict=True)]
    sizes = [4 * each.numel() for each in grads[0]]
    wanted = [sum(sizes[index] for index in bucket) for bucket in buckets(sizes, limit)]
    values = judge_gradients(evidence, expected, grads, _mistakes(grads, expected, buckets(sizes, limit)))
    if not values.passed:
        return [values]
    most = 2 * (world - 1) * sum(sizes) // world + 4 * len(wanted)
    return [values, _order(evidence, sizes, wanted, limit), _largest(evidence, max(wanted)),
            most_bytes(evidence, most, "each gradient travels once, and nothing else does")]


def _mistakes(grads: list, expected: list[torch.Tensor], together: list[list[int]]) -> dict[str, list[list[torch.Tensor]]]:
    """Every gradient copied from the beginning of its bucket: the place was not moved on."""
    made = list(expected)
    for bucket in together:
        flat = torch.cat([expected[index].reshape(-1) for index in bucket])
        for index in bucket:
            made[index] = flat[:expected[index].numel()].reshape(expected[index].shape)
    return {"the beginning of its bucket; move on by the size of each gradient when you copy back": [made] * len(grads)}


def _order(evidence: Evidence, sizes: list[int], wanted: list[int], limit: int) -> Verdict:
    want = [f"{size} B" for size in wanted]
    calls = [[f"{event.nbytes} B" for event in evidence.of(rank) if event.nbytes] for rank in range(evidence.world)]
    shown = {"expected": [want] * evidence.world, "actual": calls, "pictured": "calls in order"}
    for rank, mine in enumerate(calls):
        if mine == want:
            continue
        sent = [int(each.split()[0]) for each in mine]
        return fails("order", f"rank {rank}: {_mistake(sent, sizes, wanted, limit)}", rank=rank, **shown)
    return passes("order", "one call a bucket, from the last gradient to the first", **shown)


def _mistake(sent: list[int], sizes: list[int], wanted: list[int], limit: int) -> str:
    if len(wanted) > 1 and len(sent) == len(sizes) > len(wanted):
        return f"{len(sent)} calls, one a gradient; {len(wanted)} buckets are enough"
    if len(sent) == 1:
        return f"one call with everything; nothing could be sent before backward ends. Buckets hold at most {limit} bytes"
    forward = buckets(sizes[::-1], limit)
    if sent == [sum(sizes[::-1][index] for index in bucket) for bucket in forward]:
        return "the buckets begin with the first gradient; backward makes the last one first"
    if len(sent) == len(wanted) and sent == wanted[::-1]:
        return "the buckets are sent from the last to the first; the one that is full first must go first"
    large = next((size for size in sent if size > limit and size not in sizes), None)
    if large is not None:
        return f"one bucket has {large} bytes, and the limit is {limit}: begin a new one before the next gradient would not fit"
    return f"{len(sent)} calls of {', '.join(map(str, sent[:8]))} bytes; fill each bucket before you begin the next"


def _largest(evidence: Evidence, most: int) -> Verdict:
    for rank, largest in enumerate(evidence.values("largest")):
        if not isinstance(largest, int) or largest > most:
            return fails("lifetime", f"rank {rank} makes a tensor of {largest} bytes; none need be larger than the largest bucket, {most}",
                         rank=rank)
    return passes("lifetime", "no tensor is larger than the largest bucket")


EXERCISE = Exercise(
    id="ddp_buckets", notebook="04", title="Gradients averaged in buckets",
    task="Average the gradients over all ranks, in place. Pack them into flat buckets and call all_reduce once a bucket. Go from the last "
         "gradient to the first, as backward makes them; begin a new bucket when the next gradient would bring it above bucket_bytes. A "
         "gradient that is larger than that has a bucket of its own.",
    signature="def ddp_buckets(grads, bucket_bytes, rank, world, dist):",
    points={"values": 2, "order": 1, "lifetime": 1, "bytes": 1, "no hang": 1},
    hints=("First decide on paper which gradients go together: write the sizes from the last to the first, and a line wherever the next "
           "would not fit.",
           "A bucket is made by joining flattened gradients. After its all-reduce each gradient is a slice of it: keep count of where you "
           "are.",
           "Do not forget the last bucket when the loop ends, the division by the number of ranks, and that a list element that you "
           "replace is not a tensor that you changed: copy into it."),
    cases=cases, judge=judge)
