"""From raw measurements to the figures that are judged: ratios within a round, their medians, and the project's targets beside them.

Plain arithmetic on plain values: nothing here measures, prints or imports torch. What it returns is what --json writes and what the
table shows; there is no third set of numbers.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..viz.intervals import length, union


@dataclass(frozen=True)
class Pair:
    """A ratio of two contenders' step times, and what it should at most be, by number of ranks (None: any number)."""

    of: str
    to: str
    targets: Mapping[int | None, float]

    def target(self, ranks: int) -> float | None:
        return self.targets.get(ranks, self.targets.get(None))


PAIRS = (Pair("zero3", "torch-fsdp", {2: 0.85, 4: 0.90}), Pair("zero3", "torch-ddp", {2: 1.20}), Pair("zero1", "torch-ddp", {}),
         Pair("zero2", "torch-ddp", {}), Pair("ddp", "torch-ddp", {}), Pair("zero3-recording", "zero3", {None: 1.02}))
MEMORY_TARGET = 1.0           # ours at most torch's fully_shard
HIDDEN_TARGET = 85.0          # percent of communication, at least, with one gather ahead or more


def speed(seconds: Mapping[str, Sequence[float]], ranks: int) -> dict[str, Any]:
    """Step times and paired ratios.

    Two rounds, a: 2 s and 3 s, b: 4 s and 2 s  ->  ratios a/b 0.5 and 1.5, median 1.0 (the ratio of the medians would be 0.83).

    Args:
        seconds: each contender's step time in each round.
    """
    ratios = []
    for pair in PAIRS:
        if pair.of in seconds and pair.to in seconds:
            each = [a / b for a, b in zip(seconds[pair.of], seconds[pair.to], strict=True)]
            ratios.append({"of": pair.of, "to": pair.to, "rounds": each, "median": statistics.median(each), "min": min(each),
                           "max": max(each), "target": pair.target(ranks)})
    contenders = {key: {"rounds": list(each), "median": statistics.median(each), "min": min(each)} for key, each in seconds.items()}
    return {"unit": "seconds", "contenders": contenders, "ratios": ratios}


def memory(peaks: Mapping[str, Sequence[Sequence[int]]], method: str, steps: int) -> dict[str, Any]:
    """Peak bytes of each contender (of the rank that needs most; median over runs), and how that compares with torch's fully_shard.

    Two runs of two ranks, [90 80] and [100 110]  ->  90 and 110, peak 100.

    Args:
        peaks: for each contender, for each run, bytes above the start on each rank.
        method: how they were taken, in words.
        steps: training steps each contender made.
    """
    most = {key: statistics.median(max(ranks) for ranks in runs) for key, runs in peaks.items()}
    base = most.get("torch-fsdp")
    contenders = {key: {"runs": [list(ranks) for ranks in peaks[key]], "peak": peak, "ratio": peak / base if base else None,
                        "target": MEMORY_TARGET if key == "zero3" else None} for key, peak in most.items()}
    return {"unit": "bytes", "method": method, "steps": steps, "contenders": contenders}


def link(raw: Mapping[str, Any], ratio: float) -> dict[str, Any]:
    """Step time, communication, exposed communication and hidden share for every prefetch. `raw`: what link.measure returned."""
    block = {**raw["block"], "gather_seconds": raw["link"]["latency"] + raw["block"]["wire_bytes"] / raw["link"]["bandwidth"]}
    bare = [max(column) for column in zip(*raw["bare"], strict=True)]
    return {"unit": "seconds", "ratio": ratio, **raw["link"], "block": block,
            "bare_step": {"rounds": bare, "median": statistics.median(bare)},
            "prefetch": {ahead: _hidden(rounds, HIDDEN_TARGET if int(ahead) else None) for ahead, rounds in raw["slow"].items()}}


def _hidden(rounds: Sequence[Sequence[Mapping[str, Any]]], target: float | None) -> dict[str, Any]:
    """The figures of one prefetch. A round's step is that of the slowest rank, its communication and exposure the mean over ranks.

    Communication is the time in which the link carries something; exposed is the time in which the rank waits for a collective. On the
    link 0-4 s and 4-6 s, waiting 5-6 s: communication 6 s, exposed 1 s, hidden 83 %.
    A rank that waits longer than the link works (for a late rank, for its own thread to wake) hides nothing: 0 %.
    """
    steps = [max(rank["seconds"] for rank in ranks) for ranks in rounds]
    busy = [statistics.mean(length(union(rank["busy"])) for rank in ranks) for ranks in rounds]
    waiting = [statistics.mean(length(union([row[:2] for row in rank["waiting"]])) for rank in ranks) for ranks in rounds]
    hidden = [100 * max(0.0, 1 - exposed / total) for exposed, total in zip(waiting, busy, strict=True)]
    gathers = [seconds for ranks in rounds for rank in ranks for seconds in rank["gathers"]]
    medians = {"step": steps, "communication": busy, "exposed": waiting, "hidden_percent": hidden}
    return {**{f"{name}_rounds": values for name, values in medians.items()},
            **{name: statistics.median(values) for name, values in medians.items()},
            "waits": _waits([rank["waiting"] for ranks in rounds for rank in ranks]),
            "block_gather_measured": statistics.median(gathers), "target_percent": target}


def _waits(steps: Sequence[Sequence[Sequence[Any]]]) -> dict[str, float]:
    """Mean seconds a step spent waiting for each collective, the longest first. `steps`: the (start, end, name) of each step's waits."""
    total: Counter[str] = Counter()
    for start, end, name in itertools.chain.from_iterable(steps):
        total[name] += end - start
    return {name: seconds / len(steps) for name, seconds in total.most_common()}
