"""The exercise `forward_prefetch`: the next unit is gathered while this one computes, on a clock that is counted, not measured.

[Note: the counted clock] Every rank has one link and one thread. `compute` takes the thread for a given time; a gather takes the link, from
when it is asked for or the link is free; `wait` moves the thread to the end of the gather. What it moves by is exposed. The messages are real.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from .finding import Finding, close, largest

PROPERTIES = ("values", "overlap", "lifetime", "order", "bytes", "no hang")


def cases(seed: int) -> list[dict]:
    """Times of gathers and computes, in milliseconds; the link is faster than compute, then slower, then now one and now the other."""
    return [{"world": 2, "gather": [3, 3, 3, 3], "compute": [4, 4, 4, 4], "length": 4, "seed": 41},
            {"world": 2, "gather": [5, 5, 5], "compute": [2, 2, 2], "length": 3, "seed": seed},
            {"world": 3, "gather": [2, 6, 1, 4, 3], "compute": [5, 3, 2, 6, 1], "length": 2, "seed": seed + 1}]


def shard_of(case: dict, index: int, rank: int) -> torch.Tensor:
    """What one rank holds of a unit's weights."""
    random = torch.Generator().manual_seed(case["seed"] + 50 * index + rank)
    return torch.randn(case["length"], generator=random)


