"""The books of one process: what is alive now, and the recording that is on. A recording becomes a `Ledger` (recorded.py).

The engine keeps the books of live allocations and shards all the time (one dictionary entry a unit, no clock), so a recording
that starts late still knows what was already there. Events are only made while a recording is on. This module must never start
a collective, import the engine, or keep a tensor alive.

    with record() as ledger:
        step()
    everyone = collectives.gather_ledgers(ledger)        # on every rank
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from . import allocator, clock
from .errors import FsdpRefError
from .recorded import Ledger
from .rows import Allocation, Category, Event, Lane, Shard, wire_bytes

if TYPE_CHECKING:
    import torch

    from .saved import Memory

__all__ = ["Allocation", "Category", "Event", "Lane", "Ledger", "Shard", "wire_bytes"]

_tokens = itertools.count(1)
_alive: dict[int, Allocation] = {}
_shards: dict[int, list[Shard]] = {}
_active: Ledger | None = None
_rank = 0
_clock: Callable[[], float] = time.perf_counter
_since = 0                                                  # only what was entered after this token counts
_memory: Memory | None = None                               # what saved.py has on the books, once it was asked


def now() -> float:
    """Seconds on the monotonic clock, which all processes of a machine share (Linux and macOS)."""
    return _clock()


@contextlib.contextmanager
def afresh(clock: Callable[[], float] | None = None) -> Iterator[None]:
    """Leave out what this process held before: in the block only what is entered in it is on the books. `clock`: take the time from it.

    For a model that is only predicted (plan/simulator.py), and for tests that share processes.
    """
    global _clock, _since
    before, _clock, _since = (_clock, _since), clock or _clock, next(_tokens)
    try:
        yield
    finally:
        _clock, _since = before


def rank() -> int:
    """The rank this process writes into its rows."""
    return _rank


def active() -> bool:
    """True while a recording is on."""
    return _active is not None


def set_rank(rank: int) -> None:
    """Tell the books which rank this process is (done once, when the process group starts)."""
    global _rank
    _rank = rank


def allocate(category: Category, unit: str, nbytes: int, memory: Iterable[torch.Tensor] = (), since: float | None = None) -> int:
    """Enter `nbytes` into the books; returns the token that `free` takes. Costs one dictionary entry when nothing records.

    `memory`: the tensors it is, so that a recording of temporaries does not count them as well (saved.py); `since`: when they were made.
    """
    since = claim(memory) if memory and since is None else since
    token = next(_tokens)
    row = _alive[token] = Allocation(_rank, category, unit, nbytes, since if since is not None else now() if _active else 0.0)
    if _active is not None and nbytes:
        _active.allocations.append(row)
    return token


def claim(memory: Iterable[torch.Tensor]) -> float | None:
    """Tell a recording of temporaries that these tensors are entered by their owner; returns when they were made, if it knows."""
    return _memory.claim(memory) if _memory is not None else None


def own(memory: Iterable[torch.Tensor | None], category: Category, unit: str) -> None:
    """Tell a recording of temporaries what these tensors, which it has entered itself, are. Nothing happens without one."""
    if sees_results():
        _memory.own(memory, category, unit)


def sees_results() -> bool:
    """Whether the recording that is on enters every tensor that an operation makes (`record(temporaries=True)`)."""
    return _active is not None and _memory is not None and _memory.sees_results


def withdraw(token: int) -> float | None:
    """Take a row back as if it had never been entered; returns its start. None for an unknown token."""
    row = _alive.pop(token, None)
    if row is None:
        return None
    row.bytes = 0
    return row.start


def row_of(token: int) -> Allocation | None:
    """The row of a token; None when it is not on the books (any more)."""
    return _alive.get(token)


def free(token: int) -> None:
    """Strike an allocation off the books. An unknown token is ignored (it was freed before)."""
    row = _alive.pop(token, None)
    if row is not None and _active is not None:
        row.end = now()


def hold_shards(rows: list[Shard]) -> int:
    """Enter the shards a unit holds; returns a token for `release_shards`."""
    token = next(_tokens)
    _shards[token] = rows
    if _active is not None:
        _active.shards += rows
    return token


def release_shards(token: int) -> None:
    """Strike a unit's shards off the books, and off the recording that is on (the unit is gone, or is entered anew under its name)."""
    gone = {id(row) for row in _shards.pop(token, ())}
    if gone and _active is not None:
        _active.shards = [row for row in _active.shards if id(row) not in gone]


