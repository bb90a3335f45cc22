"""What is known of a run: what every rank returned, how it ended, and every message it sent, as the judge saw it pass.

Values and memory figures come from the ranks themselves; messages, ends and waits are seen from outside. This module only holds and counts;
it must never run anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

# What of the larger tensor a rank sends in a ring, as a multiple of (n - 1) / n
RING = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


@dataclass(frozen=True)
class Event:
    """One thing a rank did on the wire. `numel` and `nbytes` are those of the tensor it gave; `step` is its last mark before."""

    rank: int
    kind: str                       # send, recv, mark, or a collective: all_reduce, all_gather, reduce_scatter, broadcast, barrier, ...
    step: str = ""
    dtype: str = ""
    numel: int = 0
    nbytes: int = 0
    peer: int | None = None         # of send and recv: the other; of broadcast and others: the root
    reduce: str = ""

    def wire_bytes(self, world: int) -> int:
        """Bytes this rank sends: what it handed over, or, for a collective, what the ring algorithm sends."""
        if self.kind in ("recv", "mark", "barrier"):
            return 0
        whole = self.nbytes * world if self.kind == "all_gather" else self.nbytes
        return RING[self.kind] * whole * (world - 1) // world if self.kind in RING else self.nbytes

    def __str__(self) -> str:
        to = {"send": f" to {self.peer}", "recv": f" from {self.peer}"}.get(self.kind, "" if self.peer is None else f" root {self.peer}")
        size = f" {self.numel}" if self.numel else ""
        return f"{self.kind.replace('_', '-')}{to}{size}{f' ({self.reduce})' if self.reduce else ''}"


@dataclass
class RankEvidence:
    """What one rank left behind."""

    ready: bool = False                         # its walls stand, and the answer may begin
    value: object = None                        # what the harness returned: None, numbers, text, lists, dicts, tensors
    returned: bool = False
    error: dict | None = None                   # type, text, line, code
    status: int | None = None                   # how its process ended when nobody killed it
    waits: str = ""                             # what it waited for when the run was stopped
    output: str = ""
    denied: list[str] = field(default_factory=list)
    threads: int = 0                            # threads of the submission's that were left
    at: str = ""                                # the line of the answer where it was when it was stopped, if it is known


@dataclass(frozen=True)
class Failure:
    """Why a run did not come to its end. `kind`: mismatch, deadlock, time, exit, error, memory, flood, message."""

    kind: str
    words: str
    rank: int | None = None


@dataclass
class Evidence:
    """One case's run. `failure` is None when every rank returned."""

    world: int
    ranks: list[RankEvidence]
    events: list[Event] = field(default_factory=list)
    failure: Failure | None = None
    files: dict[str, bytes] = field(default_factory=dict)       # what the ranks wrote: rank-0/... or shared/... -> bytes

    def values(self, key: str | None = None) -> list:
        """What each rank returned; with `key`, that entry of it (None where there is none)."""
        found = [rank.value for rank in self.ranks]
        return found if key is None else [value.get(key) if isinstance(value, dict) else None for value in found]

    def of(self, rank: int, *kinds: str, step: str | None = None) -> list[Event]:
        """This rank's messages in order, without marks; of these kinds only, in this step only."""
        return [event for event in self.events if event.rank == rank and event.kind != "mark" and (not kinds or event.kind in kinds)
                and (step is None or event.step == step)]

    def sent(self, rank: int, step: str | None = None) -> int:
        """Bytes this rank sent."""
        return sum(event.wire_bytes(self.world) for event in self.of(rank, step=step))

    def kinds(self, rank: int, step: str | None = None) -> list[str]:
        """The kinds of this rank's messages, in order."""
        return [event.kind for event in self.of(rank, step=step)]


def tensor_like(value: object, shape: Iterable[int], dtype: torch.dtype) -> str:
    """Empty when `value` is a tensor of this shape and dtype, else words that say what it is instead."""
    if value is None:
        return "it returned nothing; return the tensor"
    if not isinstance(value, torch.Tensor):
        name = value.get("other", "dict") if isinstance(value, dict) else type(value).__name__
        return f"it returned a {name}, not a tensor"
    if tuple(value.shape) != tuple(shape):
        return f"its shape is {tuple(value.shape)} and must be {tuple(shape)}"
    return f"its dtype is {short(value.dtype)} and must be {short(dtype)}" if value.dtype != dtype else ""


def short(dtype: torch.dtype) -> str:
    """float32 for torch.float32."""
    return str(dtype).removeprefix("torch.")
