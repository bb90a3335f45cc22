"""The exercise `ring_reduce_scatter` (notebook 01): reduce-scatter from send and receive, each message to the next rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .observe import Evidence, short, tensor_like
from .pieces import bytes_round_the_ring, round_the_ring
from .report import Verdict, fails, passes
from .words import bound, difference, near


def cases(seed: int) -> Iterator[Case]:
    """Two known cases, then drawn ones: 2 to 4 ranks, other sizes and dtypes."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    known = [(2, 3, torch.float32), (3, 2, torch.float32)]
    drawn = [(4, draw.randint(4, 30), torch.float32), (3, draw.randint(2, 9), torch.int64), (4, 1, torch.float64)]
    for world, size, dtype in known + drawn:
        parts = [(torch.rand(world * size, generator=make) * 200 - 100).to(dtype) + 1 for _ in range(world)]
        yield Case(world, f"{world} ranks, chunks of {size} {short(dtype)}", each=[{"mine": part} for part in parts],
                   known={"parts": parts})


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Values, messages round the ring, bytes."""
    parts = case.known["parts"]
    verdict = _values(parts, evidence.values("result"))
    if not verdict.passed:
        return [verdict]
    size = parts[0].numel() // evidence.world * parts[0].element_size()
    return [verdict, round_the_ring(evidence), bytes_round_the_ring(evidence, size, "chunk")]


def _values(parts: list[torch.Tensor], results: list) -> Verdict:
    world = len(parts)
    chunks = torch.stack(parts).reshape(world, world, -1)                       # [rank][chunk][element]
    sums = chunks.sum(0)
    tolerance = bound(sums, world)
    held = [_name(result, chunks, tolerance) for result in results]
    shown = {"expected": [[_told(rank, (1,) * world)] for rank in range(world)], "actual": [[name] for name in held],
             "pictured": "which chunk, and whose parts are in it"}
    for rank, result in enumerate(results):
        if wrong := tensor_like(result, sums[rank].shape, sums.dtype):
            whole = isinstance(result, torch.Tensor) and result.numel() == sums.numel()
            return fails("values", f"rank {rank}: {wrong}{'; return chunk rank alone' if whole else ''}", rank=rank, **shown)
    for rank, result in enumerate(results):
        if not near(result, sums[rank], tolerance):
            return fails("values", f"rank {rank}: {_mistake(rank, result, chunks, tolerance)}", rank=rank, **shown)
    return passes("values", "each rank holds its chunk, summed over all ranks", **shown)


def _found(result: object, chunks: torch.Tensor, tolerance: float) -> tuple[int, tuple[int, ...]] | None:
    """Which chunk a result is made of, and how often each rank's part is in it."""
    world = chunks.shape[0]
    if not isinstance(result, torch.Tensor) or result.shape != chunks.shape[2:]:
        return None
    counts = sorted(itertools.product(range(3), repeat=world), key=lambda times: sum(abs(each - 1) for each in times))
    for times in counts:
        for chunk in range(world):
            made = sum(parts[chunk] * count for parts, count in zip(chunks, times, strict=True))
            if any(times) and near(result, made, tolerance):
                return chunk, times
    return None


def _told(chunk: int, times: tuple[int, ...]) -> str:
    return f"chunk {chunk}: ranks " + "+".join(str(rank) for rank, count in enumerate(times) for _ in range(count))


def _name(result: object, chunks: torch.Tensor, tolerance: float) -> str:
    found = _found(result, chunks, tolerance)
    return _told(*found) if found else "?"


def _mistake(rank: int, result: torch.Tensor, chunks: torch.Tensor, tolerance: float) -> str:
    found = _found(result, chunks, tolerance)
    if found is None:
        return difference(result, chunks.sum(0)[rank], what="its chunk", tolerance=tolerance, world=chunks.shape[0]).words
    chunk, times = found
    if times == (1,) * len(times):
        return f"it holds the sum of chunk {chunk}; the chunks must start their way one place further, so that chunk {rank} ends here"
    missing = [other for other, count in enumerate(times) if count == 0]
    if missing and sum(times) == 1 and times[rank] == 1:
        return "nothing was added to its own part"
    if missing:
        return (f"the part of rank {missing[0]} is missing in chunk {chunk}; what is sent on must be the sum so far, and every rank must "
                "add its part")
    return f"the part of rank {times.index(2)} is in chunk {chunk} twice"


EXERCISE = Exercise(
    id="ring_reduce_scatter", notebook="01", title="Reduce-scatter round a ring",
    task="Every rank holds a 1-D tensor of world chunks, equally long. Return, on rank r, chunk r summed over all ranks. send(tensor, to) "
         "hands a tensor over and does not wait; recv(source) waits for the next tensor from that rank and returns it. Send one chunk a "
         "step, and only to the next rank.",
    signature="def ring_reduce_scatter(mine, rank, world, send, recv):",
    points={"values": 2, "no hang": 1, "order": 1, "bytes": 1},
    hints=("Follow one chunk. It visits every rank once, and each adds its own part. On which rank must its way end, and so where does it "
           "begin?",
           "What a rank sends on is the sum so far: what has come plus its own part of that chunk.",
           "Chunk c begins on rank c + 1 and ends on rank c. In step s (from 0) rank r sends chunk (r - s - 1) % world and receives chunk "
           "(r - s - 2) % world, to which it adds its own part."),
    cases=cases, judge=judge)
