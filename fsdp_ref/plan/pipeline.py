"""Pipeline schedules as data: what each rank does in which order; and how long that takes, by an event-driven run.

    F = forward, B = backward (of the inputs alone where weights have their own), W = backward of the weights

    GPipe, 2 ranks, 2 micro-batches    rank 0   F0 F1 .. .. B0 B1           all forwards, then all backwards (arXiv 1811.06965)
                                       rank 1   .. F0 F1 B0 B1
    1F1B                               rank 0   F0 F1 .. B0 B1              p - rank forwards ahead, then in turns (PipeDream-Flush)
    interleaved                        v chunks of the model a rank, so that the first micro-batch comes round v times as fast
                                       (Megatron-LM, arXiv 2104.04473, section 2.2.2); needs micro-batches in multiples of the ranks
    zero-bubble H1                     W is put off into the bubbles; as much memory as 1F1B (Zero Bubble, arXiv 2401.10241, section 2.3)

[Note: two bubbles] "Bubble" has two definitions that differ: bubble / ideal time (Megatron: (p-1)/m) and bubble / total (GPipe and Zero
Bubble: (p-1)/(m+p-1)). A `Run` has both and prints both. With stages of different length, ideal is the work of the busiest rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..errors import ConfigError
from .quantities import at_least, pick, seconds, table, whole
from .strategy import SCHEDULES


@dataclass(frozen=True)
class Op:
    """One box of the picture: `kind` F, B or W, of a micro-batch, in a chunk of the rank's stages."""

    kind: str
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + ("'" * self.chunk)


@dataclass(frozen=True)
class Schedule:
    """`orders[rank]` is what that rank does, in order. Virtual stage number: chunk x ranks + rank."""

    name: str
    ranks: int
    micro_batches: int
    chunks: int
    orders: tuple[tuple[Op, ...], ...]

    @property
    def splits_backward(self) -> bool:
        """Whether W stands apart from B."""
        return self.name == "zero-bubble-h1"


@dataclass(frozen=True)
class Slot:
    """An op that ran on a rank from `start` to `end`."""

    rank: int
    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Run:
    """A schedule with times. `in_flight[rank]`: the most micro-batches (weighed by chunk) whose activations it held at once."""

    schedule: Schedule
    slots: tuple[Slot, ...]
    total: float
    ideal: float
    in_flight: tuple[Fraction, ...]

    @property
    def bubble_over_ideal(self) -> float:
        """Idle time over the busiest rank's work. [Note: two bubbles]"""
        return (self.total - self.ideal) / self.ideal

    @property
    def bubble_over_total(self) -> float:
        """Idle time over the whole. [Note: two bubbles]"""
        return (self.total - self.ideal) / self.total

    def __str__(self) -> str:
        rows = [("rank", "busy", "idle", "micro-batches in flight")]
        for rank in range(self.schedule.ranks):
            busy = sum(slot.end - slot.start for slot in self.slots if slot.rank == rank)
            rows.append((str(rank), seconds(busy), seconds(self.total - busy), f"{float(self.in_flight[rank]):g}"))
        head = (f"{self.schedule.name}, {self.schedule.ranks} ranks, {self.schedule.micro_batches} micro-batches: {seconds(self.total)}; "
                f"bubble / ideal {100 * self.bubble_over_ideal:.1f} %, bubble / total {100 * self.bubble_over_total:.1f} %")
        return f"{head}\n{table(rows, right=(1, 2, 3))}"


