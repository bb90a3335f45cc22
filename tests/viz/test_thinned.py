"""Fewer boxes, the same picture: joined gaps, majority hatching, and a long recording that draws few artists."""

from dataclasses import replace

import matplotlib.collections
import numpy as np
import pytest
from matplotlib.collections import LineCollection

from fsdp_ref.viz import memory_over_step, step_timeline, weight_lifetimes
from fsdp_ref.viz.thinned import covered, fullest, joined, mostly

from . import samples


def test_gaps_under_the_limit_are_closed_within_a_row_alone():
    rows = np.array([(2, 3, 0, 1), (0, 1, 0, 1), (5, 6, 0, 1), (1, 2, 1, 2)], float)
    assert joined(rows, 1).tolist() == [[0, 3, 0, 1], [5, 6, 0, 1], [1, 2, 1, 2]]
    assert joined(rows[:0], 1).shape == (0, 4)


def test_coverage_of_cells():
    boxes = np.array([(0.5, 2.0, 0, 1), (2.25, 2.5, 0, 1)])
    assert covered(boxes, np.array([0.0, 1, 2, 3, 4])) == pytest.approx([0.5, 1.0, 0.25, 0])


def test_a_third_of_the_time_does_not_hatch_the_bar_but_two_thirds_do():
    below = np.array([(i, i + 0.9, 0, 1) for i in range(300)])
    assert not len(mostly(below + [0.6, 0, 0, 0], below, 10))
    assert mostly(below + [0.2, 0, 0, 0], below, 10)[:, :2].tolist() == [[pytest.approx(0.2), pytest.approx(300.2)]]


def test_a_long_recording_draws_few_shapes_and_keeps_its_peak():
    ledger = samples.zero3(2, 400)
    count = lambda p: sum(len(c.get_paths()) for a in p.figure.axes for c in a.collections  # noqa: E731
                          if isinstance(c, matplotlib.collections.PolyCollection))
    timeline, memory = step_timeline(ledger), memory_over_step({"x": ledger})
    assert len(ledger.events) > 5000 and count(timeline) < 4000
    axes = memory.figure.axes[0]
    top = max(p.vertices[:, 1].max() for c in axes.collections for p in c.get_paths())
    assert top == pytest.approx(memory.table[-1]["x rank 0, peak MiB"])
    assert sum(len(p.vertices) for c in axes.collections for p in c.get_paths()) < 60_000


def test_of_a_long_curve_the_fullest_moment_of_each_part_is_kept():
    edges, levels = np.arange(101.0), np.zeros((2, 100), int)
    levels[0, 37], levels[1, 38] = 5, 9
    grid, kept = fullest(edges, levels, 10)
    assert len(grid) == 11 and kept.tolist() == [[0] * 10, [0, 0, 0, 9, 0, 0, 0, 0, 0, 0]]
    assert fullest(edges, levels, 100)[1] is levels


def test_many_steps_are_not_a_thicket_of_lines_and_few_have_theirs():
    """A recording of hundreds of steps: neither lines nor names of phases that nobody could tell apart, nor a hatch for each life."""
    one, many = samples.zero3(2), samples.zero3(2)
    for i in range(1, 300):
        many.events += [replace(e, start=e.start + 0.1 * i, end=e.end + 0.1 * i) for e in one.events]
        many.allocations += [replace(a, start=a.start + 0.1 * i, end=a.end + 0.1 * i) for a in one.allocations if a.end is not None]
    many.end += 0.1 * 299
    for draw in (step_timeline, lambda ledger: memory_over_step({"x": ledger}), weight_lifetimes):
        lines = [[len(c.get_paths()) for c in draw(ledger).figure.axes[0].collections if isinstance(c, LineCollection)]
                 for ledger in (one, many)]
        assert lines[0][0] >= 3 and not lines[1]
        assert len(draw(many).figure.axes[0].texts) < 60
    hatched = [len(c.get_paths()) for c in weight_lifetimes(many).figure.axes[0].collections if c.get_hatch()]
    assert sum(hatched) < 10
    assert [row["lives"] for row in weight_lifetimes(many).table] == [300 * row["lives"] for row in weight_lifetimes(one).table]
