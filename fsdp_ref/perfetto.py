"""A ledger as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: one JSON file with every rank, measured and predicted.

Written by hand after the Trace Event Format and Perfetto's notes on it ("Visualizing external trace formats"), without a library:

    process    one a rank; its number is the rank. Predicted ranks are processes of their own, numbered from 1000.
    thread     one a lane (compute, all-gather, ...). [Note: slices must nest] A second thread is opened where they do not.
    X          a slice: `ts` and `dur` in microseconds, from the ledger's zero, to a nanosecond
    s t f      a flow: an arrow that joins one collective's slices on all its ranks, in the order in which they came
    C          a counter of the process: bytes alive, one series a category
    M          names and sort order of processes and threads. Names carry a number too: older viewers sort by name.

[Note: slices must nest] Perfetto drops a slice that begins inside another of its thread and ends outside. Collectives in flight together
do that, so each lane takes as many threads as it needs.

[Note: what stands where] Facts come behind the events, and no `displayTimeUnit` is among them: a Perfetto of 2022 loads nothing behind a
nested fact, and takes microseconds for milliseconds where the unit of *display* is said to be those. Milliseconds are shown anyway.

Colours follow from names (Perfetto hashes a slice's name without its digits), so a slice is named after what it does first, then after the
unit. This module must never write a pickle or leave half a file behind, nor import anything that is not plain Python.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from . import textfile
from .errors import FsdpRefError
from .garbage import uncollected
from .rows import Allocation, Category, Event, Lane, meeting

if TYPE_CHECKING:
    from .recorded import Ledger

FIRST_PREDICTED = 1000
LANES = [*Lane, "marks"]
PLACE = {lane: place for place, lane in enumerate(LANES)}
_quoted = json.encoder.encode_basestring_ascii           # a text as JSON, without the set-up of `json.dumps`


def write(ledger: Ledger, path: str | os.PathLike, predicted: Ledger | None = None) -> Path:
    """Write the trace of `ledger` (all ranks), and of `predicted` beside it on the same zero; returns the path.

    Raises:
        FsdpRefError: the ledger holds neither events nor allocations.
        ConfigError: the file cannot be written.
    """
    if not ledger.events and not ledger.allocations:
        raise FsdpRefError("the ledger holds no events and no allocations, so there is no trace to write; record a step "
                           "(with record() as ledger: step())")
    with uncollected():
        parts = list(_processes(ledger, 0, "measured"))
        if predicted is not None:
            parts += _processes(predicted, max(FIRST_PREDICTED, max(ledger.ranks) + 1), "predicted")
    facts = {key: value for key, value in ledger.meta.items() if isinstance(value, str | int | float)}
    world = {"backend": str(ledger.meta.get("backend", "")), "rank": 0, "world_size": len(ledger.ranks)}
    tail = {"distributedInfo": world, "otherData": facts}                           # [Note: what stands where]
    text = '{"traceEvents": [' + ",\n".join(part for part in parts if part) + "],\n" + json.dumps(tail)[1:]
    return textfile.write(path, text, "the trace")


def _processes(ledger: Ledger, first: int, kind: str) -> Iterator[str]:
    """All trace events of one ledger, as text, rank by rank and the flows last; the process of rank r is `first + r`."""
    zero = ledger.start
    events: dict[int, list[Event]] = {rank: [] for rank in ledger.ranks}
    alive: dict[int, list[Allocation]] = defaultdict(list)
    for event in ledger.events:
        events[event.rank].append(event)
    for row in ledger.allocations:
        alive[row.rank].append(row)
    slices: dict[tuple, list[tuple[int, int, int, int]]] = defaultdict(list)
    for rank, own in events.items():
        name = f"rank {rank:02d} ({kind})"
        rows = [{"ph": "M", "pid": first + rank, "tid": 0, "name": "process_name", "args": {"name": name}},
                {"ph": "M", "pid": first + rank, "tid": 0, "name": "process_sort_index", "args": {"sort_index": first + rank}}]
        slices_of_rank, names = _threads(own, first + rank, zero, slices)
        yield ",\n".join(filter(None, (_text(rows + names), *slices_of_rank, *_counters(alive[rank], first + rank, zero))))
    yield _text(_flows(slices, first, kind))


def _text(rows: list[dict]) -> str:
    return json.dumps(rows)[1:-1]


def _ns(moment: float, zero: float) -> int:
    return round((moment - zero) * 1e9) if moment > zero else 0


def _threads(events: list[Event], pid: int, zero: float,
             slices: dict[tuple, list[tuple[int, int, int, int]]]) -> tuple[list[str], list[dict]]:
    """The slices of one rank, as text (there are many), and the rows that name its threads. Those of collectives go to `slices` as well."""
    rows, open_, used = [], defaultdict(list), set()
    for begin, minus_end, index in sorted((e.start if e.on_wire is None else e.on_wire, -e.end, i) for i, e in enumerate(events)):
        event = events[index]
        start = _ns(begin, zero)
        end = max(start, _ns(-minus_end, zero))
        kind = "marks" if event.phase == "mark" else event.lane
        tid = PLACE[kind] + _track(open_[kind], start, end) * len(LANES)
        used.add(tid)
        waited = max(0, start - _ns(event.start, zero))
        rows.append(f'{{"ph": "X", "pid": {pid}, "tid": {tid}, "ts": {start / 1000}, "dur": {(end - start) / 1000}, '
                    f'{_said(event, waited)}}}')
        if event.sequence >= 0:
            slices[meeting(event)].append((start, end, event.rank, tid))
    names = []
    for tid in sorted(used):
        track, lane = divmod(tid, len(LANES))
        name, order = f"{lane} {LANES[lane]}" + (f" ({track + 1})" if track else ""), lane * 1000 + track
        names += [{"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}},
                  {"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": order}}]
    return rows, names


def _said(event: Event, waited: int) -> str:
    """What an event's slice says besides when it was; a collective that `waited` nanoseconds for its turn says that too."""
    category = "mark" if event.phase == "mark" else event.lane
    words = f'"name": {_quoted(f"{event.name} {event.unit}".rstrip())}, "cat": {_quoted(category)}'
    if event.sequence >= 0:
        return (f'{words}, "args": {{"Collective name": {_quoted(event.name)}, "Group size": {event.group_size}, '
                f'"phase": {_quoted(event.phase)}, "message bytes": {event.bytes}, "bytes sent": {event.wire_bytes}, '
                f'"Seq": {event.sequence}, "queued us": {waited / 1000}}}')
    if event.phase or event.bytes:
        return f'{words}, "args": {{"phase": {_quoted(event.phase)}, "bytes": {event.bytes}}}'
    return words


