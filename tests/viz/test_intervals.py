"""Arithmetic on stretches of time, by hand and against a grid of whole numbers."""

import random

import pytest

from fsdp_ref.viz.intervals import common, cut, gaps, length, union, without


def _grid(stretches):
    return {tick for start, end in stretches for tick in range(int(start), int(end))}


@pytest.mark.parametrize(("compute", "communication", "under", "exposed"), [
    ([(0, 4)], [(5, 8)], 0, 3),                      # none
    ([(0, 9)], [(5, 8)], 3, 0),                      # full
    ([(0, 6)], [(5, 8)], 1, 2),                      # partial
    ([(0, 5)], [(5, 8)], 0, 3),                      # touching is no overlap
    ([(0, 6), (7, 9)], [(5, 8)], 2, 1),              # a hole in the middle
    ([], [(5, 8)], 0, 3),
    ([(0, 6)], [], 0, 0),
])
def test_overlap_cases(compute, communication, under, exposed):
    communication, compute = union(communication), union(compute)
    assert length(common(communication, compute)) == under
    assert length(without(communication, compute)) == exposed


def test_touching_and_nested_stretches_join_and_empty_ones_vanish():
    assert union([(3, 4), (0, 2), (1, 3), (0.5, 0.6), (9, 9)]).tolist() == [[0, 4]]


def test_against_a_grid():
    draw = random.Random(7)
    for _ in range(300):
        a, b = ([(s, s + draw.randrange(4)) for s in (draw.randrange(30) for _ in range(draw.randrange(7)))] for _ in range(2))
        assert _grid(union(a)) == _grid(a)
        assert _grid(common(union(a), union(b))) == _grid(a) & _grid(b)
        assert _grid(without(union(a), union(b))) == _grid(a) - _grid(b)
        owner, left = cut(a, gaps(union(b)))                                    # they overlap, and each keeps what is left of it
        assert [_grid(left[owner == i]) for i in range(len(a))] == [_grid([each]) - _grid(b) for each in a]
        assert length(union(a)) == len(_grid(a))