def schedule(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The orders of one schedule.

    Raises:
        ConfigError: an unknown name; chunks without interleaving; micro-batches that are no multiple of the ranks where that is needed.
    """
    name = pick("schedule", name, SCHEDULES)
    whole(ranks=ranks, micro_batches=micro_batches, chunks=chunks)
    if name != "interleaved" and chunks > 1:
        raise ConfigError(f"{name} has one chunk a rank and {chunks} were asked for; choose interleaved")
    if name == "interleaved" and micro_batches % ranks:
        raise ConfigError(f"interleaved needs micro-batches in multiples of the {ranks} ranks and there are {micro_batches}; use "
                          f"{-(-micro_batches // ranks) * ranks}")
    if name == "zero-bubble-h1":
        orders = [_zero_bubble(rank, ranks, micro_batches) for rank in range(ranks)]
    elif name == "interleaved":
        orders = [_interleaved(rank, ranks, micro_batches, chunks) for rank in range(ranks)]
    else:
        ahead = [micro_batches if name == "gpipe" else min(micro_batches, ranks - rank - 1) for rank in range(ranks)]
        orders = [_in_turns([Op("F", m) for m in range(micro_batches)], [Op("B", m) for m in range(micro_batches)], first)
                  for first in ahead]
    return Schedule(name, ranks, micro_batches, chunks, tuple(map(tuple, orders)))


def _in_turns(forwards: list[Op], backwards: list[Op], ahead: int) -> list[Op]:
    """`ahead` forwards, then a forward and a backward in turns, then the backwards that are left."""
    pairs = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
    return [*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead:]]


def _interleaved(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Op]:
    """Groups of `ranks` micro-batches go through chunk 0, then chunk 1, ...; backwards through the last chunk first (Megatron-LM)."""
    turns = [(first + member, chunk) for first in range(0, micro_batches, ranks) for chunk in range(chunks) for member in range(ranks)]
    forwards = [Op("F", m, chunk) for m, chunk in turns]
    backwards = [Op("B", m, chunks - 1 - chunk) for m, chunk in turns]
    return _in_turns(forwards, backwards, min(len(turns), 2 * (ranks - rank - 1) + (chunks - 1) * ranks))


def _zero_bubble(rank: int, ranks: int, micro_batches: int) -> list[Op]:
    """1F1B's order, with the W of each micro-batch `rank` backwards later: late ranks fill their last bubble, and all hold p at most."""
    order: list[Op] = []
    for op in _in_turns([Op("F", m) for m in range(micro_batches)], [Op("B", m) for m in range(micro_batches)],
                        min(micro_batches, ranks - rank - 1)):
        order.append(op)
        if op.kind == "B" and op.micro_batch >= rank:
            order.append(Op("W", op.micro_batch - rank))
    return order + [Op("W", m) for m in range(max(0, micro_batches - rank), micro_batches)]


def run(plan: Schedule, forward: float | Sequence[float] = 1.0, backward: float | Sequence[float] = 2.0,
        weight: float | Sequence[float] | None = None, send: float = 0.0) -> Run:
    """Time a schedule.

    Args:
        forward, backward: seconds of a rank's whole stage for one micro-batch, one number or one a rank; a chunk takes 1/v of it.
        weight: seconds of W (zero-bubble only; default half of `backward`, and B is the other half).
        send: seconds between the end of an op and the moment when the next stage's rank has its result.

    Raises:
        ConfigError: times that are negative or not one a rank.
    """
    times = _times(plan, forward, backward, weight)
    at_least(0, 1e9, send=send)
    done: dict[tuple[str, int, int], float] = {}                                        # (kind, micro-batch, virtual stage) -> end
    free, position, slots = [0.0] * plan.ranks, [0] * plan.ranks, []
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(plan.orders):
            while position[rank] < len(order) and (ready := _ready(plan, order[position[rank]], rank, done, send)) is not None:
                op = order[position[rank]]
                start = max(free[rank], ready)
                free[rank] = start + times[op.kind][rank] / plan.chunks
                done[op.kind, op.micro_batch, op.chunk * plan.ranks + rank] = free[rank]
                slots.append(Slot(rank, op, start, free[rank]))
                position[rank] += 1
                moved = True
    if any(place < len(order) for place, order in zip(position, plan.orders, strict=True)):
        raise ConfigError(f"the schedule {plan.name} waits for itself; every op must come after those it needs")
    work = [sum(slot.end - slot.start for slot in slots if slot.rank == rank) for rank in range(plan.ranks)]
    return Run(plan, tuple(slots), max(free), max(work), tuple(_in_flight(plan, slots, rank) for rank in range(plan.ranks)))


def _times(plan: Schedule, forward, backward, weight) -> dict[str, list[float]]:
    def a_rank(name: str, value: float | Sequence[float]) -> list[float]:
        values = [value] * plan.ranks if isinstance(value, int | float) else list(value)
        if len(values) != plan.ranks:
            raise ConfigError(f"{name} has {len(values)} times for {plan.ranks} ranks; give one number, or one a rank")
        at_least(0, 1e9, **{f"{name} of rank {rank}": each for rank, each in enumerate(values)})
        return values

    times = {"F": a_rank("forward", forward), "B": a_rank("backward", backward)}
    if plan.splits_backward:
        times["W"] = a_rank("weight", weight) if weight is not None else [each / 2 for each in times["B"]]
        times["B"] = [max(0.0, both - own) for both, own in zip(times["B"], times["W"], strict=True)]
    return times


def _ready(plan: Schedule, op: Op, rank: int, done: dict, send: float) -> float | None:
    """When an op's inputs are there; None if they are not known yet."""
    stage, last = op.chunk * plan.ranks + rank, plan.ranks * plan.chunks - 1
    needs: list[tuple[tuple[str, int, int], float]] = []
    if op.kind == "F" and stage > 0:
        needs.append((("F", op.micro_batch, stage - 1), send if plan.ranks > 1 else 0.0))
    if op.kind == "B":
        needs.append((("F", op.micro_batch, stage), 0.0))
        if stage < last:
            needs.append((("B", op.micro_batch, stage + 1), send if plan.ranks > 1 else 0.0))
    if op.kind == "W":
        needs.append((("B", op.micro_batch, stage), 0.0))
    if any(key not in done for key, _ in needs):
        return None
    return max((done[key] + wait for key, wait in needs), default=0.0)


def _in_flight(plan: Schedule, slots: list[Slot], rank: int) -> Fraction:
    """The most activations held at once: from the begin of a forward to the end of what reads them last."""
    last = "W" if plan.splits_backward else "B"
    held = peak = 0
    for slot in (slot for slot in slots if slot.rank == rank):                          # a rank's slots are in order of time
        held += slot.op.kind == "F"
        peak = max(peak, held)
        held -= slot.op.kind == last
    return Fraction(peak, plan.chunks)