def _track(tracks: list[list[int]], start: int, end: int) -> int:
    """The first track in which a slice lies beside the others or inside one. [Note: slices must nest]

    `tracks` holds, for each, the ends of the slices that are open, outermost first. Slices come in the order of their starts.
    """
    for index, ends in enumerate(tracks):
        while ends and ends[-1] <= start:
            ends.pop()
        if not ends or end <= ends[-1]:
            ends.append(end)
            return index
    tracks.append([end])
    return len(tracks) - 1


def _flows(slices: dict[tuple, list[tuple[int, int, int, int]]], first: int, kind: str) -> list[dict]:
    """Arrows from the rank that came first to a collective to the one that came last; each point lies inside its slice.

    A collective of which the ledger holds more slices of one rank than one (two groups whose counters agree) gets none.
    """
    rows, number = [], first * 10**6
    for parts in slices.values():
        parts = sorted(parts)
        if len(parts) < 2 or len({rank for _, _, rank, _ in parts}) < len(parts) or any(end <= start for start, end, _, _ in parts):
            continue
        inside = min(end - start for start, end, _, _ in parts) // 2
        number += 1
        for i, (start, _, rank, tid) in enumerate(parts):
            row = {"ph": "s" if i == 0 else "t" if i + 1 < len(parts) else "f", "pid": first + rank, "tid": tid,
                   "ts": (start + min(inside, 1000)) / 1000, "id": number, "cat": f"collective {kind}", "name": "one collective"}
            rows.append(row | {"bp": "e"} if row["ph"] == "f" else row)
    return rows


def _counters(rows: list[Allocation], pid: int, zero: float) -> Iterator[str]:
    """Bytes alive by category, a line whenever it changes; every line names every series, since they are stacked."""
    there = {row.category for row in rows}
    kinds = [str(category) for category in Category if category in there]
    place = {kind: i for i, kind in enumerate(kinds)}
    changes = [(_ns(row.start, zero), place[row.category], row.bytes) for row in rows]
    changes += [(_ns(row.end, zero), place[row.category], -row.bytes) for row in rows if row.end is not None]
    alive = [0] * len(kinds)
    series = ", ".join(f'"{kind}": %d' for kind in kinds)
    line = f'{{"ph": "C", "pid": {pid}, "tid": 0, "ts": %s, "name": "memory bytes", "args": {{{series}}}}}'
    for moment, together in groupby(sorted(changes), key=itemgetter(0)):
        for _, kind, change in together:
            alive[kind] += change
        yield line % (moment / 1000, *alive)
