"""The exercise `shard_and_pad` (notebook 06): cut a weight by rows, fill the last shards up, put the weight together again."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch

from .exercise import Case, Exercise
from .observe import Evidence, short
from .report import Verdict, fails, passes
from .words import difference

ROOM = 64


def cases(seed: int) -> Iterator[Case]:
    """Rows that do not divide, an empty shard, fewer rows than ranks, one dimension, other dtypes; drawn shapes."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    shapes = [(4, (10, 6), torch.float32), (4, (5, 8), torch.float32), (2, (8, 5), torch.float32),
              (3, (draw.randint(13, 23), 7), torch.float32),
              (4, (draw.choice((2, 3)), 4, 9), torch.bfloat16), (3, (draw.randint(34, 50),), torch.float64)]
    for world, shape, dtype in shapes:
        weight = (torch.rand(*shape, generator=make) + 0.5).to(dtype)
        yield Case(world, f"{world} ranks, shape {list(shape)}, {short(dtype)}", {"weight": weight}, known={"weight": weight})


def cut(weight: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Rank r's shard with its padding."""
    each = -(-len(weight) // world)
    shard = weight.new_zeros(each, *weight.shape[1:])
    mine = weight[rank * each:(rank + 1) * each]
    shard[:len(mine)] = mine
    return shard


def judge(case: Case, evidence: Evidence) -> list[Verdict]:
    """Shards and whole weights, then memory, calls, bytes."""
    weight, world = case.known["weight"], case.world
    for rank, told in enumerate(evidence.values("returned")):
        if told:
            return [fails("values", f"rank {rank} returned {told}; return two things: the shard and the function unshard", rank=rank)]
    values = _shards(weight, evidence) or _wholes(weight, evidence)
    if values is not None:
        return [values]
    shard = cut(weight, world, 0)
    size = shard.numel() * shard.element_size()
    shown = _drawn(weight, world, [each[:] for each in _held(weight, evidence)])
    return [passes("values", "every shard has its rows and zeros after them; unshard() is the weight, bit for bit", **shown),
            _sharding(evidence, size), _lifetime(evidence, size), _order(evidence), _bytes(evidence, size)]


def _shards(weight: torch.Tensor, evidence: Evidence) -> Verdict | None:
    """What is wrong with the shards."""
    world, rows = evidence.world, len(weight)
    shards = evidence.values("shard")
    expected = [cut(weight, world, rank) for rank in range(world)]
    shown = _drawn(weight, world, _held(weight, evidence))
    for rank, (shard, right) in enumerate(zip(shards, expected, strict=True)):
        if not isinstance(shard, torch.Tensor) or shard.shape != right.shape:
            words = _misshapen(weight, shards, expected, rank)
        elif (words := _padding(weight, shard, right, rank, world)) == "":
            mistakes = {"cut as evenly as it goes; FSDP gives ceil(rows / N) rows to each rank as long as there are any":
                        _even(weight, world, rank),
                        "dealt out like cards, every N-th row; a rank's rows are neighbours": _filled(weight[rank::world], right)}
            wrong = difference(shard, right, what=f"rank {rank}'s shard", unlike=mistakes)
            words = wrong.words if wrong else ""
        if words:
            return fails("values", f"{words} ({rows} rows on {world} ranks)", rank=rank, **shown)
    return None


def _misshapen(weight: torch.Tensor, shards: list, expected: list[torch.Tensor], rank: int) -> str:
    """Words for a shard of another shape."""
    rows, world = len(weight), len(shards)
    shard, each = shards[rank], len(expected[rank])
    if not isinstance(shard, torch.Tensor):
        return f"rank {rank}'s shard is no tensor"
    if shard.dim() == 1 and weight.dim() > 1:
        return f"rank {rank}'s shard is flat: it was cut by elements, not rows; its shape must be {list(expected[rank].shape)}"
    lengths = [len(found) if isinstance(found, torch.Tensor) and found.dim() else 0 for found in shards]
    if lengths == [rows // world] * world:
        return f"every shard has {rows // world} rows, so the last rows are on no rank; round up: {each} rows"
    if lengths == [max(0, min(each, rows - r * each)) for r in range(world)]:
        return f"rank {rank}'s shard has {lengths[rank]} rows and no padding; fill it up with zeros to {each} rows"
    return f"rank {rank}'s shard has shape {list(shard.shape)} and must have {list(expected[rank].shape)}"


def _padding(weight: torch.Tensor, shard: torch.Tensor, right: torch.Tensor, rank: int, world: int) -> str:
    """Words when the rows are right and what follows them is not zero."""
    real = max(0, min(len(right), len(weight) - rank * len(right)))
    if shard.dtype == right.dtype and torch.equal(shard[:real], right[:real]) and bool((shard[real:] != 0).any()):
        return (f"rank {rank}'s {len(right) - real} rows of padding are wrong: the padding is not zero, and a norm or an optimizer would "
                "count it")
    return ""


def _even(weight: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    base, more = divmod(len(weight), world)
    begin = rank * base + min(rank, more)
    return _filled(weight[begin:begin + base + (rank < more)], cut(weight, world, rank))


def _filled(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(like)
    made[:len(rows)] = rows[:len(made)]
    return made


def _wholes(weight: torch.Tensor, evidence: Evidence) -> Verdict | None:
    """What is wrong with the whole weights."""
    padded = torch.cat([cut(weight, evidence.world, rank) for rank in range(evidence.world)])
    for number in (0, 1):
        for rank, wholes in enumerate(evidence.values("wholes")):
            what = f"on rank {rank}, unshard() number {number + 1}"
            found = wholes[number]
            if len(padded) > len(weight) and isinstance(found, torch.Tensor) and found.shape == padded.shape:
                return fails("values", f"{what} still has its padding: {len(padded)} rows instead of {len(weight)}", rank=rank,
                             step=number + 1)
            if wrong := difference(found, weight, what=what):
                return fails("values", wrong.words, rank=rank, step=number + 1)
    return None


def _sharding(evidence: Evidence, size: int) -> Verdict:
    world = evidence.world
    for rank, alive in enumerate(evidence.values("alive")):
        if alive[0] <= size + ROOM:
            continue
        storage = evidence.values("storage")[rank]
        words = ("the shard is a view of the whole weight and keeps all of its memory; give it memory of its own, with clone()"
                 if storage > size + ROOM else
                 "your unshard keeps the whole weight" if not evidence.of(rank) else "more than the shard is kept")
        return fails("sharding", f"{words}: {alive[0]} bytes are alive on rank {rank}, and a shard has {size}", rank=rank,
                     expected=[["shard" if place == r else "" for place in range(world)] for r in range(world)],
                     actual=[["shard"] * world if evidence.values("alive")[r][0] > size + ROOM else
                             ["shard" if place == r else "" for place in range(world)] for r in range(world)],
                     pictured="which shards' memory is alive on a rank")
    return passes("sharding", f"what is left is the shard, {size} bytes of {size * world}")


def _lifetime(evidence: Evidence, size: int) -> Verdict:
    for rank, alive in enumerate(evidence.values("alive")):
        for number, later in enumerate(alive[1:], 1):
            if later > max(alive[0], size) + ROOM:
                return fails("lifetime", f"{later - alive[0]} bytes of the whole weight are still alive after nobody holds it; return it "
                             "and keep no other reference", rank=rank, step=number)
    return passes("lifetime", "a whole weight is gone when nobody holds it")


def _order(evidence: Evidence) -> Verdict:
    for rank in range(evidence.world):
        for step, most in (("", 0), ("unshard 1", 1), ("unshard 2", 1)):
            calls = [event for event in evidence.of(rank, step=step) if event.kind != "barrier"]
            if len(calls) != most:
                when = f"in {step.replace(' ', '() number ')}" if step else "while it cuts"
                return fails("order", f"rank {rank} calls {len(calls)} collectives {when}; {most} is right", rank=rank, step=step or None)
    return passes("order", "one collective in each unshard(), none before")


def _bytes(evidence: Evidence, size: int) -> Verdict:
    most = (evidence.world - 1) * size
    for rank in range(evidence.world):
        for number in (1, 2):
            if (sent := evidence.sent(rank, f"unshard {number}")) > most:
                why = "; all-reduce also adds, an all-gather would do" if evidence.of(rank, "all_reduce") else ""
                return fails("bytes", f"rank {rank} sends {sent} bytes in an unshard() and needs no more than {most}{why}", rank=rank)
    return passes("bytes", f"no rank sends more than {most} bytes in an unshard()")


def _held(weight: torch.Tensor, evidence: Evidence) -> list[list[str]]:
    """For each rank, what lies in each row of its shard: a row's number, `pad`, or `?`."""
    return [_rows(weight, shard) for shard in evidence.values("shard")]


def _rows(weight: torch.Tensor, shard: object) -> list[str]:
    if not isinstance(shard, torch.Tensor) or shard.shape[1:] != weight.shape[1:] or shard.dtype != weight.dtype or not shard.dim():
        return ["?"]
    found = []
    for row in shard:
        same = [number for number in range(len(weight)) if torch.equal(weight[number], row)]
        found.append(f"row {same[0]}" if same else "?" if bool(row.any()) else "pad")
    return found


def _drawn(weight: torch.Tensor, world: int, actual: list[list[str]]) -> dict:
    expected = [_rows(weight, cut(weight, world, rank)) for rank in range(world)]
    return {"expected": expected, "actual": actual, "pictured": "rows and padding in each shard"}


EXERCISE = Exercise(
    id="shard_and_pad", notebook="06", title="Shard, pad, and put together again",
    task="Cut a weight by rows, ceil(rows / N) to a rank, and fill a shard that is too short up with rows of zeros. Return the shard, and "
         "a function unshard() that gathers the whole weight in its true shape. The whole weight is thrown away in between.",
    signature="def shard_and_pad(weight, rank, world):",
    points={"values": 3, "sharding": 2, "lifetime": 1, "order": 1, "bytes": 2, "no hang": 1},
    hints=("Write down by hand who gets which rows when 5 rows go to 4 ranks. Which rank has nothing but padding?",
           "Make a tensor of zeros with ceil(rows / N) rows, and copy your rows into its beginning. unshard() gathers all shards, one "
           "after the other, and cuts the padding off the end.",
           "Round up: -(-rows // world) rows each. Your rows are weight[rank * each:(rank + 1) * each], which may be none. In unshard: "
           "dist.all_gather_into_tensor into a tensor with room for world * each rows, of which you return the first `rows`."),
    cases=cases, judge=judge)
