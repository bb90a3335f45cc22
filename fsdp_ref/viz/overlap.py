"""How much communication was hidden under compute: the numbers of the timeline, from the events alone.

The definition is that of Holistic Trace Analysis: overlap = communication time with compute in progress / communication time. A rank
that blocks in a wait computes nothing, although the forward of an enclosing unit may be open at that moment; waits are therefore
taken out of compute first. This module must never count a stretch of time twice: collectives in flight together count once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from ..errors import FsdpRefError
from ..ledger import Event, Lane, Ledger
from ..rows import meeting
from .intervals import Stretch, common, length, union, without
from .units import percent

COMMUNICATION = (Lane.ALL_GATHER, Lane.REDUCE_SCATTER, Lane.ALL_REDUCE, Lane.OTHER)
BUSY = (Lane.COMPUTE, Lane.OPTIMIZER)
MARK = "mark"


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
    events = [event if event.on_wire is None else replace(event, start=event.on_wire) for event in ledger.events if event.phase != MARK]
    if not events:
        raise FsdpRefError("the ledger holds no events; record a step (with record() as ledger: step()) and gather the ledgers of all"
                           " ranks")
    return events


def by_rank(events: list[Event]) -> dict[int, list[Event]]:
    """The events of each rank, ranks in order."""
    ranks: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        ranks[event.rank].append(event)
    return {rank: ranks[rank] for rank in sorted(ranks)}


def stretches(events: list[Event], lanes: tuple[Lane, ...]) -> list[Stretch]:
    """The time that at least one event of `lanes` covers."""
    return union((event.start, event.end) for event in events if event.lane in lanes)


def busy(events: list[Event]) -> list[Stretch]:
    """When one rank computed: compute and optimizer, less the time it was blocked."""
    return without(stretches(events, BUSY), stretches(events, (Lane.WAIT,)))


def last_arrivals(events: list[Event]) -> dict[tuple, float]:
    """When the last rank came to each collective, by `meeting`.

    A collective that the ledger does not hold for every rank of its group, or for more (two groups whose leaders were not
    recorded), is left out: who met whom is not known then.
    """
    starts: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for event in events:
        if event.lane in COMMUNICATION and event.sequence >= 0:
            starts[meeting(event)].append((event.rank, event.start))
    return {key: max(start for _, start in came) for key, came in starts.items() if len(came) == len({r for r, _ in came}) == key[-1]}


def rank_times(ledger: Ledger, events: list[Event] | None = None, arrivals: dict[tuple, float] | None = None) -> list[RankTimes]:
    """The step of every rank in numbers.

    Worked example: compute 0-4 s, a collective 3-6 s: communication 3 s, overlapped 1 s, exposed 2 s, overlap 33 %. Whoever has the
    `drawable` events and the `last_arrivals` of the ledger already may give them.

    Raises:
        FsdpRefError: the ledger holds no events.
    """
    events = drawable(ledger) if events is None else events
    arrivals = last_arrivals(events) if arrivals is None else arrivals
    rows = []
    for rank, own in by_rank(events).items():
        computing, talking = busy(own), stretches(own, COMMUNICATION)
        early = union((e.start, min(e.end, arrivals[meeting(e)])) for e in own if meeting(e) in arrivals)
        rows.append(RankTimes(rank, max(e.end for e in own) - min(e.start for e in own), length(computing), length(talking),
                              length(common(talking, computing)), length(without(talking, computing)), length(early)))
    return rows
