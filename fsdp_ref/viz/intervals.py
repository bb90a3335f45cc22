"""Arithmetic on stretches of time: arrays (n, 2) of starts and ends. A union is in order and disjoint; nothing has length zero.

    union      [(0, 2), (1, 3), (3, 4)]       ->  [(0, 4)]          touching stretches join
    common     [(0, 4)] with [(1, 2), (3, 9)] ->  [(1, 2), (3, 4)]
    without    [(0, 4)] less [(1, 2), (3, 9)] ->  [(0, 1), (2, 3)]
    cut        common, for stretches that may overlap, and whose piece is whose: pieces of both (0, 4) and (1, 9), say

This module knows nothing of ledgers. It must never be given an unordered array where it asks for a union.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

Stretch = tuple[float, float]
Stretches = np.ndarray


def union(stretches: ArrayLike) -> Stretches:
    """The time that at least one of `stretches` (any order, overlapping or not) covers."""
    spans = _pairs(stretches)
    spans = spans[spans[:, 1] > spans[:, 0]]
    if not len(spans):
        return spans
    starts, ends = spans[spans[:, 0].argsort()].T
    reached = np.maximum.accumulate(ends)                               # by a stretch and all before it
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > reached[:-1])))
    return np.column_stack((starts[first], reached[np.append(first[1:] - 1, len(spans) - 1)]))


def cut(a: ArrayLike, b: Stretches) -> tuple[np.ndarray, Stretches]:
    """The pieces (m, 2) that each of `a` (they may overlap) has in common with the union `b`, and of which of `a` each is: (m,)."""
    a = _pairs(a)
    first, behind = np.searchsorted(b[:, 1], a[:, 0], side="right"), np.searchsorted(b[:, 0], a[:, 1], side="left")
    count = np.maximum(behind - first, 0)                               # of stretches of b that each touches
    owner = np.repeat(np.arange(len(a)), count)
    which = first[owner] + np.arange(len(owner)) - np.repeat(count.cumsum() - count, count)
    pieces = np.column_stack((np.maximum(a[owner, 0], b[which, 0]), np.minimum(a[owner, 1], b[which, 1])))
    real = pieces[:, 1] > pieces[:, 0]
    return owner[real], pieces[real]


def gaps(b: Stretches) -> Stretches:
    """The time that the union `b` does not cover, from minus to plus infinity."""
    return np.column_stack((np.append(-np.inf, b[:, 1]), np.append(b[:, 0], np.inf)))


def common(a: Stretches, b: Stretches) -> Stretches:
    """The time that both unions cover."""
    return cut(a, b)[1]


def without(a: Stretches, b: Stretches) -> Stretches:
    """The time that the union `a` covers and the union `b` does not."""
    return cut(a, gaps(b))[1]


def length(a: Stretches) -> float:
    """Seconds that a union covers."""
    return float((a[:, 1] - a[:, 0]).sum())


def _pairs(stretches: ArrayLike) -> Stretches:
    return np.asarray(stretches, float).reshape(-1, 2)