def apply(whole: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a unit computes."""
    return torch.tanh(x + whole)


def start_of(case: dict) -> torch.Tensor:
    """The input of the first unit."""
    return torch.zeros(case["length"] * case["world"])


@dataclass
class Link:
    """The counted clock, and the units that are whole. [Note: the counted clock]"""

    case: dict
    rank: int
    now: float = 0.0
    free_at: float = 0.0
    exposed: float = 0.0
    log: list[dict] = field(default_factory=list)
    arrived: dict[int, torch.Tensor] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)
    peak: int = 0

    def index(self, unit: str) -> int:
        """Which unit a name stands for."""
        names = unit_names(self.case)
        if unit not in names:
            raise ValueError(f"there is no unit {unit!r}; the units are {', '.join(names)}")
        return names.index(unit)

    def gather(self, unit: str) -> Handle:
        """Begin a gather; the memory is taken at once."""
        index = self.index(unit)
        begin = max(self.now, self.free_at)
        self.free_at = end = begin + self.case["gather"][index]
        mine = shard_of(self.case, index, self.rank)
        pieces = [torch.empty_like(mine) for _ in range(self.case["world"])]
        dist.all_gather(pieces, mine)
        self.whole.add(index)
        self.peak = max(self.peak, len(self.whole))
        self.log.append({"what": "gather", "unit": index, "asked": self.now, "begin": begin, "end": end, "whole": len(self.whole)})
        return Handle(self, index, end, torch.cat(pieces))

    def compute(self, unit: str, x: torch.Tensor) -> torch.Tensor:
        """Forward of one unit."""
        index = self.index(unit)
        there = index in self.arrived
        self.log.append({"what": "compute", "unit": index, "begin": self.now, "there": there, "asked": index in self.whole})
        self.now += self.case["compute"][index]
        return apply(self.arrived[index] if there else torch.zeros_like(x), x)

    def release(self, unit: str) -> None:
        """Free the whole weights of one unit."""
        index = self.index(unit)
        self.log.append({"what": "free", "unit": index, "at": self.now, "was": index in self.whole})
        self.whole.discard(index)
        self.arrived.pop(index, None)


@dataclass
class Handle:
    """A gather on its way."""

    link: Link
    index: int
    end: float
    weights: torch.Tensor

    def wait(self) -> None:
        """Return when the weights are there."""
        late = max(0.0, self.end - self.link.now)
        self.link.log.append({"what": "wait", "unit": self.index, "exposed": late})
        self.link.exposed += late
        self.link.now += late
        if self.index in self.link.whole:
            self.link.arrived[self.index] = self.weights


def unit_names(case: dict) -> list[str]:
    """What the units are called."""
    return [f"block {index}" for index in range(len(case["gather"]))]


def run(student, case: dict, rank: int, world: int) -> dict:
    """One forward on this rank."""
    link = Link(case, rank)
    out = student(unit_names(case), start_of(case), link.gather, link.compute, link.release)
    return {"output": out.detach() if isinstance(out, torch.Tensor) else None, "log": link.log, "exposed": link.exposed, "peak": link.peak,
            "left": sorted(link.whole), "seconds": link.now}


def bound(case: dict) -> float:
    """The exposed time with one unit gathered ahead: the first gather, and what later ones take longer than the compute before them."""
    now = free_at = exposed = 0.0
    ends = [case["gather"][0]]
    free_at = ends[0]
    for index, compute in enumerate(case["compute"]):
        late = max(0.0, ends[index] - now)
        exposed, now = exposed + late, now + late
        if index + 1 < len(case["gather"]):
            free_at = max(now, free_at) + case["gather"][index + 1]
            ends.append(free_at)
        now += compute
    return exposed


def judge(case: dict, evidence: list[dict]) -> list[Finding]:
    """What is wrong, the cause before what follows from it."""
    found: list[Finding] = []
    for look in (_order, _held, _overlap, _numbers):
        for rank, seen in enumerate(evidence):
            found += look(case, rank, seen)
    return found


def _order(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    names = unit_names(case)
    for row in (row for row in seen["log"] if row["what"] == "compute" and not row["there"]):
        name = names[row["unit"]]
        gathered = any(other["what"] == "gather" and other["unit"] == row["unit"] for other in seen["log"])
        freed = any(other["what"] == "free" and other["unit"] == row["unit"] and other["was"] and other["at"] <= row["begin"]
                    for other in seen["log"])
        yield Finding("order", f"{name} computes " + ("before its gather was waited for: its weights may not be there" if row["asked"] else
                      "after its weights were freed" if gathered and freed else "and was never gathered"), rank, name)
    computed = [row["unit"] for row in seen["log"] if row["what"] == "compute"]
    if computed != list(range(len(names))):
        yield Finding("order", f"the units compute in the order {', '.join(names[each] for each in computed) or 'none'}; each computes once, in "
                      "the order of the list", rank)
    for index, name in enumerate(names):
        times = sum(row["what"] == "gather" and row["unit"] == index for row in seen["log"])
        if times > 1:
            yield Finding("bytes", f"{name} is gathered {times} times in one forward; once is enough", rank, name)


def _held(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    names = unit_names(case)
    frees = [row for row in seen["log"] if row["what"] == "free"]
    if not frees and seen["log"]:
        yield Finding("lifetime", f"no unit is ever freed: after forward all {len(seen['left'])} are whole", rank)
    elif seen["peak"] > 2:
        first = next(row for row in seen["log"] if row["what"] == "gather" and row["whole"] > 2)
        before = not any(row["what"] == "compute" for row in seen["log"][: seen["log"].index(first)])
        why = "everything is gathered before the first unit computes" if before else "free each unit before the gather after the next is begun"
        yield Finding("lifetime", f"{seen['peak']} units are whole at once where 2 are enough, the one that computes and the next: {why}", rank,
                      names[first["unit"]])
    elif seen["left"]:
        yield Finding("lifetime", f"{', '.join(names[each] for each in seen['left'])} is still whole after forward", rank,
                      names[seen["left"][0]])


def _overlap(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    least, sum_of_all = bound(case), float(sum(case["gather"]))
    if seen["exposed"] > least + 1e-9:
        late = [row for row in seen["log"] if row["what"] == "wait" and row["exposed"] > 0]
        places = {(row["what"], row["unit"]): place for place, row in reversed(list(enumerate(seen["log"])))}
        early = [unit for unit in range(1, len(case["gather"]))
                 if places.get(("gather", unit), 0) < places.get(("compute", unit - 1), 0) and places.get(("wait", unit), 1e9) <
                 places.get(("compute", unit - 1), 0)]
        why = ("a gather is begun in time and waited for at once, before the unit ahead of it computes" if early else
               "each gather is begun only when the unit before it has computed, so nothing is hidden" if seen["exposed"] >= sum_of_all else
               "some gathers begin too late")
        yield Finding("overlap", f"{seen['exposed']:g} ms of gathers are exposed where {least:g} ms need be: {why}", rank,
                      unit_names(case)[late[-1]["unit"]] if late else None)


def _numbers(case: dict, rank: int, seen: dict) -> Iterator[Finding]:
    x = start_of(case)
    for index in range(len(case["gather"])):
        x = apply(torch.cat([shard_of(case, index, each) for each in range(case["world"])]), x)
    if seen["output"] is None:
        yield Finding("values", "the function returns no tensor; return the output of the last unit", rank)
    elif not close(seen["output"], x):
        yield Finding("values", f"the output differs from that of the plain forward by up to {largest(seen['output'], x):.3g}", rank, "output")
