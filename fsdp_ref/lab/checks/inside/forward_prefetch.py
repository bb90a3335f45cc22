"""Harness: one forward on a counted clock.

[Note: the counted clock] Every rank has one link and one thread. `compute` takes the thread for a given time; a gather takes the link,
from when it is asked for or the link is free; `wait` moves the thread to the end of the gather. What it moves by is exposed. The
messages are real.
"""

import torch


class Link:
    """The counted clock, and the units that are whole. [Note: the counted clock]"""

    def __init__(self, case, rank):
        self.case, self.rank = case, rank
        self.now = self.free_at = self.exposed = 0.0
        self.log, self.arrived, self.whole, self.peak = [], {}, set(), 0

    def index(self, unit):
        """Which unit a name stands for."""
        names = self.case["units"]
        if unit not in names:
            raise ValueError(f"there is no unit {unit!r}; the units are {', '.join(names)}")
        return names.index(unit)

    def gather(self, unit):
        """Begin a gather; the memory is taken at once."""
        index = self.index(unit)
        begin = max(self.now, self.free_at)
        self.free_at = end = begin + self.case["gather"][index]
        mine = self.case["shards"][index]
        weights = torch.empty(self.rank.world * mine.numel())
        self.rank.wire.all_gather_into_tensor(weights, mine)
        self.whole.add(index)
        self.peak = max(self.peak, len(self.whole))
        self.log.append({"what": "gather", "unit": index, "asked": self.now, "begin": begin, "end": end, "whole": len(self.whole)})
        return Handle(self, index, end, weights)

    def compute(self, unit, x):
        """Forward of one unit."""
        index = self.index(unit)
        there = index in self.arrived
        self.log.append({"what": "compute", "unit": index, "begin": self.now, "there": there, "asked": index in self.whole})
        self.now += self.case["compute"][index]
        return torch.tanh(x + self.arrived[index]) if there else torch.tanh(x)

    def release(self, unit):
        """Free the whole weights of one unit."""
        index = self.index(unit)
        self.log.append({"what": "free", "unit": index, "at": self.now, "was": index in self.whole})
        self.whole.discard(index)
        self.arrived.pop(index, None)


class Handle:
    """A gather on its way."""

    def __init__(self, link, index, end, weights):
        self.link, self.index, self.end, self.weights = link, index, end, weights

    def wait(self):
        """Return when the weights are there."""
        late = max(0.0, self.end - self.link.now)
        self.link.log.append({"what": "wait", "unit": self.index, "exposed": late})
        self.link.exposed += late
        self.link.now += late
        if self.index in self.link.whole:
            self.link.arrived[self.index] = self.weights


def run(function, case, rank):
    """The evidence: output, log, exposed time, units at once, units left."""
    link = Link(case, rank)
    x = torch.zeros(rank.world * case["shards"][0].numel())
    out = function(list(case["units"]), x, link.gather, link.compute, link.release)
    return {"output": out, "log": link.log, "exposed": link.exposed, "peak": link.peak, "left": sorted(link.whole)}
