"""Fewer boxes where a recording has more than a page has pixels: 100,000 events are drawn in seconds, and look the same.

A box is (x0, x1, y0, y1) in the units of the axes; boxes of one row have the same y0 and y1 and, within one look, do not overlap.
This module must never change a box that is wide enough to be seen by itself; its callers ask only about thin ones.
"""

from __future__ import annotations

import numpy as np


def joined(boxes: np.ndarray, gap: float) -> np.ndarray:
    """(n, 4) boxes of one look; those of one row that are at most `gap` apart are made one.

    gap 1:   0-1, 2-3, 5-6 of one row  ->  0-3, 5-6
    """
    if not len(boxes):
        return boxes
    rows = boxes[np.lexsort((boxes[:, 0], boxes[:, 3], boxes[:, 2]))]               # row by row, from left to right
    same = (rows[1:, 2:] == rows[:-1, 2:]).all(axis=1)
    begins = np.flatnonzero(np.concatenate(([True], ~same | (rows[1:, 0] - rows[:-1, 1] > gap))))
    found = rows[begins].copy()
    found[:, 1] = np.maximum.reduceat(rows[:, 1], begins)
    return found


def mostly(boxes: np.ndarray, below: np.ndarray, pixel: float) -> np.ndarray:
    """Where the look of `boxes` covers more than half of what is drawn `below` it (both (n, 4)), pixel by pixel, as boxes.

    Joining would not do for a look that lies over another: 1 ms exposed of every 3 would hatch the whole bar.
    """
    found = []
    for y0, y1 in np.unique(boxes[:, 2:], axis=0):
        own, all_ = (rows[(rows[:, 2] == y0) & (rows[:, 3] == y1)] for rows in (boxes, below))
        edges = np.arange(own[:, 0].min(), own[:, 1].max() + pixel, pixel)
        shown = covered(own, edges) > covered(all_, edges) / 2
        for i in np.flatnonzero(shown):
            found.append((edges[i], edges[i + 1], y0, y1))
    return joined(np.array(found).reshape(-1, 4), pixel / 100)


def covered(boxes: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """How much of each of the cells between `edges` (n + 1,) the boxes cover: (n,). Boxes that overlap count once each."""
    def before(moments: np.ndarray) -> np.ndarray:          # sum over the moments m <= x of (x - m), at every edge x
        moments = np.sort(moments)
        count = np.searchsorted(moments, edges, side="right")
        return count * edges - np.concatenate(([0.0], np.cumsum(moments)))[count]
    return np.diff(before(boxes[:, 0]) - before(boxes[:, 1]))


def fullest(edges: np.ndarray, levels: np.ndarray, pieces: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges (n + 1,) and stacked levels (kinds, n) of a curve; of one with more than `pieces` pieces, in each of `pieces` equal parts of
    its time the moment with the highest sum, so that no peak is lost."""
    if levels.shape[1] <= pieces:
        return edges, levels
    grid = np.linspace(edges[0], edges[-1], pieces + 1)
    first = np.clip(np.searchsorted(edges, grid[:-1], side="right") - 1, 0, None)            # the piece in which each part begins
    last = np.maximum(np.searchsorted(edges, grid[1:], side="left"), first + 1)
    total = levels.sum(axis=0)
    return grid, levels[:, [a + int(total[a:b].argmax()) for a, b in zip(first, last, strict=True)]]
