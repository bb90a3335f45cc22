"""Arithmetic on stretches of time: a list of disjoint (start, end) pairs in order. Zero-length stretches are dropped.

    union      [(0, 2), (1, 3), (3, 4)]       ->  [(0, 4)]          touching stretches join
    common     [(0, 4)] with [(1, 2), (3, 9)] ->  [(1, 2), (3, 4)]
    without    [(0, 4)] less [(1, 2), (3, 9)] ->  [(0, 1), (2, 3)]; each_without keeps apart what is left of each

This module knows nothing of ledgers. It must never be given an unordered list where it asks for a union.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

Stretch = tuple[float, float]


def union(stretches: Iterable[Stretch]) -> list[Stretch]:
    """The time that at least one of `stretches` (any order, overlapping or not) covers."""
    spans = np.array(list(stretches)).reshape(-1, 2)
    spans = spans[spans[:, 1] > spans[:, 0]]
    starts, ends = spans[spans[:, 0].argsort()].T
    reached = np.maximum.accumulate(ends)                                       # by all up to and with this one
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > reached[:-1]))) if len(spans) else np.empty(0, int)
    last = np.append(first[1:] - 1, len(spans) - 1)[:len(first)]
    return list(zip(starts[first].tolist(), reached[last].tolist(), strict=True))


def common(a: list[Stretch], b: list[Stretch]) -> list[Stretch]:
    """The time that both unions cover."""
    shared: list[Stretch] = []
    i = j = 0
    while i < len(a) and j < len(b):
        (a0, a1), (b0, b1) = a[i], b[j]
        start, end = a0 if a0 > b0 else b0, a1 if a1 < b1 else b1
        if end > start:
            shared.append((start, end))
        if a1 < b1:
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
        while k < many and (begin := b[k][0]) < end:
            if begin > start:
                left.append((start, begin))
            if (stop := b[k][1]) > start:
                start = stop
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
