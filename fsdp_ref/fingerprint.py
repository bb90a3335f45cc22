"""Do the ranks make the same call? Asked before every collective, because afterwards the numbers are wrong or the process is gone.

gloo joins whatever arrives: two ranks that reduce `a` then `b` and `b` then `a` get the sum of both in both places, without a word; a
rank that sends another size aborts the process of its peer. So before the message itself every rank sends 16 bytes, the digest of what
it is about to do. Where they differ, the descriptions behind them go through the store, every rank raises the same error, and nothing
was sent.

    rank 0: all-reduce of a (step), 4 float32, line 7 of cell  ->  1f3c...
    rank 1: all-reduce of b (step), 4 float32, line 7 of cell  ->  90aa...       another digest: both are told, and the sums never mix

[Note: what counts] Operation, unit, phase, number of elements, dtype and reduction must agree, and so must the number of calls so far.
The line of the program is told but not compared: `if rank == 0: save(x) else: save(y)` is a legal way to make the same call.

It costs one more message a collective, 16 bytes to each other rank (`fsdp-ref doctor` measures it). It is on in the lab and in graders, and
wherever `collectives.check_calls()` or the environment variable FSDP_REF_CHECK_CALLS=1 says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
import xxhash

from . import source, wire, world
from .catalogue import PHRASES, Kind
from .errors import RankError
from .source import Place
from .words import name_ranks

TAG = 1 << 30           # of the digests' messages: far from those of the collectives, which count from 0
PATIENCE = 5.0          # seconds a description may take through the store
_last: dict[str, deque[Call]] = {}          # the last calls of each group, newest last
_on = os.environ.get("FSDP_REF_CHECK_CALLS", "0") not in ("", "0")


class check_calls:  # noqa: N801
    """Have every collective compare what the ranks are about to do, before it does it (fingerprint.py). Every rank must say so.

    A function (from now on) or, under `with`, a context manager (until its end), as `torch.set_grad_enabled` is. A rank that does
    something else is named, with what it does and at which line, and nothing is sent. On CUDA the comparison makes Python wait for
    the slowest rank, so nothing overlaps with it.
    """

    def __init__(self, on: bool = True) -> None:
        global _on
        self._before, _on = _on, on

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        global _on
        _on = self._before


def checking() -> bool:
    """Whether calls are being compared now."""
    return _on


@dataclass(frozen=True)
class Call:
    """A collective as one rank sees it. `number`: collectives of this group before it; `places`: the program's lines that made it,
    innermost first; `handler`: the signal whose handler made it."""

    operation: str
    unit: str
    phase: str
    elements: int
    dtype: str
    reduction: str
    number: int
    places: tuple[Place, ...] = ()
    handler: str = ""

    def digest(self) -> bytes:
        """16 bytes of everything but the lines. [Note: what counts]"""
        return xxhash.xxh3_128_digest(json.dumps([*self.facts(), self.number]).encode())

    def facts(self) -> tuple[str, str, str, int, str, str]:
        """What the call is, whenever it is its turn."""
        return self.operation, self.unit, self.phase, self.elements, self.dtype, self.reduction

    @property
    def name(self) -> str:
        """`all-reduce of grad`."""
        return f"{self.operation} of {self.unit}" if self.unit else self.operation

    def __str__(self) -> str:
        phase = f" in {self.phase}" if self.phase else ""
        reduced = f" ({self.reduction})" if self.reduction else ""
        line = source.tell(list(self.places))
        return f"{self.name}{phase}{reduced}, {self.elements:,} x {self.dtype}" + (f", at {line}" if line else "")

    def same(self, other: Call) -> bool:
        """Whether both do the same, whenever it is their turn."""
        return self.facts() == other.facts()


def describe(operation: str, unit: str, phase: str, message: torch.Tensor, reduction: str, number: int) -> Call:
    """The call that is being made, with the lines of the program that make it."""
    dtype = str(message.dtype).removeprefix("torch.")
    return Call(operation, unit, phase, message.numel(), dtype, reduction, number,
                tuple(source.places_of(sys._getframe(1))))


def check_of(operation: str, unit: str, phase: str, message: torch.Tensor, reduction: str, number: int,
             group: dist.ProcessGroup) -> Callable[[], None] | None:
    """The comparison that comes before this collective; None where none is to be made."""
    if not _on or group.size() == 1 or not any(device.type == "cpu" for device in group._device_types):
        return None
    return partial(compare, describe(operation, unit, phase, message, reduction, number), group)


def compare(call: Call, group: dist.ProcessGroup) -> None:
    """Return when every rank of `group` has come with the same call.

    Raises:
        RankError: two ranks differ; the same sentence on every rank. Nothing has been sent.
        RuntimeError: a rank did not come (gloo's own words).
    """
    history = _last.setdefault(group.group_name, deque(maxlen=16))
    mine = torch.frombuffer(bytearray(call.digest()), dtype=torch.uint8)
    everyone = torch.empty((group.size(), mine.numel()), dtype=torch.uint8)
    wire.all_gather(everyone, mine, group, TAG + call.number)
    if not bool((everyone == mine).all()):
        error = RankError(_tell(_exchange(call, history, group)))
        error.sent = False
        raise error
    history.append(call)


def forget() -> None:
    """Forget the calls of earlier worlds."""
    _last.clear()


def _exchange(call: Call, history: deque[Call], group: dist.ProcessGroup) -> dict[int, list[Call]]:
    """Every rank's calls, by rank: the last ones, and at the end the one it is making now."""
    here, store = dist.get_rank(), world.store_of_groups()
    ranks = [dist.get_global_rank(group, number) for number in range(group.size())]
    prefix = f"call/{group.group_name}/{call.number}"
    store.set(f"{prefix}/{here}", json.dumps([asdict(each) for each in (*history, replace(call, handler=_handler(call.places)))]))
    deadline, found = time.monotonic() + PATIENCE, {}
    while len(found) < len(ranks) and time.monotonic() < deadline:
        for rank in (rank for rank in ranks if rank not in found and store.check([f"{prefix}/{rank}"])):
            found[rank] = [_revive(each) for each in json.loads(store.get(f"{prefix}/{rank}"))]
        time.sleep(0.02)
    return dict(sorted(found.items()))


def _revive(facts: dict) -> Call:
    return Call(**{**facts, "places": tuple(Place(**place) for place in facts["places"])})


def _handler(places: tuple[Place, ...]) -> str:
    """The name of the signal whose handler is one of these calls; empty when none is."""
    for number in signal.valid_signals():
        code = getattr(signal.getsignal(number), "__code__", None)
        if code is not None and any((place.file, place.function) == (code.co_filename, code.co_name) for place in places):
            return signal.Signals(number).name
    return ""


def _tell(calls: dict[int, list[Call]]) -> str:
    """One sentence: who does what, and what it looks like."""
    kinds: dict[tuple, list[int]] = {}
    for rank, theirs in calls.items():
        kinds.setdefault((*theirs[-1].facts(), theirs[-1].number), []).append(rank)
    told = "; ".join(f"{name_ranks(ranks)}: {calls[ranks[0]][-1]}" for ranks in kinds.values())
    number = next(iter(calls.values()))[-1].number
    likely = _likely(calls, list(kinds.values()))
    return (f"the ranks disagree about collective number {number}: {told}{likely and f' ({likely})'}; every rank must make the same calls "
            "in the same order (nothing was sent)")


def _likely(calls: dict[int, list[Call]], kinds: list[list[int]]) -> str:
    """What kind of mistake it looks like (diagnosis.PHRASES), as far as two kinds of calls tell."""
    for ranks in kinds:
        if handler := calls[ranks[0]][-1].handler:
            return f"{name_ranks(ranks)}: {PHRASES[Kind.HANDLER]} of {handler}"
    if len(kinds) != 2:
        return ""
    many, few = sorted(kinds, key=lambda ranks: -len(ranks))
    usual, odd = calls[many[0]][-1], calls[few[0]][-1]
    who, reason = name_ranks(few), source.why(list(usual.places), list(odd.places), name_ranks(few))
    reason = reason or source.why(list(odd.places), list(usual.places), name_ranks(many))
    tail = f"; {reason}" if reason else ""
    if another := _another(usual, odd):
        return another + tail
    if (usual.phase == "checkpoint") != (odd.phase == "checkpoint"):
        return f"{name_ranks(many if usual.phase == 'checkpoint' else few)} {PHRASES[Kind.SAVING]}{tail}"
    for ranks in () if "in the loop" in reason else (few, many):
        call, before = calls[ranks[0]][-1], calls[ranks[0]][:-1]
        if before and before[-1].same(call):
            return f"{name_ranks(ranks)} {PHRASES[Kind.EXTRA]}{tail}"
    return reason or f"{who} {PHRASES[Kind.ORDER]}"


def _another(usual: Call, odd: Call) -> str:
    """What differs, when the two are the same call but for one thing."""
    for name, kind in (("elements", Kind.SIZE), ("dtype", Kind.DTYPE), ("reduction", Kind.REDUCTION), ("operation", Kind.OPERATION)):
        a, b = getattr(usual, name), getattr(odd, name)
        if a != b and usual.same(replace(odd, **{name: a})):
            rooted = name == "reduction" and re.match("src|dst", b) is not None
            return f"{PHRASES[Kind.ROOT if rooted else kind]}: {a} and {b}"
    return ""
