"""The ledger: what each rank did, when, and which bytes were alive meanwhile. Pictures, tests and reports read nothing else.

Three kinds of row (rows.py), all plain values that survive a round trip through JSON:

* `Event`: something that took time (a collective, a unit's forward, a checkpoint write), on one *lane* of one rank.
* `Allocation`: bytes that were alive from one moment to another, in FSDPMemTracker's vocabulary.
* `Shard`: which rows of which parameter a rank holds, padding included.

ledger.py makes one for each recording; this module only holds and hands over what was recorded.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from . import ledger_file, perfetto, textfile
from .errors import FsdpRefError
from .rows import Allocation, Event, Shard


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