def close_books(tokens: dict[str, int]) -> None:
    """Strike everything that `tokens` stand for, allocations and shards (for a `weakref.finalize`: their owner is gone)."""
    for token in tokens.values():
        free(token)
        release_shards(token)


def live_bytes(category: Category | None = None) -> int:
    """Bytes on the books now, of one category or of all."""
    return sum(row.bytes for row in _held() if category is None or row.category == category)


def _held() -> list[Allocation]:
    return [row for token, row in _alive.items() if token > _since]


def add_event(lane: Lane, name: str, unit: str, phase: str, start: float, end: float, nbytes: int = 0,
              group_size: int = 1, sequence: int = -1, on_wire: float | None = None, leader: int = -1) -> None:
    """Write one event, if a recording is on."""
    if _active is not None:
        _active.events.append(Event(_rank, lane, name, unit, phase, start, end, nbytes, group_size, sequence, on_wire, leader))


@contextlib.contextmanager
def span(lane: Lane, name: str, unit: str = "", phase: str = "", nbytes: int = 0) -> Iterator[None]:
    """Record the time a block takes."""
    start = now()
    try:
        yield
    finally:
        add_event(lane, name, unit, phase, start, now(), nbytes)


def mark(name: str) -> contextlib.AbstractContextManager[None]:
    """Name a stretch of the recording (`with mark("step 3"): ...`) so that `Ledger.window(name)` can cut it out."""
    return span(Lane.COMPUTE, name, phase="mark")


@contextlib.contextmanager
def record(*, activations: bool = False, temporaries: bool = False, **meta) -> Iterator[Ledger]:
    """Record this rank's events and allocations; yields the ledger, which is complete when the block ends.

    With `activations` also the tensors that autograd saves for backward on this thread; with `temporaries` these and every other tensor
    that an operation makes, so that the rows add up to all tensor memory there is (saved.py). Keyword arguments go to `ledger.meta`; a
    block that ends in an exception leaves its name there, under "stopped". On a GPU the allocator's own figures stand there too. Recordings
    do not nest. Models that nobody uses any more are collected first: a module and its hooks refer to each other, so Python would otherwise
    keep them, and their bytes, for a while.
    """
    global _active
    if _active is not None:
        raise FsdpRefError("a recording is already on in this process; end it before you start another")
    gc.collect()
    begin = now()
    held = _held()
    for row in held:
        row.start, row.end = begin, None
    _active = ledger = Ledger(allocations=[row for row in held if row.bytes], start=begin, meta=dict(meta))
    ledger.shards = [shard for token, rows in _shards.items() if token > _since for shard in rows]
    figures = allocator.Figures()
    try:
        with _everything(temporaries) if activations or temporaries else contextlib.nullcontext():
            yield ledger
    except BaseException as error:
        ledger.meta["stopped"] = type(error).__name__
        raise
    finally:
        _active = None
        for event in ledger.events:
            event.start, event.end = clock.resolve(event.start), clock.resolve(event.end)
        ledger.end = now()
        ledger.meta |= figures.since()
        ledger.allocations = [replace(row) for row in ledger.allocations if row.bytes]         # later frees must not edit a finished ledger
        if activations or temporaries:
            from . import saved
            saved.name_units(ledger.allocations, ledger.events)


def _everything(temporaries: bool) -> contextlib.AbstractContextManager[None]:
    global _memory
    if _memory is None:
        from . import saved  # it needs torch, which a reader of ledgers need not wait for
        _memory = saved.Memory(allocate, free, withdraw, row_of)
    return _memory.watched(temporaries)
