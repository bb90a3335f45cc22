"""Ledgers built by hand: a GPT-like model of a few layers, one step, times in round milliseconds. No engine, no clock, no chance."""

import math

from fsdp_ref.ledger import Allocation, Category, Event, Lane, Ledger, Shard
from fsdp_ref.viz import Box, Piece, SavedTensor

MS = 1e-3
KIB = 1024


def shards_of(unit: str, name: str, shape: tuple[int, ...], world: int, *, whole: bool = False) -> list[Shard]:
    """What torch.chunk gives each rank of dim 0, padded to the first chunk; or the whole parameter on each."""
    rows = shape[0] if shape else 1
    if whole:
        return [Shard(rank, unit, name, shape, "torch.float32", 0, rows, rows) for rank in range(world)]
    chunk = -(-rows // world)
    return [Shard(r, unit, name, shape, "torch.float32", min(r * chunk, rows), max(0, min(chunk, rows - r * chunk)), chunk)
            for r in range(world)]


def model_shards(world: int, *, layers: int = 3, whole: bool = False) -> list[Shard]:
    rows: list[Shard] = []
    for name, shape in (("embedding.weight", (256, 64)), ("norm.weight", (64,)), ("scale", (2,)), ("head.bias", (5,))):
        rows += shards_of("(root)", name, shape, world, whole=whole)
    for i in range(layers):
        for name, shape in (("attention.query_key_value.weight", (192, 64)), ("attention.out.weight", (64, 64)),
                            ("mlp.up.weight", (257, 64)), ("mlp.down.weight", (64, 257)), ("norm.bias", (6,))):
            rows += shards_of(f"layers.{i}", f"layers.{i}.{name}", shape, world, whole=whole)
    return rows


class _Step:
    """Builds one rank's step, event by event; times in milliseconds."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.sequence = rank, world, 0
        self.events: list[Event] = []
        self.allocations: list[Allocation] = []

    def event(self, lane: Lane, name: str, unit: str, phase: str, start: float, end: float, nbytes: int = 0) -> None:
        group, sequence = (self.world, self.sequence) if nbytes else (1, -1)
        self.sequence += bool(nbytes)
        self.events.append(Event(self.rank, lane, name, unit, phase, start * MS, end * MS, nbytes, group, sequence))

    def alive(self, category: Category, unit: str, nbytes: int, start: float, end: float | None) -> None:
        self.allocations.append(Allocation(self.rank, category, unit, nbytes, start * MS, None if end is None else end * MS))


def zero3_step(rank: int, world: int, layers: int = 3) -> _Step:
    """Gather, compute, free; gather, compute, reduce-scatter, free. Odd ranks come to each gather 1 ms late."""
    step, late = _Step(rank, world), rank % 2
    shard, full = 200 * KIB // world, 200 * KIB
    for unit in [f"layers.{i}" for i in range(layers)] + ["(root)"]:
        step.alive(Category.SHARDED_PARAM, unit, shard, 0, None)
        step.alive(Category.OPTIMIZER, unit, 2 * shard, 0, None)
    at = 1.0 + late
    step.event(Lane.ALL_GATHER, "all-gather", "(root)", "forward", at, 4, full)
    step.event(Lane.WAIT, "all-gather of (root)", "(root)", "forward", at, 4)
    step.alive(Category.UNSHARDED_PARAM, "(root)", full, 4, 40)
    begin = t = 4.0
    for i in range(layers):
        unit = f"layers.{i}"
        step.event(Lane.ALL_GATHER, "all-gather", unit, "forward", t + 0.5 * late - 1 * bool(i), t + 2, full)
        step.event(Lane.WAIT, f"all-gather of {unit}", unit, "forward", t + 0.5, t + 2)
        step.alive(Category.ALL_GATHER, unit, full, t - 1 * bool(i), t + 2.2)
        step.alive(Category.UNSHARDED_PARAM, unit, full, t + 2, t + 5)
        step.event(Lane.COMPUTE, "forward", unit, "forward", t + 2, t + 5)
        step.alive(Category.ACTIVATION, unit, 64 * KIB, t + 3, 5.5 + 5 * layers + 6 * (layers - i))
        t += 5
    step.event(Lane.COMPUTE, "forward", "(root)", "forward", begin, t + 1)
    t = begin_back = t + 1.5
    for i in reversed(range(layers)):
        unit = f"layers.{i}"
        step.event(Lane.ALL_GATHER, "all-gather", unit, "backward", t - 1 * (i + 1 < layers), t + 1, full)
        step.event(Lane.WAIT, f"all-gather of {unit}", unit, "backward", t, t + 1)
        step.alive(Category.UNSHARDED_PARAM, unit, full, t + 1, t + 6)
        step.alive(Category.UNSHARDED_GRAD, unit, full, t + 4, t + 6)
        step.event(Lane.COMPUTE, "backward", unit, "backward", t + 1, t + 6)
        step.alive(Category.REDUCE_SCATTER, unit, full, t + 6, t + 8)
        step.event(Lane.REDUCE_SCATTER, "reduce-scatter", unit, "backward", t + 6, t + 8, full)
        step.alive(Category.SHARDED_GRAD, unit, shard, t + 8, None)
        t += 6
    step.event(Lane.WAIT, "reduce-scatter", "layers.0", "backward", t, t + 2)
    step.event(Lane.COMPUTE, "backward", "(root)", "backward", begin_back, t + 3)
    step.event(Lane.OPTIMIZER, "step", "", "optimizer", t + 3.2, t + 5)
    step.alive(Category.TEMPORARY, "", 200 * KIB, t + 3.2, t + 5)
    return step


def ddp_step(rank: int, world: int, layers: int = 3) -> _Step:
    """Whole parameters, gradients and moments; one all-reduce a unit, two of them in flight together."""
    step, full = _Step(rank, world), 200 * KIB
    for unit in [f"layers.{i}" for i in range(layers)] + ["(root)"]:
        step.alive(Category.UNSHARDED_PARAM, unit, full, 0, None)
        step.alive(Category.OPTIMIZER, unit, 2 * full, 0, None)
    t = 1.0
    for i in range(layers):
        step.event(Lane.COMPUTE, "forward", f"layers.{i}", "forward", t, t + 3)
        step.alive(Category.ACTIVATION, f"layers.{i}", 64 * KIB, t + 1, 2.5 + 3 * layers + 5 * (layers - i))
        t += 3
    step.event(Lane.COMPUTE, "forward", "(root)", "forward", 1, t + 1)
    t = begin = t + 1.5
    for i in reversed(range(layers)):
        unit = f"layers.{i}"
        step.event(Lane.COMPUTE, "backward", unit, "backward", t, t + 5)
        step.alive(Category.UNSHARDED_GRAD, unit, full, t + 2, None)
        step.event(Lane.ALL_REDUCE, "all-reduce", unit, "backward", t + 5 + 0.3 * rank, t + 11, full)
        t += 5
    step.event(Lane.WAIT, "all-reduce", "layers.0", "backward", t, t + 6)
    step.event(Lane.COMPUTE, "backward", "(root)", "backward", begin, t + 6)
    step.event(Lane.OPTIMIZER, "step", "", "optimizer", t + 6.2, t + 11)
    return step


def _ledger(steps: list[_Step], shards: list[Shard]) -> Ledger:
    events = sorted((event for step in steps for event in step.events), key=lambda e: (e.start, e.rank))
    return Ledger(events, [a for step in steps for a in step.allocations], shards, 0.0, max(e.end for e in events) + MS)


def zero3(world: int = 4, layers: int = 3) -> Ledger:
    return _ledger([zero3_step(rank, world, layers) for rank in range(world)], model_shards(world, layers=layers))


def ddp(world: int = 4, layers: int = 3) -> Ledger:
    return _ledger([ddp_step(rank, world, layers) for rank in range(world)], model_shards(world, layers=layers, whole=True))


def checkpoint_tensors() -> list[SavedTensor]:
    """Three tensors saved by 4 ranks and loaded by 3, cut as torch.chunk does."""
    def cut(rows: int, ranks: int, file: str = "") -> tuple[Piece, ...]:
        chunk = -(-rows // ranks)
        return tuple(Piece(r, min(r * chunk, rows), min(r * chunk + chunk, rows), file.format(r)) for r in range(ranks))

    return [SavedTensor(name, rows, size, cut(rows, 4, "rank-{}.safetensors"), cut(rows, 3))
            for name, rows, size in (("layers.0.attention.weight", 96, 512), ("embedding.weight", 257, 256), ("scale", 2, 4))]


def losses(steps: range, *, off: float = 0.0) -> dict[int, float]:
    return {step: 2 + 3 * math.exp(-step / 15) + 0.05 * math.sin(step) + off for step in steps}


def one_f_one_b(stages: int, batches: int) -> list[Box]:
    """1F1B by its rule: a forward takes 1, a backward 2; stage r starts with stages - r forwards, then alternates."""
    orders = []
    for rank in range(stages):
        warm = min(stages - rank, batches)
        order = [("F", i) for i in range(warm)]
        for i in range(batches - warm):
            order += [("B", i), ("F", warm + i)]
        orders.append(order + [("B", i) for i in range(batches - warm, batches)])
    done: dict[tuple[str, int, int], float] = {}
    free, boxes = [0.0] * stages, []
    while any(orders):
        for rank, order in enumerate(orders):
            kind, i = order[0] if order else ("", 0)
            need = ("F", i, rank - 1) if kind == "F" else ("B", i, rank + 1) if rank + 1 < stages else ("F", i, rank)
            if order and (need[2] < 0 or need in done):
                start = max(free[rank], done.get(need, 0.0))
                free[rank] = done[kind, i, rank] = start + (1 if kind == "F" else 2)
                boxes.append(Box(rank, kind, i, start, free[rank], i % 2))
                order.pop(0)
    return boxes
