"""The ledger: what each rank did, when, and which bytes were alive meanwhile. Pictures, tests and reports read nothing else.

Three kinds of row (rows.py), all plain values that survive a round trip through JSON:

* `Event`: something that took time (a collective, a unit's forward, a checkpoint write), on one *lane* of one rank.
* `Allocation`: bytes that were alive from one moment to another, in FSDPMemTracker's vocabulary.
* `Shard`: which rows of which parameter a rank holds, padding included.

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
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import allocator, clock, ledger_file, perfetto, textfile
from .errors import FsdpRefError
from .rows import Allocation, Category, Event, Lane, Shard, wire_bytes

__all__ = ["Allocation", "Category", "Event", "Lane", "Ledger", "Shard", "wire_bytes"]


@dataclass
class Ledger:
    """All rows of one rank, or (after a merge) of all ranks. `meta` holds facts about the run: backend, world size, placements."""

    events: list[Event] = field(default_factory=list)
    allocations: list[Allocation] = field(default_factory=list)
    shards: list[Shard] = field(default_factory=list)
    start: float = 0.0
    end: float = 0.0
    meta: dict = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """The ranks that have a row here, in order."""
        return sorted({row.rank for rows in (self.events, self.allocations, self.shards) for row in rows})

    def of_rank(self, rank: int) -> Ledger:
        """The rows of one rank alone."""
        pick = lambda rows: [row for row in rows if row.rank == rank]  # noqa: E731
        return replace(self, events=pick(self.events), allocations=pick(self.allocations), shards=pick(self.shards))

    def window(self, name: str) -> Ledger:
        """What happened inside the spans that `mark(name)` made (one a rank): events inside, allocations alive meanwhile."""
        spans = {event.rank: event for event in self.events if event.phase == "mark" and event.name == name}
        if not spans:
            known = sorted({event.name for event in self.events if event.phase == "mark"})
            raise FsdpRefError(f"nothing was marked {name!r} in this recording; the marks are {known or 'none'}")
        start, end = min(span.start for span in spans.values()), max(span.end for span in spans.values())
        inside = [event for event in self.events if event.start >= start and event.end <= end and event.phase != "mark"]
        alive = [a for a in self.allocations if a.start < end and (a.end is None or a.end > start)]
        return replace(self, events=inside, allocations=alive, start=start, end=end)

    def peak_bytes(self, rank: int) -> int:
        """The most bytes that were alive at one moment on `rank`."""
        edges: list[tuple[float, int, int]] = []
        for row in self.allocations:
            if row.rank == rank:
                edges.append((row.start, 1, row.bytes))
                edges.append((float("inf") if row.end is None else row.end, 0, -row.bytes))   # frees sort before allocations
        alive = peak = 0
        for _, _, change in sorted(edges):
            alive += change
            peak = max(peak, alive)
        return peak

    @staticmethod
    def merge(ledgers: list[Ledger], offsets: list[tuple[float, float]] | None = None) -> Ledger:
        """One ledger with the rows of all, on one clock that starts at 0 with the earliest recording.

        `offsets`: how far each ledger's clock is ahead, and by how much that may be wrong (alignment.py); the largest error is
        `meta["clock_error_seconds"]` afterwards. Without them the clocks are taken to be one.

        Raises:
            FsdpRefError: there is nothing to merge.
        """
        if not ledgers:
            raise FsdpRefError("there are no ledgers to merge; give the ledger of at least one rank")
        ahead = [shift for shift, _ in offsets] if offsets else [0.0] * len(ledgers)
        begin = min(ledger.start - shift for ledger, shift in zip(ledgers, ahead, strict=True))
        merged = Ledger(meta=dict(ledgers[0].meta), end=max(ledger.end - shift for ledger, shift in zip(ledgers, ahead,
                                                                                                        strict=True)) - begin)
        for ledger, shift in zip(ledgers, ahead, strict=True):
            zero = begin + shift
            merged.events += [replace(e, start=e.start - zero, end=e.end - zero, on_wire=None if e.on_wire is None else e.on_wire - zero)
                              for e in ledger.events]
            merged.allocations += [replace(a, start=a.start - zero, end=None if a.end is None else a.end - zero)
                                   for a in ledger.allocations]
            merged.shards += ledger.shards
            if "stopped" in ledger.meta:
                merged.meta["stopped"] = ledger.meta["stopped"]
        if offsets:
            merged.meta["clock_error_seconds"] = max(error for _, error in offsets)
        merged.events.sort(key=lambda event: (event.start, event.rank))
        return merged

    def to_json(self) -> dict:
        """Plain lists and numbers, for `json.dump`."""
        return ledger_file.as_json(self)

    @staticmethod
    def from_json(data: dict) -> Ledger:
        """The inverse of `to_json`. Raises FsdpRefError naming what is wrong when `data` is something else (see ledger_file.py)."""
        return Ledger(**ledger_file.rows_of(data))

    def save(self, path: str | os.PathLike) -> Path:
        """Write one JSON file, whole or not at all; returns its path."""
        return textfile.write(path, json.dumps(self.to_json()), "the ledger")

    def to_perfetto(self, path: str | os.PathLike, predicted: Ledger | None = None) -> Path:
        """Write a trace of all ranks that ui.perfetto.dev and chrome://tracing open; `predicted` ranks stand beside the measured ones."""
        return perfetto.write(self, path, predicted)

    @staticmethod
    def load(path: str | os.PathLike) -> Ledger:
        """Read what `save` wrote. Raises FsdpRefError naming the file when it is missing or no ledger."""
        try:
            return Ledger.from_json(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise FsdpRefError(f"cannot read the ledger {path} ({error}); give the ledger.json of a run") from error


# -- the books of one process -------------------------------------------------------------------------------------------------

_tokens = itertools.count(1)
_alive: dict[int, Allocation] = {}
_shards: dict[int, list[Shard]] = {}
_active: Ledger | None = None
_rank = 0
_clock: Callable[[], float] = time.perf_counter
_since = 0                                                  # only what was entered after this token counts


def now() -> float:
    """Seconds on the monotonic clock, which all processes of a machine share (Linux and macOS)."""
    return _clock()


@contextlib.contextmanager
def predicted_by(clock: Callable[[], float]) -> Iterator[None]:
    """Books of a model that is only predicted (plan/simulator.py): the time is `clock`'s, and what this process held before is left out."""
    global _clock, _since
    before, _clock, _since = (_clock, _since), clock, next(_tokens)
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


def allocate(category: Category, unit: str, nbytes: int) -> int:
    """Enter `nbytes` into the books; returns the token that `free` takes. Costs one dictionary entry when nothing records."""
    token = next(_tokens)
    row = _alive[token] = Allocation(_rank, category, unit, nbytes, now() if _active else 0.0)
    if _active is not None and nbytes:
        _active.allocations.append(row)
    return token


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
def record(*, activations: bool = False, **meta) -> Iterator[Ledger]:
    """Record this rank's events and allocations; yields the ledger, which is complete when the block ends.

    With `activations` also the tensors that autograd saves for backward on this thread (saved.py). Keyword arguments go to `ledger.meta`;
    a block that ends in an exception leaves its name there, under "stopped". On a GPU the allocator's own figures stand there too.
    Recordings do not nest. Models that nobody uses any more are collected first: a module and its hooks refer to each other, so Python
    would otherwise keep them, and their bytes, for a while.
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
        with _saved_for_backward() if activations else contextlib.nullcontext():
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
        ledger.allocations = [replace(row) for row in ledger.allocations]      # later frees must not edit a finished ledger
        if activations:
            from . import saved
            saved.name_units(ledger.allocations, ledger.events)


def _saved_for_backward() -> contextlib.AbstractContextManager[None]:
    from . import saved  # it needs torch, which a reader of ledgers need not wait for
    return saved.watched(allocate, free)
