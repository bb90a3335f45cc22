"""The exercise `clip_grad_norm`: one norm over all shards of all ranks, one number on the wire, the same scaling everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from .finding import Finding, close, largest

PROPERTIES = ("values", "order", "bytes", "no hang")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
TOLERANCE = 1e-5                             # of a float32 sum in any order, and of the 1e-6 that torch adds to the norm


def cases(seed: int) -> list[dict]:
    """`real`: for each rank how many elements of each parameter are its own; `padded`: the length of every shard."""
    found = [{"world": 2, "real": [[4, 3], [4, 3]], "padded": [4, 3], "order": 2.0, "share": 0.5, "seed": 31},
             {"world": 3, "real": [[5, 1, 2], [5, 0, 2], [2, 0, 1]], "padded": [5, 1, 2], "order": 2.0, "share": 0.25, "seed": seed},
             {"world": 3, "real": [[3, 1], [0, 1], [0, 0]], "padded": [3, 1], "order": math.inf, "share": 0.5, "seed": seed + 1},
             {"world": 2, "real": [[2, 1], [1, 0]], "padded": [2, 1], "order": 1.0, "share": 3.0, "seed": seed + 2}]
    return [{**case, "limit": limit(case)} for case in found]


def shards_of(case: dict, rank: int) -> list[torch.Tensor]:
    """This rank's gradient shards; what is padding holds large numbers, as memory that nobody cleared does."""
    found = []
    for index, (real, padded) in enumerate(zip(case["real"][rank], case["padded"], strict=True)):
        random = torch.Generator().manual_seed(case["seed"] + 100 * rank + index)
        shard = torch.randn(padded, generator=random) * (rank + 1)
        shard[real:] = 100.0
        found.append(shard)
    return found


def norm(case: dict, ranks: list[int], order: float | None = None, padding: bool = False) -> float:
    """The norm over what some ranks hold."""
    pieces = [shard[: len(shard) if padding else real].double() for rank in ranks
              for shard, real in zip(shards_of(case, rank), case["real"][rank], strict=True)]
    return float(torch.linalg.vector_norm(torch.cat(pieces), order or case["order"])) if sum(map(len, pieces)) else 0.0


def limit(case: dict) -> float:
    """`max_norm`: a share of the norm, so that it clips when the share is below one."""
    return case["share"] * norm(case, list(range(case["world"])))


def run(student, case: dict, rank: int, world: int) -> dict:
    """One call on this rank."""
    shards, log = shards_of(case, rank), []

    def all_reduce(tensor: torch.Tensor, op: str = "sum") -> None:
        """The sum (or maximum) over the ranks, in place."""
        if op not in OPS:
            raise ValueError(f"all_reduce has no operation {op!r}; choose sum or max")
        log.append({"op": op, "bytes": tensor.numel() * tensor.element_size()})
        dist.all_reduce(tensor, OPS[op])

    returned = student(shards, list(case["real"][rank]), case["limit"], case["order"], all_reduce)
    try:
        total = float(returned)
    except (TypeError, ValueError):
        total = None
    return {"norm": total, "shards": [shard.detach() for shard in shards], "log": log}


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    found: list[Finding] = []
    for look in (_calls, _norm, _scaling):
        for rank, seen in enumerate(evidence):
            found += look(case, rank, seen)
    return found


def _calls(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    sent, everyone = sum(row["bytes"] for row in seen["log"]), list(range(case["world"]))
    if not seen["log"]:
        yield Finding("order", "no all-reduce was called: each rank clips by the norm of its own shards, so the ranks scale differently", rank)
    elif sent > 8 and len(seen["log"]) == 1:
        yield Finding("bytes", f"{sent} bytes are all-reduced where one number (at most 8 bytes) is enough: gradients need not travel to know "
                      "their norm", rank)
    elif len(seen["log"]) > 1:
        yield Finding("order", f"{len(seen['log'])} all-reduces ({sent} bytes) where one is enough: add up what this rank holds first", rank)
    elif math.isinf(case["order"]) and seen["log"][0]["op"] != "max" and not _same(seen["norm"], norm(case, everyone, 2.0)):
        yield Finding("values", "the infinity norm is the largest absolute value of all ranks, and the all-reduce was a sum", rank)
    elif not math.isinf(case["order"]) and seen["log"][0]["op"] != "sum":
        yield Finding("values", f"the norm of order {case['order']:g} adds up over the ranks, and the all-reduce was a maximum", rank)


def _norm(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    everyone, got = list(range(case["world"])), seen["norm"]
    right = norm(case, everyone)
    if got is None:
        yield Finding("values", "the function returns no number; return the norm before clipping", rank)
    elif not _same(got, right):
        yield Finding("values", _why(case, rank, got, right), rank, "norm")


def _why(case: dict, rank: int, got: float, right: float) -> str:
    everyone, world, order = list(range(case["world"])), case["world"], case["order"]
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
        "the norm after clipping; return the one before": min(right, case["limit"]),
    }
    told = next((words for words, value in guesses.items() if _same(got, value)), None)
    return f"{got:.6g} is {told} ({right:.6g} is right)" if told else f"the norm is {right:.6g}, and {got:.6g} was returned"


def _scaling(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    right_norm = norm(case, list(range(case["world"])))
    factor = min(1.0, case["limit"] / right_norm)
    for index, (got, before, real) in enumerate(zip(seen["shards"], shards_of(case, rank), case["real"][rank], strict=True)):
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
