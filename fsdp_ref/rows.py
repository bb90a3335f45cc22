"""The rows of the ledger: plain values, nothing that runs. ledger.py collects them, everything else reads them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Lane(enum.StrEnum):
    """Where an event is drawn. Events of one lane of one rank do not overlap, except collectives in flight together."""

    COMPUTE = "compute"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    OTHER = "other collective"
    SEND = "send and receive"
    WAIT = "wait"
    OPTIMIZER = "optimizer"
    CHECKPOINT = "checkpoint"

    __hash__ = str.__hash__         # that of an Enum is a Python function, and rows are looked up by the hundred thousand


class Category(enum.StrEnum):
    """What a piece of memory is for (the words of torch's FSDPMemTracker). Members stand in stacking order, bottom first."""

    SHARDED_PARAM = "sharded parameter"
    OPTIMIZER = "optimizer state"
    SHARDED_GRAD = "sharded gradient"
    UNSHARDED_PARAM = "unsharded parameter"
    UNSHARDED_GRAD = "unsharded gradient"
    ALL_GATHER = "all-gather buffer"
    REDUCE_SCATTER = "reduce-scatter buffer"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"

    __hash__ = str.__hash__


def wire_bytes(name: str, nbytes: int, group_size: int) -> float:
    """Bytes each rank sends for a collective `name` of a message of `nbytes`: all of them for a send, 0 for what is no message."""
    if name == "send":
        return float(nbytes)
    rounds = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}.get(name, 0)
    return rounds * nbytes * (group_size - 1) / group_size


@dataclass(slots=True)
class Event:
    """One thing that took time on one rank.

    `bytes` is the whole message (the gathered tensor, the tensor before scattering); `wire_bytes` is what this rank sends with a
    ring. `sequence` counts the collectives of one group, so the same number on two ranks is the same collective. `group_size`
    is 1 for what is no collective; `leader` is the lowest rank of its group, which tells apart the groups of a mesh (-1: not known).
    Times are seconds on the machine's monotonic clock. `start` is when it was asked for; a collective may have stood behind others
    then, and `on_wire` is when its turn came (None: at once, or not known).
    """

    rank: int
    lane: str
    name: str
    unit: str
    phase: str
    start: float
    end: float
    bytes: int = 0
    group_size: int = 1
    sequence: int = -1
    on_wire: float | None = None
    leader: int = -1

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank sends in a ring: (n-1)/n of the message, twice that for an all-reduce (= reduce-scatter + all-gather)."""
        return wire_bytes(self.name, self.bytes, self.group_size)


def meeting(event: Event) -> tuple:
    """What two ranks' events have in common when they are one collective. Its last entry is the size of the group."""
    return event.leader, event.sequence, event.lane, event.unit, event.phase, event.group_size


@dataclass(slots=True)
class Allocation:
    """Bytes that were alive from `start` to `end` (None: still alive when the recording ended)."""

    rank: int
    category: str
    unit: str
    bytes: int
    start: float
    end: float | None = None


@dataclass(slots=True)
class Shard:
    """The rows of one parameter that one rank holds: `rows` real ones from row `offset`, padded to `padded_rows`.

    A replicated parameter has offset 0 and all rows on every rank. A scalar counts as one row. `dim` is the dim that is cut; "rows" are
    slices along it.
    """

    rank: int
    unit: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    rows: int
    padded_rows: int
    dim: int = 0
