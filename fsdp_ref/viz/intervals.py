"""Arithmetic on stretches of time: a list of disjoint (start, end) pairs in order. Zero-length stretches are dropped.

    union      [(0, 2), (1, 3), (3, 4)]       ->  [(0, 4)]          touching stretches join
    common     [(0, 4)] with [(1, 2), (3, 9)] ->  [(1, 2), (3, 4)]
    without    [(0, 4)] less [(1, 2), (3, 9)] ->  [(0, 1), (2, 3)]; each_without keeps apart what is left of each

This module knows nothing of ledgers. It must never be given an unordered list where it asks for a union.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

Stretch = tuple[float, float]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The time that at least one of `stretches` (any order, overlapping or not) covers."""
    joined: list[Stretch] = []
    for start, end in sorted(s for s in stretches if s[1] > s[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def common(a: list[Stretch], b: list[Stretch]) -> list[Stretch]:
    """The time that both unions cover."""
    shared: list[Stretch] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if end > start:
            shared.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return shared


def without(a: list[Stretch], b: list[Stretch]) -> list[Stretch]:
    """The time that the union `a` covers and the union `b` does not."""
    return list(chain.from_iterable(each_without(a, b)))


def each_without(a: list[Stretch], b: list[Stretch]) -> list[list[Stretch]]:
    """For each of `a` (in order of their starts; they may overlap) the time that it covers and the union `b` does not."""
    found: list[list[Stretch]] = []
    j, many = 0, len(b)
    for start, end in a:
        while j < many and b[j][1] <= start:
            j += 1
        left, k = [], j
        while k < many and b[k][0] < end:
            if b[k][0] > start:
                left.append((start, b[k][0]))
            start = max(start, b[k][1])
            k += 1
        if end > start:
            left.append((start, end))
        found.append(left)
    return found


def length(a: list[Stretch]) -> float:
    """Seconds that a union covers."""
    return sum(end - start for start, end in a)


def clip(a: list[Stretch], start: float, end: float) -> list[Stretch]:
    """The part of a union between `start` and `end`."""
    return common(a, [(start, end)]) if end > start else []
