"""The event-driven model behind the simulator: one clock of compute, streams for gathers and reductions, one link that they share.

The engine is replayed in the order in which a rank runs it. `Clock` is where that rank's compute stands. When the engine starts a
collective, `Network` decides when it begins and ends; when the engine waits, the clock jumps to that end. So what is hidden and what is
exposed follows from the engine's own order, and nothing else.

    stream     carries                          begins when
    compute    forward, backward, optimizer     the one before has ended, and what it waits for
    gather     all-gathers                      it was asked for, the stream and the link are free, and a buffer is ([Note: gathers ahead])
    reduce     reduce-scatters, all-reduces     it was asked for (its gradients exist then), the stream and the link are free

[Note: gathers ahead] On the CPU a gather is asked for when compute comes to the engine's prefetch. On a GPU the host runs ahead of the
device, so a gather begins as early as it has a buffer: `in_flight` of them may be between their begin and their use (None: asked for at
compute's pace, as on the CPU).

[Note: late ranks] A collective begins when the last rank comes to it. Where ranks differ (a busy machine, uneven work), the others' costs
give each of them a clock of its own, and all clocks meet at every wait; what this rank then waits is skew, not transfer.

Pipelines have a stream of their own for sends between stages: `pipeline.run` times those. This module must never import the engine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from .. import ledger
from ..ledger import Lane

TICK = 1e-9             # between two readings, so that what follows has a later time, as on a real clock
STREAMS = {Lane.ALL_GATHER: "gather", Lane.REDUCE_SCATTER: "reduce", Lane.ALL_REDUCE: "reduce"}


class Clock:
    """Seconds of predicted compute time; reading it takes a nanosecond. `peers` are where the other ranks stand. [Note: late ranks]"""

    def __init__(self, peers: int = 0) -> None:
        self.time, self.peers = 0.0, [0.0] * peers

    def __call__(self) -> float:
        self.time += TICK
        return self.time

    @property
    def last(self) -> float:
        """Where the rank stands that is furthest behind."""
        return max(self.time, *self.peers) if self.peers else self.time

    def advance(self, seconds: float, peers: Sequence[float] = ()) -> None:
        """Compute for so long, and each of the others for `peers`."""
        self.time += seconds
        self.peers = [time + took for time, took in zip(self.peers, peers, strict=True)]

    def reach(self, moment: float) -> None:
        """All ranks wait until `moment`, if it is not over."""
        self.time, self.peers = max(self.time, moment), [max(time, moment) for time in self.peers]


class Network:
    """Gives every collective its begin and end, and writes it into the ledger.

    `cost(name, bytes, ranks, stride)` says how long one takes; `stride_of(group)` how many GPUs apart the group's members are.
    """

    def __init__(self, clock: Clock, cost: Callable[[str, float, int, int], float], stride_of: Callable[[object], int],
                 in_flight: int | None = None) -> None:
        self.clock, self.cost, self.stride_of, self.in_flight = clock, cost, stride_of, in_flight
        self.free: dict[str, float] = defaultdict(float)
        self.link = 0.0
        self.gathers = 0                                                    # asked for so far
        self.used: list[float] = []                                         # when each was taken into use

    def carry(self, facts: tuple, group: object) -> Callable[[], None]:
        """A collective is asked for; returns what waits for it (`collectives.carried_by`)."""
        lane, name, unit, phase, nbytes, ranks, sequence, leader = facts
        stream = STREAMS.get(lane, "other")
        asked = self.clock()
        self.gathers += stream == "gather"
        ready = self._buffer_free() if stream == "gather" and self.in_flight is not None else max(asked, self.clock.last)
        begin = max(ready, self.free[stream], self.link)
        end = begin + self.cost(name, nbytes, ranks, self.stride_of(group))
        self.free[stream] = self.link = end
        ledger.add_event(lane, name, unit, phase, min(asked, begin), end, nbytes, ranks, sequence, begin, leader)

        def wait() -> None:
            self.clock.reach(end)
            if stream == "gather":
                self.used.append(self.clock.time)
        return wait

    def _buffer_free(self) -> float:
        """When one of the `in_flight` buffers is free: when the gather that many before this one was taken into use (now, if it was
        not yet). [Note: gathers ahead]"""
        before = self.gathers - 1 - self.in_flight
        return 0.0 if before < 0 else self.used[before] if before < len(self.used) else self.clock.time
