"""How much communication was hidden under compute: the numbers of the timeline, from the events alone.

The definition is that of Holistic Trace Analysis: overlap = communication time with compute in progress / communication time. A rank
that blocks in a wait computes nothing, although the forward of an enclosing unit may be open at that moment; waits are therefore
taken out of compute first. This module must never count a stretch of time twice: collectives in flight together count once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import numpy as np

from ..errors import FsdpRefError
from ..ledger import Event, Lane, Ledger
from ..rows import meeting
from .intervals import Stretch, Stretches, common, length, union, without
from .units import percent

COMMUNICATION = (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.OTHER)
BUSY = (Lane.COMPUTE, Lane.OPTIMIZER)
MARK = "mark"


class Lanes(dict[Lane, list[Event]]):
    """One rank's events by lane, in order of their starts; lanes without events are left out."""

    def spans(self, lane: Lane) -> np.ndarray:
        """From when to when each event of a lane took: (n, 2)."""
        events = self.get(lane, ())
        return np.column_stack(([event.start for event in events], [event.end for event in events]))

    def stretches(self, *lanes: Lane) -> Stretches:
        """The time that at least one event of `lanes` covers."""
        return union(np.concatenate([self.spans(lane) for lane in lanes]))

    @cached_property
    def busy(self) -> Stretches:
        """When the rank computed: compute and optimizer, less the time it was blocked."""
        return without(self.stretches(*BUSY), self.stretches(Lane.WAIT))

    def before_the_last(self, lane: Lane, arrivals: dict[tuple, float]) -> np.ndarray:
        """For each event of a lane the part before its last rank came, (n, 2); of length 0 where there is none or this is not known."""
        if lane not in self._early:
            last = [arrivals.get(meeting(event), event.start) if event.sequence >= 0 else event.start for event in self.get(lane, ())]
            self._early[lane] = self.spans(lane)
            self._early[lane][:, 1] = np.minimum(self._early[lane][:, 1], last)
        return self._early[lane]

    @cached_property
    def _early(self) -> dict[Lane, np.ndarray]:
        return {}

    @cached_property
    def ends(self) -> Stretch:
        """When the first event began and the last ended."""
        return min(events[0].start for events in self.values()), max(max([event.end for event in events]) for events in self.values())


@dataclass(frozen=True)
class RankTimes:
    """One rank's step in seconds.

    `communication` = `overlapped` + `exposed`. `early` is the part of the communication during which another rank had not come to
    the collective yet: skew between ranks, not transfer.
    """

    rank: int
    step: float
    compute: float
    communication: float
    overlapped: float
    exposed: float
    early: float

    @property
    def overlap_percent(self) -> float | None:
        """Overlap as Holistic Trace Analysis defines it, None when the rank did not communicate."""
        return percent(self.overlapped, self.communication)


def drawable(ledger: Ledger) -> list[Event]:
    """The events that took time in the step: everything but marks. A collective begins when its turn on the wire comes, not when it was
    asked for: what stood in a queue was no transfer.

    Raises:
        FsdpRefError: there are none.
    """
    events = [event if event.on_wire is None else _on_wire(event) for event in ledger.events if event.phase != MARK]
    if not events:
        raise FsdpRefError("the ledger holds no events; record a step (with record() as ledger: step()) and gather the ledgers of all"
                           " ranks")
    return events


def _on_wire(e: Event) -> Event:
    """The event from the moment its turn came. (`dataclasses.replace` takes twice as long, and a recording may have many.)"""
    return Event(e.rank, e.lane, e.name, e.unit, e.phase, e.on_wire, e.end, e.bytes, e.group_size, e.sequence, None, e.leader)


def lanes_of_ranks(events: list[Event]) -> dict[int, Lanes]:
    """The events of each rank by lane: ranks in order, and in each lane the events in order of their starts."""
    ranks: dict[int, Lanes] = defaultdict(Lanes)
    for event in sorted(events, key=attrgetter("start", "sequence")):
        ranks[event.rank].setdefault(event.lane, []).append(event)
    return {rank: ranks[rank] for rank in sorted(ranks)}


def last_arrivals(events: list[Event]) -> dict[tuple, float]:
    """When the last rank came to each collective, by `meeting`.

    A collective that the ledger does not hold for every rank of its group, or for more (two groups whose leaders were not
    recorded), is left out: who met whom is not known then.
    """
    met: dict[tuple, list[Event]] = defaultdict(list)
    for event in events:
        if event.sequence >= 0 and event.lane in COMMUNICATION:
            met[meeting(event)].append(event)
    return {key: max([event.start for event in came]) for key, came in met.items()
            if len(came) == key[-1] and len({event.rank for event in came}) == key[-1]}


def rank_times(ledger: Ledger, ranks: dict[int, Lanes] | None = None, arrivals: dict[tuple, float] | None = None) -> list[RankTimes]:
    """The step of every rank in numbers.

    Worked example: compute 0-4 s, a collective 3-6 s: communication 3 s, overlapped 1 s, exposed 2 s, overlap 33 %. Whoever has the
    `lanes_of_ranks` and the `last_arrivals` of its `drawable` events already may give them.

    Raises:
        FsdpRefError: the ledger holds no events.
    """
    if ranks is None or arrivals is None:
        events = drawable(ledger)
        ranks, arrivals = lanes_of_ranks(events), last_arrivals(events)
    rows = []
    for rank, own in ranks.items():
        computing, talking = own.busy, own.stretches(*COMMUNICATION)
        early = union(np.concatenate([own.before_the_last(lane, arrivals) for lane in COMMUNICATION]))
        start, end = own.ends
        rows.append(RankTimes(rank, end - start, length(computing), length(talking), length(common(talking, computing)),
                              length(without(talking, computing)), length(early)))
    return rows
